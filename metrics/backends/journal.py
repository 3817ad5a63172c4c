"""The journal backend: every figure of a flush as an Event, for the collector and Spark."""

import msgspec

from brokerless.core import DiskJournal
from brokerless.metrics.aggregate.flush import Flush
from brokerless.metrics.aggregate.sketch import Sketch
from brokerless.metrics.aggregate.timers import Figures
from brokerless.metrics.backends.base import Backend
from brokerless.metrics.parser import Number, name_and_tags

TOPIC = "metrics"
TOPIC_PASSED = "metrics.passed"


class Row(msgspec.Struct, omit_defaults=True):
    """One event's JSON. `window` is [start, end] in seconds since 1970; counters alone have the loss fields.

    `bound` is null when nothing is known of it. `sketch` (bins of a distribution) merges with other daemons'.
    """

    name: str
    tags: dict[str, str]
    type: str
    value: Number
    window: tuple[float, float]
    corrected: Number | msgspec.UnsetType = msgspec.UNSET
    bound: float | msgspec.UnsetType | None = msgspec.UNSET
    grade: str | msgspec.UnsetType = msgspec.UNSET
    figures: Figures | msgspec.UnsetType = msgspec.UNSET
    sketch: Sketch | msgspec.UnsetType = msgspec.UNSET


def rows(flush: Flush) -> list[Row]:
    """What the journal gets of a flush: counters that moved, gauges, timers and sets with values."""
    window = (flush.start, flush.end)
    out = []
    for p in flush.counters:
        if p.raw or p.corrected or p.bound:
            name, tags = name_and_tags(p.series)
            out.append(Row(name, tags, "counter", p.raw, window, p.corrected, p.bound, p.grade.label))
    for series, value in flush.gauges.items():
        out.append(Row(*name_and_tags(series), "gauge", value, window))
    for series, figures in flush.timers.items():
        count = figures["count"]
        if count and not isinstance(count, dict):
            sketch = flush.sketches.get(series, msgspec.UNSET)
            out.append(Row(*name_and_tags(series), "timer", count, window, figures=figures, sketch=sketch))
    for series, size in flush.sets.items():
        if size:
            out.append(Row(*name_and_tags(series), "set", size, window))
    for point in flush.timestamped:
        kind = "counter" if point.kind == "c" else "gauge"
        at = (float(point.timestamp), float(point.timestamp))
        out.append(Row(*name_and_tags(point.series), kind, point.value, at))
    return out


class JournalBackend(Backend):
    """Appends to a DiskJournal: a window survives `kill -9` as soon as it is appended."""

    def __init__(self, name: str, directory: str, source: str) -> None:
        self._journal = DiskJournal(directory)
        try:
            self._journal.bind(source)
        except BaseException:
            self._journal.close()
            raise
        self._appended = 0.0
        self._encoder = msgspec.json.Encoder()
        super().__init__(name)

    def deliver(self, flush: Flush) -> int:
        encode = self._encoder.encode
        datas = [encode(row) for row in rows(flush)]
        at = int(flush.end * 1_000_000)
        if datas and self._appended != flush.end:
            self._journal.append_many(TOPIC, datas, times=[at] * len(datas), content_type="application/json")
        # A retry after the next step failed must not append these again.
        self._appended = flush.end
        if flush.passed:
            self._journal.append_many(TOPIC_PASSED, flush.passed, content_type="text/plain")
        return sum(map(len, datas))

    def release(self) -> None:
        self._journal.close()
