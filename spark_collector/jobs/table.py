"""Tables to which batches are added exactly once: tasks write Parquet files, the driver commits them by their names.

Each commit carries the query and the batch. The table itself recognises a batch that comes again after a crash, and
refuses a second writer of the same query. Before a commit the files are looked up where the table is, and
their rows are compared with what the tasks wrote: a path that the machines do not share is an error, not a loss.

Spark hands the rows over as Arrow, and pyarrow makes the files: that takes less CPU than Spark's own Parquet writer,
and works in directories and in object stores alike, for which Spark has no client without further jars. Files of a
batch that died before its commit are not part of the table.
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from brokerless.core.errors import ConfigError, Fault, UsageError
from brokerless.spark_collector.jobs.parquet import Target, WrittenFile, write_files
from brokerless.spark_collector.tier.object_store import is_url

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

# Where a task writes; also marks files that have the partition columns in them.
BATCH = "batch-"
# Another query, or a compaction, may commit at the same time: the commit is tried again on the newer version.
COMMIT_RETRIES = 30
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class TableError(Fault):
    """The table cannot be written or read as it should; `path` names it."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"table {path}: {problem}")
        self.path = path
        self.problem = problem


class TaskReader(NamedTuple):
    """How tasks get the rows of a table, of this schema, from what Spark hands them; goes to the executors."""

    schema: "pa.Schema"
    read: Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]

    def count(self, rows: "DataFrame") -> int:
        """How many these are."""

        def count(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            yield pa.RecordBatch.from_pydict({"rows": [sum(b.num_rows for b in self.read(batches))]})

        return sum(row.rows for row in rows.mapInArrow(count, "rows bigint").collect())


class ExactlyOnceTable:
    """What all formats share: how the files of a batch are written and checked. A format says how they are committed.

    `path`: a directory or URL. `partition_by`: columns of the table's partitions, fixed when it is made.
    `storage_options`: what the object store needs, in the words of deltalake and obstore (`aws_access_key_id`,
    `aws_endpoint`, …); both also read the usual environment variables.
    """

    def __init__(
        self, path: str, partition_by: tuple[str, ...] = (), storage_options: dict[str, str] | None = None
    ) -> None:
        self.partition_by = partition_by
        self.storage_options = storage_options or {}
        self._locate(path)

    def _locate(self, path: str) -> None:
        self.local = not is_url(path)
        self.path = local_path(path) if self.local else path.rstrip("/")

    # ---- what a format says --------------------------------------------------------------------------------

    def sibling(self, suffix: str, partition_by: tuple[str, ...] = ()) -> "ExactlyOnceTable":
        """The table whose name is that of this one and `suffix`."""
        raise NotImplementedError

    def last_batch(self, query: str) -> int:
        """The last batch of this query that was committed, -1 if none was."""
        raise NotImplementedError

    def last_rows(self, query: str) -> int | None:
        """How many rows that batch had; None if it is not known (of tables that earlier versions wrote)."""
        raise NotImplementedError

    def arrow_schema(self) -> "pa.Schema | None":
        """The columns of the table; None if there is none."""
        raise NotImplementedError

    def partitions(self) -> tuple[str, ...] | None:
        """The columns of its partitions; None if there is no table."""
        raise NotImplementedError

    def version(self) -> int:
        """A number that rises with each commit of anybody; -1 if there is no table."""
        raise NotImplementedError

    def files(self) -> int:
        """How many files the table has now."""
        raise NotImplementedError

    def read_arrow(self) -> "pa.Table":
        """All rows, read by this process. Raises TableError if there is no table."""
        raise NotImplementedError

    def replace_arrow(self, rows: "pa.Table") -> None:
        """Replace the content by these rows, in one commit; what is known of queries and batches stays."""
        raise NotImplementedError

    def _prepare(self, schema: "pa.Schema") -> None:
        """Called before files are written."""

    def _commit(self, files: list[WrittenFile], schema: "pa.Schema", batch: int, query: str) -> None:
        raise NotImplementedError

    # ---- what all do -------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> str:
        """Where a streaming query that writes this table keeps its checkpoint: inside a local table.

        Raises UsageError for a table in an object store, where Spark cannot write: give a path of your own.
        """
        if not self.local:
            raise UsageError(
                f"{self.path}: give a checkpoint directory; Spark cannot keep it in an object store"
            )
        return os.path.join(self.path, "_brokerless", "checkpoint")

    def check(self) -> None:
        """Raise ConfigError if the table has other partitions than `partition_by`."""
        found = self.partitions()
        if found is not None and found != self.partition_by:
            raise ConfigError(
                "partition_by",
                f"the table {self.path} is partitioned by {_listed(found)}, "
                f"not by {_listed(self.partition_by)}: use its own, or another table",
            )

    def append(
        self,
        rows: "DataFrame",
        batch: int,
        query: str,
        *,
        summary: bool = False,
        reader: "TaskReader | None" = None,
    ) -> int:
        """Write the rows of one batch and commit them; returns how many, 0 if the batch was there already.

        `summary`: the rows are a summary of the batch, which may have another number of rows when it comes again.
        `reader`: what is written is what the tasks make of these rows with it.

        Raises TableError, with nothing committed, if the files that the driver finds do not hold the rows that the
        tasks wrote, if another job has just committed this batch, or if a batch that was committed comes again with
        more rows than it had.
        """
        reader = reader or TaskReader(arrow_schema(rows), lambda batches: batches)
        if self._is_done(batch, query, lambda: 0 if summary else reader.count(rows)):
            return 0
        schema = reader.schema
        self._prepare(schema)
        folder = f"{BATCH}{uuid.uuid4().hex}"
        files = self._write(rows, reader, folder)
        target = self._target()
        written = sum(file.rows for file in files)
        found = sum(file.rows for file in files if target.size(file.path) == file.size)
        if found != written:
            raise TableError(
                self.path,
                f"the tasks wrote {written:,} rows, and {found:,} are in the files that the driver finds in {folder}: "
                "nothing was committed. Driver and executors must share this path",
            )
        self._commit(files, schema, batch, query)
        return written

    def append_arrow(self, rows: "pa.Table", batch: int, query: str) -> None:
        """The same for a small Arrow table, written by this process."""
        if self._is_done(batch, query, lambda: rows.num_rows):
            return
        self._prepare(rows.schema)
        folder = f"{BATCH}{uuid.uuid4().hex}"
        files = list(write_files(iter(rows.to_batches()), rows.schema, self._target(), folder))
        self._commit(files, rows.schema, batch, query)

    def _is_done(self, batch: int, query: str, count: Callable[[], int]) -> bool:
        """Whether the table has this batch.

        Spark repeats the newest batch only, and with the same rows. Anything else comes from a checkpoint that is
        older than the table, whose batches have the same numbers and other rows: to skip them would lose these.
        """
        last = self.last_batch(query)
        if last < batch:
            return False
        known = self.last_rows(query)
        if last > batch or (known is not None and (now := count()) > known):
            what = f"up to batch {last}" if last > batch else f"with {known:,} rows, and not with {now:,}"
            raise TableError(
                self.path,
                f"batch {batch} comes again, and the table has this query {what}: the checkpoint is older than the "
                "table (a restored copy?). Nothing was written; restore both as they were at one time, or give a new "
                "checkpoint, with --dedupe if the table was always landed so",
            )
        return True

    def _target(self) -> Target:
        return Target(self.path, self.local, self.partition_by, self.storage_options)

    def _write(self, rows: "DataFrame", reader: "TaskReader", folder: str) -> list[WrittenFile]:
        """Write the rows as files, which are not part of the table yet."""
        target = self._target()

        def write(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            for file in write_files(reader.read(batches), reader.schema, target, folder):
                yield pa.RecordBatch.from_pylist([{"file": msgspec.json.encode(file).decode()}])

        reported = rows.mapInArrow(write, "file string").collect()
        return [msgspec.json.decode(row.file, type=WrittenFile) for row in reported]


def plain(error: Exception) -> str:
    """A message of a store's library in one line, and without colours for terminals."""
    return " ".join(_COLOUR.sub("", str(error)).split())


def _listed(names: Any) -> str:
    return ", ".join(names) or "nothing"


def arrow_schema(rows: "DataFrame") -> "pa.Schema":
    """Nullable, as files are for every other reader: a column that gets nulls one day is no new table."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.schema([field.with_nullable(True) for field in to_arrow_schema(rows.schema, timezone="UTC")])


def local_path(path: str) -> str:
    """The absolute path, without `file:`."""
    if path.startswith("file:"):
        path = "/" + path.removeprefix("file:").lstrip("/")
    return os.path.abspath(path)
