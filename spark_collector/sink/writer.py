"""`df.write.format("brokerless")` and `df.writeStream.format("brokerless")`, as Spark calls them.

Tasks turn rows into messages, the driver appends the messages of a batch to the journal. So the journal is on the
driver's machine and executors share nothing with it, and a batch passes through the driver's memory.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from brokerless.core.errors import ConfigError, UsageError
from brokerless.spark_collector.sink.batches import ONLY, append_batch
from brokerless.spark_collector.sink.events import check_columns, encode_batches, parse_sink_options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class SinkMessage(WriterCommitMessage):
    """The events of one task."""

    def __init__(self, events: bytes) -> None:
        self.events = events


class _Writer:
    """What the writers of batches and of streams share."""

    def __init__(self, options: Mapping[str, str], schema: "StructType", overwrite: bool) -> None:
        if overwrite:
            raise UsageError("a journal cannot be overwritten: use mode append")
        self.options = parse_sink_options(options)
        self.given = dict(options)
        check_columns({f.name: f.dataType.simpleString() for f in schema.fields}, self.options.topic)

    def write(self, iterator: Iterator["pa.RecordBatch"]) -> SinkMessage:
        """One task; runs in an executor."""
        return SinkMessage(encode_batches(iterator, self.options.topic))

    def _append(self, messages: Sequence[Any], query: str, batch: int) -> None:
        append_batch(self.options, [m.events for m in messages if m is not None], query, batch)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """All rows of a DataFrame, or none of them."""

    def commit(self, messages: Sequence[Any]) -> None:
        """Append; runs on the driver."""
        self._append(messages, uuid.uuid4().hex, ONLY)

    def abort(self, messages: Sequence[Any]) -> None:
        """Nothing to do: what failed tasks made is forgotten."""


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """The rows of each micro-batch, once."""

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        """Append; runs on the driver."""
        self._append(messages, self._query(), batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Nothing to do: what failed tasks made is forgotten."""

    def _query(self) -> str:
        """The query's id, which Spark keeps in its checkpoint and does not tell a writer in Python."""
        lower = {key.lower(): value for key, value in self.given.items()}
        where = lower.get("checkpointlocation", "").removeprefix("file://").removeprefix("file:")
        try:
            return str(json.loads(Path(where, "metadata").read_text("utf-8"))["id"])
        except (OSError, ValueError, KeyError):
            raise ConfigError(
                "checkpointLocation",
                "must be given as an option of the query, and be a directory of the driver's machine; without it a "
                "batch that comes again cannot be recognised (with the jar, any checkpoint will do)",
            ) from None
