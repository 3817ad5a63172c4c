"""Frames become exactly the rows that their events are."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from brokerless.core import encode_frame
from brokerless.spark_collector.collector.spool import JOURNAL_TRANSPORT, Item, sent_frame
from brokerless.spark_collector.source.rows import RowBuilder, lost_batch
from brokerless.spark_collector.source.schema import COLUMNS, arrow_schema


@given(st.integers(), st.integers(1, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_equal_events(seed: int, frames: int, directly: bool) -> None:
    """For frames of any mixture of topics and content types, rows equal `frame.events()` field by field."""
    rng = random.Random(seed)
    builder = RowBuilder()
    expected = []
    for f in range(frames):
        n = rng.randint(1, 40)
        topics = [(f"t{i}", rng.randint(0, 9)) for i in range(rng.choice([1, 1, 2, 5]))]
        index = [rng.randrange(len(topics)) for _ in range(n)]
        used = sorted(set(index))
        topics = [topics[i] for i in used]
        index = [used.index(i) for i in index]
        contents = rng.choice([None, ["a/b"], [rng.choice(["", "x/y", "a/b"]) for _ in range(n)]])
        frame = encode_frame(
            rng.choice(["s1", "s2"]),
            rng.randint(1, 3),
            rng.randint(0, 1000),
            topics=topics,
            topic_index=index,
            times=[rng.randint(0, 10**15) for _ in range(n)],
            datas=[rng.randbytes(rng.randint(0, 9)) for _ in range(n)],
            content_types=contents,
            keys=rng.choice([None, [rng.choice(["", "k"]) for _ in range(n)]]),
            headers=rng.choice([None, [rng.choice([{}, {"a": "1", "ü": ""}]) for _ in range(n)]]),
        )
        received = -1 if directly else 10**14
        builder.add(Item(f, "direct" if not directly else JOURNAL_TRANSPORT, "event", received, frame))
        for e in frame.events():
            stamp = e.time if directly else received
            expected.append(
                (
                    e.source,
                    e.epoch,
                    e.topic,
                    e.seq,
                    e.offset,
                    e.time,
                    stamp,
                    e.content_type,
                    e.data,
                    e.key,
                    list(e.headers.items()),
                )
            )
    batch = builder.take()
    assert batch.schema == arrow_schema()
    assert tuple(batch.schema.names) == COLUMNS
    columns = ["source", "epoch", "topic", "seq", "offset", "time", "received", "content_type", "data"]
    columns += ["key", "headers"]
    values = [
        batch.column(c).cast("int64") if c in ("time", "received") else batch.column(c) for c in columns
    ]
    assert list(zip(*(v.to_pylist() for v in values), strict=True)) == expected
    assert builder.rows == 0


def test_a_producers_word_has_one_row_per_topic() -> None:
    """seq is what the topic's next seq was, offset the same for all topics."""
    builder = RowBuilder()
    builder.add(Item(0, "direct", "sent", 50, sent_frame("s", 7, 30, 40, {"b": 9, "a": 21})))
    rows = builder.take().to_pylist()
    assert [(r["topic"], r["seq"], r["offset"], r["kind"]) for r in rows] == [
        ("a", 21, 30, "sent"),
        ("b", 9, 30, "sent"),
    ]


def test_a_lost_range_is_a_row() -> None:
    """What cannot be read is said in the data, with its numbers."""
    (row,) = lost_batch("s", 1, 5, 9, "evicted", 1000).to_pylist()
    assert (row["kind"], row["offset"], row["data"]) == (
        "lost",
        5,
        b'{"what":"lost","first":5,"last":9,"reason":"evicted"}',
    )
