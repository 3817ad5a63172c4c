"""Landing in a Delta table without any jar: Spark writes the files, the PyPI package deltalake commits them.

Each commit carries the transaction id (query, batch), so a batch that comes again after a crash is
recognised by
the table itself. Files of a batch that died before its commit are not part of the table; `vacuum` removes
them.
"""

import json
import os
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from brokerless.core.errors import ConfigError, MissingDependency
from brokerless.spark_collector.jobs.land import LandOptions
from brokerless.spark_collector.jobs.parse import parse_json, split_parsed
from brokerless.spark_collector.table import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class DeltaLander:
    """The batch function of `brokerless spark land --format delta`."""

    def __init__(self, path: str, options: LandOptions | None = None) -> None:
        try:
            import deltalake  # noqa: F401
        except ImportError:
            raise MissingDependency("deltalake", "delta", "landing in a Delta table") from None
        self.options = options or LandOptions()
        if self.options.dedupe:
            raise ConfigError(
                "dedupe", "is not there for delta; de-duplicate when reading, by source, epoch, offset"
            )
        self.path = os.path.abspath(local_path(path))
        self.quarantine = DeltaTarget(f"{self.path}_quarantine", self.options.partition_by)
        self.target = DeltaTarget(self.path, self.options.partition_by)
        self._schema = self.options.json_schema

    @property
    def checkpoint(self) -> str:
        """Where the query that feeds this keeps its checkpoint: inside the table, hidden from its readers."""
        return os.path.join(self.path, "_brokerless", "checkpoint")

    @property
    def quarantined(self) -> int:
        """Rows in the quarantine table."""
        return self.quarantine.rows()

    def __call__(self, rows: "DataFrame", batch: int, query: str) -> None:
        """Land one micro-batch; doing it again changes nothing."""
        from pyspark.sql import functions as F

        wanted = rows.where(F.col("kind").isin(*self.options.kinds)).withColumn("date", F.to_date("time"))
        if self._schema is None:
            self.target.write(wanted, batch, query)
            return
        parsed, self._schema = parse_json(wanted, self._schema)
        good, bad = split_parsed(parsed)
        self.target.write(good, batch, query)
        self.quarantine.write(bad, batch, query)


class DeltaTarget:
    """One Delta table to which batches are added."""

    def __init__(self, path: str, partition_by: tuple[str, ...]) -> None:
        self.path = path
        self.partition_by = partition_by

    def _table(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.path) if DeltaTable.is_deltatable(self.path) else None

    def rows(self) -> int:
        """How many rows the table has."""
        found = self._table()
        return int(found.count()) if found is not None else 0

    def write(self, rows: "DataFrame", batch: int, query: str) -> None:
        """Write the files, then commit them with the batch's transaction id."""
        found = self._table()
        if found is not None:
            done = found.transaction_version(query)
            if done is not None and done >= batch:
                return
        folder = f"batch-{uuid.uuid4().hex}"
        rows.write.mode("overwrite").partitionBy(*self.partition_by).parquet(os.path.join(self.path, folder))
        self._commit(found, folder, rows, batch, query)

    def _commit(self, found: Any, folder: str, rows: "DataFrame", batch: int, query: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq
        from deltalake import CommitProperties, Schema, Transaction
        from deltalake.transaction import AddAction, create_table_with_add_actions
        from pyspark.sql.pandas.types import to_arrow_schema

        adds = []
        for directory, _, names in os.walk(os.path.join(self.path, folder)):
            for name in (n for n in names if n.endswith(".parquet")):
                full = os.path.join(directory, name)
                relative = os.path.relpath(full, self.path)
                values = dict(part.split("=", 1) for part in relative.split(os.sep) if "=" in part)
                adds.append(
                    AddAction(
                        path=relative.replace(
                            "%", "%25"
                        ),  # Delta's paths are URLs, and Spark's folders are too
                        size=os.path.getsize(full),
                        partition_values={k: unquote(v) for k, v in values.items()},
                        modification_time=int(time.time() * 1000),
                        data_change=True,
                        stats=json.dumps({"numRecords": pq.read_metadata(full).num_rows}),
                    )
                )
        properties = CommitProperties(app_transactions=[Transaction(query, batch)])
        # Nullable, as files are for every other reader: a column that gets nulls one day is no new table.
        fields = to_arrow_schema(rows.schema, timezone="UTC")
        schema = Schema.from_arrow(pa.schema([field.with_nullable(True) for field in fields]))
        partitions = list(self.partition_by)
        if found is None:
            create_table_with_add_actions(
                self.path, schema, adds, "append", partitions, commit_properties=properties
            )
        elif adds:
            found.create_write_transaction(
                adds, "append", schema, partition_by=partitions, commit_properties=properties
            )
