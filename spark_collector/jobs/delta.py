"""Delta tables without any jar: tasks write Parquet files, the PyPI package deltalake commits them.

Each commit carries the transaction id (query, batch). The table itself recognises a batch that comes again after a
crash, and refuses a second writer of the same query. Before a commit the files are looked up where the table is, and
their rows are compared with what the tasks wrote: a path that the machines do not share is an error, not a loss.

A local table is written by Spark's own Parquet writer. For an object store (`s3://`, `gs://`, `abfs://`, …) the tasks
write through `obstore`, because Spark has no client for these without further jars. Files of a batch that died before
its commit are not part of the table; `vacuum` removes them.
"""

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core.errors import ConfigError, Fault, MissingDependency, UsageError
from brokerless.spark_collector.tier.object_store import is_url, open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# Where a task writes; also marks files that have the partition columns in them.
_BATCH = "batch-"
_FOLDER = "_folder"
# Another query, or a compaction, may commit at the same time: the commit is tried again on the newer version.
_COMMIT_RETRIES = 30
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


class BatchTable:
    """The Delta table at `path` (a directory or URL), to which batches are added exactly once.

    `partition_by`: columns of the table's partitions, fixed when it is made. `storage_options`: what the object store
    needs, in the words of deltalake and obstore (`aws_access_key_id`, `aws_endpoint`, …); both also read the usual
    environment variables. Raises MissingDependency without deltalake.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        partition_by: tuple[str, ...] = (),
        storage_options: dict[str, str] | None = None,
        description: str = "",
    ) -> None:
        try:
            import deltalake  # noqa: F401
        except ImportError:
            raise MissingDependency("deltalake", "delta", "Delta tables") from None
        self.local = not is_url(str(path))
        self.path = local_path(str(path)) if self.local else str(path).rstrip("/")
        self.partition_by = partition_by
        self.storage_options = storage_options or {}
        self.description = description

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

    def _options(self) -> dict[str, str] | None:
        if self.local:
            return None
        # Without it two writers of one version would both believe that they were first.
        return {"aws_conditional_put": "etag", **self.storage_options}

    def open(self) -> Any:
        """The `deltalake.DeltaTable`; None if there is none yet. Raises TableError if its store or log is unusable."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            if not DeltaTable.is_deltatable(self.path, self._options()):
                return None
            return DeltaTable(self.path, storage_options=self._options())
        except (OSError, DeltaError, ValueError) as error:
            raise TableError(self.path, f"cannot be opened: {_plain(error)}") from None

    def exists(self) -> bool:
        """Whether there is a table."""
        return self.open() is not None

    def rows(self) -> int:
        """How many rows the table has."""
        found = self.open()
        return 0 if found is None else int(found.count())

    def last_batch(self, query: str) -> int:
        """The last batch of this query that was committed, -1 if none was."""
        found = self.open()
        done = None if found is None else found.transaction_version(query)
        return -1 if done is None else int(done)

    def check(self) -> None:
        """Raise ConfigError if the table has other partitions than `partition_by`."""
        found = self.open()
        if found is not None and tuple(found.metadata().partition_columns) != self.partition_by:
            raise ConfigError(
                "partition_by",
                f"the table {self.path} is partitioned by {_listed(found.metadata().partition_columns)}, "
                f"not by {_listed(self.partition_by)}: use its own, or another table",
            )

    # ---- writing ---------------------------------------------------------------------------------------

    def append(self, rows: "DataFrame", batch: int, query: str) -> int:
        """Write the rows of one batch and commit them; returns how many, 0 if the batch was there already.

        Raises TableError, with nothing committed, if the files that the driver finds do not hold the rows that the
        tasks wrote, or if another job has just committed this batch.
        """
        if self.last_batch(query) >= batch:
            return 0
        folder = f"{_BATCH}{uuid.uuid4().hex}"
        files, written = (self._write_with_spark if self.local else self._write_with_python)(rows, folder)
        found = sum(file.rows for file in files)
        if found != written:
            raise TableError(
                self.path,
                f"the tasks wrote {written:,} rows, and {found:,} are in the files that the driver finds in {folder}: "
                "nothing was committed. Driver and executors must share this path",
            )
        self._commit(files, _arrow_schema(rows), batch, query)
        return written

    def append_arrow(self, rows: "pa.Table", batch: int, query: str) -> None:
        """The same for a small Arrow table, written by this process."""
        if self.last_batch(query) >= batch:
            return
        files = list(
            _write_partitions(iter(rows.to_batches()), self._target(), f"{_BATCH}{uuid.uuid4().hex}")
        )
        self._commit(files, rows.schema, batch, query)

    def replace_arrow(self, rows: "pa.Table") -> None:
        """Replace the content by these rows, in one commit; transaction ids stay."""
        from deltalake import write_deltalake

        write_deltalake(
            self.path, rows, mode="overwrite", schema_mode="merge", storage_options=self._options()
        )

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
                        values = {n: _text(first.column(n)[0].as_py()) for n in self.partition_by}
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

    def _commit(self, files: list[WrittenFile], schema: "pa.Schema", batch: int, query: str) -> None:
        from deltalake import CommitProperties, DeltaTable, Schema, Transaction
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction

        found = self.open()
        wanted = Schema.from_arrow(schema)
        if found is None:
            found = DeltaTable.create(
                self.path,
                wanted,
                mode="ignore",
                partition_by=list(self.partition_by) or None,
                description=self.description or None,
                storage_options=self._options(),
            )
        elif files:
            found = self._evolve(found, schema)
        now = int(time.time() * 1000)
        adds = [
            AddAction(
                path=file.path,
                size=file.size,
                partition_values=file.values,
                modification_time=now,
                data_change=True,
                stats=json.dumps({"numRecords": file.rows}),
            )
            for file in files
        ]
        properties = CommitProperties(
            app_transactions=[Transaction(query, batch)], max_commit_retries=_COMMIT_RETRIES
        )
        try:
            found.create_write_transaction(
                adds,
                "append",
                found.schema(),
                partition_by=list(self.partition_by) or None,
                commit_properties=properties,
            )
        except CommitFailedError as error:
            raise TableError(
                self.path,
                f"batch {batch} of query {query} was not committed, because another job of the same query writes this "
                f"table ({error}); end one of them",
            ) from None

    def _evolve(self, found: Any, schema: "pa.Schema") -> Any:
        """Add columns and fields that the table does not have yet. Raises TableError if a type would change."""
        import pyarrow as pa
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import DeltaError

        if {f.name for f in _leaves(schema)} <= {
            f.name for f in _leaves(pa.schema(found.schema().to_arrow()))
        }:
            return found
        empty = pa.Table.from_pylist([], schema)
        try:
            write_deltalake(
                self.path, empty, mode="append", schema_mode="merge", storage_options=self._options()
            )
        except (DeltaError, ValueError) as error:
            raise TableError(self.path, f"the rows do not fit its schema: {error}") from None
        return DeltaTable(self.path, storage_options=self._options())

    # ---- reading ---------------------------------------------------------------------------------------

    def read_arrow(self) -> "pa.Table":
        """All rows, read by this process. Raises TableError if there is no table."""
        found = self.open()
        if found is None:
            raise TableError(self.path, "there is no Delta table")
        return found.to_pyarrow_table()

    def read(self, spark: "SparkSession") -> "DataFrame":
        """The content at this moment as a DataFrame. Raises TableError if there is no table."""
        found = self.open()
        if found is None:
            raise TableError(self.path, "there is no Delta table")
        from pyspark.sql.types import StructType

        schema = StructType.fromJson(json.loads(found.schema().to_json()))
        if not self.local:
            return self._read_with_python(spark, found, schema)
        files = found.file_uris()
        if not files:
            return spark.createDataFrame([], schema)
        rows = spark.read.schema(schema).parquet(*files)
        return (
            self._restore_partitions(spark, found, rows) if self.partition_by or _partitions(found) else rows
        )

    def _restore_partitions(self, spark: "SparkSession", found: Any, rows: "DataFrame") -> "DataFrame":
        """Files that other writers made (a compaction) have no partition columns: take these from the table's log."""
        import pyarrow as pa
        from pyspark.sql import functions as F

        names = _partitions(found)
        actions = pa.table(found.get_add_actions(flatten=True)).to_pylist()
        foreign = [a for a in actions if not a["path"].startswith(_BATCH)]
        if not foreign:
            return rows
        kinds = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
        values = [
            (os.path.basename(a["path"]), *(_text(a[f"partition.{name}"]) for name in names)) for a in foreign
        ]
        columns = ", ".join(f"`__{name}` string" for name in names)
        logged = F.broadcast(spark.createDataFrame(values, f"__file string, {columns}"))
        named = rows.withColumn("__name", F.col("_metadata.file_name"))
        joined = named.join(logged, F.col("__name") == F.col("__file"), "left")
        restored = {name: F.coalesce(name, F.col(f"__{name}").cast(kinds[name])) for name in names}
        return joined.withColumns(restored).select(*rows.columns)

    def _read_with_python(self, spark: "SparkSession", found: Any, schema: Any) -> "DataFrame":
        path, options, version = self.path, self._options(), found.version()
        files = [(a,) for a in found.file_uris()]

        def read(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            from deltalake import DeltaTable

            table = DeltaTable(path, version=version, storage_options=options)
            wanted = {uri for batch in batches for uri in batch.column("uri").to_pylist()}
            dataset = table.to_pyarrow_dataset()
            for fragment in dataset.get_fragments():
                if any(uri.endswith(fragment.path) for uri in wanted):
                    yield from fragment.to_batches(schema=dataset.schema)

        if not files:
            return spark.createDataFrame([], schema)
        return spark.createDataFrame(files, "uri string").repartition(len(files)).mapInArrow(read, schema)

    # ---- upkeep ----------------------------------------------------------------------------------------

    def optimize(self) -> int:
        """Put small files together, also while a job writes; returns how many files fewer there are."""
        found = self.open()
        if found is None:
            raise UsageError(f"{self.path} is not a landed table")
        done = found.optimize.compact()
        return int(done["numFilesRemoved"]) - int(done["numFilesAdded"])

    def vacuum(self, *, keep_hours: int) -> int:
        """Delete files that no version of the last `keep_hours` needs; returns how many.

        Raises UsageError below a week (168 hours): a job that writes at this moment may need younger files.
        """
        found = self.open()
        if found is None:
            raise UsageError(f"{self.path} is not a landed table")
        if keep_hours < 168:
            raise UsageError("--vacuum must be at least 168 hours: younger files may belong to a running job")
        return len(found.vacuum(retention_hours=keep_hours, dry_run=False, full=True))


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
            values = tuple(_text(key[name]) for name in target.partition_by)
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


def _plain(error: Exception) -> str:
    """A message of deltalake in one line; it writes for terminals, with colours."""
    return " ".join(_COLOUR.sub("", str(error)).split())


def _partitions(found: Any) -> list[str]:
    return list(found.metadata().partition_columns)


def _text(value: Any) -> str | None:
    """A partition value as Delta's log has it."""
    if value is None:
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _listed(names: Any) -> str:
    return ", ".join(names) or "nothing"


def _leaves(schema: "pa.Schema") -> Iterator[Any]:
    """All fields, those of structs with the names on the way to them."""
    import pyarrow as pa

    for field in schema:
        if pa.types.is_struct(field.type):
            for inner in _leaves(pa.schema(list(field.type))):
                yield inner.with_name(f"{field.name}.{inner.name}")
        else:
            yield field


def _arrow_schema(rows: "DataFrame") -> "pa.Schema":
    """Nullable, as files are for every other reader: a column that gets nulls one day is no new table."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.schema([field.with_nullable(True) for field in to_arrow_schema(rows.schema, timezone="UTC")])


def local_path(path: str) -> str:
    """The absolute path, without `file:`."""
    if path.startswith("file:"):
        path = "/" + path.removeprefix("file:").lstrip("/")
    return os.path.abspath(path)
