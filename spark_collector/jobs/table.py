"""Tables to which batches are added exactly once: tasks write Parquet files, the driver commits them by their names.

Each commit carries the query and the batch. The table itself recognises a batch that comes again after a crash, and
refuses a second writer of the same query. Before a commit the files are looked up where the table is, and
their rows are compared with what the tasks wrote: a path that the machines do not share is an error, not a loss.

A local table is written by Spark's own Parquet writer. For an object store (`s3://`, `gs://`, `abfs://`, …) the tasks
write through `obstore`, because Spark has no client for these without further jars. Files of a batch that died before
its commit are not part of the table.
"""

import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core.errors import ConfigError, Fault, UsageError
from brokerless.core.runtime.files import sync_directory, sync_file
from brokerless.spark_collector.tier.object_store import is_url, open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

# Where a task writes; also marks files that have the partition columns in them.
BATCH = "batch-"
_FOLDER = "_folder"
# Another query, or a compaction, may commit at the same time: the commit is tried again on the newer version.
COMMIT_RETRIES = 30
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class TableError(Fault):
    """The table cannot be written or read as it should; `path` names it."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"table {path}: {problem}")
        self.path = path
        self.problem = problem


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that a task wrote: its path within the table, and the values of its partition columns."""

    path: str
    size: int
    rows: int
    values: dict[str, str | None]


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

    def append(self, rows: "DataFrame", batch: int, query: str, *, summary: bool = False) -> int:
        """Write the rows of one batch and commit them; returns how many, 0 if the batch was there already.

        `summary`: the rows are a summary of the batch, which may have another number of rows when it comes again.

        Raises TableError, with nothing committed, if the files that the driver finds do not hold the rows that the
        tasks wrote, if another job has just committed this batch, or if a batch that was committed comes again with
        more rows than it had.
        """
        if self._is_done(batch, query, (lambda: 0) if summary else rows.count):
            return 0
        self._prepare(schema := arrow_schema(rows))
        folder = f"{BATCH}{uuid.uuid4().hex}"
        files, written = (self._write_with_spark if self.local else self._write_with_python)(rows, folder)
        found = sum(file.rows for file in files)
        if found != written:
            raise TableError(
                self.path,
                f"the tasks wrote {written:,} rows, and {found:,} are in the files that the driver finds in {folder}: "
                "nothing was committed. Driver and executors must share this path",
            )
        self._sync(files)
        self._commit(files, schema, batch, query)
        return written

    def append_arrow(self, rows: "pa.Table", batch: int, query: str) -> None:
        """The same for a small Arrow table, written by this process."""
        if self._is_done(batch, query, lambda: rows.num_rows):
            return
        self._prepare(rows.schema)
        folder = f"{BATCH}{uuid.uuid4().hex}"
        files = list(_write_partitions(iter(rows.to_batches()), self._target(), folder))
        self._sync(files)
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

    def _sync(self, files: list[WrittenFile]) -> None:
        """Make local files survive a power cut, before the table's log names them."""
        if self.local:
            for file in files:
                sync_file(os.path.join(self.path, file.path))
            for folder in {os.path.dirname(file.path) for file in files}:
                sync_directory(os.path.join(self.path, folder))
            sync_directory(self.path)

    def _target(self) -> "_Target":
        return _Target(self.path, self.local, self.partition_by, self.storage_options)

    def _write_with_spark(self, rows: "DataFrame", folder: str) -> tuple[list[WrittenFile], int]:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        counted = Observation()
        observed = rows.observe(counted, F.count(F.lit(1)).alias("rows"))
        where = os.path.join(self.path, folder)
        writer = observed.write
        if self.partition_by:
            # Folders have short names whatever the values are; the values stay in the files.
            key = F.sha1(F.to_json(F.struct(*self.partition_by)).cast("binary"))
            writer = observed.withColumn(_FOLDER, F.substring(key, 1, 16)).write.partitionBy(_FOLDER)
        writer.mode("overwrite").parquet(where)
        return list(self._look_up(folder)), int(counted.get["rows"])

    def _look_up(self, folder: str) -> Iterator[WrittenFile]:
        """The files under a local folder as this process finds them, with what their footers say.

        They are moved out of Spark's `_folder=…`, which some readers would take for a column.
        """
        import pyarrow.parquet as pq

        top = os.path.join(self.path, folder)
        for directory, _, names in os.walk(top):
            for name in sorted(n for n in names if n.endswith(".parquet")):
                full = os.path.join(directory, name)
                if directory != top:
                    flat = os.path.join(
                        top, f"{os.path.basename(directory).removeprefix(f'{_FOLDER}=')}-{name}"
                    )
                    os.rename(full, flat)
                    full = flat
                with pq.ParquetFile(full) as file:
                    count = file.metadata.num_rows
                    values = {}
                    if count and self.partition_by:
                        first = next(file.iter_batches(1, columns=list(self.partition_by)))
                        values = {n: text(first.column(n)[0].as_py()) for n in self.partition_by}
                if count:
                    yield WrittenFile(os.path.relpath(full, self.path), os.path.getsize(full), count, values)

    def _write_with_python(self, rows: "DataFrame", folder: str) -> tuple[list[WrittenFile], int]:
        import obstore

        target = self._target()

        def write(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            for file in _write_partitions(batches, target, folder):
                yield pa.RecordBatch.from_pylist([{"file": msgspec.json.encode(file).decode()}])

        reported = rows.mapInArrow(write, "file string").collect()
        store = open_store(self.path, self.storage_options)
        files, written = [], 0
        for row in reported:
            file = msgspec.json.decode(row.file, type=WrittenFile)
            written += file.rows
            if obstore.head(store, file.path)["size"] == file.size:
                files.append(file)
        return files, written


class _Target(msgspec.Struct, frozen=True):
    """Where and how a task writes; goes to the executors."""

    path: str
    local: bool
    partition_by: tuple[str, ...]
    storage_options: dict[str, str]

    def put(self, name: str, data: "pa.Buffer") -> None:
        """Write one file, which must not exist."""
        if not self.local:
            import obstore

            obstore.put(open_store(self.path, self.storage_options), name, data.to_pybytes())
            return
        full = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "xb") as file:
            file.write(data)


def _write_partitions(
    batches: Iterator["pa.RecordBatch"], target: _Target, folder: str
) -> Iterator[WrittenFile]:
    """Write the rows of one task, one file for each combination of partition values."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    sinks: dict[tuple[str | None, ...], tuple[pq.ParquetWriter, pa.BufferOutputStream, list[int]]] = {}
    for batch in batches:
        table = pa.table(batch)
        names = list(target.partition_by)
        for key in table.group_by(names).aggregate([]).to_pylist() if names else [{}]:
            part = table
            for name, value in key.items():
                part = part.filter(pc.equal(part[name], pa.scalar(value, part[name].type)))
            values = tuple(text(key[name]) for name in target.partition_by)
            if values not in sinks:
                out = pa.BufferOutputStream()
                sinks[values] = (pq.ParquetWriter(out, part.schema, compression="zstd"), out, [0])
            sinks[values][0].write_table(part)
            sinks[values][2][0] += part.num_rows
    for values, (writer, out, count) in sinks.items():
        writer.close()
        data = out.getvalue()
        if not count[0]:
            continue
        name = f"{folder}/{hashlib.sha1(repr(values).encode()).hexdigest()[:16]}-{uuid.uuid4().hex}.parquet"  # noqa: S324
        target.put(name, data)
        yield WrittenFile(name, data.size, count[0], dict(zip(target.partition_by, values, strict=True)))


def plain(error: Exception) -> str:
    """A message of a store's library in one line, and without colours for terminals."""
    return " ".join(_COLOUR.sub("", str(error)).split())


def text(value: Any) -> str | None:
    """A partition value as Delta's log has it."""
    if value is None:
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _listed(names: Any) -> str:
    return ", ".join(names) or "nothing"


def leaves(schema: "pa.Schema") -> Iterator[Any]:
    """All fields, those of structs with the names on the way to them."""
    import pyarrow as pa

    for field in schema:
        if pa.types.is_struct(field.type):
            for inner in leaves(pa.schema(list(field.type))):
                yield inner.with_name(f"{field.name}.{inner.name}")
        else:
            yield field


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
