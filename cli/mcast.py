"""`brokerless mcast`: publish to, subscribe to, and look at MoldUDP64 multicast streams."""

import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from brokerless.cli.exit_codes import FAILED, LOST
from brokerless.cli.options import (
    Also,
    ContentType,
    Count,
    CursorFile,
    Data,
    IdleTimeout,
    JournalDirectory,
    Json,
    Key,
    Start,
    Topics,
)
from brokerless.cli.output import account_text, event_fields, iso_time, print_json, result, say, say_lost
from brokerless.cli.signals import LOOK_S, StandardInput, exit_code, on_signals
from brokerless.core import DiskJournal, Event
from brokerless.core.errors import ConfigError
from brokerless.core.journal.meta import META
from brokerless.core.runtime.datagrams import DatagramReceiver
from brokerless.multicast import Publisher, RequestServer, Stale, Subscriber
from brokerless.multicast.sockets import is_multicast, parse_address, receiving_socket
from brokerless.multicast.tools.dump import DumpedPacket, Dumper, messages_of
from brokerless.multicast.tools.pcap import Datagram, PcapWriter, read_pcap

app = cyclopts.App(
    name="mcast",
    help="UDP multicast (MoldUDP64): pub, sub, serve, dump.",
    help_epilogue="Example: brokerless mcast sub 239.255.7.7:30001 --from oldest",
)

_LONGEST_POLL_MS = 2**31 - 1  # what the system call takes

Interfaces = Annotated[
    list[str], Parameter("--interface", negative="", help="Interface, by name or address.")
]
KeyFile = Annotated[
    Path | None, Parameter("--auth-key", help="File with the key that authenticates packets.")
]


@app.command(help_epilogue="Example: brokerless mcast pub 239.255.7.7:30001 ORDERS orders.eu hello")
def pub(
    group: str,
    session: str,
    topic: str,
    data: Data = "-",
    *,
    journal: JournalDirectory = None,
    key: Key = "",
    content_type: ContentType = "",
    rate: float = 0,
    linger: float = 1.0,
    requests: str = "auto",
    request_process: Annotated[bool, Parameter(negative="")] = False,
    interface: Interfaces | None = None,
    ttl: int = 0,
    auth_key: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Publish DATA, or every line of standard input if DATA is `-`.

    Ctrl-C and SIGTERM end the session in order: what was accepted is sent, requests are answered for the linger.

    Parameters
    ----------
    group
        Multicast group and port, as in 239.255.7.7:30001.
    session
        Name of the session, up to six characters.
    topic
        The topic of all events.
    ttl
        0 stays on this machine.
    rate
        Events per second at most; 0 is no limit.
    linger
        Seconds to stay at most for subscribers that have not got everything.
    requests
        Where to answer requests: HOST:PORT, `auto` (the port after the group's) or `none`.
    request_process
        Answer requests in a process of its own; needs --journal.
    """
    if not 0 <= rate < math.inf:
        raise ConfigError("rate", f"must be a number from 0 on, not {rate}")
    store = DiskJournal(journal) if journal is not None else None
    publisher = Publisher(
        group,
        session,
        journal=store,
        interface=interface or ["127.0.0.1"],
        ttl=ttl,
        requests=None if requests == "none" else requests,
        request_process=request_process,
        linger_s=linger,
        auth_key=_key(auth_key),
    )
    source = StandardInput()
    interrupted = on_signals(source.stop)
    lines: Iterator[bytes] = iter(source) if data == "-" else iter([os.fsencode(data)])
    with publisher:
        time.sleep(0.02)  # so that subscribers hear the heartbeat that tells where this stream begins
        begun, sent = time.monotonic(), 0
        for line in lines:
            publisher.publish(topic, line, content_type=content_type, key=key)
            sent += 1
            if interrupted:
                break
            while rate and not interrupted and (ahead := sent / rate - (time.monotonic() - begun)) > 0:
                time.sleep(min(ahead, LOOK_S))
        publisher.flush()
        say(f"{sent} published to {group} as {publisher.session}, {publisher.io_mode}")
    if as_json:
        print_json({"session": publisher.session, "topic": topic, "accepted": sent})
    if publisher.counters.lingered:
        say(f"{publisher.counters.lingered} subscribers had not got everything")
    if interrupted:
        raise SystemExit(exit_code(interrupted))


@app.command(help_epilogue="Example: brokerless mcast sub 239.255.7.7:30001 orders. --from oldest --json")
def sub(
    group: str,
    *topics: Topics,
    also: Also = (),
    session: str | None = None,
    start: Start = "",
    cursor: CursorFile = None,
    count: Count = 0,
    timeout: IdleTimeout = 0.0,
    until_end: Annotated[bool, Parameter(negative="")] = False,
    interface: Interfaces | None = None,
    sender: str | None = None,
    request_server: Annotated[list[str], Parameter(negative="")] | None = None,
    repair: bool = True,
    auth_key: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Print events as they come; losses in their place on standard error, and the accounting at the end.

    Exit code 0; 3 if something was lost, 1 if fewer than --count came, 128 and the signal's number if interrupted.

    Parameters
    ----------
    group
        Multicast group and port; with --also, lines A and B of one stream.
    session
        A publisher's name, or a foreign session; without it the first that is heard.
    sender
        Join for this source address only.
    request_server
        A request server, HOST:PORT; by default the port after the group's, on this machine. Repeatable.
    repair
        Ask for what is missing.
    until_end
        End with the session.
    """
    if count < 0 or timeout < 0:
        raise ConfigError("count" if count < 0 else "timeout", "must be 0 or more")
    idle = timeout or None
    begin: str | int | None = int(start) if start.isdecimal() else start or None
    shown = 0
    subscriber = Subscriber(
        [group, *also],
        session,
        interface=interface or ["127.0.0.1"],
        sender=sender,
        request_servers=request_server if repair else [],
        topics=topics,
        start=begin,  # type: ignore[arg-type]
        cursor=cursor,
        stop_at_end=until_end,
        auth_key=_key(auth_key),
        on_loss=say_lost,
        on_stale=_say_stale,
    )
    with subscriber:
        interrupted = on_signals(subscriber.stop)
        say(f"following {', '.join([group, *also])}")
        if count:
            for event in itertools.islice(subscriber.events(idle), count):
                _print([event], as_json)
                shown += 1
        else:
            for batch in subscriber.batches(idle):
                _print(batch.events, as_json)
        account = subscriber.ledger.account()
    c = subscriber.counters
    say(
        f"{account_text(account)}; "
        f"{c.gaps} gaps, {c.repaired} repaired by {c.requests} requests and {c.fetches} fetches, "
        f"{c.kernel_drops} kernel drops"
    )
    if subscriber.session is None and subscriber.sessions_heard:
        say(f"no session {session!r} was heard, but {', '.join(subscriber.sessions_heard)}")
        raise SystemExit(exit_code(interrupted) or FAILED)
    if interrupted:
        raise SystemExit(exit_code(interrupted))
    if account.lost:
        raise SystemExit(LOST)
    if shown < count:
        raise SystemExit(FAILED)


def _say_stale(stale: Stale) -> None:
    if stale.reason == "rewound":
        say(f"STALE: {stale.session} went back, to offset {stale.next_offset}")
    else:
        say(f"STALE: nothing was heard of {stale.session or 'any session'} for {stale.silent_s:.1f} s")


def _print(events: list[Event], as_json: bool) -> None:
    for event in events:
        if as_json:
            print_json(event_fields(event))
        else:
            print(f"{event.topic} {event.data.decode('utf-8', 'replace')}")
    sys.stdout.flush()


@app.command(help_epilogue="Example: brokerless mcast serve var/ticks TICKS --address 127.0.0.1:30002")
def serve(
    journal: Path,
    session: str,
    *,
    address: str = "127.0.0.1:0",
    allow: Annotated[list[str], Parameter(negative="")] | None = None,
    auth_key: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Answer requests out of a disk journal that another process writes, until interrupted.

    Parameters
    ----------
    journal
        The journal's directory.
    session
        Name of the session, as the publisher has it.
    address
        Where to listen, UDP and TCP; port 0 takes a free one.
    allow
        Addresses or networks that may ask; without it everybody may.
    """
    if not (journal / META).exists():
        raise ConfigError("journal", f"there is no journal at {journal}")
    with RequestServer(journal, session, address, allow=allow, auth_key=_key(auth_key)) as server:
        interrupted = on_signals(lambda: None)
        fields = {"session": session, "journal": str(journal), "address": str(server.address)}
        result(fields, f"serving {session} from {journal} at {server.address}", as_json=as_json)
        while not interrupted:
            time.sleep(LOOK_S)
        counted = {name: value for name, value in server.counters.snapshot().items() if value}
        say(", ".join(f"{name} {value}" for name, value in counted.items()) or "no requests")


@app.command(help_epilogue="Example: brokerless mcast dump 239.255.7.7:30001 --show problems")
def dump(
    group: str | None = None,
    *,
    interface: Interfaces | None = None,
    pcap: Path | None = None,
    port: int = 0,
    write: Path | None = None,
    messages: bool = False,
    count: int = 0,
    timeout: float | None = None,
    show: Literal["all", "problems", "nothing"] = "all",
    as_json: Json = False,
) -> None:
    """Print any MoldUDP64 stream, packet by packet: session, sequence, gaps. Live, or from a capture file.

    Parameters
    ----------
    group
        Multicast group and port to join; not with --pcap.
    pcap
        Read this capture (pcap or pcapng) instead.
    port
        From a capture, only datagrams to or from this port.
    write
        Also write the packets to this capture file.
    messages
        Show the messages, too.
    count
        End after so many packets.
    timeout
        End when nothing has come for so many seconds.
    show
        All packets, only those with something remarkable, or nothing but the last line.
    """
    if (group is None) == (pcap is None):
        raise ConfigError("group", "give either a group or --pcap FILE")
    if count < 0 or not 0 <= (timeout or 0) < math.inf:
        raise ConfigError("count" if count < 0 else "timeout", "must be 0 or more")
    source = (
        _captured(pcap, port) if pcap is not None else _live(str(group), interface or ["127.0.0.1"], timeout)
    )
    dumper = Dumper()
    # Without a buffer: whoever looks at the file, or ends this in any way, finds every packet in it.
    out = write.open("wb", buffering=0) if write is not None else None
    try:
        writer = PcapWriter(out) if out is not None else None
        for datagram in source:
            if writer is not None:
                writer.write(datagram)
            multicast = is_multicast(datagram.destination)
            line = dumper.look(
                f"{datagram.destination}:{datagram.destination_port}", datagram.data, multicast=multicast
            )
            if show == "all" or (show == "problems" and (line.notes or line.kind == "malformed")):
                (_print_json if as_json else _print_line)(datagram, line, messages)
            if count and dumper.packets >= count:
                break
    except KeyboardInterrupt:
        pass
    finally:
        if out is not None:
            out.close()
    print(
        f"{dumper.packets} packets, {dumper.messages} messages, {dumper.gaps} gaps with {dumper.missing} missing, "
        f"{dumper.repeated} repeated, {dumper.malformed} malformed",
        file=sys.stderr,
    )


def _print_line(datagram: Datagram, line: DumpedPacket, messages: bool) -> None:
    clock = time.strftime("%H:%M:%S", time.gmtime(datagram.time)) + f"{datagram.time % 1:.6f}"[1:]
    what = f"{line.kind:<9} {line.session:<10} {line.sequence}"
    if line.messages:
        what += f"+{line.messages}"
    notes = f"  [{'; '.join(line.notes)}]" if line.notes else ""
    print(f"{clock} {datagram.source}:{datagram.source_port} {len(datagram.data):>5} {what}{notes}")
    if messages:
        for sequence, known, data in messages_of(datagram.data):
            print(f"    {sequence} {known} {data[:64]!r}{'…' if len(data) > 64 else ''}")
    sys.stdout.flush()


def _print_json(datagram: Datagram, line: DumpedPacket, messages: bool) -> None:
    fields = {
        "time": iso_time(int(datagram.time * 1e6)),
        "sender": f"{datagram.source}:{datagram.source_port}",
        "bytes": len(datagram.data),
        "kind": line.kind,
        "session": line.session,
        "sequence": line.sequence,
        "messages": line.messages,
        "notes": list(line.notes),
    }
    if messages:
        fields["data"] = [data.decode("utf-8", "replace") for _, _, data in messages_of(datagram.data)]
    print_json(fields)


def _captured(path: Path, port: int) -> Iterator[Datagram]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError("--pcap", f"{path}: {error.strerror}") from None
    with file:
        for datagram in read_pcap(file, str(path)):
            if not port or port in (datagram.source_port, datagram.destination_port):
                yield datagram


def _live(group: str, interfaces: list[str], timeout: float | None) -> Iterator[Datagram]:
    import select

    address = parse_address(group, "group", multicast=True)
    socks = [receiving_socket(address, interface) for interface in interfaces]
    try:
        poll = select.poll()
        readers = {}
        for sock in socks:
            readers[sock.fileno()] = DatagramReceiver(sock, "plain")
            poll.register(sock, select.POLLIN)
        while ready := poll.poll(None if timeout is None else min(timeout * 1000, _LONGEST_POLL_MS)):
            for reader in (readers[fd] for fd, _ in ready):
                for data, _ in reader.receive():
                    yield Datagram(time.time(), reader.sender[0], reader.sender[1], *address, bytes(data))
    finally:
        for sock in socks:
            sock.close()


def _key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("--auth-key", f"{path}: {error.strerror}") from None
