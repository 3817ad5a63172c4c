"""`df.write` and `df.writeStream` to format brokerless, in the JVM and in Python; `EventSink` with a publisher."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brokerless.core import DiskJournal, JournalReader
from brokerless.core.errors import UsageError
from brokerless.direct import Publisher, Subscriber
from brokerless.spark_collector import EventSink, run_stream
from tests.conftest import Until
from tests.spark_collector.spools import fill, open_spool
from tests.spark_collector.twins import JVM, PYTHON, require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def events(path: Path) -> list[Any]:
    """What the journal holds."""
    with JournalReader(path) as reader:
        return [event for frame in reader.read(reader.oldest).frames for event in frame.events()]


@pytest.mark.parametrize("name", [JVM, PYTHON])
def test_a_dataframe_is_appended(spark: "SparkSession", tmp_path: Path, name: str) -> None:
    """All columns of an event, or the two that it needs; wrong ones and wrong rows leave nothing."""
    require(spark, name)
    path = tmp_path / "orders"

    def write(sql: str, mode: str = "append", **options: str) -> None:
        rows = spark.sql(sql)
        rows.write.format(name).options(**options).mode(mode).save(str(path))

    write(
        "SELECT 'größe' topic, X'00ff' data, 'a/b' content_type, 'k' key, map('h', '1', 'ü', '') headers, "
        "timestamp_micros(1234567) time"
    )
    write("SELECT 'text' data, 'event' kind, 5L offset UNION ALL SELECT 'no', 'lost', 6L", topic="fixed")
    first, second = events(path)
    assert (first.source, first.topic, first.data, first.content_type, first.key, first.time) == (
        *("orders", "größe", b"\x00\xff", "a/b", "k", 1234567),
    )
    assert first.headers == {"h": "1", "ü": ""}
    assert (second.topic, second.data, second.offset) == ("fixed", b"text", 1)
    for sql, options, match in (
        ("SELECT 'a' topic", {}, "data"),
        ("SELECT 'a' topic, 1 data", {}, "binary or string"),
        ("SELECT 'a' topic, 'x' data, 1 colour", {}, "colour"),
        ("SELECT 'a' topic, 'x' data", {"nonsense": "1"}, "nonsense"),
        ("SELECT 'a' topic, 'x' data UNION ALL SELECT 'b\\n', 'y'", {}, "control"),
        ("SELECT 'a' topic, 'x' data UNION ALL SELECT 'b', NULL", {}, "data"),
    ):
        with pytest.raises(Exception, match=match):
            write(sql, **options)
    with pytest.raises(Exception, match=r"(?i)overwrit|truncat"):
        write("SELECT 'a' topic, 'x' data", mode="overwrite")
    assert len(events(path)) == 2


@pytest.mark.parametrize("name", [JVM, PYTHON])
def test_a_stream_is_appended_once(spark: "SparkSession", tmp_path: Path, name: str) -> None:
    """From a spool into a journal, over restarts; a batch whose commit Spark forgot comes again and is known."""
    require(spark, name)
    path, checkpoint = tmp_path / "copy", tmp_path / "cp"

    def run() -> None:
        rows = spark.readStream.format(name).option("maxEventsPerTrigger", 60).load(str(tmp_path / "s"))
        query = (
            rows.writeStream.format(name)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start(str(path))
        )
        query.awaitTermination(120)
        assert query.exception() is None

    with open_spool(tmp_path / "s") as spool:
        for part in range(2):
            fill(spool, "p", 100 * part, 100)
            run()
            # As if the driver had died between the append and Spark's own note of it.
            newest = max(checkpoint.glob("commits/[0-9]*"), key=lambda file: int(file.name))
            newest.unlink()
            (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
            run()
    found = events(path)
    assert sorted(int(event.data) for event in found) == list(range(200))
    assert [event.headers for event in found if event.data.strip() == b"8"] == [{"n": "8"}]
    assert {event.source for event in found} == {"copy"}


def test_a_publisher_sends_what_a_stream_computes(
    spark: "SparkSession", tmp_path: Path, until: Until
) -> None:
    """Subscribers get each row once, although a batch came twice."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 60)
    with pytest.raises(UsageError, match="memory"), Publisher("tcp://127.0.0.1:0", source="m") as memory:
        EventSink(memory)
    journal = DiskJournal(tmp_path / "out", fsync="never")
    with Publisher("tcp://127.0.0.1:0", source="out", journal=journal) as publisher:
        sink = EventSink(publisher, topic="sums")
        heard: list[bytes] = []
        with Subscriber([publisher.address], start="oldest") as subscriber:

            def twice(rows: Any, batch: int, query: str) -> None:
                some = rows.where("kind = 'event'").selectExpr("data", "headers")
                sink(some, batch, query)
                sink(some, batch, query)

            stream = spark.readStream.format(JVM).option("maxEventsPerTrigger", 25).load(str(tmp_path / "s"))
            run_stream(stream, twice, checkpoint=str(tmp_path / "cp"))
            assert sink.appended == 60

            def arrived() -> bool:
                event = subscriber.receive(timeout=0.2)
                if event is not None:
                    heard.append(event.data)
                return len(heard) == 60

            until(arrived, 60, "all rows at the subscriber")
            assert sorted(map(int, heard)) == list(range(60))
