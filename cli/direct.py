"""`brokerless pub`, `brokerless sub`, `brokerless keys`: direct messaging from a shell."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from brokerless.cli.client_keys import Curve, ServerKey, client_keys
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
    StartOrTime,
    Topics,
)
from brokerless.cli.output import account_text, event_fields, print_json, result, say, say_lost
from brokerless.cli.signals import LOOK_S, StandardInput, exit_code, on_signals
from brokerless.core import DiskJournal, Event, MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.direct import ClientKeys, KeyPair, Publisher, ServerKeys, Subscriber, Worker, load_public

pub = cyclopts.App(
    name="pub",
    help="Publish events at an address.",
    help_epilogue="Example: brokerless pub tcp://127.0.0.1:5555 orders.eu hello --journal var/orders --keep",
)
sub = cyclopts.App(
    name="sub",
    help="Print events of a publisher, as they come.",
    help_epilogue="Example: brokerless sub tcp://127.0.0.1:5555 orders. --from oldest --count 10 --json",
)
keys = cyclopts.App(
    name="keys", help="Make and show CURVE keys.", help_epilogue="Example: brokerless keys new orders.key"
)
# The library's name of an argument, and what is typed for it here.
_OPTIONS = {
    "address": "ADDRESS",
    "start": "--from",
    "topics": "TOPICS",
    "cursor": "--cursor",
    "group": "--group",
    "source": "--source",
    "allow": "--allow",
    "curve": "--curve",
}
# How an event is printed: the event and its attempt.
Show = Callable[[Event, int], None]


@pub.default
def publish(
    address: str,
    topic: str,
    data: Data = "-",
    *,
    source: str = "shell",
    journal: JournalDirectory = None,
    key: Key = "",
    content_type: ContentType = "",
    wait_for: int | None = None,
    timeout: float = 10.0,
    keep: Annotated[bool, Parameter(negative="")] = False,
    curve: Path | None = None,
    allow: Annotated[tuple[Path, ...], Parameter(negative="")] = (),
    as_json: Json = False,
) -> None:
    """Bind to ADDRESS, publish DATA (or each line of stdin), and wait until those who listen have had it.

    Parameters
    ----------
    address
        Where to bind: tcp://host:port, ipc://path, nng+tcp://host:port, …
    topic
        The topic of all events.
    source
        The producer's name. It belongs to the journal.
    wait_for
        Subscribers or workers to wait for before publishing: 0 with --journal or --keep, else 1.
    timeout
        Seconds to wait for them, and at the end for those that have not had everything.
    keep
        Serve the journal after the input has ended, until Ctrl-C.
    curve
        Key file of this publisher (brokerless keys new): encrypt.
    allow
        Public key files of the clients that may connect; all if not given.
    """
    if timeout < 0 or (wait_for or 0) < 0:
        raise ConfigError("--timeout" if timeout < 0 else "--wait-for", "must be 0 or more")
    kept = DiskJournal(journal) if journal is not None else MemoryJournal()
    stays = journal is not None or keep  # who comes later has it all the same
    needed = wait_for if wait_for is not None else 0 if stays else 1
    server_keys = ServerKeys.load(curve) if curve is not None else None
    allowed = [load_public(path) for path in allow] or None
    with (
        _options_named(),
        Publisher(address, source=source, journal=kept, curve=server_keys, allow=allowed) as publisher,
    ):
        say(f"publishing at {publisher.address}")
        if needed and not _clients(publisher, needed, timeout):
            if not stays:
                say(
                    f"nobody came within {timeout:g} s, and without --journal or --keep nobody could have it later"
                )
                raise SystemExit(FAILED)
            say(f"nobody came within {timeout:g} s; it stays in the journal")
        sent = 0
        source_lines = StandardInput()
        interrupted = on_signals(source_lines.stop)
        for line in source_lines if data == "-" else [os.fsencode(data)]:
            publisher.publish(topic, line, key=key, content_type=content_type)
            sent += 1
            if interrupted:
                break
        publisher.flush()
        cut_short = exit_code(interrupted)
        while keep and not interrupted:
            time.sleep(LOOK_S)
        drained = publisher.drain(timeout)
    say(f"{sent} events accepted" + ("" if drained else ", but not all of them were taken in time"))
    if as_json:
        print_json({"source": source, "topic": topic, "accepted": sent, "drained": drained})
    if cut_short or (not drained and journal is None):
        raise SystemExit(cut_short or FAILED)


def _clients(publisher: Publisher, needed: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if publisher.subscribers + sum(g.workers for g in publisher.groups().values()) >= needed:
            return True
        time.sleep(0.01)
    return False


@sub.default
def subscribe(
    address: str,
    *topics: Topics,
    also: Also = (),
    group: str = "",
    start: StartOrTime = "",
    cursor: CursorFile = None,
    count: Count = 0,
    timeout: IdleTimeout = 0.0,
    key_affinity: Annotated[bool, Parameter(negative="")] = False,
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Print the events of TOPICS (all if none), and at the end what the ledger says.

    Exit code 0; 3 if something was lost, 1 if fewer than --count came or no publisher ever answered.

    Parameters
    ----------
    address
        The publisher's address.
    group
        Join this group as a worker: print and acknowledge this worker's share.
    key_affinity
        With --group: events of one key go to one worker, in order.
    """
    if count < 0 or timeout < 0:
        raise ConfigError("--count" if count < 0 else "--timeout", "must be 0 or more")
    keys = client_keys(curve, server_key)
    show = _show_json if as_json else _show_plain
    addresses = [address, *also]
    idle = timeout or None
    if group:
        if cursor is not None:
            raise ConfigError("--cursor", "a group's position is kept by the publisher")
        _work(addresses, topics, group, _start(start) or "oldest", show, count, idle, key_affinity, keys)
        return
    where = int(start) if start.isdecimal() else _start(start) or None
    with (
        _options_named(),
        Subscriber(
            addresses,
            topics=topics,
            start=where,  # type: ignore[arg-type]  # checked by Subscriber, which says what is allowed
            cursor=cursor,
            on_loss=say_lost,
            curve=keys,
        ) as subscriber,
    ):
        interrupted = on_signals(subscriber.stop)
        seen = 0
        say(f"following {', '.join(addresses)}")
        for event in subscriber.events(idle):
            show(event, 1)
            seen += 1
            if seen == count:
                break
        if subscriber.connected and not interrupted:
            subscriber.reconcile(1.0)
        account = subscriber.ledger.account()
        say(account_text(account) + ("" if subscriber.connected else "; no publisher is connected"))
        _end(interrupted, account.lost, seen < count or _nobody_answered(subscriber))


def _start(text: str) -> str | datetime:
    """What --from says: a time in ISO 8601 (without a time zone: in UTC), or the word itself."""
    if not text[:1].isdigit():
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Errors of the library name its arguments; here the user typed options."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_OPTIONS.get(error.field, error.field), error.problem) from None


def _nobody_answered(client: Subscriber | Worker) -> bool:
    """Whether no publisher ever answered; what seems to be the reason is printed."""
    if client.counters.joins:
        return False
    for address, problem in client.unanswered.items():
        say(f"{address} did not answer: {problem}")
    return True


def _end(interrupted: list[int], lost: int, short: bool) -> None:
    """The exit code, for scripts: what was interrupted says so, and loss is never silent."""
    if interrupted:
        raise SystemExit(exit_code(interrupted))
    if lost:
        raise SystemExit(LOST)
    if short:
        raise SystemExit(FAILED)


def _work(
    addresses: list[str],
    topics: tuple[str, ...],
    group: str,
    start: str | datetime,
    show: Show,
    count: int,
    idle: float | None,
    key_affinity: bool,
    keys: ClientKeys | None,
) -> None:
    with (
        _options_named(),
        Worker(
            addresses,
            group=group,
            topics=topics,
            start=start,  # type: ignore[arg-type]  # checked by Worker
            # Few at a time: what a shell pipeline has not read yet, another worker could do.
            prefetch=min(64, count) if count else 64,
            key_affinity=key_affinity,
            on_loss=say_lost,
            curve=keys,
        ) as worker,
    ):
        interrupted = on_signals(worker.stop)
        seen = 0
        say(f"working in {group} of {', '.join(addresses)}")
        for delivery in worker.deliveries(idle):
            show(delivery.event, delivery.attempt)
            delivery.ack()
            seen += 1
            if seen == count:
                break
        counted = worker.counters
        say(f"{seen} delivered, {counted.redelivered} of them redelivered, {counted.lost} lost by the group")
        _end(interrupted, counted.lost, seen < count or _nobody_answered(worker))


def _show_plain(event: Event, _attempt: int) -> None:
    sys.stdout.buffer.write(event.data + b"\n")
    sys.stdout.buffer.flush()


def _show_json(event: Event, attempt: int) -> None:
    print_json(event_fields(event, attempt))


@keys.command(help_epilogue="Example: brokerless keys new orders.key")
def new(path: Path, *, as_json: Json = False) -> None:
    """Make a key pair: PATH (secret, for its owner only) and PATH.pub (for the other side).

    Parameters
    ----------
    path
        Where to write the secret key file.
    """
    secret, public = KeyPair.new().save(path)
    fields = {"secret": str(secret), "public": str(public)}
    result(fields, f"secret key: {secret}\npublic key: {public}", as_json=as_json)


@keys.command(help_epilogue="Example: brokerless keys show orders.key.pub")
def show(path: Path, *, as_json: Json = False) -> None:
    """Print the public key of a key file.

    Parameters
    ----------
    path
        A key file or its .pub file.
    """
    public = load_public(path).decode()
    result({"public_key": public}, public, as_json=as_json)
