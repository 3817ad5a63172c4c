"""Landing in Iceberg tables of a SQL catalogue: once whatever is killed when, and readable by others."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brokerless.core import DiskJournal
from brokerless.core.errors import ConfigError, UsageError
from brokerless.spark_collector import Lander, LandOptions, SparkInput
from brokerless.spark_collector.jobs.iceberg import IcebergTable
from brokerless.spark_collector.jobs.stream import run_stream
from brokerless.spark_collector.jobs.table import TableError
from tests.conftest import Until
from tests.spark_collector.jobs.killed_writers import check_each_once, kill_writers
from tests.spark_collector.spools import BIG, fill, open_spool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyiceberg")
pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
CATALOG = "PYICEBERG_CATALOG__DEFAULT__"


def catalog(directory: Path, s3: dict[str, str] | None = None) -> dict[str, str]:
    """The environment variables of a SQL catalogue in a directory, with files beside it or in an object store."""
    directory.mkdir(exist_ok=True)
    chosen = {"URI": f"sqlite:///{directory}/catalog.db", "WAREHOUSE": f"file://{directory}"}
    if s3 is not None:
        chosen |= {"WAREHOUSE": f"s3://bucket/{directory.name}-{os.getpid()}", "S3__REGION": "us-east-1"}
        chosen |= {
            "S3__ENDPOINT": s3["aws_endpoint"],
            "S3__ACCESS_KEY_ID": "test",
            "S3__SECRET_ACCESS_KEY": "test",
        }
    return {CATALOG + name: value for name, value in chosen.items()}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue that commands find by themselves."""
    use(monkeypatch, catalog(tmp_path / "warehouse"))


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    from pyiceberg.utils.config import Config

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it is read when pyiceberg is imported


def rows_of(name: str) -> Any:
    return IcebergTable(name).read_arrow()


def land(spark: "SparkSession", lander: Lander, checkpoint: Path, *paths: Path) -> int:
    rows = SparkInput(paths=tuple(map(str, paths)), max_events_per_trigger=100)
    return run_stream(rows.stream(spark), lander, checkpoint=str(checkpoint)).rows


def test_batches_land_once_and_others_read_them(
    spark: "SparkSession", tmp_path: Path, configured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions, de-duplication of two collectors, a batch that comes again; Arrow, DuckDB and Polars agree."""
    import duckdb
    import polars

    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # the faster one is a package of its own
    options = LandOptions(format="iceberg", partition_by=("date", "topic"), dedupe=True)
    for name in ("s", "t"):
        with open_spool(tmp_path / name) as spool:
            fill(spool, "p", 0, 200)
    lander = Lander("events.all", options)
    with pytest.raises(UsageError, match="checkpoint"):
        _ = lander.checkpoint
    assert land(spark, lander, tmp_path / "cp", tmp_path / "s", tmp_path / "t") == 400
    assert lander.landed == 200
    # The checkpoint is gone, everything comes again: intervals of offsets know it.
    again = Lander("events.all", options)
    assert land(spark, again, tmp_path / "cp2", tmp_path / "s") == 200
    assert again.landed == 0
    expected = [(n, "ab"[n % 2]) for n in range(200)]
    found = rows_of("events.all")
    assert sorted(zip(*(found[c].to_pylist() for c in ("offset", "topic")), strict=True)) == expected
    assert duckdb.sql("select found.offset, topic from found order by 1").fetchall() == expected
    frame = polars.scan_iceberg(IcebergTable("events.all").open()).collect()
    assert sorted(zip(frame["offset"], frame["topic"], strict=True)) == expected
    assert IcebergTable("events.all").partitions() == ("date", "topic")
    with pytest.raises(ConfigError, match="partitioned by date, topic"):
        Lander("events.all", LandOptions(format="iceberg"))


def test_a_batch_that_comes_again_lands_nothing(
    spark: "SparkSession", tmp_path: Path, configured: None
) -> None:
    """The table knows the last batch of each query; the same one is passed over."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
    rows = SparkInput(paths=(str(tmp_path / "s"),)).batch(spark)
    lander = Lander("events.all", LandOptions(format="iceberg"))
    lander(rows, 0, "q")
    lander(rows, 0, "q")
    assert rows_of("events.all").num_rows == lander.landed == 100
    lander(rows, 0, "another")
    assert rows_of("events.all").num_rows == 200


def test_payloads_become_columns_and_new_fields_are_added(
    spark: "SparkSession", tmp_path: Path, configured: None
) -> None:
    """An inferred schema stays that of the table; a given one adds fields; what does not parse is in quarantine."""
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for text in (b'{"a": 1}', b"no json"):
            journal.append("t", text)
    table, checkpoint = "events.parsed", tmp_path / "cp"
    land(spark, Lander(table, LandOptions(format="iceberg", json_schema="infer")), checkpoint, tmp_path / "j")
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        journal.append("t", b'{"a": 2, "b": "x"}')
    options = LandOptions(format="iceberg", json_schema="a bigint, b string")
    land(spark, Lander(table, options), checkpoint, tmp_path / "j")
    found = sorted(rows_of(table)["json"].to_pylist(), key=lambda row: int(row["a"]))
    assert found == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    assert rows_of(f"{table}_quarantine")["data"].to_pylist() == [b"no json"]
    kept = Lander(table, LandOptions(format="iceberg", json_schema="infer"))
    assert kept._schema == "`a` bigint, `b` string"


def test_topics_of_every_kind_land(spark: "SparkSession", tmp_path: Path, configured: None) -> None:
    """As partitions, too."""
    topics = ["007", "a/b=c d", "%" * 255, "ü" * 127, "x" * 255]
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for topic in topics:
            journal.append(topic, b"x")
    options = LandOptions(format="iceberg", partition_by=("date", "topic"))
    land(spark, Lander("events.topics", options), tmp_path / "cp", tmp_path / "j")
    assert sorted(rows_of("events.topics")["topic"].to_pylist()) == sorted(topics)


def few(batch: int) -> Any:
    import pyarrow as pa

    return pa.table({"batch": [batch] * 5, "n": list(range(5))})


class Slow(IcebergTable):
    """A writer that looked up the table before another one committed, and commits after it."""

    looked: Any = None

    def _opened(self) -> Any:
        found, self.looked = self.looked, None
        return found or super()._opened()


@pytest.mark.parametrize("batches", [0, 1])
def test_two_jobs_of_one_query_never_both_commit(configured: None, batches: int) -> None:
    """The slower one is refused; pyiceberg alone would repeat its commit, and the rows would be there twice."""
    one, two = IcebergTable("events.race"), Slow("events.race")
    for batch in range(batches):
        one.append_arrow(few(batch), batch, "q")
    one._prepare(few(0).schema)
    two._prepare(few(0).schema)
    file = []
    two._commit, commit = lambda files, *_: file.extend(files), two._commit  # type: ignore[method-assign]
    two.append_arrow(few(batches), batches, "q")
    two.looked = two.open()
    one.append_arrow(few(batches), batches, "q")
    with pytest.raises(TableError, match="another job"):
        commit(file, few(0).schema, batches, "q")
    assert one.read_arrow().num_rows == 5 * (batches + 1)
    # Another query is no reason to be refused: the commit is tried again on what is there now.
    two.looked = two.open()
    one.append_arrow(few(batches + 1), batches + 1, "q")
    commit(file, few(0).schema, 7, "another")
    assert one.read_arrow().num_rows == 5 * (batches + 3)
    assert two.last_batch("another") == 7


def test_a_table_whose_commits_would_be_repeated_is_refused(configured: None) -> None:
    table = IcebergTable("events.repeating")
    table.append_arrow(few(0), 0, "q")
    with table.open().transaction() as change:
        change.set_properties({"commit.retry.num-retries": "4"})
    with pytest.raises(TableError, match="num-retries must be 0"):
        table.append_arrow(few(1), 1, "q")


def test_what_is_no_table_or_catalogue_is_named(configured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("events", "/data/events", "s3://bucket/events"):
        with pytest.raises(ConfigError, match=r"namespace\.name"):
            IcebergTable(name)
    with pytest.raises(TableError, match="no such Iceberg table"):
        IcebergTable("no.such").read_arrow()
    use(monkeypatch, {f"{CATALOG}URI": "sqlite:////nowhere/at/all.db"})
    with pytest.raises((ConfigError, TableError), match=r"catalogue|cannot be opened"):
        IcebergTable("a.b")


@pytest.mark.parametrize("store", ["directory", "s3"])
def test_killed_writers_leave_each_batch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, until: Until, store: str
) -> None:
    """kill -9 at random, between data and commit too: what was said to be committed is there, and nothing twice."""
    s3 = request.getfixturevalue("s3") if store == "s3" else None
    environment = catalog(tmp_path / "warehouse", s3)
    imports = """
import pyiceberg.catalog.sql, pyiceberg.io.pyarrow
from brokerless.spark_collector.jobs.iceberg import IcebergTable
"""
    expression = "IcebergTable('events.killed', partition_by=('part',))"
    committed = kill_writers(tmp_path, imports, expression, environment, until)
    use(monkeypatch, environment)
    check_each_once(IcebergTable("events.killed", partition_by=("part",)), committed)


def _rows(batch: int) -> Any:
    import pyarrow as pa

    return pa.table({"batch": [batch] * 40, "n": list(range(40)), "part": ["a/%", "b"] * 20})
