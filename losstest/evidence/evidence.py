"""Everything that a verdict is made from, and how it is read back from a run's directory."""

from pathlib import Path
from typing import Any

import msgspec

from brokerless.losstest.evidence.event_log import plain, read_event_log
from brokerless.losstest.evidence.reader import WitnessFile
from brokerless.losstest.evidence.witness import Record
from brokerless.losstest.model import Cell, Usage

Records = WitnessFile | list[Record]


class Declared(msgspec.Struct, frozen=True):
    """The transport itself says that positions `first` to `last` of `epoch` are lost to a subscription."""

    subscription: str
    epoch: int
    first: int
    last: int
    reason: str


class DropCount(msgspec.Struct, frozen=True):
    """A drop counter of one process rose by `increase`, and this was seen at `t`."""

    subscription: str
    t: int
    reason: str
    increase: int


class ConsumerLog(msgspec.Struct):
    """What one incarnation of one consumer saw."""

    index: int
    incarnation: int
    subscription: str
    records: Records


class Evidence(msgspec.Struct, kw_only=True):
    """The witnesses of one run. The verdict is a pure function of this."""

    cell: Cell
    producers: list[Records] = []  # one per incarnation, in order
    consumers: list[ConsumerLog] = []
    links: list[Records] = []  # what relay and seeded drop took
    supervisor: list[dict[str, Any]] = []  # what the supervisor logged
    filters: list[dict[str, Any]] = []  # what the kernel's filter was told, and between when and when
    resets: list[int] = []  # when the relay reset a connection
    closed: list[int] = []  # when the relay saw an end close one
    connected: list[int] = []  # when a new one went through the relay
    declared: list[Declared] = []
    drops: list[DropCount] = []
    wire_bytes: int | None = None  # over loopback, where the run had it alone
    usage: dict[str, Usage] = {}  # process → what it cost; of one that was killed, as far as it was told
    problems: list[str] = []

    def damage(self) -> list[str]:
        """What could not be read of the witness files. Known when they have been read."""
        found = []
        for records in (*self.producers, *(log.records for log in self.consumers), *self.links):
            if isinstance(records, WitnessFile):
                name = records.path.name
                if records.damaged:
                    found.append(
                        f"{name}: {records.damaged} records after record {records.records} are not readable"
                    )
                if records.unknown_kinds:
                    kinds = sorted(records.unknown_kinds)
                    found.append(f"{name}: records of kinds {kinds} are of another version")
        return found


def load(directory: Path) -> Evidence:
    """Read a run's directory. Raises FileNotFoundError when there is no cell.json in it."""
    cell = msgspec.json.decode((directory / "cell.json").read_bytes(), type=Cell)
    evidence = Evidence(cell=cell, supervisor=read_event_log(directory / "supervisor.jsonl"))
    for entry in evidence.supervisor:
        if entry["what"] == "error":
            evidence.problems.append(plain(entry["text"]))
        elif entry["what"] == "usage":
            evidence.usage[entry["process"]] = msgspec.convert(entry["usage"], Usage)
        elif entry["what"] == "wire":
            evidence.wire_bytes = entry["bytes"]
    for path in sorted(directory.glob("*.wit"), key=_incarnation):
        _add_witness(evidence, path)
    for path in sorted(directory.glob("*-*.jsonl")):
        _read_process_log(evidence, path)
    return evidence


def _incarnation(path: Path) -> tuple[str, int]:
    name, _, number = path.stem.partition(".")
    return name, int(number) if number.isdecimal() else 0


def _add_witness(evidence: Evidence, path: Path) -> None:
    name, _, number = path.stem.partition(".")
    role, _, index = name.partition("-")
    if role == "producer":
        evidence.producers.append(WitnessFile(path))
    elif role == "consumer":
        subscription = evidence.cell.subscription(int(index))
        evidence.consumers.append(ConsumerLog(int(index), int(number), subscription, WitnessFile(path)))
    else:
        evidence.links.append(WitnessFile(path))


def _read_process_log(evidence: Evidence, path: Path) -> None:
    role, _, index = path.stem.partition(".")[0].partition("-")
    subscription = evidence.cell.subscription(int(index)) if role == "consumer" else ""
    before: dict[str, int] = {}
    for entry in read_event_log(path):
        what = entry["what"]
        if what == "lost":
            fields = {k: entry[k] for k in ("epoch", "first", "last", "reason")}
            evidence.declared.append(Declared(subscription, **fields))
        elif what == "drops":  # cumulative
            for reason, number in entry["drops"].items():
                increase = number - before.get(reason, 0)
                if increase > 0:
                    evidence.drops.append(DropCount(subscription, entry["t"], reason, increase))
            before = entry["drops"]
        elif what == "filter":
            evidence.filters.append(entry)
        elif what == "reset":
            evidence.resets.append(entry["at"])
        elif what == "closed":
            evidence.closed.append(entry["at"])
        elif what == "connected":
            evidence.connected.append(entry["at"])
        elif what == "usage":  # cumulative: the last one counts
            evidence.usage[path.stem] = msgspec.convert(entry["usage"], Usage)
        elif what == "error":
            evidence.problems.append(plain(f"{path.stem}: {entry['text']}"))
