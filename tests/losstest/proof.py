"""A transport that is perfect, and variants that are wrong in exactly known ways: what proves the loss test.

Events are appended to a file in the shared directory; a consumer's cursor is a file in its state directory.
`misbehaving.py` has many more of them.
"""

import fcntl
import os
import signal
import time
from collections.abc import Iterable

import msgspec

from brokerless.losstest import (
    Consumer,
    Loss,
    Message,
    Position,
    Producer,
    Promise,
    Setup,
    Traits,
    Transport,
    resolve,
)
from brokerless.losstest.adapters.framing import Deframer, frame
from brokerless.losstest.adapters.statsd_plain import StatsdConsumer, StatsdProducer
from brokerless.losstest.evidence import payload

ANY = Promise(
    "may",
    (
        *("offline", "producer_crash", "overflow_sender", "overflow_receiver"),
        *("in_flight", "evicted", "gave_up"),
    ),
    "this is a proof",
)


def number(data: bytes) -> int | None:
    tag = payload.decode(data)
    return None if tag is None or tag.probe else tag.n


class FileProducer(Producer):
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._log = os.open(setup.shared / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._offset = 1000 * setup.incarnation
        self._losses: list[Loss] = []

    def send(self, data: bytes) -> Position:
        self._offset += 3  # positions of a transport need not be the loss test's numbers
        n = number(data)
        if n is None or not self.drop(n):
            self.write(data)
        return Position(7, self._offset)

    def drop(self, n: int) -> bool:
        return False

    def write(self, data: bytes) -> None:
        os.write(self._log, frame(data))

    def declare(self, reason: str) -> None:
        self._losses.append(Loss(7, self._offset, self._offset, reason))

    def losses(self) -> list[Loss]:
        told, self._losses = self._losses, []
        return told


class FileConsumer(Consumer):
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._cursor = setup.state / "cursor"
        self._presence = open(setup.shared / "presence", "w")  # noqa: SIM115  # held until the process ends
        fcntl.flock(self._presence, fcntl.LOCK_SH)
        path = setup.shared / "log"
        path.touch()
        self._log = open(path, "rb", buffering=0)  # noqa: SIM115
        self._at = int(self._cursor.read_text()) if self._cursor.exists() else 0
        self._log.seek(self._at)
        self._frames = Deframer()

    def receive(self, timeout_s: float) -> Iterable[Message]:
        bodies = self._frames.feed(self._log.read(4096) or b"")
        if not bodies:
            time.sleep(min(timeout_s, 0.003))
        for body in bodies:
            self._at += len(frame(body))
            yield from self.shape(Message(body, ack=self.ack))

    def ack(self) -> None:
        temporary = self._cursor.with_suffix(".new")
        temporary.write_text(str(self._at))
        os.replace(temporary, self._cursor)

    def shape(self, message: Message) -> Iterable[Message]:
        return [message]


class Silent(FileProducer):
    """Drops every seventh event and says nothing."""

    def drop(self, n: int) -> bool:
        return n % 7 == 3


class Forgetful(FileProducer):
    """Drops what it is given while no consumer is there."""

    def drop(self, n: int) -> bool:
        with open(self.setup.shared / "presence", "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True


class Bounded(FileProducer):
    """Drops when the consumer is more than `buffer_events` behind."""

    def drop(self, n: int) -> bool:
        cursor = self.setup.shared.parent / "consumer-0" / "cursor"
        done = int(cursor.read_text()) if cursor.exists() else 0
        behind = (os.fstat(self._log).st_size - done) // (self.setup.size + 8)
        return behind >= self.setup.buffer_events


class Resting(FileConsumer):
    """When it comes back it does nothing for twice its quiet time, and says nothing of it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._begins = time.monotonic() + 1.2 * (setup.incarnation > 1)

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if time.monotonic() < self._begins:
            time.sleep(0.01)
            return []
        return super().receive(timeout_s)


class Endless(FileConsumer):
    """Gives the first event again and again."""

    _first: Message | None = None

    def receive(self, timeout_s: float) -> Iterable[Message]:
        for message in super().receive(timeout_s):
            if number(message.data) is not None:
                self._first = self._first or message
            yield message
        if self._first is not None:
            yield self._first


class Holding(FileConsumer):
    """Acknowledges at once and gives each event only with the next one, or when closed, or after a silence."""

    _held: Message | None = None
    _since = 0.0
    _closed = False

    def receive(self, timeout_s: float) -> Iterable[Message]:
        for message in () if self._closed else super().receive(timeout_s):
            held, self._held, self._since = self._held, Message(message.data), time.monotonic()
            self.ack()
            if held is not None:
                yield held
        if self._held is not None and (self._closed or time.monotonic() - self._since > 0.3):
            held, self._held = self._held, None
            yield held

    def close(self) -> None:
        self._closed = True


def make(
    producer: type[Producer] = FileProducer, consumer: type[Consumer] = FileConsumer, **promises: Promise
) -> Transport:
    names = (
        "none",
        "stop",
        "kill",
        "kill-fresh",
        "pause-long",
        "producer-kill",
        "ack-then-die",
        "late",
        "clock-jump",
    )
    traits = Traits(
        family="proof",
        acks=True,
        quiet_s=0.6,
        promises={**dict.fromkeys(names, ANY), **promises},
        summary="a proof",
    )
    return Transport("proof", producer, consumer, traits)


perfect = Transport("perfect", FileProducer, FileConsumer, Traits(family="proof", acks=True, quiet_s=0.6))
resting = msgspec.structs.replace(perfect, consumer=Resting)


class Restless(Endless):
    """Rests in the controls, and never again once the wall clock has jumped."""

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if time.time() < START + 1000 and self._first is None:
            return FileConsumer.receive(self, timeout_s)
        return super().receive(timeout_s)


START = time.time()
restless, silent = make(consumer=Restless), make(Silent)


class Moody(Silent):
    """Drops in the first of its runs in a directory, and never again."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        mark = setup.shared.parents[4] / "moody"  # beside the transports of the run
        self._first = not mark.exists()
        mark.touch()

    def drop(self, n: int) -> bool:
        return self._first and super().drop(n)


moody = make(Moody, none=Promise())


class DiesBefore(StatsdProducer):
    """Counts, drops event DROPPED silently, and is killed in `send()` of event FATAL, before it is sent.

    Both add to the same counter.
    """

    DROPPED, FATAL = 81, 95

    def send(self, data: bytes) -> None:
        n = number(data)
        if n == self.FATAL:
            self.end(data)
        if n != self.DROPPED:
            super().send(data)

    def end(self, data: bytes) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAfter(DiesBefore):
    """The same, killed after event FATAL was sent and before `send()` returned."""

    def end(self, data: bytes) -> None:
        StatsdProducer.send(self, data)
        super().end(data)


dies_before, dies_after = make(DiesBefore, StatsdConsumer), make(DiesAfter, StatsdConsumer)


def _careless(setup: Setup) -> Producer:
    """The publisher with a journal on disk, told not to sync, whatever the scenario needs."""
    return resolve("zmq-fanout-disk").producer(msgspec.structs.replace(setup, sync=False))


careless = msgspec.structs.replace(resolve("zmq-fanout-disk"), producer=_careless)
