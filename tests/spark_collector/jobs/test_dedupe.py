"""What de-duplication remembers stays small, however often the job is started again."""

from pathlib import Path

import pytest

from brokerless.spark_collector.jobs import dedupe
from brokerless.spark_collector.jobs.dedupe import Island, LandedOffsets
from brokerless.spark_collector.jobs.delta import BatchTable
from brokerless.spark_collector.jobs.table import TableError


def test_the_state_is_bounded_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run lands one batch: the files are merged all the same, and a batch that comes again finds what was."""
    monkeypatch.setattr(dedupe, "MERGE_EVERY", 5)
    table = BatchTable(tmp_path / "landed")
    for batch in range(17):
        for _ in range(2):  # the second time it was killed before Spark's own commit
            landed = LandedOffsets(table)
            known = landed.before(batch, "q")
            assert [list(k) for k in known.values()] == ([[(0, 10 * batch - 1)]] if batch else [])
            landed.add([Island("p", 1, 10 * batch, 10 * batch + 9, 10)], batch, "q")
        found = table.open()
        assert len(found.file_uris()) <= 6
    assert table.read_arrow().num_rows <= 6


def test_a_query_with_a_new_checkpoint_knows_what_others_landed(tmp_path: Path) -> None:
    """Its batches begin with 0 again; what was landed before is known all the same. Old states can be read."""
    import pyarrow as pa

    old = BatchTable(tmp_path / "old")
    types = {
        "source": pa.string(),
        "epoch": pa.int64(),
        "lo": pa.int64(),
        "hi": pa.int64(),
        "batch": pa.int64(),
    }
    rows = pa.Table.from_pylist([{"source": "p", "epoch": 1, "lo": 0, "hi": 9, "batch": 3}], pa.schema(types))
    old.append_arrow(rows, 3, "q")
    for table in (BatchTable(tmp_path / "new"), old):
        landed = LandedOffsets(table)
        landed.before(4, "q")
        landed.add([Island("p", 1, 0, 99, 100)], 4, "q")
        assert [list(k) for k in LandedOffsets(table).before(0, "another").values()] == [[(0, 99)]]
        assert [list(k) for k in LandedOffsets(table).before(5, "q").values()] == [[(0, 99)]]
    assert [list(k) for k in LandedOffsets(old).before(4, "q").values()] == [[(0, 9)]]


def test_two_jobs_on_one_table(tmp_path: Path) -> None:
    """In turns each knows what the other landed; the same events at the same time are an error, not a silent copy."""
    one, two = (LandedOffsets(BatchTable(tmp_path / "landed")) for _ in range(2))
    assert one.before(0, "q1") == {}
    one.add([Island("p", 1, 0, 9, 10)], 0, "q1")
    assert [list(k) for k in two.before(0, "q2").values()] == [[(0, 9)]]
    two.add([Island("p", 1, 10, 19, 10)], 0, "q2")
    assert [list(k) for k in one.before(1, "q1").values()] == [[(0, 19)]]
    assert [list(k) for k in two.before(1, "q2").values()] == [[(0, 19)]]
    one.add([Island("p", 1, 15, 29, 15)], 1, "q1")
    with pytest.raises(TableError, match="another job landed 7 of the events of batch 1"):
        two.add([Island("p", 1, 5, 26, 22)], 1, "q2")
    # It is told once; when the batch comes again, the table has it, and what it landed is remembered.
    assert [list(k) for k in two.before(1, "q2").values()] == [[(0, 29)]]
    two.add([Island("p", 1, 5, 26, 22)], 1, "q2")
    # Other events at the same time are no harm.
    one.before(2, "q1")
    two.before(2, "q2")
    one.add([Island("p", 1, 30, 39, 10)], 2, "q1")
    two.add([Island("q", 1, 0, 9, 10)], 2, "q2")
    known = {key: list(islands) for key, islands in one.before(3, "q1").items()}
    assert known == {("p", 1): [(0, 39)], ("q", 1): [(0, 9)]}
