"""`spark.read.format("brokerless")` and `spark.readStream.format("brokerless")`.

Works with pyspark 4.0 to 4.3: read limits, availableNow and the reported backlog are used where Spark has
them.
Planning happens in one process on the driver, reading in the executors, which need this package installed.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from brokerless.spark_collector.options import SourceOptions, parse_options
from brokerless.spark_collector.places import place_of
from brokerless.spark_collector.planning import Marks, Piece, Planner, read_piece
from brokerless.spark_collector.schema import ROW_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

try:
    from pyspark.sql.streaming import datasource as limits

    AvailableNow: Any = limits.SupportsTriggerAvailableNow
except ImportError:  # pyspark 4.0 and 4.1 know neither limits nor this trigger
    AvailableNow = object


class PiecePartition(InputPartition):
    """One task of a batch."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.piece = piece


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[Any]:
    if not isinstance(partition, PiecePartition):
        return iter(())  # Spark makes up one partition where there are none
    return read_piece(place_of(partition.piece.key), partition.piece, options)


class BrokerlessSource(DataSource):
    """Journals and publishers as rows; see docs/spark_collector.md for the options."""

    @classmethod
    def name(cls) -> str:
        """What `format()` takes."""
        return "brokerless"

    def schema(self) -> str:
        """The one row schema."""
        return ROW_SCHEMA

    def reader(self, schema: "StructType") -> "BatchReader":
        """For `spark.read`."""
        return BatchReader(parse_options(self.options))

    def streamReader(self, schema: "StructType") -> "StreamReader":
        """For `spark.readStream`."""
        return StreamReader(parse_options(self.options))


class BatchReader(DataSourceReader):
    """Everything between startingOffsets and endingOffsets, as it is when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> list[PiecePartition]:
        """Ranges of offsets, one per task."""
        return [PiecePartition(piece) for piece in Planner(self.options).everything()]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one range; runs in an executor."""
        return _read(self.options, partition)


class StreamReader(DataSourceStreamReader, AvailableNow):  # type: ignore[misc]  # depends on Spark
    """Micro-batches; the checkpoint keeps a `Mark` per place."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._planner: Planner | None = None
        self._last: Marks = {}

    def __getstate__(self) -> dict[str, Any]:
        """Executors get the options only."""
        return {"options": self.options, "_planner": None, "_last": {}}

    @property
    def planner(self) -> Planner:
        """Made in the planning process."""
        if self._planner is None:
            self._planner = Planner(self.options)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        return _dump(self.planner.initial())

    def getDefaultReadLimit(self) -> Any:
        """maxEventsPerTrigger."""
        most = self.options.max_events
        return limits.ReadMaxRows(most) if most else limits.ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end: what is there now."""
        self.planner.aim({})

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """How far the next batch goes."""
        max_events = self.options.max_events if limit is None else getattr(limit, "max_rows", 0)
        if start is None:  # pyspark 4.0 and 4.1 do not say where they are: it is where we sent them
            begin = self._last or self.planner.initial()
        else:
            begin = _load(start)
        self._last = self.planner.latest(begin, max_events)
        return _dump(self._last)

    def reportLatestOffset(self) -> dict[str, Any]:
        """What there is in all: the backlog in the query's progress."""
        return _dump(
            {key: extent.mark(extent.next) for key, extent in self.planner.extents(self._last).items()}
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[PiecePartition]:
        """Ranges of offsets, one per task."""
        return [PiecePartition(piece) for piece in self.planner.pieces(_load(start), _load(end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one range; runs in an executor."""
        return _read(self.options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the spool's retention does not wait for Spark.

        The checkpoint does the remembering.
        """


def _dump(marks: Marks) -> dict[str, Any]:
    return {key: msgspec.to_builtins(mark) for key, mark in sorted(marks.items())}


def _load(found: dict[str, Any]) -> Marks:
    return msgspec.convert(found, Marks)


# Spark finds this name in the top-level module `pyspark_brokerless` by itself.
DefaultSource = BrokerlessSource
