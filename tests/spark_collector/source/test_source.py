"""The data source over real spools and journals, in a real SparkSession: in the JVM and in Python."""

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from brokerless.core import DiskJournal, Retention
from brokerless.core.journal.segment import segment_name
from brokerless.direct import Mirror, Publisher
from brokerless.losstest.harness.ports import Ports
from brokerless.spark_collector.source.planning import Partition
from tests.spark_collector.spools import BIG, fill, fill_journal, open_spool
from tests.spark_collector.twins import JVM, PYTHON, require

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


FORMATS = (JVM, PYTHON)
_format = [JVM]


@pytest.fixture(params=FORMATS, autouse=True)
def _each_format(request: pytest.FixtureRequest, spark: "SparkSession") -> None:
    """Every test here holds for both, unless it is parametrized with one."""
    require(spark, request.param)
    _format[0] = request.param


def batch(spark: "SparkSession", path: object, **options: str) -> "DataFrame":
    return spark.read.format(_format[0]).options(**options).load(str(path))


def offsets(frame: "DataFrame", source: str = "p") -> list[int]:
    return sorted(r.offset for r in frame.where(f"source = '{source}'").select("offset").collect())


class Sink:
    """Runs a stream to what is there now, and collects its batches."""

    def __init__(self, spark: "SparkSession", checkpoint: Path) -> None:
        self.spark, self.checkpoint = spark, str(checkpoint)
        self.batches: list[list[Any]] = []
        self.progress: list[Any] = []

    def run(self, path: object, **options: str) -> list[list[Any]]:
        """One availableNow run; returns the batches of this run."""
        self.batches = []
        stream = self.spark.readStream.format(_format[0]).options(**options).load(str(path))
        query = (
            stream.writeStream.foreachBatch(lambda df, _: self.batches.append(df.collect()))
            .option("checkpointLocation", self.checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        assert not query.isActive
        self.progress = query.recentProgress
        return self.batches


def test_a_spool_becomes_rows(spark: "SparkSession", tmp_path: Path) -> None:
    """Every event of every frame is one row with all its fields, over several segments and tasks."""
    with open_spool(tmp_path / "s", segment_bytes=16 * 1024) as spool:
        fill(spool, "p", 0, 5000)
        fill(spool, "q", 100, 7, per_frame=1)
    frame = batch(spark, tmp_path / "s", numPartitions="3")
    assert frame.rdd.getNumPartitions() == 3
    rows = sorted(frame.collect(), key=lambda r: (r.source, r.offset))
    assert [(r.offset, r.data) for r in rows if r.source == "p"] == [
        (i, str(i).encode().ljust(8)) for i in range(5000)
    ]
    assert [(r.topic, r.seq) for r in rows[:4]] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert {(r.transport, r.kind, r.epoch) for r in rows} == {("direct", "event", 1)}
    assert all(r.time <= r.received for r in rows)
    assert offsets(frame, "q") == list(range(100, 107))


def test_a_producers_own_journal_becomes_rows(spark: "SparkSession", tmp_path: Path) -> None:
    """The same source reads journals that no collector wrote, and several locations by list and glob."""
    fill_journal(tmp_path / "j1", "p", 1500)
    fill_journal(tmp_path / "j2", "q", 30)
    for paths in (f"{tmp_path}/j1,{tmp_path}/j2", f"{tmp_path}/j*"):
        rows = batch(spark, paths).collect()
        assert sorted(r.seq for r in rows if r.source == "p") == list(range(1500))
        assert sorted(r.offset for r in rows if r.source == "q") == list(range(30))
        assert {r.transport for r in rows} == {"journal"}
        assert all(r.received == r.time for r in rows)


def test_offsets_can_be_chosen(spark: "SparkSession", tmp_path: Path) -> None:
    """startingOffsets and endingOffsets bound a batch, by the location's own offsets."""
    fill_journal(tmp_path / "j", "p", 100)
    location = str(tmp_path / "j")
    start, end = json.dumps({location: 90}), json.dumps({location: 95})
    assert offsets(batch(spark, location, startingOffsets=start, endingOffsets=end)) == [90, 91, 92, 93, 94]
    assert offsets(batch(spark, location, startingOffsets="latest")) == []


def test_ranges_instead_of_rows(spark: "SparkSession", tmp_path: Path) -> None:
    """With `ranges` a row for each task, which says what it would read: together everything, once."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        end = spool.next
    rows = batch(spark, tmp_path / "s", ranges="true", numPartitions="3").collect()
    assert {r.kind for r in rows} == {"range"}
    parts = sorted((msgspec.json.decode(r.data, type=Partition) for r in rows), key=lambda p: p.first)
    assert [(a.stop, a.key) for a in parts[:-1]] == [(b.first, str(tmp_path / "s")) for b in parts[1:]]
    assert (len(parts), parts[0].first, parts[-1].stop) == (3, 0, end)
    sink = Sink(spark, tmp_path / "cp")
    (found,) = sink.run(tmp_path / "s", ranges="true", numPartitions="2")
    assert [r.kind for r in found] == ["range"] * 2
    if _format[0] == JVM:
        assert sink.progress[-1]["sources"][0]["metrics"]["lostOffsets"] == "0"


def test_a_stream_goes_on_where_it_was(spark: "SparkSession", tmp_path: Path) -> None:
    """Batches keep the limit, nothing comes twice, new spools and new events come with the next run."""
    sink = Sink(spark, tmp_path / "cp")
    with open_spool(tmp_path / "s1") as spool:
        fill(spool, "p", 0, 95)
        batches = sink.run(f"{tmp_path}/s*", maxEventsPerTrigger="40")
        assert [len(b) for b in batches] == [40, 40, 15]
        assert sorted(r.offset for b in batches for r in b) == list(range(95))
        backlog = [json.loads(p.sources[0].latestOffset)[str(tmp_path / "s1")]["next"] for p in sink.progress]
        assert backlog[0] == 10, "frames known to be there, reported as backlog"
        fill(spool, "p", 95, 5)
        with open_spool(tmp_path / "s2", source="other") as second:
            fill(second, "q", 0, 3, per_frame=1)
        rows = [r for b in sink.run(f"{tmp_path}/s*") for r in b]
        assert sorted((r.source, r.offset) for r in rows) == [("p", n) for n in range(95, 100)] + [
            ("q", n) for n in range(3)
        ]
        assert sink.run(f"{tmp_path}/s*") == []


def test_a_spool_that_is_away_is_behind_not_lost(spark: "SparkSession", tmp_path: Path) -> None:
    """While a spool cannot be reached the others go on; when it returns it continues where it was."""
    sink = Sink(spark, tmp_path / "cp")
    with open_spool(tmp_path / "s1") as one, open_spool(tmp_path / "s2", source="c2") as two:
        fill(one, "p", 0, 10)
        fill(two, "q", 0, 10)
        paths = f"{tmp_path}/s1,{tmp_path}/s2"
        assert sum(map(len, sink.run(paths))) == 20
        fill(one, "p", 10, 10)
        fill(two, "q", 10, 10)
    (tmp_path / "s2").rename(tmp_path / "unmounted")
    assert [r.source for b in sink.run(paths) for r in b] == ["p"] * 10
    (tmp_path / "unmounted").rename(tmp_path / "s2")
    assert sorted((r.source, r.offset) for b in sink.run(paths) for r in b) == [
        ("q", n) for n in range(10, 20)
    ]


def test_data_loss_fails_or_is_reported(spark: "SparkSession", tmp_path: Path) -> None:
    """When retention has passed the wanted range.

    An error with the numbers, or exactly that range as a row.
    """
    small = Retention(max_bytes=64 * 1024)
    sink = Sink(spark, tmp_path / "cp")
    with open_spool(tmp_path / "s", segment_bytes=16 * 1024, retention=small) as spool:
        fill(spool, "p", 0, 50, size=500)
        assert sum(map(len, sink.run(tmp_path / "s"))) == 50
        fill(spool, "p", 50, 1000, size=500)
        oldest, end = spool.oldest, spool.next
        assert oldest > 5
        with pytest.raises(Exception, match=rf"offsets 5 to {oldest - 1} are gone"):
            sink.run(tmp_path / "s")
        rows = [r for b in sink.run(tmp_path / "s", failOnDataLoss="false") for r in b]
    (lost,) = [r for r in rows if r.kind == "lost"]
    note = {"what": "lost", "first": 5, "last": oldest - 1, "reason": "evicted"}
    assert (lost.source, msgspec.json.decode(lost.data)) == ("collector", note)
    assert sorted(r.offset for r in rows if r.kind == "event") == list(range(oldest * 10, end * 10))


def test_a_corrupt_segment_is_named_or_quarantined(spark: "SparkSession", tmp_path: Path) -> None:
    """Changed bytes in a segment stop the query with the file's name.

    Or become a row that says what is missing.
    """
    with open_spool(tmp_path / "s", segment_bytes=16 * 1024) as spool:
        fill(spool, "p", 0, 2000, size=50)
    name = segment_name(2)
    file = tmp_path / "s" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    file.write_bytes(raw)
    with pytest.raises(Exception, match=rf"segment .*{name} is damaged"):
        batch(spark, tmp_path / "s").collect()
    rows = batch(spark, tmp_path / "s", onCorrupt="quarantine").collect()
    (lost,) = [r for r in rows if r.kind == "lost"]
    note = msgspec.json.decode(lost.data)
    missing = set(range(2000)) - {r.offset for r in rows if r.kind == "event"}
    assert note["reason"] == "corrupt"
    assert missing == set(range(note["first"] * 10, (note["last"] + 1) * 10))


def test_a_newer_format_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    """A spool written by a newer version names itself and what to do."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 10)
    meta = tmp_path / "s" / "meta.json"
    meta.write_text(meta.read_text().replace('"format":1', '"format":99'))
    with pytest.raises(Exception, match="has format 99"):
        batch(spark, tmp_path / "s").collect()


def test_an_endpoint_is_read_by_the_executors(spark: "SparkSession", tmp_path: Path) -> None:
    """A publisher's address as the source: batches by offset; while it is away it is behind, then it goes on."""

    def publisher(address: str) -> Publisher:
        return Publisher(
            address, source="p", journal=DiskJournal(tmp_path / "j", retention=BIG, fsync="never")
        )

    sink = Sink(spark, tmp_path / "cp")

    def run(address: str, **options: str) -> list[int]:
        sink.batches = []
        stream = spark.readStream.format(_format[0]).options(endpoint=address, **options).load()
        writer = stream.writeStream.foreachBatch(lambda df, _: sink.batches.append(df.collect()))
        query = writer.option("checkpointLocation", sink.checkpoint).trigger(availableNow=True).start()
        query.awaitTermination(120)
        return sorted(r.offset for b in sink.batches for r in b)

    with publisher("tcp://127.0.0.1:0") as p:
        address = p.address
        p.publish_many("a", [b"x"] * 100)
        assert run(address, maxEventsPerTrigger="60") == list(range(100))
        assert len(sink.batches) == 2
        rows = spark.read.format(_format[0]).option("endpoint", address).load()
        assert {(r.topic, r.seq, r.data) for r in rows.collect()} == {("a", n, b"x") for n in range(100)}
    assert run(address) == [], "away: nothing, and no error"
    with publisher(address) as p:
        p.publish_many("a", [b"y"] * 20)
        assert run(address) == list(range(100, 120))


@pytest.mark.parametrize("_each_format", [JVM], indirect=True)  # both plan and replay by the same code
def test_a_query_goes_on_at_a_mirror(spark: "SparkSession", tmp_path: Path, ports: Ports) -> None:
    """The publisher's host is gone: with the mirror's address the same checkpoint goes on, nothing missing or twice."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    sink = Sink(spark, tmp_path / "cp")

    def run(address: str) -> list[int]:
        sink.batches = []
        stream = spark.readStream.format(_format[0]).option("endpoint", address).load()
        writer = stream.writeStream.foreachBatch(lambda df, _: sink.batches.append(df.collect()))
        query = writer.option("checkpointLocation", sink.checkpoint).trigger(availableNow=True).start()
        query.awaitTermination(120)
        return sorted(r.offset for b in sink.batches for r in b)

    with Mirror(a, journal=tmp_path / "copy", serve=b) as mirror:
        with Publisher(a, source="p", journal=tmp_path / "j", mirrors=[b]) as p:
            p.publish_many("t", [b"x"] * 100, wait="mirrored", timeout=60)
            assert run(a) == list(range(100))
            p.publish_many("t", [b"x"] * 20, wait="mirrored", timeout=60)
        assert run(b) == list(range(100, 120))
        with mirror.promote() as p:
            p.publish_many("t", [b"x"] * 20)
            p.flush()
            assert run(b) == list(range(120, 140))


def test_wrong_options_are_named(spark: "SparkSession", tmp_path: Path) -> None:
    """A misspelt option or value is an error, not a default."""
    for options, name in [
        ({"maxEventPerTrigger": "1"}, "maxEventPerTrigger"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss"),
    ]:
        with pytest.raises(Exception, match=f"(?i){name}"):
            batch(spark, tmp_path, **options).collect()


@pytest.mark.parametrize("_each_format", [JVM], indirect=True)
def test_a_checkpoint_serves_both(spark: "SparkSession", tmp_path: Path) -> None:
    """A query goes on where the other kind of data source stopped: with a JDK yesterday, without one today."""
    sink = Sink(spark, tmp_path / "cp")
    require(spark, PYTHON)
    with open_spool(tmp_path / "s") as spool:
        for round_ in range(4):
            fill(spool, "p", 10 * round_, 10)
            _format[0] = FORMATS[round_ % 2]
            rows = [r.offset for b in sink.run(tmp_path / "s") for r in b]
            assert rows == list(range(10 * round_, 10 * round_ + 10))
            assert sink.run(tmp_path / "s") == [], "and nothing comes again"


def test_only_wanted_columns(spark: "SparkSession", tmp_path: Path) -> None:
    """Any choice and order of columns, and none at all."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 25)
    frame = batch(spark, tmp_path / "s")
    assert frame.count() == 25
    assert sorted(map(tuple, frame.select("data", "offset").collect())) == sorted(
        (str(n).encode().ljust(8), n) for n in range(25)
    )


def test_the_largest_events(spark: "SparkSession", tmp_path: Path) -> None:
    """Events of all the 16 MiB that a producer accepts, among small ones."""
    large = bytes(range(256)) * (16 * 1024 * 4)
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for _ in range(3):
            journal.append_many("a", [b"before", large, b"after"])
    rows = batch(spark, tmp_path / "j", numPartitions="2").selectExpr("offset", "length(data)", "crc32(data)")
    expected = [(n, len(d), zlib.crc32(d)) for n, d in enumerate([b"before", large, b"after"] * 3)]
    assert sorted(map(tuple, rows.collect())) == expected


def test_subscribed_topics_and_sources(spark: "SparkSession", tmp_path: Path) -> None:
    """Exactly the rows of these topics and sources, also of frames that mix topics."""
    with open_spool(tmp_path / "s") as spool:
        for source in ("p", "q", "other"):
            fill(spool, source, 0, 100)
    fill_journal(tmp_path / "j", "p", 50)  # topic a only

    def found(**options: str) -> set[tuple[str, str, int]]:
        rows = batch(spark, f"{tmp_path}/s,{tmp_path}/j", **options).collect()
        return {
            (r.source, r.topic, sum(s.source == r.source and s.topic == r.topic for s in rows)) for r in rows
        }

    assert found(subscribe="b") == {("p", "b", 50), ("q", "b", 50), ("other", "b", 50)}
    assert found(subscribe="b, a", sources="q") == {("q", "a", 50), ("q", "b", 50)}
    assert found(subscribePattern="[b-z]", sourcesPattern="p|q") == {("p", "b", 50), ("q", "b", 50)}
    assert found(subscribe="none") == set()
    sink = Sink(spark, tmp_path / "cp")
    rows = [r for b in sink.run(tmp_path / "s", subscribe="a", sources="p") for r in b]
    assert [(r.source, r.topic, r.offset) for r in rows] == [("p", "a", n) for n in range(0, 100, 2)]


def test_filters_pass_over_frames(spark: "SparkSession", tmp_path: Path) -> None:
    """Filters give the same rows as without push-down, and what they passed over is counted."""
    second = 1_000_000
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for n in range(60):
            journal.append(f"t{n % 3}", str(n).encode(), time=1_700_000_000 * second + n * second)
            journal.flush()
    frame = batch(spark, tmp_path / "j")
    for condition, wanted in [
        ("topic = 't1'", {n for n in range(60) if n % 3 == 1}),
        ("topic IN ('t1', 't2') AND source = 'p'", {n for n in range(60) if n % 3}),
        ("topic LIKE 't%' AND kind = 'event'", set(range(60))),
        ("source = 'nobody'", set()),
        (
            "time >= timestamp_micros(1700000010000000) AND time < timestamp_micros(1700000020000000)",
            set(range(10, 20)),
        ),
        ("topic = 't1' OR offset = 0", {0} | {n for n in range(60) if n % 3 == 1}),
    ]:
        found = frame.where(condition)
        assert {r.offset for r in found.collect()} == wanted, condition
    if _format[0] == JVM:
        found = frame.where("topic = 't1'")
        found.collect()
        plan = found._jdf.queryExecution().executedPlan()
        leaf = plan.collectLeaves().head()
        leaf = leaf.executedPlan().collectLeaves().head() if "AdaptiveSparkPlan" in leaf.nodeName() else leaf
        assert leaf.metrics().get("skippedFrames").get().value() == 40


def test_keys_are_a_column(spark: "SparkSession", tmp_path: Path) -> None:
    """With a key, without one, and both in one batch."""
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        journal.append("a", b"x", key="größe")
        journal.append("a", b"y")
        journal.flush()
        journal.append("a", b"z")
    rows = batch(spark, tmp_path / "j").select("offset", "key").collect()
    assert sorted(map(tuple, rows)) == [(0, "größe"), (1, ""), (2, "")]


def test_headers_are_a_map_column(spark: "SparkSession", tmp_path: Path) -> None:
    """With headers, without, both in one batch and in one frame; single ones can be asked for by name."""
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        journal.append("a", b"x", headers={"traceparent": "00-1", "größe": "ü"})
        journal.append("b", b"y")
        journal.flush()
        journal.append("a", b"z")
        journal.append("a", b"w", headers={"traceparent": "00-2"})
    frame = batch(spark, tmp_path / "j")
    rows = frame.orderBy("offset").select("headers").collect()
    assert [row.headers for row in rows] == [
        {"traceparent": "00-1", "größe": "ü"},
        {},
        {},
        {"traceparent": "00-2"},
    ]
    assert [r.offset for r in frame.where("headers['traceparent'] = '00-2'").select("offset").collect()] == [
        3
    ]
    some = batch(spark, tmp_path / "j", subscribe="a").orderBy("offset").select("headers").collect()
    assert [len(row.headers) for row in some] == [2, 0, 1]


def test_a_time_begins_a_stream_and_ends_a_batch(spark: "SparkSession", tmp_path: Path) -> None:
    """startingTimestamp and endingTimestamp as in Kafka's source."""
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        for n in range(20):
            journal.append("a", b"x", time=1_700_000_000_000_000 + n * 1_000_000)
    sink = Sink(spark, tmp_path / "cp")
    rows = [r.offset for b in sink.run(tmp_path / "j", startingTimestamp="1700000015000") for r in b]
    assert rows == [15, 16, 17, 18, 19]
    assert offsets(batch(spark, tmp_path / "j", endingTimestamp="1700000003000")) == [0, 1, 2]


def test_bytes_limit_a_batch(spark: "SparkSession", tmp_path: Path) -> None:
    """maxBytesPerTrigger, alone and with maxEventsPerTrigger=0."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100, size=1000)
    sink = Sink(spark, tmp_path / "cp")
    batches = sink.run(tmp_path / "s", maxBytesPerTrigger="45000", maxEventsPerTrigger="0")
    assert [len(b) for b in batches] == [40, 40, 20]


@pytest.mark.parametrize("_each_format", [JVM], indirect=True)  # Spark has no interface for it in Python
def test_progress_says_what_is_behind_lost_and_skipped(spark: "SparkSession", tmp_path: Path) -> None:
    """In the query's progress, where the data source is that of the JVM."""
    small = Retention(max_bytes=64 * 1024)
    sink = Sink(spark, tmp_path / "cp")
    with open_spool(tmp_path / "s", segment_bytes=16 * 1024, retention=small) as spool:
        fill(spool, "q", 0, 50, size=500)
        sink.run(tmp_path / "s")
        fill(spool, "p", 0, 1000, size=500)
        oldest, end = spool.oldest, spool.next
        sink.run(tmp_path / "s", failOnDataLoss="false", sources="nobody", maxEventsPerTrigger="20")
    metrics = [p.sources[0].metrics for p in sink.progress]
    assert int(metrics[-1]["lostOffsets"]) == oldest - 5
    assert int(metrics[-1]["skippedFrames"]) == end - oldest
    assert int(metrics[0]["behind"]) > 0
    assert int(metrics[-1]["behind"]) == 0
    assert sum(p.numInputRows for p in sink.progress) == 1, "the row of the lost range"
