"""Transports that misbehave in exactly known ways. Each keeps a truth log that the loss test never reads.

Lines of the truth log: `lost N REASON` (REASON is what a correct verdict says), `found N` (not lost after all),
`duplicate`, `late` (given after its successor), `unexpected`, `premature`, `refused`, `refused-delivered`,
`maybe`, `maybe-delivered`.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))  # worker processes load this file by its path
from proof import ANY, Bounded, Endless, FileConsumer, FileProducer, Forgetful, Holding, number

from brokerless.losstest import (
    Consumer,
    Indeterminate,
    Loss,
    Message,
    Position,
    Producer,
    Rejected,
    Setup,
    Traits,
    Transport,
)
from brokerless.losstest.evidence import payload

Chooses = Callable[[int], bool]
NOBODY_KNOWS = "unattributed"


def log(setup: Setup, line: str) -> None:
    """Append to the truth log; one write, so that it survives a kill."""
    fd = os.open(setup.shared / "secret-truth", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode() + b"\n")
    os.close(fd)


class Case(msgspec.Struct, frozen=True):
    """One misbehaviour: what misbehaves, in which scenario, and what the row must say beyond the truth log."""

    name: str
    producer: type[Producer] = FileProducer
    consumer: type[Consumer] = FileConsumer
    scenario: str = "none"
    verdict: str = "fail"
    findings: tuple[str, ...] = ()  # texts that must be in the findings
    problems: tuple[str, ...] = ()
    exact: bool = True  # False: a killed consumer may get events again, which only the witnesses know
    drain_s: float = 20.0
    lead_s: float = 0.25
    tail_s: float = 0.3


# Producers ------------------------------------------------------------------------------------------------------


def dropping(chooses: Chooses, says: str = "", truth: str = NOBODY_KNOWS) -> type[FileProducer]:
    """Drops the chosen events; declares them lost as `says`, if anything."""

    class Dropping(FileProducer):
        def drop(self, n: int) -> bool:
            if not chooses(n):
                return False
            log(self.setup, f"lost {n} {truth}")
            if says:
                self.declare(says)
            return True

    return Dropping


class ClaimsWhatArrived(FileProducer):
    """Declares events lost that it delivers."""

    def drop(self, n: int) -> bool:
        if n % 7 == 3:
            self.declare("gave_up")
        return False


def forgetting(says: str = "", truth: str = "offline") -> type[FileProducer]:
    """Drops what it is given while no consumer is there."""

    class Forgetting(Forgetful):
        def drop(self, n: int) -> bool:
            away = super().drop(n)
            if away:
                log(self.setup, f"lost {n} {truth}")
                if says:
                    self.declare(says)
            return away

    return Forgetting


def forgetting_and_dropping(chooses: Chooses) -> type[FileProducer]:
    """As above, and also drops chosen events for no reason."""

    class Both(forgetting()):  # type: ignore[misc]
        def drop(self, n: int) -> bool:
            if chooses(n):
                log(self.setup, f"lost {n} {NOBODY_KNOWS}")
                return True
            return bool(super().drop(n))

    return Both


class Returning(FileConsumer):
    """Leaves a mark when an event was committed after a restart."""

    def ack(self) -> None:
        super().ack()
        if self.setup.incarnation > 1:
            (self.setup.shared / "back").touch()


class DropsAfterReturn(forgetting()):  # type: ignore[misc]
    """Drops two events for no reason when the consumer is back."""

    _dropped = 0

    def drop(self, n: int) -> bool:
        if self._dropped < 2 and (self.setup.shared / "back").exists():
            self._dropped += 1
            log(self.setup, f"lost {n} {NOBODY_KNOWS}")
            return True
        return bool(super().drop(n))


def overflowing(says: str = "", truth: str = "overflow_sender") -> type[FileProducer]:
    """Drops while the consumer is more than `buffer_events` behind."""

    class Overflowing(Bounded):
        def drop(self, n: int) -> bool:
            full = super().drop(n)
            if full:
                log(self.setup, f"lost {n} {truth}")
                if says:
                    self.declare(says)
            return full

    return Overflowing


class Buffering(FileProducer):
    """Keeps up to ten events in memory, and so loses them when it is killed."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._memory: list[bytes] = []

    def write(self, data: bytes) -> None:
        n = number(data)
        if n is not None:
            log(self.setup, f"lost {n} producer_crash")
        if len(self._memory) >= 10:
            self.flush()
        self._memory.append(data)
        if n is None:
            self.flush()

    def flush(self) -> None:
        for data in self._memory:
            super().write(data)
            n = number(data)
            if n is not None:
                log(self.setup, f"found {n}")
        self._memory = []


def refusing(delivers: bool) -> type[FileProducer]:
    """Refuses every seventh event; a liar delivers it all the same."""

    class Refusing(FileProducer):
        def send(self, data: bytes) -> Position:
            n = number(data)
            if n is None or n % 7 != 3:
                return super().send(data)
            log(self.setup, "refused")
            if delivers:
                log(self.setup, "refused-delivered")
                super().send(data)
            raise Rejected("no")

    return Refusing


def doubtful(error: type[Exception]) -> type[FileProducer]:
    """Does not know of every seventh event; delivers every fourteenth."""

    class Doubtful(FileProducer):
        def send(self, data: bytes) -> Position:
            n = number(data)
            if n is None or n % 7 != 3:
                return super().send(data)
            log(self.setup, "maybe")
            if n % 14 == 3:
                log(self.setup, "maybe-delivered")
                super().send(data)
            raise error("perhaps")

    return Doubtful


class ClaimsEverything(forgetting()):  # type: ignore[misc]
    """Forgets while nobody is there, and declares again and again that all it ever had was evicted."""

    def losses(self) -> list[Loss]:
        return [Loss(7, 0, 2**62, "evicted")]


class DropsOfTheSecond(FileProducer):
    """The second of several producers drops some of its events, long before anything is broken."""

    def drop(self, n: int) -> bool:
        chosen = self.setup.index == 1 and n in (1, 7, 13)
        if chosen:
            log(self.setup, f"lost {n} {NOBODY_KNOWS}")
        return chosen


class GivesUpBefore(forgetting()):  # type: ignore[misc]
    """Drops some events long before the fault, and says that it gave them up."""

    def drop(self, n: int) -> bool:
        if n not in (5, 6, 30):
            return bool(super().drop(n))
        log(self.setup, f"lost {n} {NOBODY_KNOWS}")
        self.declare("gave_up")
        return True


class Excusing(FileProducer):
    """Drops some events, and has a counter that tells of many more, as a full buffer would."""

    def drop(self, n: int) -> bool:
        if not 10 <= n < 40:
            return False
        log(self.setup, f"lost {n} {NOBODY_KNOWS}")
        return True

    def drops(self) -> dict[str, int]:
        return {"overflow_sender": 10**6, "overflow_receiver": 10**6}


def ending(end: Callable[[], object]) -> type[FileConsumer]:
    """The process of the consumer ends in the middle, by itself."""

    class Ending(FileConsumer):
        def shape(self, message: Message) -> Iterable[Message]:
            n = number(message.data)
            if n == 150:
                for missing in range(150, 255):
                    log(self.setup, f"lost {missing} {NOBODY_KNOWS}")
                end()
            return [message]

    return Ending


def exit_in_order() -> None:
    """As `sys.exit()` does, which no error tells of."""
    raise SystemExit(0)


class NeverCloses(FileConsumer):
    """Does not come back from an orderly stop."""

    def close(self) -> None:
        while True:
            time.sleep(1)


def returning(position: object) -> type[FileProducer]:
    """Delivers everything, and says of every seventh event that it lies where none can."""

    class Returning(FileProducer):
        def send(self, data: bytes) -> Position:
            where = super().send(data)
            n = number(data)
            return where if n is None or n % 7 else position  # type: ignore[return-value]

    return Returning


class DeclaresAnything(FileProducer):
    """Declares as lost what are no positions."""

    def losses(self) -> list[Loss]:
        return [Loss("a", None, 2.5, "evicted"), (1, 2, 3, "evicted")]  # type: ignore[arg-type, list-item]


class Promising(dropping(lambda n: False)):  # type: ignore[misc]
    """Says for ever that more will come."""

    def pending(self) -> int:
        return 5


# Consumers ------------------------------------------------------------------------------------------------------


def repeating(times: int) -> type[FileConsumer]:
    """Gives every tenth event several times."""

    class Repeating(FileConsumer):
        def shape(self, message: Message) -> Iterable[Message]:
            n = number(message.data)
            if n is None or n % 10:
                return [message]
            for _ in range(times - 1):
                log(self.setup, "duplicate")
            return [message] * times

    return Repeating


class LateDuplicates(FileConsumer):
    """Gives the first event once more when nothing has come for most of its quiet time."""

    _first: Message | None = None
    _came = 0.0

    def receive(self, timeout_s: float) -> Iterable[Message]:
        for message in super().receive(timeout_s):
            self._came = time.monotonic()
            if number(message.data) is not None:
                self._first = self._first or message
            yield message
        if self._first is not None and time.monotonic() - self._came > 0.35:
            log(self.setup, "duplicate")
            yield self._first
            self._first = None


def shuffling(size: int) -> type[FileConsumer]:
    """Turns every block of `size` events round."""

    class Shuffling(FileConsumer):
        def __init__(self, setup: Setup) -> None:
            super().__init__(setup)
            self._held: list[Message] = []

        def shape(self, message: Message) -> Iterable[Message]:
            n = number(message.data)
            if n is None or n >= 200:
                return [message]
            self._held.append(message)
            if len(self._held) < size:
                return []
            block, self._held = self._held[::-1], []
            for _ in block[1:]:
                log(self.setup, "late")
            return block

    return Shuffling


def inventing(
    make: Callable[[Message, payload.Tag], Message], word: str = "unexpected"
) -> type[FileConsumer]:
    """With every twentieth event gives something that was never offered."""

    class Inventing(FileConsumer):
        def shape(self, message: Message) -> Iterable[Message]:
            tag = payload.decode(message.data)
            if tag is None or tag.probe or tag.n % 20:
                return [message]
            log(self.setup, word)
            return [message, make(message, tag)]

    return Inventing


class Mixing(FileConsumer):
    """Gives pairs of events whose bodies are exchanged: heads and checksums are right."""

    _held: Message | None = None

    def shape(self, message: Message) -> Iterable[Message]:
        n = number(message.data)
        if n is None or n % 20 > 1:
            return [message]
        if self._held is None:
            self._held = message
            return []
        one, other, self._held = self._held.data, message.data, None
        for data in (one, other):
            log(self.setup, "unexpected")
            log(self.setup, f"lost {number(data)} {NOBODY_KNOWS}")
        return [Message(a[:24] + b[24:-4] + a[-4:]) for a, b in ((one, other), (other, one))]


class Premature(FileConsumer):
    """Gives an event that is sent only half a second later."""

    def shape(self, message: Message) -> Iterable[Message]:
        tag = payload.decode(message.data)
        if tag is None or tag.probe or tag.n != 10:
            return [message]
        log(self.setup, "premature")
        log(self.setup, "duplicate")  # it comes again when it is sent
        for _ in range(149):
            log(self.setup, "late")  # everything in between comes after it
        return [message, Message(payload.encode(tag.run, 0, tag.n + 150, self.setup.size))]


class Eating(FileConsumer):
    """Keeps every seventh event for itself."""

    def shape(self, message: Message) -> Iterable[Message]:
        n = number(message.data)
        if n is None or n % 7 != 3:
            return [message]
        log(self.setup, f"lost {n} {NOBODY_KNOWS}")
        return []


class Joining(FileConsumer):
    """Gives some pairs of events as one."""

    _held: Message | None = None

    def shape(self, message: Message) -> Iterable[Message]:
        n = number(message.data)
        if n is None or n % 20 > 1:
            return [message]
        log(self.setup, f"lost {n} {NOBODY_KNOWS}")
        if self._held is None:
            self._held = message
            return []
        log(self.setup, "unexpected")
        joined, self._held = self._held.data + message.data, None
        return [Message(joined)]


def spoiling(make: Callable[[bytes], list[bytes]]) -> type[FileConsumer]:
    """Gives something else instead of every twentieth event."""

    class Spoiling(FileConsumer):
        def shape(self, message: Message) -> Iterable[Message]:
            n = number(message.data)
            if n is None or n % 20:
                return [message]
            log(self.setup, f"lost {n} {NOBODY_KNOWS}")
            made = [Message(data) for data in make(message.data)]
            for _ in made:
                log(self.setup, "unexpected")
            return made

    return Spoiling


def swapped(data: bytes) -> bytes:
    """The data with the first two neighbours behind the head exchanged that differ: two equal ones damage nothing."""
    at = next(at for at in range(payload.HEAD_SIZE, len(data) - 1) if data[at] != data[at + 1])
    return data[:at] + data[at + 1 : at - 1 : -1] + data[at + 2 :]


class StartsAgain(FileConsumer):
    """Knows nothing of what it had before it was stopped, and gives all of it once more."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.incarnation > 1:
            self._at = 0
            self._log.seek(0)

    def shape(self, message: Message) -> Iterable[Message]:
        n = number(message.data)
        mark = self.setup.shared / f"given-{n}"
        if n is not None and mark.exists():
            log(self.setup, "duplicate")
        mark.touch()
        return [message]


class SecondEats(FileConsumer):
    """The second of two subscribers keeps some early events for itself."""

    def shape(self, message: Message) -> Iterable[Message]:
        n = number(message.data)
        if n not in (3, 10, 17) or self.setup.index != 1:
            return [message]
        log(self.setup, f"lost {n} {NOBODY_KNOWS}")
        return []


class HoldsToTheEnd(FileConsumer):
    """Keeps one event until it is closed, long after everything seemed to be at rest."""

    _held: Message | None = None
    _closed = False

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._closed:
            return super().receive(timeout_s)
        return [self._held] if self._held is not None else []

    def shape(self, message: Message) -> Iterable[Message]:
        if number(message.data) != 100:
            return [message]
        self._held = message
        log(self.setup, "late")
        return []

    def close(self) -> None:
        self._closed = True


_random = random.Random(7)
_CHOSEN = frozenset(_random.sample(range(255), 40))
PATTERNS: dict[str, Chooses] = {
    "every-seventh": lambda n: n % 7 == 3,
    "the-first": lambda n: n == 0,
    "the-last": lambda n: n == 254,
    "one": lambda n: n == 150,
    "a-block": lambda n: 100 <= n < 140,
    "at-random": lambda n: n in _CHOSEN,
    "all-odd": lambda n: n % 2 == 1,
    "the-end": lambda n: n >= 230,
    "everything": lambda n: True,
}
SEVENTH = PATTERNS["every-seventh"]
SUPPORTS = "nothing that was observed supports it"
CASES = [
    *(
        Case(f"loses-nothing-with-{scenario}", scenario=scenario, verdict="pass", exact=False)
        for scenario in ("stop", "kill", "pause-long", "late", "producer-kill", "clock-jump")
    ),
    *(Case(f"drops-{name}", dropping(chooses)) for name, chooses in PATTERNS.items()),
    *(
        Case(f"drops-and-says-{reason}", dropping(SEVENTH, reason), findings=(f"says {reason}", SUPPORTS))
        for reason in (
            *("offline", "producer_crash", "overflow_sender", "overflow_receiver"),
            *("in_flight", "evicted", "gave_up"),
        )
    ),
    Case("drops-and-says-nonsense", dropping(SEVENTH, "gremlins"), findings=("gremlins",)),
    Case("says-lost-what-arrived", ClaimsWhatArrived, verdict="pass"),
    Case("forgets-while-away", forgetting(), scenario="kill", verdict="pass", exact=False),
    *(
        Case(
            f"forgets-while-away-and-says-{reason}",
            forgetting(reason),
            scenario="kill",
            verdict="pass",
            findings=(f"says {reason}", "was offline"),
            exact=False,
        )
        for reason in ("overflow_sender", "overflow_receiver", "evicted", "producer_crash")
    ),
    Case(
        "gives-up-while-away", forgetting("gave_up", "gave_up"), scenario="kill", verdict="pass", exact=False
    ),
    Case(
        "forgets-and-drops-before",
        forgetting_and_dropping(lambda n: n in (5, 6, 30)),
        scenario="kill",
        exact=False,
        lead_s=2.5,
    ),
    Case(
        "forgets-and-drops-after",
        DropsAfterReturn,
        Returning,
        scenario="kill",
        verdict="pass",
        exact=False,
        tail_s=3.0,
    ),
    Case("forgets-before-a-late-join", forgetting(), scenario="late", verdict="pass"),
    Case("overflows", overflowing(), scenario="pause-long", verdict="pass"),
    Case(
        "overflows-and-says-offline",
        overflowing("offline"),
        scenario="pause-long",
        verdict="pass",
        findings=("says offline", "was overflow_sender"),
    ),
    Case("gives-up-while-stopped", overflowing("gave_up", "gave_up"), scenario="pause-long", verdict="pass"),
    Case("buffers-and-crashes", Buffering, scenario="producer-kill", verdict="pass", exact=False),
    Case("holds-until-stopped", consumer=Holding, scenario="stop", verdict="pass"),
    Case("refuses", refusing(delivers=False), verdict="pass"),
    Case("refuses-and-delivers", refusing(delivers=True), problems=("refused and delivered",)),
    Case("does-not-know", doubtful(Indeterminate), verdict="pass"),
    Case("raises-anything", doubtful(ValueError), problems=("ValueError",)),
    Case("excuses-itself-with-a-counter", Excusing),
    Case("exits-in-order", consumer=ending(exit_in_order), problems=("ended by itself: exit code 0",)),
    Case(
        "is-killed-by-somebody",
        consumer=ending(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        problems=("ended by itself: SIGKILL",),
    ),
    Case("never-closes", consumer=NeverCloses, verdict="pass", findings=("does not end consumer-0.1",)),
    Case("says-yes-for-a-position", returning(True), problems=("returned True, which is no Position",)),
    Case("is-nowhere", returning(Position(-1, 2**70)), problems=("which is no Position",)),
    Case("declares-anything", DeclaresAnything, problems=("losses() gave", "no Loss of positions")),
    Case("says-more-will-come", Promising, verdict="unknown", drain_s=1.5),
    Case("gives-twice", consumer=repeating(2), verdict="pass"),
    Case("gives-five-times", consumer=repeating(5), verdict="pass"),
    Case("gives-again-late", consumer=LateDuplicates, verdict="pass"),
    Case("swaps", consumer=shuffling(2), verdict="pass"),
    Case("turns-blocks-round", consumer=shuffling(8), verdict="pass"),
    Case("invents", consumer=inventing(lambda m, t: Message(payload.encode(t.run, 0, t.n + 10**6, 60)))),
    Case("damages", consumer=inventing(lambda m, t: Message(m.data[:-1] + bytes([m.data[-1] ^ 1])))),
    Case("cuts-short", consumer=inventing(lambda m, t: Message(m.data[:-9]))),
    Case("gives-empty-events", consumer=inventing(lambda m, t: Message(b""))),
    Case(
        "brings-events-of-another-run",
        consumer=inventing(lambda m, t: Message(payload.encode(t.run ^ 1, 0, t.n, 60))),
    ),
    Case("mixes-bodies-up", consumer=Mixing),
    Case("delivers-before-it-is-sent", consumer=Premature, problems=("before they were sent",)),
    Case("keeps-some-for-itself", consumer=Eating),
    Case("joins-two-events", consumer=Joining),
    Case("splits-events", consumer=spoiling(lambda data: [data[:30], data[30:]])),
    Case("appends-a-byte", consumer=spoiling(lambda data: [data + b"0"])),
    Case("swaps-two-bytes", consumer=spoiling(lambda data: [swapped(data)])),
    Case("turns-all-round", consumer=shuffling(200), verdict="pass"),
    Case("starts-again", consumer=StartsAgain, scenario="stop", verdict="pass"),
    # Before anything is broken, also on a busy machine.
    Case("second-subscriber-eats", consumer=SecondEats, scenario="all-down", exact=False, lead_s=1.0),
    Case("second-producer-drops", DropsOfTheSecond, scenario="many-producers", exact=False),
    Case(
        "claims-that-everything-was-evicted",
        ClaimsEverything,
        scenario="kill",
        verdict="pass",
        findings=("says evicted", "was offline"),
        exact=False,
    ),
    Case(
        "gives-up-before-the-fault",
        GivesUpBefore,
        scenario="kill",
        findings=("says gave_up of 3", SUPPORTS),
        exact=False,
        lead_s=2.5,
    ),
    Case("holds-to-the-end", consumer=HoldsToTheEnd, verdict="unknown"),
    Case("never-ends", consumer=Endless, verdict="unknown", drain_s=1.5, exact=False),
]


def _transport(case: Case) -> Transport:
    scenarios = ("none", "stop", "kill", "pause-long", "producer-kill", "late", "all-down", "many-producers")
    traits = Traits(
        family="misbehaving",
        journal="memory",
        acks=True,
        many_producers=True,
        quiet_s=0.8,
        promises=dict.fromkeys(scenarios, ANY),
        summary="misbehaves",
    )
    return Transport(case.name, case.producer, case.consumer, traits)


for _case in CASES:
    globals()[_case.name.replace("-", "_")] = _transport(_case)
