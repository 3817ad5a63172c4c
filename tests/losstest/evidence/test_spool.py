"""What consumers spool for `--spark`."""

from pathlib import Path

import pytest

from brokerless.losstest.evidence.spool import Spool
from brokerless.spark_collector import Windows, local

pytestmark = pytest.mark.spark


def test_a_copy_that_another_process_spools_counts_once(tmp_path: Path) -> None:
    """However long after the first copy a redelivered event is spooled, the table has it once, and a duplicate."""
    for process in ("before", "after"):
        spool = Spool(tmp_path / process, process, "sub-0")
        for offset in range(1, 11):
            spool.add(offset, b"x")
        spool.close()
    table = local.loss({"path": str(tmp_path / "*")}, windows=Windows(1e-6), by="topic")
    (row,) = table.to_pylist()
    assert (row["received"], row["duplicates"]) == (10, 10)
