"""What de-duplication remembers stays small, however often the job is started again."""

from pathlib import Path

import pytest

from brokerless.spark_collector.jobs import dedupe
from brokerless.spark_collector.jobs.dedupe import Island, LandedOffsets
from brokerless.spark_collector.jobs.delta import BatchTable


def test_the_state_is_bounded_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run lands one batch: the files are merged all the same, and a batch that comes again finds what was."""
    monkeypatch.setattr(dedupe, "MERGE_EVERY", 5)
    table = BatchTable(tmp_path / "landed")
    for batch in range(17):
        for _ in range(2):  # the second time it was killed before Spark's own commit
            landed = LandedOffsets(table)
            known = landed.before(batch)
            assert [list(k) for k in known.values()] == ([[(0, 10 * batch - 1)]] if batch else [])
            landed.add([Island("p", 1, 10 * batch, 10 * batch + 9, 10)], batch, "q")
        found = table.open()
        assert len(found.file_uris()) <= 6
    assert table.read_arrow().num_rows <= 6
