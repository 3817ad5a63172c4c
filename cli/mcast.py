"""`brokerless mcast`: publish to, subscribe to, and look at MoldUDP64 multicast streams."""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from brokerless.cli.signals import exit_code, on_signals
from brokerless.core import DiskJournal, Event, Lost
from brokerless.core.errors import ConfigError
from brokerless.multicast import Publisher, RequestServer, Subscriber
from brokerless.multicast.acquire import Acquirer
from brokerless.multicast.dump import Dumper, Line, messages_of
from brokerless.multicast.pcap import Datagram, PcapWriter, read_pcap
from brokerless.multicast.sockets import is_multicast, parse_address, receiving_socket

# A signal whose handler returns does not end a sleep: how late `serve` may notice it.
_LOOK_S = 0.2

app = cyclopts.App(name="mcast", help="UDP multicast (MoldUDP64): pub, sub, serve, dump.")

Interfaces = Annotated[
    list[str], Parameter("--interface", negative="", help="Interface, by name or address.")
]
Start = Annotated[str | None, Parameter("--from", help="live, oldest, cursor, or an offset.")]
KeyFile = Annotated[
    Path | None, Parameter("--auth-key", help="File with the key that authenticates packets.")
]


@app.command
def pub(
    group: str,
    session: str,
    topic: str,
    data: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    *,
    interface: Interfaces | None = None,
    ttl: int = 0,
    journal: Path | None = None,
    key: str = "",
    content_type: str = "",
    rate: float = 0,
    linger: float = 0.5,
    requests: str = "auto",
    auth_key: KeyFile = None,
) -> None:
    """Publish DATA, or every line of standard input if DATA is `-`.

    Parameters
    ----------
    group
        Multicast group and port, as in 239.255.7.7:30001.
    session
        Name of the session, up to six characters.
    ttl
        0 stays on this machine.
    journal
        Directory of a disk journal, so that receivers can get what they missed later on.
    rate
        Events per second at most; 0 is no limit.
    linger
        Seconds to stay and answer requests after the last event.
    requests
        Where to answer requests: HOST:PORT, `auto` (the port after the group's) or `none`.
    """
    store = DiskJournal(journal) if journal is not None else None
    publisher = Publisher(
        group,
        session,
        journal=store,
        interface=interface or ["127.0.0.1"],
        ttl=ttl,
        requests=None if requests == "none" else requests,
        auth_key=_key(auth_key),
    )
    lines: Iterator[bytes] = (
        (line.rstrip(b"\n") for line in sys.stdin.buffer) if data == "-" else iter([data.encode()])
    )
    with publisher:
        time.sleep(0.02)  # so that subscribers hear the heartbeat that tells where this stream begins
        begun, sent = time.monotonic(), 0
        for line in lines:
            publisher.publish(topic, line, content_type, key)
            sent += 1
            if rate and (ahead := sent / rate - (time.monotonic() - begun)) > 0:
                time.sleep(ahead)
        publisher.flush()
        time.sleep(linger)
        print(f"{sent} published to {group} as {publisher.session}, {publisher.way}", file=sys.stderr)


@app.command
def sub(
    group: list[str],
    *,
    session: str | None = None,
    interface: Interfaces | None = None,
    topic: Annotated[list[str], Parameter(negative="")] | None = None,
    sender: str | None = None,
    server: Annotated[list[str], Parameter("--server", negative="")] | None = None,
    repair: bool = True,
    start: Start = None,
    cursor: Path | None = None,
    count: int = 0,
    timeout: float | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    until_end: bool = False,
    auth_key: KeyFile = None,
) -> None:
    """Print events as they come; losses in their place on standard error, and the books at the end.

    Exit code 0; 3 if something was lost, 1 if fewer than --count came, 128 and the signal's number if interrupted.

    Parameters
    ----------
    group
        Multicast group and port; two of them are lines A and B of one stream.
    session
        A publisher's name, or a foreign session; without it the first that is heard.
    topic
        Topic prefixes.
    sender
        Join for this source address only.
    server
        Request servers, HOST:PORT; by default the port after the group's, on this machine.
    count
        End after so many events; 0 does not.
    timeout
        End when nothing has come for so many seconds.
    until_end
        End with the session.
    """
    begin: str | int | None = int(start) if start is not None and start.isdigit() else start
    shown = 0
    subscriber = Subscriber(
        group,
        session,
        interface=interface or ["127.0.0.1"],
        sender=sender,
        request_servers=[] if not repair else server,
        topics=topic or (),
        start=begin,  # type: ignore[arg-type]
        cursor=cursor,
        stop_at_end=until_end,
        auth_key=_key(auth_key),
        on_loss=_print_lost,
    )
    with subscriber:
        interrupted = on_signals(subscriber.stop)
        if count:
            for event in itertools.islice(subscriber.events(timeout), count):
                _print([event], as_json)
                shown += 1
        else:
            for batch in subscriber.batches(timeout):
                _print(batch.events, as_json)
        books = subscriber.ledger.account()
    c = subscriber.counters
    print(
        f"{books.delivered} delivered, {books.lost} lost {books.lost_by_reason or ''}, {books.pending} pending; "
        f"{c.gaps} gaps, {c.repaired} repaired by {c.requests} requests and {c.fetches} fetches, "
        f"{c.kernel_drops} kernel drops",
        file=sys.stderr,
    )
    if interrupted:
        raise SystemExit(exit_code(interrupted))
    if books.lost:
        raise SystemExit(3)
    if shown < count:
        raise SystemExit(1)


def _print_lost(lost: Lost) -> None:
    print(f"LOST {lost.first}–{lost.last} ({lost.reason})", file=sys.stderr)


def _print(events: list[Event], as_json: bool) -> None:
    out = sys.stdout
    for event in events:
        out.write(_json(event) if as_json else f"{event.topic} {event.data.decode('utf-8', 'replace')}")
        out.write("\n")
    out.flush()


def _json(event: Event) -> str:
    return json.dumps(
        {
            "source": event.source,
            "epoch": event.epoch,
            "offset": event.offset,
            "topic": event.topic,
            "seq": event.seq,
            "time": event.time,
            "key": event.key,
            "content_type": event.content_type,
            "data": event.data.decode("utf-8", "replace"),
        }
    )


@app.command
def serve(
    journal: Path,
    session: str,
    *,
    address: str = "127.0.0.1:0",
    allow: Annotated[list[str], Parameter(negative="")] | None = None,
    auth_key: KeyFile = None,
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
    with RequestServer(journal, session, address, allow=allow, auth_key=_key(auth_key)) as server:
        interrupted = on_signals(lambda: None)
        print(f"serving {session} from {journal} at {server.address}", flush=True)
        while not interrupted:
            time.sleep(_LOOK_S)
        shown = {name: value for name, value in server.counters.snapshot().items() if value}
        print(json.dumps(shown), file=sys.stderr)


@app.command
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
                _print_line(datagram, line, messages)
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


def _print_line(datagram: Datagram, line: Line, messages: bool) -> None:
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
    sock = receiving_socket(address, interfaces)
    try:
        acquirer = Acquirer(sock, "plain")
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while poll.poll(None if timeout is None else timeout * 1000):
            for data, _ in acquirer.receive():
                yield Datagram(time.time(), acquirer.sender[0], acquirer.sender[1], *address, bytes(data))
    finally:
        sock.close()


def _key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("--auth-key", f"{path}: {error.strerror}") from None
