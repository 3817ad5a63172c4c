"""Delta tables without any jar: the PyPI package deltalake commits what the tasks wrote.

Each commit carries the transaction id (query, batch). Files of a batch that died before its commit are
removed by `vacuum`.
"""

import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from brokerless.core.errors import MissingDependency, UsageError
from brokerless.core.runtime.files import sync_directory, sync_file
from brokerless.spark_collector.jobs.parquet import WrittenFile, leaves, text
from brokerless.spark_collector.jobs.table import (
    BATCH,
    COMMIT_RETRIES,
    ExactlyOnceTable,
    TableError,
    plain,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
# A transaction id, too: the rows of the query's last batch. The log keeps the newest of each id.
_ROWS = ":rows"


class BatchTable(ExactlyOnceTable):
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
            raise MissingDependency("deltalake", "delta", "a Delta table") from None
        super().__init__(str(path), partition_by, storage_options)
        self.description = description

    def sibling(self, suffix: str, partition_by: tuple[str, ...] = ()) -> "BatchTable":
        """The table beside this one."""
        return BatchTable(self.path + suffix, partition_by=partition_by, storage_options=self.storage_options)

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
            raise TableError(self.path, f"cannot be opened: {plain(error)}") from None

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

    def last_rows(self, query: str) -> int | None:
        """How many rows that batch had; None if it is not known (of tables that earlier versions wrote)."""
        found = self.open()
        rows = None if found is None else found.transaction_version(query + _ROWS)
        return None if rows is None else int(rows)

    def arrow_schema(self) -> "pa.Schema | None":
        """Its columns; None if there is no table."""
        found = self.open()
        return None if found is None else _columns(found)

    def partitions(self) -> tuple[str, ...] | None:
        """The columns of its partitions; None if there is no table."""
        found = self.open()
        return None if found is None else _partitions(found)

    def version(self) -> int:
        """A number that rises with each commit of anybody; -1 if there is no table."""
        found = self.open()
        return -1 if found is None else int(found.version())

    def files(self) -> int:
        """How many files the table has now."""
        found = self.open()
        return 0 if found is None else len(found.file_uris())

    # ---- writing ---------------------------------------------------------------------------------------

    def replace_arrow(self, rows: "pa.Table") -> None:
        """Replace the content by these rows, in one commit; transaction ids stay."""
        from deltalake import write_deltalake

        write_deltalake(
            self.path, rows, mode="overwrite", schema_mode="merge", storage_options=self._options()
        )

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
        before = found.version()
        if files:
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
            app_transactions=[
                Transaction(query, batch),
                Transaction(query + _ROWS, sum(file.rows for file in files)),
            ],
            max_commit_retries=COMMIT_RETRIES,
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
        if self.local:
            self._sync_log(since=before)

    def _sync_log(self, since: int) -> None:
        """Make commits survive a power cut, before Spark's checkpoint says that the batch is done."""
        log = os.path.join(self.path, "_delta_log")
        for version in range(since, self.open().version() + 1):
            sync_file(os.path.join(log, f"{version:020d}.json"))
        for folder in (log, self.path, os.path.dirname(self.path)):
            sync_directory(folder)

    def _evolve(self, found: Any, schema: "pa.Schema") -> Any:
        """Add columns and fields that the table does not have yet. Raises TableError if a type would change."""
        import pyarrow as pa
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import DeltaError

        if {f.name for f in leaves(schema)} <= {f.name for f in leaves(_columns(found))}:
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
        foreign = [a for a in actions if not a["path"].startswith(BATCH)]
        if not foreign:
            return rows
        kinds = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
        values = [
            (os.path.basename(a["path"]), *(text(a[f"partition.{name}"]) for name in names)) for a in foreign
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

    # ---- maintenance -----------------------------------------------------------------------------------

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


def _columns(found: Any) -> "pa.Schema":
    import pyarrow as pa

    return pa.schema(found.schema().to_arrow())


def _partitions(found: Any) -> tuple[str, ...]:
    return tuple(found.metadata().partition_columns)
