"""Iceberg tables of a catalogue (SQL or REST), through the PyPI package pyiceberg.

What was committed is known by a property of the table, `brokerless.<query>`, whose value is the last batch. It is set
by the commit that adds the files, and the catalogue replaces a table's metadata in one step, so that `kill -9` leaves
both or neither. pyiceberg would repeat a commit that another writer was faster with, whatever that one committed: a
batch would be there twice. So its own retries are switched off (a property of the table, too); the batch is looked up
again before each attempt.
"""

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from brokerless.core.errors import ConfigError, MissingDependency, UsageError
from brokerless.spark_collector.jobs.parquet import WrittenFile
from brokerless.spark_collector.jobs.table import (
    COMMIT_RETRIES,
    ExactlyOnceTable,
    TableError,
    plain,
)

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_OF = "brokerless."
_ROWS_OF = "brokerless.rows."
_PROPERTIES = {
    "commit.retry.num-retries": "0",
    # Each commit writes the table's whole metadata again; of the earlier ones only the newest are of use.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
}
# What obstore, which the tasks write with, calls the settings that the catalogue has for its files.
_STORE_OPTIONS = {
    "s3.endpoint": "aws_endpoint",
    "s3.access-key-id": "aws_access_key_id",
    "s3.secret-access-key": "aws_secret_access_key",
    "s3.session-token": "aws_session_token",
    "s3.region": "aws_region",
}


class IcebergTable(ExactlyOnceTable):
    """The table `namespace.name` of the default catalogue in pyiceberg's own configuration, or of `catalog`.

    It is made with the first batch. The catalogue decides where its files are. Raises MissingDependency without
    pyiceberg, ConfigError if there is no such catalogue, or if the name has no namespace.
    """

    def __init__(
        self,
        path: str,
        *,
        partition_by: tuple[str, ...] = (),
        storage_options: dict[str, str] | None = None,
        catalog: Any = None,
    ) -> None:
        if "." not in path or "/" in path:
            raise ConfigError("table", f"{path} is not the name of an Iceberg table, which is namespace.name")
        self.name = path
        self._given = storage_options or {}
        self._catalog = catalog or _default_catalog()
        super().__init__(path, partition_by, storage_options)

    def _locate(self, path: str) -> None:
        self.path, self.local = path, True
        if (found := self.open()) is not None:
            self._found_at(found)

    def _found_at(self, found: Any) -> None:
        """The tasks write where the catalogue has the table."""
        location, its = found.location(), found.io.properties
        super()._locate(unquote(location) if location.startswith("file:") else location)
        options = {ours: str(its[theirs]) for theirs, ours in _STORE_OPTIONS.items() if theirs in its}
        if options.get("aws_endpoint", "").startswith("http:"):
            options["aws_allow_http"] = "true"
        self.storage_options = options | self._given

    def sibling(self, suffix: str, partition_by: tuple[str, ...] = ()) -> "IcebergTable":
        """The table of that name in the same namespace."""
        return IcebergTable(
            self.name + suffix, partition_by=partition_by, storage_options=self._given, catalog=self._catalog
        )

    def open(self) -> Any:
        """The `pyiceberg.table.Table`; None if there is none yet. Raises TableError if the catalogue is away."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return self._catalog.load_table(self.name)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        except Exception as error:  # each kind of catalogue has its own
            raise TableError(self.name, f"cannot be opened: {plain(error)}") from None

    def _opened(self) -> Any:
        found = self.open()
        if found is None:
            raise TableError(self.name, "there is no such Iceberg table")
        return found

    @property
    def checkpoint(self) -> str:
        """There is no place for it in a catalogue: raises UsageError."""
        raise UsageError(f"{self.name}: give a checkpoint directory; an Iceberg table has no place for it")

    def last_batch(self, query: str) -> int:
        """The last batch of this query that was committed, -1 if none was."""
        found = self.open()
        return -1 if found is None else _last_batch(found, query)

    def last_rows(self, query: str) -> int | None:
        """How many rows that batch had; None if it is not known (of tables that earlier versions wrote)."""
        found = self.open()
        rows = None if found is None else found.properties.get(_ROWS_OF + query)
        return None if rows is None else int(rows)

    def arrow_schema(self) -> "pa.Schema | None":
        """Its columns; None if there is no table."""
        found = self.open()
        return None if found is None else found.schema().as_arrow()

    def partitions(self) -> tuple[str, ...] | None:
        """The columns of its partitions; None if there is no table."""
        found = self.open()
        if found is None:
            return None
        return tuple(found.schema().find_column_name(field.source_id) for field in found.spec().fields)

    def version(self) -> int:
        """A number that rises with each commit of anybody; -1 if there is no table."""
        found = self.open()
        return -1 if found is None else int(found.metadata.last_sequence_number)

    def files(self) -> int:
        """How many files the table has now."""
        found = self.open()
        return 0 if found is None else len(list(found.scan().plan_files()))

    def read_arrow(self) -> "pa.Table":
        """All rows, read by this process. Raises TableError if there is no table."""
        return self._opened().scan().to_arrow()

    def replace_arrow(self, rows: "pa.Table") -> None:
        """Replace the content by these rows, in one commit."""
        self._opened().overwrite(rows)

    def _prepare(self, schema: "pa.Schema") -> None:
        from pyiceberg.exceptions import TableAlreadyExistsError

        if self.open() is None:
            self._catalog.create_namespace_if_not_exists(self.name.rpartition(".")[0])
            try:
                # One commit: a table without its partitions is never seen.
                making = self._catalog.create_table_transaction(self.name, schema, properties=_PROPERTIES)
                with making as creation, creation.update_spec() as spec:
                    for column in self.partition_by:
                        spec.add_identity(column)
            except TableAlreadyExistsError:
                pass  # another job has just made it
        found = self._opened()
        if any(found.properties.get(name) is None for name in _PROPERTIES):
            with found.transaction() as change:
                change.set_properties({n: v for n, v in _PROPERTIES.items() if n not in found.properties})
        self._found_at(found)
        self.check()

    def _commit(self, files: list[WrittenFile], schema: "pa.Schema", batch: int, query: str) -> None:
        from pyiceberg.exceptions import CommitFailedException

        if not files:
            return  # a batch that comes again has no rows again
        for _ in range(COMMIT_RETRIES):
            found = self._opened()
            if _last_batch(found, query) >= batch:
                raise TableError(
                    self.name,
                    f"batch {batch} of query {query} was committed by another job of the same query; end one of them",
                )
            if found.properties.get("commit.retry.num-retries") != "0":
                raise TableError(
                    self.name,
                    "its property commit.retry.num-retries must be 0, or a batch could be there twice",
                )
            try:
                with found.transaction() as change:
                    with change.update_schema() as columns:
                        columns.union_by_name(schema)
                    rows = sum(file.rows for file in files)
                    change.set_properties({_BATCH_OF + query: str(batch), _ROWS_OF + query: str(rows)})
                    names = [f"{found.location()}/{file.path}" for file in files]
                    change.add_files(names, check_duplicate_files=False)
                return
            except CommitFailedException:
                continue  # another writer was faster; nothing of this was committed
            except (ValueError, TypeError) as error:
                raise TableError(self.name, f"the rows do not fit its schema: {plain(error)}") from None
        raise TableError(self.name, f"batch {batch} of query {query}: other writers were faster each time")


def _last_batch(found: Any, query: str) -> int:
    return int(found.properties.get(_BATCH_OF + query, -1))


def _default_catalog() -> Any:
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError:
        raise MissingDependency("pyiceberg", "iceberg", "an Iceberg table") from None
    try:
        return load_catalog()
    except Exception as error:  # what the configuration leads to: files, URLs, databases
        raise ConfigError(
            "catalog", f"pyiceberg's default catalogue cannot be used: {plain(error)}"
        ) from None
