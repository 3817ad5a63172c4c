"""The loss table equals the truth, for every window, on streams with known faults."""

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from brokerless.spark_collector.jobs.ledger import LedgerNote, Windows, batch_to_ledger, ledger_rows
from brokerless.spark_collector.jobs.loss import LOSS_COLUMNS, loss, totals
from brokerless.spark_collector.schema import arrow_schema
from tests.spark_collector.streams import HOUR, START, Stream, random_stream, row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
WINDOWS = Windows(window_s=10, late_after_s=60)
FAR = START + 1000 * HOUR


def simple(source: str, count: int = 30) -> Stream:
    """One event a second."""
    return Stream(source, 1, "t", [START + n * 1_000_000 for n in range(count)])


def random_streams() -> list[Stream]:
    rng = random.Random(7)
    return [
        random_stream(rng, f"random{n}", epoch, topic, WINDOWS)
        for n in range(150)
        for epoch in range(1, rng.choice([2, 2, 3]))
        for topic in rng.choice([("a",), ("a", "b")])
    ]


class Case:
    """Streams with known faults, all in one Spark job, which costs more than a thousand streams."""

    def __init__(self) -> None:
        self.random = random_streams()
        self.missing, self.healed = simple("missing"), simple("healed")
        self.missing.lose(3, 4, 5, 20)
        self.healed.delay(3 * HOUR, 3, 4, 5, 20)
        self.silent = simple("silent")
        self.silent.lose(8, 9, 10, 11, 25)
        self.declared = simple("declared")
        self.declared.lose(21, 22, 23)
        self.declared.notes.append(LedgerNote("lost", 22, 22, "evicted"))
        self.evicted = simple("evicted")
        self.evicted.lose(5, 6, 25)
        self.begun, self.joined, self.begun_all = (simple(n, 10) for n in ("begun", "joined", "begun_all"))
        for stream in (self.begun, self.joined, self.begun_all):
            stream.lose(*range(6))
        self.begun.notes.append(LedgerNote("begin", 2))

    def rows(self) -> list[dict[str, Any]]:
        spoken = [*self.random, self.missing, self.healed, self.declared, self.evicted]
        rows = [r for s in spoken for r in s.rows(WINDOWS)]
        rows += [r for s in (self.silent, self.begun, self.joined) for r in s.rows(WINDOWS, words=False)]
        rows += self.begun_all.rows(WINDOWS, words=False)
        # Without a topic the numbers are offsets, and a beginning is that of all topics.
        rows.append(note_row("evicted", LedgerNote("lost", 4, 8, "evicted")))
        rows.append(note_row("begun_all", LedgerNote("begin", 0)))
        random.Random(1).shuffle(rows)
        return rows


def note_row(source: str, note: LedgerNote) -> dict[str, Any]:
    data = msgspec.json.encode(note)
    name = {"source": source, "epoch": 1, "topic": ""}
    return row(**name, kind="ledger", seq=note.first, time=START, received=START, data=data)


Table = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(scope="module")
def ledger(spark: "SparkSession", case: Case) -> "DataFrame":
    """The ledger rows, of several partitions, as several batches of several collectors would make them."""
    import pyarrow as pa

    events = spark.createDataFrame(pa.Table.from_pylist(case.rows(), arrow_schema())).repartition(3)
    return ledger_rows(events, WINDOWS).persist()


def by_source(table: "DataFrame") -> Table:
    found: Table = defaultdict(list)
    for r in table.collect():
        found[r.source].append(r.asDict())
    return found


@pytest.fixture(scope="module")
def table(ledger: "DataFrame") -> Table:
    """The loss table long afterwards."""
    return by_source(loss(ledger, window_s=10, now_us=FAR))


def check(table: Table, streams: list[Stream], windows: Windows = WINDOWS) -> None:
    """Every window of every stream, and no other."""
    sources = {s.source for s in streams}
    found = {
        (r["source"], r["epoch"], r["topic"], round(r["window"].timestamp() * 1e6)): r
        for source in sources
        for r in table[source]
    }
    for stream in streams:
        for slot, truth in stream.truth(windows).items():
            got = found.pop((stream.source, stream.epoch, stream.topic, slot))
            assert {k: got[k] for k in truth} == dict(truth), (stream.source, slot)
            assert got["uncertain"] == got["pending"] == 0
            assert got["sent"] == got["received"] + got["lost"] + got["pending"]
    assert not any(r["sent"] or r["received"] or r["lost"] for r in found.values())


def sums(rows: list[dict[str, Any]], *names: str) -> tuple[int, ...]:
    return tuple(sum(r[n] for r in rows) for n in names)


def test_random_faults_are_counted_exactly_in_every_window(table: Table, case: Case) -> None:
    """Gaps, bursts, tails, duplicates, hours late, new epochs, at random in 150 sources: all exact."""
    check(table, case.random)


def test_late_events_heal(table: Table, case: Case) -> None:
    """A loss goes to zero, and to `healed`, when the events come hours later."""
    assert sums(table["missing"], "lost", "healed") == (4, 0)
    assert sums(table["healed"], "lost", "healed") == (0, 4)
    check(table, [case.missing, case.healed])


def test_a_gap_over_a_border_without_a_word_is_uncertain(table: Table) -> None:
    """Without the producer's word the sum is still exact, and what cannot be placed is uncertain."""
    assert sums(table["silent"], "lost", "uncertain", "sent") == (5, 4, 30)


def test_what_was_just_revealed_is_pending_until_it_settles(ledger: "DataFrame", table: Table) -> None:
    """A gap is pending for the stated time, then lost; a declared one is lost at once, with its reason."""
    now = START + 27 * 1_000_000
    from pyspark.sql import functions as F

    fresh = by_source(loss(ledger.where(F.col("source") == "declared"), window_s=10, now_us=now, settle_s=60))
    names = ("sent", "received", "lost", "pending")
    assert sums(fresh["declared"], *names) == (30, 27, 1, 2)
    assert sums(table["declared"], *names) == (30, 27, 3, 0)
    assert [r["reasons"] for r in table["declared"] if r["lost"]] == [{"evicted": 1, "unattributed": 2}]


def test_losses_declared_by_offset_name_their_reason(table: Table) -> None:
    """An evicted range of offsets, of unknown topics, gives its reason to the gaps that lie in it."""
    named = [r["reasons"] for r in table["evicted"] if r["lost"]]
    assert sorted(named, key=str) == [{"evicted": 2}, {"unattributed": 1}]


def test_responsibility_begins_where_the_consumer_says(table: Table) -> None:
    """With a `begin` note the numbers from there on count even if the first are missing; without, not."""
    assert sums(table["joined"], "lost") == (0,)
    assert sums(table["begun"], "lost") == (4,)
    assert sums(table["begun_all"], "lost") == (6,)


def test_larger_windows_are_sums_of_smaller_ones(ledger: "DataFrame", table: Table, case: Case) -> None:
    """A ledger of 10 s windows read with 60 s windows has the same sums, exact in the larger windows."""
    minute = Windows(window_s=60, late_after_s=60)
    coarse = by_source(loss(ledger, window_s=60, now_us=FAR))
    for stream in case.random:
        truth = stream.truth(minute)
        got = [r for r in coarse[stream.source] if (r["epoch"], r["topic"]) == (stream.epoch, stream.topic)]
        names = ("sent", "received", "lost", "duplicates")
        for r in got:
            expected = truth[round(r["window"].timestamp() * 1e6)]
            assert {n: r[n] for n in names} == {n: expected[n] for n in names}


def test_the_table_has_the_documented_columns(ledger: "DataFrame") -> None:
    """Names and order are API; totals keep the epochs apart."""
    table = loss(ledger, window_s=10, now_us=FAR)
    assert tuple(table.columns) == LOSS_COLUMNS
    assert totals(table).columns[:3] == ["source", "epoch", "topic"]


def test_a_million_events_in_order_become_few_rows() -> None:
    """Islands are per stream and window, not per event."""
    import pyarrow as pa

    count = 50_000
    n = pa.array(range(count), pa.int64())
    times = pa.array(range(START, START + count), pa.timestamp("us", tz="UTC"))
    columns = {"source": pa.repeat("s", count), "epoch": pa.repeat(pa.scalar(1, pa.int64()), count)}
    columns |= {"topic": pa.repeat("t", count), "seq": n, "offset": n, "time": times, "received": times}
    columns |= {"transport": pa.repeat("x", count), "kind": pa.repeat("event", count)}
    columns |= {"content_type": pa.repeat("", count), "data": pa.repeat(pa.scalar(b"", pa.binary()), count)}
    batch = pa.RecordBatch.from_pydict(columns, arrow_schema())
    ledger = batch_to_ledger(batch, WINDOWS).to_pylist()
    assert [(r["lo"], r["hi"], r["rows"]) for r in ledger] == [(0, count - 1, count)]
