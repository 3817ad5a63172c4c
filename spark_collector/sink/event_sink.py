"""Rows of a streaming query into a journal or publisher that this process has open."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from brokerless.core import DiskJournal
from brokerless.core.errors import UsageError
from brokerless.spark_collector.sink.batches import BatchAppender
from brokerless.spark_collector.sink.events import check_columns, encode_batches

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from brokerless.direct import Publisher


class EventSink:
    """A batch function of `run_stream` whose rows become events of a journal or of a publisher.

    `target`: an open `DiskJournal`, or a `Publisher` with one, so that its subscribers get the events at once; nothing
    else may publish there while a batch is appended. `topic`: of all events; default: the column `topic`. `appended`
    counts what this object appended. Raises UsageError for a journal in memory, which forgets which batches it has.
    """

    def __init__(self, target: "DiskJournal | Publisher", *, topic: str = "") -> None:
        journal = target if isinstance(target, DiskJournal) else target.journal
        if not isinstance(journal, DiskJournal):
            raise UsageError("an EventSink needs a disk journal: one in memory forgets which batches it has")
        self._topic = topic
        self._appender = BatchAppender(journal)
        self.appended = 0

    def __call__(self, rows: "DataFrame", batch: int, query: str) -> None:
        """Append one micro-batch; doing it again changes nothing."""
        check_columns({f.name: f.dataType.simpleString() for f in rows.schema.fields}, self._topic)
        topic = self._topic

        def encode(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            yield pa.RecordBatch.from_pylist([{"events": encode_batches(batches, topic)}])

        messages = [bytes(row.events) for row in rows.mapInArrow(encode, "events binary").collect()]
        self.appended += self._appender.append(messages, query, batch)
