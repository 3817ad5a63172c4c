"""Landing, parsing, de-duplication, compaction, counts, metrics, SQL: on real tables."""

import datetime
import json
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from brokerless.core import DiskJournal, encode_frame
from brokerless.core.errors import ConfigError, UsageError
from brokerless.spark_collector import (
    JobFailed,
    Lander,
    LandOptions,
    LedgerTable,
    SparkInput,
    Windows,
    run_stream,
)
from brokerless.spark_collector.collector.spool import NESTED
from brokerless.spark_collector.jobs import report
from brokerless.spark_collector.jobs.delta import BatchTable, TableError
from brokerless.spark_collector.jobs.land import prepare
from brokerless.spark_collector.jobs.metric_series import metric_series
from brokerless.spark_collector.jobs.parquet import Target
from brokerless.spark_collector.jobs.stream import (
    AlreadyRunning,
    checkpoint_lock,
    root_cause,
    run_parquet_sink,
)
from brokerless.spark_collector.jobs.views import make_views, read_table
from tests.spark_collector.spools import BIG, fill, open_spool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def run(spark: "SparkSession", function: Any, *paths: Path, max_events: int | None = None) -> int:
    """One run over what is there, fed as the commands feed it; returns the rows read, of a Lander those landed."""
    source = SparkInput(paths=tuple(map(str, paths)), max_events_per_trigger=max_events)
    if not isinstance(function, Lander):
        return run_stream(source.stream(spark), function, checkpoint=function.checkpoint).rows
    stream = function.stream(source, spark)
    before = function.landed

    def landed() -> int:
        return function.landed - before

    return run_stream(stream, function, checkpoint=function.checkpoint, counted=landed).rows


def run_rows(spark: "SparkSession", lander: Lander, path: Path) -> int:
    """The same, fed with rows."""
    source = SparkInput(paths=(str(path),))
    return run_stream(source.stream(spark), lander, checkpoint=lander.checkpoint).rows


def offsets_in(path: str) -> list[int]:
    found: list[int] = DeltaTable(path).to_pyarrow_table(columns=["offset"]).column(0).to_pylist()
    return sorted(found)


def test_land_then_compact_and_read_with_others(spark: "SparkSession", tmp_path: Path) -> None:
    """Batches land once; compaction keeps every row; Spark, Arrow, DuckDB and Polars read the same."""
    import duckdb
    import polars

    table = str(tmp_path / "events")
    options = LandOptions(partition_by=("date", "topic"))
    with open_spool(tmp_path / "s") as spool:
        for part in range(3):
            fill(spool, "p", part * 200, 200)
            lander = Lander(table, options)
            assert run(spark, lander, tmp_path / "s", max_events=100) == 200
            assert lander.landed == 200
    landed = BatchTable(table)
    today = time.strftime("%Y-%m-%d", time.gmtime())

    def everywhere() -> None:
        expected = [(n, "ab"[n % 2]) for n in range(600)]
        rows = read_table(spark, table).select("offset", "topic", "date").collect()
        assert sorted((r.offset, r.topic) for r in rows) == expected
        assert {str(r.date) for r in rows} == {today}
        frame = polars.read_delta(table)
        assert sorted(zip(frame["offset"], frame["topic"], strict=True)) == expected
        found = DeltaTable(table).to_pyarrow_dataset()  # noqa: F841  # by its name in the SQL
        query = "select found.offset, topic from found order by 1"
        assert duckdb.sql(query).fetchall() == expected
        with_headers = [(n, {"n": str(n)}) for n in range(0, 600, 4)]
        query = "select found.offset, headers from found where cardinality(headers) > 0 order by 1"
        assert duckdb.sql(query).fetchall() == with_headers
        some = read_table(spark, table).where("size(headers) > 0").orderBy("offset")
        assert [(r.offset, r.headers) for r in some.select("offset", "headers").collect()] == with_headers
        assert frame.to_pandas()["offset"].sum() == sum(range(600))

    everywhere()
    before = len(DeltaTable(table).file_uris())
    assert landed.optimize() == before - 2 > 0
    assert len(DeltaTable(table).file_uris()) == 2
    everywhere()
    assert landed.optimize() == 0
    with pytest.raises(UsageError, match="168"):
        landed.vacuum(keep_hours=1)
    assert run(spark, Lander(table, options), tmp_path / "s") == 0, "the checkpoint survives the compaction"


def test_topics_of_every_kind_land(spark: "SparkSession", tmp_path: Path) -> None:
    """Topics that look like numbers, have slashes or are as long as allowed are what they were, also as partitions."""
    topics = ["007", "a/b=c d", "%" * 255, "ü" * 127, "x" * 255]
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for topic in topics:
            journal.append(topic, b"x")
    for name, columns in (("events", ("date",)), ("by_topic", ("date", "topic"))):
        run(spark, Lander(str(tmp_path / name), LandOptions(partition_by=columns)), tmp_path / "j")
        rows = read_table(spark, str(tmp_path / name)).collect()
        assert sorted(r.topic for r in rows) == sorted(topics)
        assert sorted(DeltaTable(str(tmp_path / name)).to_pyarrow_table()["topic"].to_pylist()) == sorted(
            topics
        )


def test_the_date_is_that_of_utc(spark: "SparkSession", tmp_path: Path) -> None:
    """Whatever the session's time zone is."""
    at = int(datetime.datetime(2026, 3, 1, 23, 59, tzinfo=datetime.UTC).timestamp() * 1_000_000)
    with open_spool(tmp_path / "s") as spool:
        frame = encode_frame("p", 1, 0, topics=[("t", 0)], topic_index=None, times=[at], datas=[b"x"])
        spool.append("direct/event", frame.raw, NESTED)
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        run(spark, Lander(str(tmp_path / "events")), tmp_path / "s")
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    assert DeltaTable(str(tmp_path / "events")).to_pyarrow_table()["date"].to_pylist() == [
        datetime.date(2026, 3, 1)
    ]


def test_only_events_are_counted_as_landed(spark: "SparkSession", tmp_path: Path) -> None:
    """Sent counts and notes pass through the job and are not landed."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 30)
        for kind in ("sent", "ledger"):
            frame = encode_frame("p", 1, 30, topics=[("a", 15)], topic_index=None, times=[1], datas=[b"{}"])
            spool.append(f"direct/{kind}", frame.raw, NESTED)
    lander = Lander(str(tmp_path / "events"))
    assert run(spark, lander, tmp_path / "s") == 30
    assert lander.landed == 30 == DeltaTable(str(tmp_path / "events")).count()


def test_ranges_land_as_rows_do(spark: "SparkSession", tmp_path: Path) -> None:
    """What the tasks read by themselves is what they get from Spark, in the same columns, also on one checkpoint."""
    rng = random.Random(4)
    with open_spool(tmp_path / "s") as spool:
        for n in range(40):
            count = rng.randint(1, 30)
            frame = encode_frame(
                rng.choice("pq"),
                1,
                30 * n,
                topics=[("größe", 15 * n), ("b", 15 * n)] if count > 1 else [("b", 15 * n)],
                topic_index=[i % 2 for i in range(count)] if count > 1 else None,
                # Of days long ago, too, before 1970 and in the last microsecond of one.
                times=[
                    rng.choice([-1, -86_400_000_000, 86_399_999_999, 1_800_000_000_000_000])
                    for _ in range(count)
                ],
                datas=[rng.randbytes(rng.choice([0, 1, 200])) for _ in range(count)],
                keys=rng.choice([None, ["k"] * count]),
                headers=rng.choice([None, [{"a": "1", "b": ""}] * count]),
            )
            spool.append(f"direct/{rng.choice(['event', 'event', 'sent'])}", frame.raw, NESTED)
        assert run(spark, first := Lander(str(tmp_path / "ranges")), tmp_path / "s") == first.landed > 0
        run_rows(spark, Lander(str(tmp_path / "rows")), tmp_path / "s")
        # An earlier version fed rows: its checkpoint goes on with ranges.
        fill(spool, "later", 0, 50)
        assert run(spark, Lander(str(tmp_path / "rows")), tmp_path / "s") == 50
        assert run_rows(spark, Lander(str(tmp_path / "ranges")), tmp_path / "s") == 50
    ranges, rows = (DeltaTable(str(tmp_path / name)).to_pyarrow_table() for name in ("ranges", "rows"))
    assert ranges.schema == rows.schema
    order = [("source", "ascending"), ("topic", "ascending"), ("offset", "ascending")]
    assert ranges.sort_by(order).to_pylist() == rows.sort_by(order).to_pylist()


def test_a_stream_of_ranges_is_for_its_own_lander(spark: "SparkSession", tmp_path: Path) -> None:
    """Rows that come where ranges were asked for are refused, not passed over; losses that are allowed come as rows."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 10)
    lander = Lander(str(tmp_path / "t"))
    lander.stream(SparkInput(paths=(str(tmp_path / "s"),)), spark)
    with pytest.raises(JobFailed, match="its own stream"):
        run_rows(spark, lander, tmp_path / "s")
    assert not BatchTable(tmp_path / "t").exists()
    lenient = SparkInput(paths=(str(tmp_path / "s"),), fail_on_data_loss=False)
    kinds = {r.kind for r in _collected(Lander(str(tmp_path / "t")).stream(lenient, spark), tmp_path / "cp")}
    assert kinds == {"event"}, "so that Spark counts what is lost"


def _collected(stream: Any, checkpoint: Path) -> list[Any]:
    found: list[Any] = []
    run_stream(stream, lambda rows, *_: found.extend(rows.collect()), checkpoint=str(checkpoint))
    return found


def test_loss_while_ranges_are_read_fails_the_job(spark: "SparkSession", tmp_path: Path) -> None:
    """What cannot be read when the tasks read it is the job's error, in the words of the data source."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 200)
    segment = next((tmp_path / "s").glob("*.seg"))
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    segment.write_bytes(raw)
    with pytest.raises(JobFailed, match=segment.name):
        run(spark, Lander(str(tmp_path / "t")), tmp_path / "s")
    assert not BatchTable(tmp_path / "t").exists()


def test_other_partitions_than_the_tables_are_refused(spark: "SparkSession", tmp_path: Path) -> None:
    """Before anything is written: a table with two layouts could not be read."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 10)
    run(spark, Lander(str(tmp_path / "events")), tmp_path / "s")
    with pytest.raises(ConfigError, match="partitioned by date"):
        Lander(str(tmp_path / "events"), LandOptions(partition_by=("date", "topic")))


def test_partitions_that_no_table_can_have_are_refused_at_once(tmp_path: Path) -> None:
    """Without Spark, and before there is a checkpoint: not in the middle of the first batch."""
    for name, problem in (
        ("nope", "no such column"),
        ("data", "cannot be"),
        ("headers", "cannot be"),
        ("json", "no such"),
    ):
        with pytest.raises(ConfigError, match=problem):
            LandOptions(partition_by=("date", name))
    with pytest.raises(ConfigError, match="twice"):
        LandOptions(partition_by=("date", "date"))


def test_a_table_whose_store_refuses_is_an_error_in_plain_text(tmp_path: Path) -> None:
    """Named, in one line, and without the colours that the store's library puts into its messages."""
    (tmp_path / "events" / "_delta_log").mkdir(parents=True)
    (tmp_path / "events" / "_delta_log" / "00000000000000000000.json").write_text("not a log")
    with pytest.raises(TableError, match="events") as raised:
        Lander(str(tmp_path / "events"))
    assert "\x1b" not in str(raised.value)
    assert "\n" not in str(raised.value)


def hold(checkpoint: str, ready: Any, done: Any) -> None:
    with checkpoint_lock(checkpoint):
        ready.set()
        done.wait(60)


def test_one_job_per_checkpoint(spark: "SparkSession", tmp_path: Path) -> None:
    """A second job on the same table is refused while the first one runs, and harms nothing."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 10)
    lander = Lander(str(tmp_path / "events"))
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(lander.checkpoint, ready, done))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(AlreadyRunning, match=str(other.pid)):
            run(spark, lander, tmp_path / "s")
    finally:
        done.set()
        other.join(60)
    assert run(spark, lander, tmp_path / "s") == 10


def test_a_second_writer_of_one_query_is_refused_by_the_table(spark: "SparkSession", tmp_path: Path) -> None:
    """Two that both believe that batch 1 is theirs: one commits, the other gets an error and adds nothing."""
    rows = spark.range(7).selectExpr("id as offset")
    first, second = (BatchTable(tmp_path / "t") for _ in range(2))
    assert first.append(rows, 0, "q") == 7
    asked = second.last_batch

    def overtaken(query: str) -> int:
        last = asked(query)
        second.last_batch = asked  # type: ignore[method-assign]
        assert first.append(rows, 1, "q") == 7
        return last

    second.last_batch = overtaken  # type: ignore[method-assign]
    opened = second.open()  # what it knew when it decided to write
    second.open = lambda: opened  # type: ignore[method-assign]
    with pytest.raises(TableError, match="another job"):
        second.append(rows, 1, "q")
    assert first.append(rows, 1, "q") == 0, "it is there already"
    assert first.rows() == 14


def test_a_table_that_the_tasks_do_not_share_is_an_error(spark: "SparkSession", tmp_path: Path) -> None:
    """Rows that were written where the driver does not find them are not committed as if they were there."""
    table = BatchTable(tmp_path / "t")
    (tmp_path / "elsewhere").mkdir()
    theirs, ours = (Target(str(tmp_path / name), True, (), {}) for name in ("elsewhere", "t"))
    targets = [theirs, ours]  # the same path, on the tasks' machine and on the driver's
    table._target = lambda: targets.pop(0)  # type: ignore[method-assign]
    with pytest.raises(TableError, match="tasks wrote 10 rows, and 0 are"):
        table.append(spark.range(10).selectExpr("id as offset"), 0, "q")
    assert not table.exists()
    assert not (tmp_path / "t" / "_delta_log").exists()


def test_plain_parquet_by_sparks_own_sink(spark: "SparkSession", tmp_path: Path) -> None:
    """`--format parquet`: Spark reads each event once, and the number of landed events is right."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 200)
    out, rows = str(tmp_path / "out"), SparkInput(paths=(str(tmp_path / "s"),), max_events_per_trigger=100)
    stream = prepare(rows.stream(spark))
    assert run_parquet_sink(stream, out, partition_by=("date",), checkpoint=f"{out}.cp") == 200
    assert sorted(r.offset for r in spark.read.parquet(out).collect()) == list(range(200))


def test_the_cause_of_an_error_is_one_line() -> None:
    """Ours if there is one, else the innermost, without the names of Java classes."""
    ours = "x\n  File a\nbrokerless.core.errors.Fault: it is full\nmore\nCaused by: java.lang.Exception: y"
    assert root_cause(ours) == "it is full"
    assert root_cause("a\nCaused by: org.x.FooException: b\nCaused by: java.io.IOException: c") == "c"
    text = "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: DataLoss: gone SQLSTATE: X"
    assert root_cause(text) == "DataLoss: gone"
    text = (
        "[FOREACH_BATCH] Message: Traceback (most recent call last):\n  File x\n"
        "pyspark.errors.exceptions.captured.AnalysisException: [UNRESOLVED] no column `x` SQLSTATE: 42703;\n at x"
    )
    assert root_cause(text) == "[UNRESOLVED] no column `x`"
    assert root_cause("") == "unknown"
    inner = "[FOREACH_BATCH_USER_FUNCTION_ERROR] x\nTraceback\npyspark.errors.PythonException: y\nValueError: the cause"
    assert root_cause(inner) == "ValueError: the cause"


def test_two_collectors_of_one_producer_land_once(spark: "SparkSession", tmp_path: Path) -> None:
    """With dedupe, events that two spools have (in part, and repeated within one) are landed once.

    Over restarts.
    """
    table = str(tmp_path / "events")
    options = LandOptions(dedupe=True, partition_by=("date",))
    spools = [tmp_path / "s1", tmp_path / "s2"]
    with open_spool(spools[0]) as one, open_spool(spools[1], source="c2") as two:
        fill(one, "p", 0, 100)
        fill(two, "p", 50, 100)
        fill(two, "p", 120, 10)
        run(spark, Lander(table, options), *spools, max_events=70)
        fill(one, "p", 0, 30)
        fill(one, "p", 150, 20)
        run(spark, Lander(table, options), *spools)
        shutil.rmtree(Lander(table, options).checkpoint)
        fill(one, "p", 170, 5)
        again = Lander(table, options)
        run(spark, again, *spools)
        assert again.landed == 5, "without its checkpoint it knows what was landed"
    assert offsets_in(table) == list(range(175))


def spool_json(path: Path, payloads: list[bytes]) -> None:
    now = time.time_ns() // 1000
    with open_spool(path) as spool:
        frame = encode_frame(
            "p", 1, 0, topics=[("t", 0)], topic_index=None, times=[now] * len(payloads), datas=payloads
        )
        spool.append("direct/event", frame.raw, NESTED)


PAYLOADS = [
    b'{"a": 1, "b": "x"}',
    b"not json",
    b'{"a": 2, "b": null}',
    b'{"a": "no number"}',
    b"[1]",
    b'{"a": 3}',
]


def test_json_payloads_become_columns_or_go_to_quarantine(spark: "SparkSession", tmp_path: Path) -> None:
    """What parses is typed columns, the rest is kept whole in the quarantine table, and the two add up."""
    spool_json(tmp_path / "s", PAYLOADS)
    lander = Lander(
        str(tmp_path / "events"), LandOptions(json_schema="a int, b string", partition_by=("date",))
    )
    run(spark, lander, tmp_path / "s")
    good = read_table(spark, str(tmp_path / "events")).select("json.a", "json.b").orderBy("a").collect()
    assert [(r.a, r.b) for r in good] == [(1, "x"), (2, None), (3, None)]
    bad = read_table(spark, f"{tmp_path}/events_quarantine").collect()
    assert sorted(bytes(r.data) for r in bad) == sorted([b"not json", b'{"a": "no number"}', b"[1]"])
    assert lander.quarantined == 3
    views = make_views(spark, table=str(tmp_path / "events"))
    assert views == ["events", "quarantine"]
    assert spark.sql("select sum(json.a) from events").first()[0] == 6
    for wrong in ("not a schema!", "a int, A string", "x struct<b: int, B: int>"):
        with pytest.raises(ConfigError, match="json_schema"):
            Lander(str(tmp_path / "x"), LandOptions(json_schema=wrong))
    with pytest.raises(UsageError, match="not a landed table"):
        make_views(spark, table=str(tmp_path / "nothing"))


def test_json_schema_can_be_inferred(spark: "SparkSession", tmp_path: Path) -> None:
    """`infer` finds the columns of the objects; nested ones too."""
    spool_json(tmp_path / "s", [b'{"a": 1, "n": {"x": 1.5}}', b'{"a": 2, "l": [1, 2]}', b"?"])
    lander = Lander(str(tmp_path / "events"), LandOptions(json_schema="infer", partition_by=("date",)))
    run(spark, lander, tmp_path / "s")
    rows = (
        read_table(spark, str(tmp_path / "events"))
        .selectExpr("json.a", "json.n.x", "json.l")
        .orderBy("a")
        .collect()
    )
    assert [(r.a, float(r.x) if r.x else None, r.l) for r in rows] == [(1, 1.5, None), (2, None, [1, 2])]


def test_an_inferred_schema_stays_that_of_the_table(spark: "SparkSession", tmp_path: Path) -> None:
    """A later run reads other payloads with the table's own schema; names that differ in case are one column."""
    spool_json(tmp_path / "s", [b'{"a": 1, "A": "x", "c": 1, "n": {"k": 1, "K": 2}}'])
    options = LandOptions(json_schema="infer")
    run(spark, Lander(str(tmp_path / "events"), options), tmp_path / "s")
    with open_spool(tmp_path / "s") as spool:
        frame = encode_frame(
            "p",
            1,
            1,
            topics=[("t", 1)],
            topic_index=None,
            times=[1] * 2,
            datas=[b'{"c": 5}', b'{"c": "text"}'],
        )
        spool.append("direct/event", frame.raw, NESTED)
    again = Lander(str(tmp_path / "events"), options)
    run(spark, again, tmp_path / "s")
    assert (again.landed, again.quarantined) == (1, 1)
    rows = (
        read_table(spark, str(tmp_path / "events")).selectExpr("offset", "json.*").orderBy("offset").collect()
    )
    assert len(rows) == 2
    assert DeltaTable(str(tmp_path / "events")).to_pyarrow_table().num_rows == 2


def test_a_schema_with_more_fields_is_added(spark: "SparkSession", tmp_path: Path) -> None:
    """New fields of the payload become fields of the table, null in the rows that were there before."""
    spool_json(tmp_path / "s", [b'{"a": 1, "b": "x"}'])
    run(spark, Lander(str(tmp_path / "events"), LandOptions(json_schema="a int")), tmp_path / "s")
    with open_spool(tmp_path / "s") as spool:
        frame = encode_frame(
            "p", 1, 1, topics=[("t", 1)], topic_index=None, times=[1], datas=[b'{"a": 2, "b": "y"}']
        )
        spool.append("direct/event", frame.raw, NESTED)
    run(spark, Lander(str(tmp_path / "events"), LandOptions(json_schema="a int, b string")), tmp_path / "s")
    rows = read_table(spark, str(tmp_path / "events")).selectExpr("json.a", "json.b").orderBy("a").collect()
    assert [tuple(r) for r in rows] == [(1, None), (2, "y")]
    found = DeltaTable(str(tmp_path / "events")).to_pyarrow_table()["json"].to_pylist()
    assert sorted(found, key=str) == [{"a": 1, "b": None}, {"a": 2, "b": "y"}]


def test_counts_and_loss_from_one_ledger(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are de-duplicated; merging the ledger's batches changes neither counts nor loss."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        fill(spool, "p", 50, 100)
        fill(spool, "p", 160, 40)
    ledger = LedgerTable(str(tmp_path / "ledger"), Windows(3600.0, 60.0))
    run(spark, ledger, tmp_path / "s", max_events=60)

    def files() -> int:
        return len(DeltaTable(str(tmp_path / "ledger")).file_uris())

    assert files() > 2

    def figures() -> tuple[Any, Any]:
        counts = ledger.counts(spark).groupBy("topic").sum("events", "duplicates").orderBy("topic").collect()
        lost = (
            ledger.loss(spark, settle_s=0).groupBy("topic").sum("sent", "received", "lost").orderBy("topic")
        )
        return [tuple(r) for r in counts], [tuple(r) for r in lost.collect()]

    before = figures()
    assert before == ([("a", 95, 25), ("b", 95, 25)], [("a", 100, 95, 5), ("b", 100, 95, 5)])
    monkeypatch.setattr(report, "MERGE_FILES", 1)
    assert ledger.merge() > 1
    assert files() == 1
    assert figures() == before
    with pytest.raises(ConfigError, match="multiple"):
        LedgerTable(str(tmp_path / "ledger"), Windows(5000.0))
    views = make_views(spark, ledger=str(tmp_path / "ledger"))
    assert views == ["loss", "counts"]
    assert spark.sql("select sum(events) from counts").first()[0] == 190
    monkeypatch.setattr(report, "MERGE_FILES", 2)
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 200, 200)
    again = LedgerTable(str(tmp_path / "ledger"))
    run(spark, again, tmp_path / "s", max_events=20)
    assert files() < 8, "ten batches, merged while the job ran"
    assert figures()[0] == [("a", 195, 25), ("b", 195, 25)]


def test_metrics_series(spark: "SparkSession", tmp_path: Path) -> None:
    """Counters add up with their bounds and the worst grade, gauges keep the newest.

    A repeated flush counts once.
    """
    flushes = []
    for n in range(4):
        window = [1_700_000_000.0 + 10 * n, 1_700_000_010.0 + 10 * n]
        grade = "ledger" if n == 1 else "exact"
        counter = {
            "name": "hits",
            "tags": {"b": "2", "a": "1"},
            "type": "counter",
            "value": 10,
            "window": window,
        }
        flushes.append(counter | {"corrected": 12, "bound": 0.5, "grade": grade})
        flushes.append({"name": "load", "tags": {}, "type": "gauge", "value": n, "window": window})
    with DiskJournal(tmp_path / "j", source="statsd", retention=BIG, fsync="never") as journal:
        journal.append_many("metrics", [json.dumps(f).encode() for f in flushes], "application/json")
    rows = SparkInput(paths=(str(tmp_path / "j"),)).batch(spark)
    series = metric_series(rows.unionByName(rows), window_s=20).collect()
    hits = [r.asDict() for r in series if r.name == "hits"]
    assert [(r["value"], r["corrected"], r["low"], r["high"], r["grade"], r["flushes"]) for r in hits] == [
        (20, 24, 23, 25, "ledger", 2),
        (20, 24, 23, 25, "exact", 2),
    ]
    assert hits[0]["tags"] == {"a": "1", "b": "2"}
    assert [r.value for r in series if r.name == "load"] == [1, 3]
    assert [r.window.timestamp() for r in series if r.name == "load"] == [1_700_000_000, 1_700_000_020]


def test_a_batch_that_comes_again_is_known(spark: "SparkSession", tmp_path: Path) -> None:
    """Batches land once: one that comes again is known by its transaction id."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
    lander = Lander(str(tmp_path / "events"))
    seen: list[tuple[int, str]] = []

    def twice(rows: Any, batch: int, query: str) -> None:
        lander(rows, batch, query)
        Lander(str(tmp_path / "events"))(rows, batch, query)
        seen.append((batch, query))

    twice.checkpoint = lander.checkpoint  # type: ignore[attr-defined]
    run(spark, twice, tmp_path / "s", max_events=60)
    assert len(seen) == 2
    assert DeltaTable(str(tmp_path / "events")).transaction_version(seen[0][1]) == 1
    assert offsets_in(str(tmp_path / "events")) == list(range(100))


def test_a_failed_job_says_why(spark: "SparkSession", tmp_path: Path) -> None:
    """The message is the line that matters, not a Java stack trace."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 10)
    meta = tmp_path / "s" / "meta.json"
    meta.write_text(meta.read_text().replace('"format":1', '"format":99'))
    with pytest.raises(JobFailed, match="has format 99") as error:
        run(spark, Lander(str(tmp_path / "t")), tmp_path / "s")
    assert len(str(error.value).splitlines()) == 1


def test_a_checkpoint_that_is_older_than_the_table(spark: "SparkSession", tmp_path: Path) -> None:
    """A restored copy of it has batches of the same numbers with more rows: they are refused, not skipped."""
    lander = Lander(str(tmp_path / "t"))
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        run(spark, lander, tmp_path / "s", max_events=50)
        shutil.copytree(lander.checkpoint, tmp_path / "copy")
        fill(spool, "p", 100, 30)
        run(spark, lander, tmp_path / "s", max_events=50)
        shutil.rmtree(lander.checkpoint)
        shutil.copytree(tmp_path / "copy", lander.checkpoint)
        again = Lander(str(tmp_path / "t"))
        assert run(spark, again, tmp_path / "s", max_events=50) == 0, "the same rows are the same batch"
        shutil.rmtree(lander.checkpoint)
        shutil.copytree(tmp_path / "copy", lander.checkpoint)
        fill(spool, "p", 130, 10)
        with pytest.raises(JobFailed, match="with 30 rows, and not with 40: the checkpoint is older"):
            run(spark, lander, tmp_path / "s", max_events=50)
    assert offsets_in(lander.table.path) == list(range(130))


def test_batches_of_an_older_checkpoint_and_power_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older batch is refused; what a commit names is synced before the job may go on."""
    synced = set()

    def note(fd: int) -> None:
        synced.add(os.path.realpath(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fdatasync", note)
    monkeypatch.setattr(os, "fsync", note)
    table = BatchTable(tmp_path / "t")
    rows = pa.table({"n": [1, 2, 3]})
    for batch in range(3):
        table.append_arrow(rows, batch, "q")
    there = {str(p) for p in [*(tmp_path / "t").rglob("*")] if p.name != "_delta_log" or p.is_dir()}
    assert there | {str(tmp_path), str(tmp_path / "t")} == synced
    table.append_arrow(rows, 2, "q")
    with pytest.raises(TableError, match="up to batch 2: the checkpoint is older"):
        table.append_arrow(rows, 1, "q")
    assert table.rows() == 9
