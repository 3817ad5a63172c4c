"""Landing, parsing, de-duplication, compaction, counts, metrics, SQL: on real tables."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brokerless.core import DiskJournal, encode_frame
from brokerless.core.errors import ConfigError, UsageError
from brokerless.spark_collector import (
    DeltaLander,
    JobFailed,
    Lander,
    LandOptions,
    LedgerTable,
    SparkInput,
    Table,
    Windows,
    compact,
    make_views,
    metrics,
    read_table,
    run_stream,
)
from brokerless.spark_collector.jobs.compact import choose
from brokerless.spark_collector.spool import NESTED
from brokerless.spark_collector.table import File
from tests.spark_collector.spools import BIG, fill, open_spool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def run(spark: "SparkSession", function: Any, *paths: Path, max_events: int | None = None) -> int:
    """One run over what is there; returns the rows read."""
    rows = SparkInput(paths=tuple(map(str, paths)), max_events_per_trigger=max_events)
    checkpoint = function.checkpoint if hasattr(function, "checkpoint") else function.table.checkpoint
    return run_stream(rows.stream(spark), function, checkpoint=checkpoint).rows


def test_land_by_date_and_topic_then_compact(spark: "SparkSession", tmp_path: Path) -> None:
    """Batches land once in folders by date and topic; compaction keeps every row; plain readers agree."""
    table = str(tmp_path / "events")
    with open_spool(tmp_path / "s") as spool:
        for part in range(3):
            fill(spool, "p", part * 200, 200)
            assert run(spark, Lander(table), tmp_path / "s", max_events=100) == 200
    landed = Table(table)
    assert landed.notes() == {"rows": 600}
    folders = {str(Path(f.path).parent) for f in landed.files()}
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert folders == {f"date={today}/topic=a", f"date={today}/topic=b"}
    before = len(landed.files())
    assert compact(spark, landed) == before - len(landed.files()) > 0
    assert len(landed.files()) == 2
    for rows in (read_table(spark, table), spark.read.parquet(table)):
        assert sorted(r.offset for r in rows.select("offset").collect()) == list(range(600))
    assert compact(spark, landed) == 0


def test_topics_that_look_like_numbers_stay_text(spark: "SparkSession", tmp_path: Path) -> None:
    """A topic named 007 comes back as 007, and with a slash as it was; the date is a date."""
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for topic in ("007", "a/b=c d"):
            journal.append(topic, b"x")
    run(spark, Lander(str(tmp_path / "events")), tmp_path / "j")
    rows = read_table(spark, str(tmp_path / "events")).collect()
    assert sorted(r.topic for r in rows) == ["007", "a/b=c d"]
    assert {r.date for r in rows} == {r.time.date() for r in rows}


def test_small_files_are_chosen_by_folder_and_size() -> None:
    """Large files and folders of few files stay; groups stay below the target."""
    small = [File(f"t=a/{n}", 40) for n in range(7)]
    others = [File("t=a/big", 90), File("t=b/1", 10), File("t=b/2", 10)]
    groups = choose(small + others, target_bytes=100, min_files=2)
    assert [[f.path for f in g] for g in groups] == [
        ["t=a/0", "t=a/1"], ["t=a/2", "t=a/3"], ["t=a/4", "t=a/5"], ["t=b/1", "t=b/2"],
    ]  # fmt: skip


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
    assert sorted(r.offset for r in read_table(spark, table).collect()) == list(range(170))


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
    with pytest.raises(JobFailed, match="json_schema"):
        run(spark, Lander(str(tmp_path / "x"), LandOptions(json_schema="not a schema!")), tmp_path / "s")
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


def test_counts_and_loss_from_one_ledger(spark: "SparkSession", tmp_path: Path) -> None:
    """Counts are de-duplicated; merging the ledger's batches changes neither counts nor loss."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        fill(spool, "p", 50, 100)
        fill(spool, "p", 160, 40)
    ledger = LedgerTable(str(tmp_path / "ledger"), Windows(3600.0, 60.0))
    run(spark, ledger, tmp_path / "s", max_events=60)
    assert len(ledger.table.files()) > 2

    def figures() -> tuple[Any, Any]:
        counts = ledger.counts(spark).groupBy("topic").sum("events", "duplicates").orderBy("topic").collect()
        lost = (
            ledger.loss(spark, settle_s=0).groupBy("topic").sum("sent", "received", "lost").orderBy("topic")
        )
        return [tuple(r) for r in counts], [tuple(r) for r in lost.collect()]

    before = figures()
    assert before == ([("a", 95, 25), ("b", 95, 25)], [("a", 100, 95, 5), ("b", 100, 95, 5)])
    assert ledger.merge(spark) > 1
    assert len(ledger.table.files()) == 1
    assert figures() == before
    with pytest.raises(ConfigError, match="multiple"):
        LedgerTable(str(tmp_path / "ledger"), Windows(5000.0))
    views = make_views(spark, ledger=str(tmp_path / "ledger"))
    assert views == ["loss", "counts"]
    assert spark.sql("select sum(events) from counts").first()[0] == 190


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
    series = metrics(rows.unionByName(rows), window_s=20).collect()
    hits = [r.asDict() for r in series if r.name == "hits"]
    assert [(r["value"], r["corrected"], r["low"], r["high"], r["grade"], r["flushes"]) for r in hits] == [
        (20, 24, 23, 25, "ledger", 2),
        (20, 24, 23, 25, "exact", 2),
    ]
    assert hits[0]["tags"] == {"a": "1", "b": "2"}
    assert [r.value for r in series if r.name == "load"] == [1, 3]
    assert [r.window.timestamp() for r in series if r.name == "load"] == [1_700_000_000, 1_700_000_020]


def test_delta_without_jars(spark: "SparkSession", tmp_path: Path) -> None:
    """Batches land in a Delta table once: a batch that comes again is known by its transaction id."""
    from deltalake import DeltaTable

    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
    lander = DeltaLander(str(tmp_path / "events"))
    seen: list[tuple[Any, int, str]] = []

    def twice(rows: Any, batch: int, query: str) -> None:
        lander(rows, batch, query)
        DeltaLander(str(tmp_path / "events"))(rows, batch, query)
        seen.append((None, batch, query))

    twice.checkpoint = lander.checkpoint  # type: ignore[attr-defined]
    run(spark, twice, tmp_path / "s", max_events=60)
    table = DeltaTable(str(tmp_path / "events"))
    assert len(seen) == 2
    assert table.transaction_version(seen[0][2]) == 1
    assert sorted(table.to_pyarrow_table().column("offset").to_pylist()) == list(range(100))


def test_a_failed_job_says_why(spark: "SparkSession", tmp_path: Path) -> None:
    """The message is the line that matters, not a Java stack trace."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 10)
    meta = tmp_path / "s" / "meta.json"
    meta.write_text(meta.read_text().replace('"format":1', '"format":99'))
    with pytest.raises(JobFailed, match="has format 99") as error:
        run(spark, Lander(str(tmp_path / "t")), tmp_path / "s")
    assert len(str(error.value).splitlines()) == 1
