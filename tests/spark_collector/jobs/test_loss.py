"""The loss table equals the truth, for every window, on streams with known faults."""

import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow.compute as pc
import pytest

from brokerless.spark_collector.collector.spool import LedgerNote
from brokerless.spark_collector.jobs.ledger import (
    Windows,
    batch_to_ledger,
    ledger_arrow_schema,
    ledger_rows,
    merge_ledger,
)
from brokerless.spark_collector.jobs.loss import (
    LOSS_COLUMNS,
    counts_frame,
    counts_table,
    loss_frame,
    loss_table,
    totals,
    totals_table,
)
from brokerless.spark_collector.source.schema import arrow_schema
from tests.spark_collector.streams import HOUR, START, Stream, random_stream, row

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

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
    """Streams with known faults."""

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
        rows += [
            r for s in (self.silent, self.begun, self.joined) for r in s.rows(WINDOWS, sent_counts=False)
        ]
        rows += self.begun_all.rows(WINDOWS, sent_counts=False)
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
def ledger(case: Case) -> "pa.Table":
    """The ledger rows, as several batches of several collectors would make them."""
    import pyarrow as pa

    rows = pa.Table.from_pylist(case.rows(), arrow_schema()).combine_chunks()
    size = -(-rows.num_rows // 3)
    parts = [batch_to_ledger(batch, WINDOWS) for batch in rows.to_batches(max_chunksize=size)]
    assert len(parts) == 3
    return pa.Table.from_batches(parts)


def by_source(table: "pa.Table") -> Table:
    found: Table = defaultdict(list)
    for r in table.to_pylist():
        found[r["source"]].append(r | {"reasons": dict(r["reasons"])})
    return found


def computed(ledger: "pa.Table", window_s: float = 10, settle_s: float = 10, now_us: int = FAR) -> Table:
    """The loss table by source; by default long afterwards."""
    size, settle = round(window_s * 1_000_000), round(settle_s * 1_000_000)
    return by_source(loss_table(ledger, window_us=size, now_us=now_us, settle_us=settle))


@pytest.fixture(scope="module")
def table(ledger: "pa.Table") -> Table:
    return computed(ledger)


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


def test_a_gap_over_a_border_without_sent_counts_is_uncertain(table: Table) -> None:
    """Without the producer's sent counts the sum is still exact, and what cannot be placed is uncertain."""
    assert sums(table["silent"], "lost", "uncertain", "sent") == (5, 4, 30)


def test_what_was_just_revealed_is_pending_until_it_settles(ledger: "pa.Table", table: Table) -> None:
    """A gap is pending for the stated time, then lost; a declared one is lost at once, with its reason."""
    now = START + 27 * 1_000_000
    fresh = computed(ledger, settle_s=60, now_us=now)
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


def test_larger_windows_are_sums_of_smaller_ones(ledger: "pa.Table", table: Table, case: Case) -> None:
    """A ledger of 10 s windows read with 60 s windows has the same sums, exact in the larger windows."""
    minute = Windows(window_s=60, late_after_s=60)
    coarse = computed(ledger, window_s=60)
    for stream in case.random:
        truth = stream.truth(minute)
        got = [r for r in coarse[stream.source] if (r["epoch"], r["topic"]) == (stream.epoch, stream.topic)]
        names = ("sent", "received", "lost", "duplicates")
        for r in got:
            expected = truth[round(r["window"].timestamp() * 1e6)]
            assert {n: r[n] for n in names} == {n: expected[n] for n in names}


def test_the_table_has_the_documented_columns(ledger: "pa.Table") -> None:
    """Names and order are API; totals keep the epochs apart."""
    table = loss_table(ledger, window_us=10_000_000, now_us=FAR, settle_us=0)
    assert tuple(table.column_names) == LOSS_COLUMNS
    assert totals_table(table).column_names[:3] == ["source", "epoch", "topic"]


def test_a_million_events_in_order_become_few_rows() -> None:
    """Islands are per stream and window, not per event."""
    import pyarrow as pa

    count = 50_000
    n = pa.array(range(count), pa.int64())
    times = pa.array(range(START, START + count), pa.timestamp("us", tz="UTC"))
    columns = {"source": pa.repeat("s", count), "epoch": pa.repeat(pa.scalar(1, pa.int64()), count)}
    columns |= {"topic": pa.repeat("t", count), "seq": n, "offset": n, "time": times, "received": times}
    columns |= {"transport": pa.repeat("x", count), "kind": pa.repeat("event", count)}
    columns |= {
        "content_type": pa.repeat("", count),
        "key": pa.repeat("", count),
        "data": pa.repeat(pa.scalar(b"", pa.binary()), count),
        "headers": pa.array([[]] * count, arrow_schema().field("headers").type),
    }
    batch = pa.RecordBatch.from_pydict(columns, arrow_schema())
    ledger = batch_to_ledger(batch, WINDOWS).to_pylist()
    assert [(r["lo"], r["hi"], r["rows"]) for r in ledger] == [(0, count - 1, count)]


def test_merged_ledgers_mean_the_same(ledger: "pa.Table", table: Table) -> None:
    """Joining the islands of all batches changes no number, and makes fewer rows."""
    merged = merge_ledger(ledger)
    assert merged.num_rows < ledger.num_rows
    assert computed(merged) == table
    assert merge_ledger(merged).num_rows == merged.num_rows


def test_what_was_evicted_before_the_first_join_is_lost(tmp_path: Any) -> None:
    """A beginning at 0, a declared range of offsets, and then the first events: exactly that range is lost."""
    import pyarrow as pa

    late = simple("late", 10)
    late.lose(*range(6))
    begin = note_row("late", LedgerNote("begin", 0)) | {"time": 0}
    rows = [
        *late.rows(WINDOWS, sent_counts=False),
        begin,
        note_row("late", LedgerNote("lost", 0, 3, "evicted")),
    ]
    batch = pa.Table.from_pylist(rows, arrow_schema()).combine_chunks().to_batches()[0]
    found = computed(pa.Table.from_batches([batch_to_ledger(batch, WINDOWS)]))["late"]
    assert sums(found, "sent", "received", "lost", "uncertain") == (10, 4, 6, 6)
    assert [r["reasons"] for r in found if r["lost"]] == [{"evicted": 4, "unattributed": 2}]


@pytest.mark.timeout(60)
def test_many_streams_take_time_in_proportion() -> None:
    """200,000 streams of one source, each with a gap and half of them with a declared one: seconds, not minutes."""
    import pyarrow as pa

    count = 200_000
    names = pa.array([f"t{n}" for n in range(count)])

    def rows(kind: str, lo: int, hi: int, reason: str | None = None, take: int = count) -> "pa.Table":
        def number(value: int) -> "pa.Array":
            return pa.repeat(pa.scalar(value, pa.int64()), take)

        columns = [pa.repeat("s", take), number(1), names.slice(0, take), pa.repeat(kind, take)]
        columns += [
            pa.repeat(False, take),
            number(0),
            number(0),
            number(lo),
            number(hi),
            number(lo),
            number(hi),
        ]
        columns += [number(max(0, hi - lo + 1)), number(0)]
        columns.append(pa.repeat(reason, take) if reason else pa.nulls(take, pa.string()))
        return pa.table(columns, schema=ledger_arrow_schema())

    ledger = pa.concat_tables(
        [rows("event", 0, 4), rows("event", 7, 9), rows("lost", 5, 5, "evicted", take=count // 2)]
    )
    began = time.monotonic()
    table = loss_table(ledger, window_us=10_000_000, now_us=FAR, settle_us=0)
    assert time.monotonic() - began < 40
    assert pc.sum(table["lost"]).as_py() == 2 * count
    assert sum(n for r in table["reasons"].to_pylist() for k, n in r if k == "evicted") == count // 2


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_spark_gives_the_same_numbers(spark: "SparkSession", case: Case, ledger: "pa.Table") -> None:
    """The jobs on DataFrames, over several partitions, equal the functions that they share with `brokerless loss`."""
    import pyarrow as pa

    events = spark.createDataFrame(pa.Table.from_pylist(case.rows(), arrow_schema())).repartition(3)
    rows = ledger_rows(events, WINDOWS).persist()
    found = loss_frame(rows, window_s=10, now_us=FAR)
    assert tuple(found.columns) == LOSS_COLUMNS
    expected = loss_table(ledger, window_us=10_000_000, now_us=FAR, settle_us=10_000_000)

    def comparable(table: "pa.Table") -> list[Any]:
        return sorted((str(sorted(r.items())) for r in table.to_pylist()), key=str)

    assert comparable(found.toArrow().select(expected.column_names)) == comparable(expected)
    assert totals(found).count() == totals_table(expected).num_rows
    counted = counts_frame(rows, window_s=60).toArrow()
    assert comparable(counted) == comparable(counts_table(ledger, window_us=60_000_000))
