"""Everything that a verdict is made from, and how it is read back from a run's directory."""

from pathlib import Path
from typing import Any

import msgspec

from brokerless.losstest.model import Cell
from brokerless.losstest.notes import read_notes
from brokerless.losstest.witness import Kind, Record, read

_KINDS = frozenset(map(int, Kind))


class Declared(msgspec.Struct, frozen=True):
    """The transport itself says that positions `first` to `last` of `epoch` are lost to a subscription."""

    subscription: str
    epoch: int
    first: int
    last: int
    reason: str


class ConsumerLog(msgspec.Struct):
    """What one incarnation of one consumer saw."""

    index: int
    incarnation: int
    subscription: str
    records: list[Record]


class Evidence(msgspec.Struct, kw_only=True):
    """The witnesses of one run. The verdict is a pure function of this."""

    cell: Cell
    producers: list[list[Record]] = []  # one list per incarnation, in order
    consumers: list[ConsumerLog] = []
    links: list[Record] = []  # what relay and sieve swallowed
    world: list[dict[str, Any]] = []  # the supervisor's notes
    filters: list[dict[str, Any]] = []  # what the kernel's filter was told, and between when and when
    declared: list[Declared] = []
    drops: dict[str, int] = {}  # reason → how many a counter of the transport tells of
    problems: list[str] = []


def load(directory: Path) -> Evidence:
    """Read a run's directory. Raises FileNotFoundError when there is no cell.json in it."""
    cell = msgspec.json.decode((directory / "cell.json").read_bytes(), type=Cell)
    evidence = Evidence(cell=cell, world=read_notes(directory / "world.jsonl"))
    evidence.problems += [note["text"] for note in evidence.world if note["what"] == "error"]
    for path in sorted(directory.glob("*.wit"), key=_incarnation):
        reading = read(path)
        if reading.damaged:
            evidence.problems.append(
                f"{path.name}: {reading.damaged} records after record {len(reading.records)} are not readable"
            )
        strange = sorted({r.kind for r in reading.records} - _KINDS)
        if strange:
            evidence.problems.append(f"{path.name}: records of kinds {strange} are of another version")
        _place(evidence, path.stem, reading.records)
    for path in sorted(directory.glob("*-*.jsonl")):
        _read_claims(evidence, path)
    return evidence


def _incarnation(path: Path) -> tuple[str, int]:
    name, _, number = path.stem.partition(".")
    return name, int(number) if number.isdigit() else 0


def _place(evidence: Evidence, stem: str, records: list[Record]) -> None:
    name, _, number = stem.partition(".")
    role, _, index = name.partition("-")
    if role == "producer":
        evidence.producers.append(records)
    elif role == "consumer":
        subscription = evidence.cell.subscription(int(index))
        evidence.consumers.append(ConsumerLog(int(index), int(number), subscription, records))
    else:
        evidence.links += records


def _read_claims(evidence: Evidence, path: Path) -> None:
    role, _, index = path.stem.partition(".")[0].partition("-")
    subscription = evidence.cell.subscription(int(index)) if role == "consumer" else ""
    latest: dict[str, int] = {}
    for note in read_notes(path):
        if note["what"] == "lost":
            fields = {k: note[k] for k in ("epoch", "first", "last", "reason")}
            evidence.declared.append(Declared(subscription, **fields))
        elif note["what"] == "drops":  # cumulative, so the last word counts
            latest = note["drops"]
        elif note["what"] == "filter":
            evidence.filters.append(note)
        elif note["what"] == "error":
            evidence.problems.append(f"{path.stem}: {note['text']}")
    for reason, number in latest.items():
        evidence.drops[reason] = evidence.drops.get(reason, 0) + number
