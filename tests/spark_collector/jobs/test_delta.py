"""Delta tables over a long life: killed writers, compaction beside them, vacuum, a log of many commits."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from brokerless.spark_collector.jobs.delta import BatchTable
from tests.conftest import Until
from tests.spark_collector.jobs.killed_writers import check_each_once, kill_writers

WEEK_S = 7 * 86_400


class Compactions:
    """Compacts a table again and again, in a thread, once it is there."""

    def __init__(self, table: BatchTable) -> None:
        self.table = table
        self.removed: list[int] = []
        self.problem: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.05):
                if self.table.exists():
                    self.removed.append(self.table.optimize())
                    self.table.vacuum(keep_hours=168)
        except BaseException as error:
            self.problem = error

    def __enter__(self) -> "Compactions":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.problem is not None:
            raise self.problem


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A place for a table, and the options of its store."""
    if request.param == "directory":
        yield str(tmp_path / "t"), {}
    else:
        yield request.getfixturevalue("url"), request.getfixturevalue("s3")


def test_compaction_beside_killed_writers_loses_nothing(
    tmp_path: Path, store: tuple[str, dict[str, str]], until: Until
) -> None:
    """kill -9 at random, while another process of the operator's compacts: each batch is there once."""
    path, options = store
    expression = f"BatchTable({path!r}, partition_by=('part',), storage_options={options!r})"
    table = BatchTable(path, partition_by=("part",), storage_options=options)
    with Compactions(table) as compactions:
        committed = kill_writers(
            tmp_path, "from brokerless.spark_collector.jobs.delta import BatchTable", expression, {}, until
        )
        check_each_once(table, committed)
        until(lambda: sum(compactions.removed) > 0, 60, "a compaction that put files together")
    check_each_once(table, committed)


def test_vacuum_deletes_what_no_version_needs_and_nothing_else(tmp_path: Path) -> None:
    """Files of a week ago: those of a batch that died and those that were put together go; table, checkpoint stay."""
    table = BatchTable(tmp_path / "t")
    for batch in range(4):
        table.append_arrow(pa.table({"n": [batch]}), batch, "q")
    checkpoint = Path(table.checkpoint) / "offsets" / "0"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("v1")
    died = tmp_path / "t" / "batch-died" / "x.parquet"
    died.parent.mkdir()
    died.write_bytes(b"not committed")
    assert table.optimize() == 3
    replaced = [p for p in (tmp_path / "t").glob("batch-*/*.parquet") if p != died]
    young = tmp_path / "t" / "batch-young" / "x.parquet"
    for path in (tmp_path / "t").rglob("*"):
        os.utime(path, (time.time() - 2 * WEEK_S,) * 2)
    young.parent.mkdir()
    young.write_bytes(b"of a running job")
    removed = table.vacuum(keep_hours=168)
    assert not died.exists()
    assert young.exists()
    assert checkpoint.exists()
    assert removed >= 1
    # Put together just now: for a week readers of the version before may need them.
    assert all(path.exists() for path in replaced)
    assert sorted(table.read_arrow()["n"].to_pylist()) == [0, 1, 2, 3]
    table.append_arrow(pa.table({"n": [4]}), 4, "q")
    assert table.last_batch("q") == 4


def test_a_log_of_many_commits_is_not_read_from_its_beginning(tmp_path: Path) -> None:
    """Its checkpoints stand for what was before them: the table opens without the commits that they hold."""
    table = BatchTable(tmp_path / "t")
    for batch in range(130):
        table.append_arrow(pa.table({"n": [batch]}), batch, "q")
    log = tmp_path / "t" / "_delta_log"
    points = sorted(log.glob("*.checkpoint*.parquet"))
    assert points
    newest = int(points[-1].name.partition(".")[0])
    assert newest >= 99
    for commit in log.glob("*.json"):
        if int(commit.name.partition(".")[0]) <= newest:
            commit.unlink()
    assert table.last_batch("q") == 129
    assert DeltaTable(str(tmp_path / "t")).count() == 130
