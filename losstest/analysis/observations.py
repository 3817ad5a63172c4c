"""What the witnesses say, in columns: what the producer did, and what one subscription received. Pure."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from brokerless.losstest.evidence.evidence import ConsumerLog, Evidence, Records
from brokerless.losstest.evidence.reader import Columns, WitnessFile, portions
from brokerless.losstest.evidence.witness import NO_POSITION, Kind, Unexpected

FOREVER = (1 << 63) - 1
BLOCK = 1 << 20  # events at a time, so that temporary columns stay small
Times = NDArray[np.int64]
Numbers = NDArray[np.int64]
# What became of send(): never called, called, returned, refused, said that it does not know.
NOT_OFFERED, OPEN, ACCEPTED, REJECTED, INDETERMINATE = range(5)


class SentEvents:
    """The producer's side. Columns have one entry per event number; a time of 0 means that there is none."""

    def __init__(self, events: int) -> None:
        self.offered: Times = np.zeros(events, np.int64)
        self.accepted: Times = np.zeros(events, np.int64)
        self.outcome = np.zeros(events, np.uint8)
        self.positions: Times = np.zeros(0, np.int64)  # of the transport; empty if it tells none
        self.epochs = np.zeros(0, np.uint32)
        self.start = 0  # intended time of event 0
        self.interval = 1  # ns between two intended times
        self.done = False

    def __len__(self) -> int:
        return len(self.outcome)

    def count(self, *outcomes: int) -> int:
        """How many events had one of these outcomes."""
        return sum(int(np.count_nonzero(self.outcome == outcome)) for outcome in outcomes)

    @property
    def accepted_numbers(self) -> Numbers:
        """The numbers of all accepted events."""
        return np.flatnonzero(self.outcome == ACCEPTED)

    def intended(self, numbers: Numbers) -> Times:
        """When these events were meant to be sent."""
        return self.start + numbers * self.interval

    def add(self, records: Columns) -> None:
        """Take over the records of one portion, in their order."""
        kind = records["kind"]
        numbers = records["n"].astype(np.int64)
        times = records["t"].astype(np.int64)
        for one in np.flatnonzero(np.isin(kind, (Kind.START, Kind.DONE))):
            if kind[one] == Kind.START:
                self.start, self.interval = int(times[one]), max(1, int(records["position"][one]))
            self.done = bool(kind[one] == Kind.DONE)
        sent = np.isin(kind, (Kind.OFFERED, Kind.ACCEPTED, Kind.REJECTED, Kind.INDETERMINATE))
        if sent.any():
            self._grow(int(numbers[sent].max()) + 1)
        offered = kind == Kind.OFFERED
        self.offered[numbers[offered]] = times[offered]
        fresh = numbers[offered]
        self.outcome[fresh[self.outcome[fresh] == NOT_OFFERED]] = OPEN
        for which, outcome in (
            (Kind.REJECTED, REJECTED),
            (Kind.INDETERMINATE, INDETERMINATE),
            (Kind.ACCEPTED, ACCEPTED),
        ):
            self.outcome[numbers[kind == which]] = outcome
        accepted = kind == Kind.ACCEPTED
        self.accepted[numbers[accepted]] = times[accepted]
        placed = accepted & (records["position"] != NO_POSITION)
        if placed.any():
            if not len(self.positions):
                self.positions = np.full(len(self), -1, np.int64)
                self.epochs = np.zeros(len(self), np.uint32)
            self.positions[numbers[placed]] = records["position"][placed].astype(np.int64)
            self.epochs[numbers[placed]] = records["epoch"][placed]

    def _grow(self, events: int) -> None:
        more = events - len(self)
        if more > 0:
            self.offered, self.accepted, self.outcome = (
                np.concatenate([column, np.zeros(more, column.dtype)])
                for column in (self.offered, self.accepted, self.outcome)
            )
            if len(self.positions):
                self.positions = np.concatenate([self.positions, np.full(more, -1, np.int64)])
                self.epochs = np.concatenate([self.epochs, np.zeros(more, np.uint32)])


def sent_events(producers: list[Records], expected: int) -> SentEvents:
    """Merge the producers and their incarnations; `expected` is how many events were planned."""
    sent = SentEvents(expected)
    done: dict[str, bool] = {}  # producer → whether its last incarnation offered everything
    for records in producers:
        sent.done = False
        for portion in portions(records):
            sent.add(portion)
        done[records.path.stem.partition(".")[0] if isinstance(records, WitnessFile) else ""] = sent.done
    sent.done = bool(done) and all(done.values())
    return sent


class Presence:
    """When one incarnation of a consumer lived and received, from its own witness."""

    def __init__(self, log: ConsumerLog) -> None:
        self.index, self.incarnation = log.index, log.incarnation
        self.ready = FOREVER
        self.received = FOREVER  # the first probe or event
        self.last_record = 0
        self.highest = -1  # event number that it was given


class ReceivedEvents:
    """One subscription's side. Times are those of the first occurrence; 0 means that there is none."""

    def __init__(self, name: str, sent: SentEvents) -> None:
        self.name = name
        self._sent = sent
        self.delivered: Times = np.zeros(len(sent), np.int64)
        self.committed: Times = np.zeros(len(sent), np.int64)
        self.acked = np.zeros(len(sent), np.bool_)
        self.presences: list[Presence] = []
        self.duplicates = self.reordered = 0
        self.unexpected = self.damaged = self.other_run = 0
        self.last_delivery = 0

    def add_log(self, log: ConsumerLog) -> None:
        """Take over what one process saw."""
        presence = Presence(log)
        self.presences.append(presence)
        for portion in portions(log.records):
            self._add(portion, presence)

    def _add(self, records: Columns, presence: Presence) -> None:
        kind, flags = records["kind"], records["flags"]
        times = records["t"].astype(np.int64)
        presence.last_record = int(times[-1])
        for which in (Kind.READY, Kind.PROBE, Kind.DELIVERED):
            found = kind == which
            if found.any():
                first = int(times[found.argmax()])
                if which == Kind.READY:
                    presence.ready = min(presence.ready, first)
                else:
                    presence.received = min(presence.received, first)
        unexpected = kind == Kind.UNEXPECTED
        self.unexpected += int(records["count"][unexpected].sum())
        self.damaged += int(records["count"][unexpected & (flags == Unexpected.DAMAGED)].sum())
        self.other_run += int(records["count"][unexpected & (flags == Unexpected.OTHER_RUN)].sum())
        numbers, delivered_at = self._numbers(records, times, Kind.DELIVERED)
        if len(numbers):
            self.last_delivery = max(self.last_delivery, int(delivered_at.max()))
            self._deliver(numbers, delivered_at, presence)
        numbers, committed_at = self._numbers(records, times, Kind.COMMITTED)
        known = numbers < len(self._sent)
        _keep_first(self.committed, numbers[known], committed_at[known])
        numbers, _ = self._numbers(records, times, Kind.ACKED)
        self.acked[numbers[numbers < len(self._sent)]] = True

    @staticmethod
    def _numbers(records: Columns, times: Times, kind: Kind) -> tuple[Numbers, Times]:
        """Numbers and times of the records of one kind; a record may stand for several events in a row."""
        chosen = np.flatnonzero(records["kind"] == kind)
        numbers, counts = records["n"][chosen].astype(np.int64), records["count"][chosen].astype(np.int64)
        numbers[numbers < 0] = FOREVER - 1  # beyond what anybody offers
        if (counts == 1).all():
            return numbers, times[chosen]
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(numbers, counts) + steps, np.repeat(times[chosen], counts)

    def _deliver(self, numbers: Numbers, times: Times, presence: Presence) -> None:
        known = numbers < len(self._sent)
        known[known] = self._sent.outcome[numbers[known]] != NOT_OFFERED
        self.unexpected += int((~known).sum())
        numbers, times = numbers[known], times[known]
        distinct, at = np.unique(numbers, return_index=True)
        fresh = self.delivered[distinct] == 0
        self.duplicates += len(numbers) - int(fresh.sum())
        first = np.sort(at[fresh])
        in_order = np.maximum.accumulate(np.concatenate([[presence.highest], numbers[first]]))
        self.reordered += int((numbers[first] < in_order[:-1]).sum())
        _keep_first(self.delivered, numbers, times)
        if len(numbers):
            presence.highest = max(presence.highest, int(numbers.max()))


def _keep_first(column: Times, numbers: Numbers, times: Times) -> None:
    """Store the earliest time of each event."""
    distinct, at = np.unique(numbers, return_index=True)
    before, now = column[distinct], times[at]
    column[distinct] = np.where((before == 0) | (now < before), now, before)


def received_events(evidence: Evidence, sent: SentEvents) -> Iterator[ReceivedEvents]:
    """What each subscription received, one after the other: one is in memory if the caller lets go of it."""
    cell = evidence.cell
    for name in dict.fromkeys(cell.subscription(i) for i in range(cell.consumers)):
        yield _received(name, evidence, sent)


def _received(name: str, evidence: Evidence, sent: SentEvents) -> ReceivedEvents:
    received = ReceivedEvents(name, sent)
    for log in evidence.consumers:
        if log.subscription == name:
            received.add_log(log)
    return received


def link_events(links: Iterable[Records], sent: SentEvents, kind: Kind) -> NDArray[np.bool_]:
    """Which events relay or seeded drop dropped, or the relay delayed, as a mask."""
    mask = np.zeros(len(sent), np.bool_)
    for records in links:
        for portion in portions(records):
            numbers = portion["n"][portion["kind"] == kind]
            mask[numbers[numbers < len(mask)]] = True
    return mask
