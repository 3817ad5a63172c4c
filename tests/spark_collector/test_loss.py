"""The loss table equals the truth, for every window, on streams with known faults."""

import random
from typing import TYPE_CHECKING, Any

import pytest

from brokerless.spark_collector.jobs.ledger import LedgerNote, Windows, batch_to_ledger, ledger_rows
from brokerless.spark_collector.jobs.loss import LOSS_COLUMNS, loss, totals
from brokerless.spark_collector.schema import arrow_schema
from tests.spark_collector.streams import HOUR, START, Stream, random_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
WINDOWS = Windows(window_s=10, late_after_s=60)
FAR = START + 1000 * HOUR


def frame(spark: "SparkSession", rows: list[dict[str, Any]], parts: int = 3) -> "DataFrame":
    """The rows as a DataFrame of some partitions, as several batches of several collectors would be."""
    import pyarrow as pa

    table = pa.Table.from_pylist(rows, arrow_schema())
    return spark.createDataFrame(table).repartition(parts)


def table_of(spark: "SparkSession", rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """The loss table of these rows."""
    ledger = ledger_rows(frame(spark, rows), options.pop("windows", WINDOWS))
    options = {"window_s": 10, "now_us": FAR} | options
    return [r.asDict() for r in loss(ledger, **options).collect()]


def by_window(table: list[dict[str, Any]]) -> dict[tuple[str, int, str, int], dict[str, Any]]:
    return {(r["source"], r["epoch"], r["topic"], round(r["window"].timestamp() * 1e6)): r for r in table}


def check(table: list[dict[str, Any]], streams: list[Stream], windows: Windows = WINDOWS) -> None:
    """Every window of every stream, and no other."""
    found = by_window(table)
    for stream in streams:
        for slot, truth in stream.truth(windows).items():
            got = found.pop((stream.source, stream.epoch, stream.topic, slot))
            assert {k: got[k] for k in truth} == dict(truth), (stream.source, slot)
            assert got["uncertain"] == got["pending"] == 0
    assert not any(r["sent"] or r["received"] or r["lost"] for r in found.values())


def test_random_faults_are_counted_exactly_in_every_window(spark: "SparkSession") -> None:
    """Gaps, bursts, tails, duplicates, hours late, new epochs, at random in 150 sources: all windows are exact."""
    rng = random.Random(7)
    streams = [
        random_stream(rng, f"s{n}", epoch, topic, WINDOWS)
        for n in range(150)
        for epoch in range(1, rng.choice([2, 2, 3]))
        for topic in rng.choice([("a",), ("a", "b")])
    ]
    rows = [r for s in streams for r in s.rows(WINDOWS)]
    rng.shuffle(rows)
    check(table_of(spark, rows), streams)


def test_late_events_heal(spark: "SparkSession") -> None:
    """A loss that was reported goes to zero, and to `healed`, when the events come hours later."""
    times = [START + n * 1_000_000 for n in range(30)]
    early, late = Stream("s", 1, "t", times), Stream("s", 1, "t", times)
    early.lose(3, 4, 5, 20)
    late.delay(3 * HOUR, 3, 4, 5, 20)
    before, after = table_of(spark, early.rows(WINDOWS)), table_of(spark, late.rows(WINDOWS))
    assert sum(r["lost"] for r in before) == 4
    assert sum(r["lost"] for r in after) == 0
    assert sum(r["healed"] for r in after) == 4
    check(after, [late])


def test_a_gap_over_a_border_without_a_word_is_uncertain(spark: "SparkSession") -> None:
    """Without the producer's word the sum is still exact, and what cannot be placed is said to be uncertain."""
    stream = Stream("s", 1, "t", [START + n * 1_000_000 for n in range(30)])
    stream.lose(8, 9, 10, 11, 25)
    table = table_of(spark, stream.rows(WINDOWS, words=False))
    assert sum(r["lost"] for r in table) == 5
    assert sum(r["uncertain"] for r in table) == 4
    assert sum(r["sent"] for r in table) == 30


def test_what_was_just_revealed_is_pending_until_it_settles(spark: "SparkSession") -> None:
    """A gap is pending for the stated time, then lost; a declared one is lost at once, with its reason."""
    stream = Stream("s", 1, "t", [START + n * 1_000_000 for n in range(30)])
    stream.lose(21, 22, 23)
    stream.notes.append(LedgerNote("lost", 22, 22, "evicted"))
    rows = stream.rows(WINDOWS)
    now = START + 27 * 1_000_000
    open_ = totals_of(table_of(spark, rows, now_us=now, settle_s=60))
    assert open_ == {"sent": 30, "received": 27, "lost": 1, "pending": 2}
    settled = table_of(spark, rows, now_us=now + 120 * 1_000_000, settle_s=60)
    assert totals_of(settled) == {"sent": 30, "received": 27, "lost": 3, "pending": 0}
    assert [r["reasons"] for r in settled if r["lost"]] == [{"evicted": 1, "unattributed": 2}]


def totals_of(table: list[dict[str, Any]]) -> dict[str, int]:
    return {k: sum(r[k] for r in table) for k in ("sent", "received", "lost", "pending")}


def test_losses_declared_by_offset_name_their_reason(spark: "SparkSession") -> None:
    """An evicted range of offsets, of unknown topics, gives its reason to the gaps that lie in it."""
    stream = Stream("s", 1, "t", [START + n * 1_000_000 for n in range(30)])
    stream.lose(5, 6, 25)
    rows = stream.rows(WINDOWS)
    stream.topic, stream.notes = "", [LedgerNote("lost", 4, 8, "evicted")]
    rows += stream.rows(WINDOWS)[-1:]
    named = [r["reasons"] for r in table_of(spark, rows) if r["lost"]]
    assert sorted(named, key=str) == [{"evicted": 2}, {"unattributed": 1}]


def test_responsibility_begins_where_the_consumer_says(spark: "SparkSession") -> None:
    """With a `begin` note the numbers from there on count even if the first ones are missing; without, not."""
    stream = Stream("s", 1, "t", [START + n * 1_000_000 for n in range(10)])
    stream.lose(*range(6))
    plain = stream.rows(WINDOWS, words=False)
    assert totals_of(table_of(spark, plain))["lost"] == 0
    stream.notes.append(LedgerNote("begin", 2))
    assert totals_of(table_of(spark, stream.rows(WINDOWS, words=False)))["lost"] == 4


def test_larger_windows_are_sums_of_smaller_ones(spark: "SparkSession") -> None:
    """A ledger of 10 s windows read with 60 s windows equals a ledger made with 60 s."""
    rng = random.Random(11)
    streams = [random_stream(rng, f"s{n}", 1, "t", WINDOWS) for n in range(40)]
    minute = Windows(window_s=60, late_after_s=60)
    for s in streams:  # late is decided by the window that the ledger was made with
        s.arrivals = [(seq, s.times[seq] + 1000) for seq, _ in s.arrivals]
    rows = [r for s in streams for r in s.rows(WINDOWS)]
    check(table_of(spark, rows, window_s=60), streams, minute)


def test_the_table_has_the_documented_columns(spark: "SparkSession") -> None:
    """Names and order are API; totals keep the epochs apart."""
    stream = Stream("s", 1, "t", [START])
    other = Stream("s", 2, "t", [START])
    ledger = ledger_rows(frame(spark, stream.rows(WINDOWS) + other.rows(WINDOWS)), WINDOWS)
    table = loss(ledger, window_s=10, now_us=FAR)
    assert tuple(table.columns) == LOSS_COLUMNS
    assert [(r.epoch, r.sent) for r in totals(table).collect()] == [(1, 1), (2, 1)]


def test_a_million_events_in_order_become_few_rows() -> None:
    """Islands are per stream and window, not per event."""
    import pyarrow as pa

    count = 50_000
    n = pa.array(range(count), pa.int64())
    times = pa.array(range(START, START + count), pa.timestamp("us", tz="UTC"))
    columns = {"source": pa.repeat("s", count), "epoch": pa.repeat(pa.scalar(1, pa.int64()), count)}
    columns |= {"topic": pa.repeat("t", count), "seq": n, "offset": n, "time": times, "received": times}
    columns |= {"transport": pa.repeat("x", count), "kind": pa.repeat("event", count)}
    columns |= {"content_type": pa.repeat("", count), "data": pa.nulls(count, pa.binary())}
    batch = pa.RecordBatch.from_pydict(columns, arrow_schema())
    ledger = batch_to_ledger(batch, WINDOWS).to_pylist()
    assert [(r["lo"], r["hi"], r["rows"]) for r in ledger] == [(0, count - 1, count)]
