"""`brokerless pub`, `brokerless sub`, `brokerless keys`: direct messaging from a shell."""

import base64
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import cyclopts
from cyclopts import Parameter

from brokerless.cli.signals import exit_code, on_signals
from brokerless.core import DiskJournal, Event, Lost, MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.direct import ClientKeys, KeyPair, Publisher, ServerKeys, Subscriber, Worker, load_public

pub = cyclopts.App(name="pub", help="Publish events at an address.")
sub = cyclopts.App(name="sub", help="Print events of a publisher, as they come.")
keys = cyclopts.App(name="keys", help="Make and show CURVE keys.")
# Exit code of `sub` when events were lost: apart from 1 (did not work) and 2 (wrong arguments).
LOST = 3
# How an event is printed: the event and its attempt.
Show = Callable[[Event, int], None]


@pub.default
def publish(
    address: str,
    topic: str,
    data: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    *,
    source: str = "shell",
    journal: Path | None = None,
    key: str = "",
    content_type: str = "",
    wait_for: int | None = None,
    timeout: float = 10.0,
    keep: bool = False,
    curve: Path | None = None,
    allow: tuple[Path, ...] = (),
) -> None:
    """Bind to ADDRESS, publish DATA (or each line of stdin), and wait until those who listen have had it.

    Parameters
    ----------
    address
        Where to bind: tcp://host:port, ipc://path, nng+tcp://host:port, …
    topic
        The topic of all events.
    data
        The event's data; `-` reads stdin, one event per line.
    source
        The producer's name. It belongs to the journal.
    journal
        Keep the events in this directory, so that they survive this process. In memory if not given.
    key
        The key of all events, for workers with key affinity.
    content_type
        The content type of all events.
    wait_for
        Subscribers or workers to wait for before publishing: 1 without a journal, 0 with one.
    timeout
        Seconds to wait for them, and at the end for those that have not had everything.
    keep
        Serve the journal after the input has ended, until Ctrl-C.
    curve
        Key file of this publisher (brokerless keys new): encrypt.
    allow
        Public key files of the clients that may connect; all if not given.
    """
    if timeout < 0:
        raise ConfigError("timeout", "must be 0 or more")
    kept = DiskJournal(journal) if journal is not None else MemoryJournal()
    needed = wait_for if wait_for is not None else (0 if journal is not None else 1)
    server_keys = ServerKeys.load(curve) if curve is not None else None
    allowed = [load_public(path) for path in allow] or None
    with Publisher(address, source=source, journal=kept, curve=server_keys, allow=allowed) as publisher:
        _say(f"publishing at {publisher.address}")
        if needed and not _clients(publisher, needed, timeout):
            if journal is None:
                _say(f"nobody came within {timeout:g} s, and without --journal nobody could have it later")
                raise SystemExit(1)
            _say(f"nobody came within {timeout:g} s; it stays in the journal")
        sent = 0
        try:
            for line in _lines(sys.stdin.buffer) if data == "-" else [os.fsencode(data)]:
                publisher.publish(topic, line, key=key, content_type=content_type)
                sent += 1
            publisher.flush()
            while keep:
                time.sleep(1)
        except KeyboardInterrupt:
            _say("interrupted")
        drained = publisher.drain(timeout)
    _say(f"{sent} events accepted" + ("" if drained else ", but not all of them were taken in time"))
    if not drained and journal is None:
        raise SystemExit(1)


def _clients(publisher: Publisher, needed: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if publisher.subscribers + sum(g.workers for g in publisher.groups().values()) >= needed:
            return True
        time.sleep(0.01)
    return False


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines without their end, as soon as each is there."""
    for line in stream:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


@sub.default
def subscribe(
    address: str,
    *topics: str,
    also: tuple[str, ...] = (),
    group: str = "",
    start: Annotated[str, Parameter("--from")] = "",
    cursor: Path | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    count: int = 0,
    timeout: float = 0.0,
    key_affinity: bool = False,
    curve: Path | None = None,
    server: Path | None = None,
) -> None:
    """Print the events of TOPICS (prefixes; all if none), and at the end what the ledger says.

    Exit code 0; 3 if something was lost, 1 if fewer than --count came.

    Parameters
    ----------
    address
        The publisher's address.
    topics
        Prefixes of topics.
    also
        Further publishers to follow.
    group
        Join this group as a worker: print and acknowledge this worker's share.
    start
        live, oldest, cursor, or an offset. Default: live, or cursor if there is one; a new group: oldest.
    cursor
        Remember the position in this file.
    as_json
        One JSON object per event.
    count
        End after so many events; 0 means never.
    timeout
        End after so many seconds without an event; 0 means never.
    key_affinity
        With --group: events of one key go to one worker, in order.
    curve
        Key file of this client.
    server
        Public key file of the publisher.
    """
    if count < 0 or timeout < 0:
        raise ConfigError("count" if count < 0 else "timeout", "must be 0 or more")
    client_keys = None
    if curve is not None or server is not None:
        if curve is None or server is None:
            raise ConfigError(
                "curve", "encryption needs both --curve (own key file) and --server (publisher's)"
            )
        client_keys = ClientKeys.load(curve, server)
    show = _show_json if as_json else _show_plain
    addresses = [address, *also]
    idle = timeout or None
    if group:
        if cursor is not None:
            raise ConfigError("cursor", "a group's position is kept by the publisher")
        _work(addresses, topics, group, start or "oldest", show, count, idle, key_affinity, client_keys)
        return
    where: str | int | None = int(start) if start.isdigit() else start or None
    with Subscriber(
        addresses,
        topics=topics,
        start=where,  # type: ignore[arg-type]  # checked by Subscriber, which says what is allowed
        cursor=cursor,
        on_loss=_show_lost,
        curve=client_keys,
    ) as subscriber:
        interrupted = on_signals(subscriber.stop)
        seen = 0
        _say(f"following {', '.join(addresses)}")
        for event in subscriber.events(idle):
            show(event, 1)
            seen += 1
            if seen == count:
                break
        if subscriber.connected and not interrupted:
            subscriber.reconcile(1.0)
        account = subscriber.ledger.account()
        reasons = "".join(f", {n} {reason}" for reason, n in account.lost_by_reason.items() if n)
        _say(
            f"{account.delivered} delivered, {account.lost} lost{reasons}, {account.pending} pending, "
            f"{account.duplicates} duplicates"
            + ("" if account.balanced else " (books do not balance)")
            + ("" if subscriber.connected else "; no publisher is connected")
        )
        _end(interrupted, account.lost, seen < count)


def _end(interrupted: list[int], lost: int, short: bool) -> None:
    """The exit code, for scripts: what was interrupted says so, and loss is never silent."""
    if interrupted:
        raise SystemExit(exit_code(interrupted))
    if lost:
        raise SystemExit(LOST)
    if short:
        raise SystemExit(1)


def _work(
    addresses: list[str],
    topics: tuple[str, ...],
    group: str,
    start: str,
    show: Show,
    count: int,
    idle: float | None,
    key_affinity: bool,
    client_keys: ClientKeys | None,
) -> None:
    with Worker(
        addresses,
        group=group,
        topics=topics,
        start=start,  # type: ignore[arg-type]  # checked by Worker
        # Few at a time: what a shell pipeline has not read yet, another worker could do.
        prefetch=min(64, count) if count else 64,
        key_affinity=key_affinity,
        on_loss=_show_lost,
        curve=client_keys,
    ) as worker:
        interrupted = on_signals(worker.stop)
        seen = 0
        _say(f"working in {group} of {', '.join(addresses)}")
        for delivery in worker.deliveries(idle):
            show(delivery.event, delivery.attempt)
            delivery.ack()
            seen += 1
            if seen == count:
                break
        counted = worker.counters
        _say(f"{seen} delivered, {counted.redelivered} of them redelivered, {counted.lost} lost by the group")
    _end(interrupted, counted.lost, seen < count)


def _show_plain(event: Event, _attempt: int) -> None:
    sys.stdout.buffer.write(event.data + b"\n")
    sys.stdout.buffer.flush()


def _show_json(event: Event, attempt: int) -> None:
    shown: dict[str, object] = {
        "id": event.id,
        "source": event.source,
        "epoch": event.epoch,
        "offset": event.offset,
        "topic": event.topic,
        "seq": event.seq,
        "time": event.time,
    }
    if event.key:
        shown["key"] = event.key
    if event.content_type:
        shown["content_type"] = event.content_type
    if attempt > 1:
        shown["attempt"] = attempt
    try:
        shown["data"] = event.data.decode()
    except UnicodeDecodeError:
        shown["data_base64"] = base64.b64encode(event.data).decode()
    print(json.dumps(shown, ensure_ascii=False), flush=True)


def _show_lost(lost: Lost) -> None:
    _say(f"lost: offsets {lost.first} to {lost.last} of {lost.source} ({lost.count} events, {lost.reason})")


def _say(text: str) -> None:
    """Words for the user go to stderr; stdout is for events."""
    print(text, file=sys.stderr, flush=True)


@keys.command
def new(path: Path) -> None:
    """Make a key pair: PATH (secret, for its owner only) and PATH.pub (for the other side).

    Parameters
    ----------
    path
        Where to write the secret key file.
    """
    secret, public = KeyPair.new().save(path)
    print(f"secret key: {secret}\npublic key: {public}")


@keys.command
def show(path: Path) -> None:
    """Print the public key of a key file.

    Parameters
    ----------
    path
        A key file or its .pub file.
    """
    print(load_public(path).decode())
