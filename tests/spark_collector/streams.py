"""Generated streams with known faults, and the truth about them by brute force."""

import random
from collections import Counter, defaultdict
from typing import Any

import msgspec

from brokerless.spark_collector.collector.spool import LedgerNote
from brokerless.spark_collector.jobs.ledger import Windows
from brokerless.spark_collector.source.schema import COLUMNS

HOUR = 3600 * 1_000_000
START = 1_700_000_040 * 1_000_000  # a full minute


def row(**values: Any) -> dict[str, Any]:
    """A row of the collector's schema; times in microseconds."""
    blank: dict[str, Any] = dict.fromkeys(COLUMNS)
    return (
        blank
        | {"offset": 0, "transport": "test", "kind": "event", "content_type": "", "data": b"x", "key": ""}
        | {"headers": []}
        | values
    )


class Stream:
    """One (source, epoch, topic): what it sent, what of it arrived and when, what was said about it."""

    def __init__(self, source: str, epoch: int, topic: str, times: list[int]) -> None:
        self.source, self.epoch, self.topic, self.times = source, epoch, topic, times
        self.arrivals: list[tuple[int, int]] = [(seq, t + 1000) for seq, t in enumerate(times)]
        self.notes: list[LedgerNote] = []

    def lose(self, *seqs: int) -> None:
        """These never arrive."""
        gone = set(seqs)
        self.arrivals = [a for a in self.arrivals if a[0] not in gone]

    def repeat(self, *seqs: int) -> None:
        """These arrive once more."""
        self.arrivals += [(s, t + 5000) for s, t in self.arrivals if s in set(seqs)]

    def delay(self, by_us: int, *seqs: int) -> None:
        """These arrive later."""
        late = set(seqs)
        self.arrivals = [(s, t + by_us if s in late else t) for s, t in self.arrivals]

    def rows(self, windows: Windows, *, sent_counts: bool = True) -> list[dict[str, Any]]:
        """The rows a collector would have written, in no particular order."""
        name = {"source": self.source, "epoch": self.epoch, "topic": self.topic}
        rows = [
            row(**name, seq=s, offset=s, time=self.times[s], received=received)
            for s, received in self.arrivals
        ]
        if sent_counts:
            rows += [
                row(**name, kind="sent", seq=n, offset=n, time=t, received=t + 1000)
                for t, n in self.borders(windows)
            ]
        for note in self.notes:
            data = msgspec.json.encode(note)
            rows.append(row(**name, kind="ledger", seq=note.first, time=START, received=START, data=data))
        return rows

    def borders(self, windows: Windows) -> list[tuple[int, int]]:
        """What the producer says at each border of a window, and at its end."""
        size = windows.window_us
        first, last = self.times[0] // size, self.times[-1] // size + 1
        return [(b * size, sum(t < b * size for t in self.times)) for b in range(first, last + 1)]

    def truth(self, windows: Windows) -> dict[int, dict[str, int]]:
        """Per window: sent, received, duplicates, lost, healed."""
        size = windows.window_us
        table: dict[int, dict[str, int]] = defaultdict(Counter)  # type: ignore[arg-type]
        first_seen: dict[int, int] = {}
        for seq, received in self.arrivals:
            first_seen[seq] = min(received, first_seen.get(seq, received))
        copies = Counter(seq for seq, _ in self.arrivals)
        for seq, time in enumerate(self.times):
            slot = time - time % size
            entry = table[slot]
            entry["sent"] += 1
            entry["received"] += seq in copies
            entry["lost"] += seq not in copies
            entry["duplicates"] += max(0, copies[seq] - 1)
            entry["healed"] += seq in copies and first_seen[seq] > slot + size + windows.late_us
        return table


def random_stream(rng: random.Random, source: str, epoch: int, topic: str, windows: Windows) -> Stream:
    """A stream with a random mixture of all faults."""
    count = rng.randint(1, 60)
    step = rng.choice([1_000, 1_000_000, windows.window_us // 3, windows.window_us])
    time = START + rng.randrange(windows.window_us)
    times = []
    for _ in range(count):
        times.append(time)
        time += rng.randint(1, max(1, 2 * step))
    stream = Stream(source, epoch, topic, times)
    everything = range(count)
    if rng.random() < 0.5:
        stream.lose(*rng.sample(everything, rng.randint(0, count // 3)))
    if rng.random() < 0.4:  # a burst
        at = rng.randrange(count)
        stream.lose(*range(at, min(count, at + rng.randint(1, 20))))
    if rng.random() < 0.3:  # the tail
        stream.lose(*range(rng.randrange(count), count))
    if rng.random() < 0.4:
        stream.repeat(*rng.sample(everything, rng.randint(0, count // 2)))
    if rng.random() < 0.4:
        stream.delay(rng.randint(1, 5) * HOUR, *rng.sample(everything, rng.randint(0, count // 2)))
    return stream
