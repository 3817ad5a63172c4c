"""Makes evidence of runs whose truth is known: for the tests of the pure parts."""

from collections.abc import Callable, Iterable

from brokerless.losstest.evidence.evidence import ConsumerLog, Declared, Evidence
from brokerless.losstest.evidence.witness import NO_POSITION, Kind, Record
from brokerless.losstest.model import Cell, Promise, Traits

MS = 1_000_000
START = 1_000_000_000_000
ANY = Promise("may")


def cell(**changes: object) -> Cell:
    fields: dict[str, object] = {
        "transport": "t",
        "scenario": "kill",
        "seed": 1,
        "run": 5,
        "rate": 1000.0,
        "size": 60,
        "lead_s": 0.1,
        "offline_s": 0.1,
        "tail_s": 0.1,
        "drain_s": 1.0,
        "buffer_events": 10,
        "retention_events": 10,
        "traits": Traits(family="f"),
        "promise": ANY,
    }
    return Cell(**(fields | changes))  # type: ignore[arg-type]


def record(
    kind: Kind, n: int = 0, t: int = 0, count: int = 1, position: int = NO_POSITION, epoch: int = 0
) -> Record:
    return Record(int(kind), 0, 0, count, n, t, position, epoch)


def due(n: int) -> int:
    """When event n was offered and accepted: one per millisecond."""
    return START + n * MS


def producer(
    accepted: Iterable[int], rejected: Iterable[int] = (), unknown: Iterable[int] = ()
) -> list[Record]:
    outcome = dict.fromkeys(accepted, Kind.ACCEPTED) | dict.fromkeys(rejected, Kind.REJECTED)
    numbers = sorted({*outcome, *unknown})
    records = [record(Kind.START, len(numbers), START, position=MS)]
    for n in numbers:
        records.append(record(Kind.OFFERED, n, due(n)))
        if n in outcome:
            records.append(record(outcome[n], n, due(n), position=2 * n, epoch=9))
    return [*records, record(Kind.DONE, t=due(max(numbers, default=0)) + 1)]


def consumer(
    numbers: Iterable[int],
    index: int = 0,
    incarnation: int = 1,
    subscription: str = "sub-0",
    ready: int = START - MS,
    late: Callable[[int], int] = lambda n: MS // 2,
) -> ConsumerLog:
    """`late`: how long after it was sent event n arrives."""
    records = [record(Kind.READY, t=ready), record(Kind.PROBE, t=ready)]
    for n in numbers:
        t = max(due(n), ready) + late(n)
        records += [record(Kind.DELIVERED, n, t), record(Kind.COMMITTED, n, t), record(Kind.ACKED, n, t)]
    return ConsumerLog(index, incarnation, subscription, records)


def rested(last: int) -> list[dict[str, object]]:
    return [
        {"t": START - 2 * MS, "what": "begin"},
        {"t": due(last) + 1000 * MS, "what": "quiescent"},
        {"t": due(last) + 1001 * MS, "what": "end"},
    ]


__all__ = [
    "ANY",
    "MS",
    "START",
    "Declared",
    "Evidence",
    "cell",
    "consumer",
    "due",
    "producer",
    "record",
    "rested",
]
