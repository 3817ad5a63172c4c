"""The exactly-once table, without Spark: files are files."""

import multiprocessing
import os
from pathlib import Path

import pytest

from brokerless.core.errors import UsageError
from brokerless.spark_collector.table import CHECKPOINT_EVERY, Table, TableError, local_path


def put(table: Table, *names: str, text: str = "x") -> str:
    """Stage files of these names, as a Spark job would."""
    staged = table.stage()
    for name in names:
        file = Path(staged) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return staged


def visible(table: Table) -> list[str]:
    """What a plain reader of the folder sees."""
    found = (p.relative_to(table.path) for p in table.path.rglob("*.parquet"))
    return sorted(str(p) for p in found if not str(p).startswith("_"))


def test_a_batch_is_committed_once(tmp_path: Path) -> None:
    """The same batch of the same query changes nothing the second time; another query's batch is its own."""
    table = Table(tmp_path / "t")
    assert table.commit(put(table, "d=1/a.parquet"), query="q", batch=0)
    assert not table.commit(put(table, "d=1/a.parquet", "d=2/b.parquet"), query="q", batch=0)
    assert table.commit(put(table, "d=1/a.parquet"), query="other", batch=0)
    assert visible(table) == ["d=1/00000000-0000.parquet", "d=1/00000001-0000.parquet"]
    assert [f.path for f in table.files()] == visible(table)
    assert table.batches() == {"q": 0, "other": 0}


def test_a_commit_that_was_decided_is_carried_out_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dying between the decision and any of the renames loses nothing and doubles nothing."""
    for survive in range(3):
        table = Table(tmp_path / f"t{survive}")
        staged = put(table, "a.parquet", "b.parquet", "c.parquet")
        real, calls = os.rename, [0]

        def dies(src: str, dst: str, real=real, calls=calls, survive=survive) -> None:  # type: ignore[no-untyped-def]
            if calls[0] == survive:
                raise KeyboardInterrupt
            calls[0] += 1
            real(src, dst)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", dies)
            with pytest.raises(KeyboardInterrupt):
                table.commit(staged, query="q", batch=0)
        assert len(visible(table)) == survive
        assert all(Path(p).exists() for p in table.paths()), "a snapshot is whole at every moment"
        again = Table(table.path)
        again.recover()
        assert len(visible(again)) == 3
        assert again.batches() == {"q": 0}


def test_what_was_not_decided_is_thrown_away(tmp_path: Path) -> None:
    """Staged files without a commit are never seen by a reader, and `recover` removes them."""
    table = Table(tmp_path / "t")
    put(table, "a.parquet")
    assert visible(table) == []
    assert not table.exists()
    table.recover()
    assert list(table.path.rglob("*.parquet")) == []


def test_the_log_stays_cheap_and_exact(tmp_path: Path) -> None:
    """Over many commits with removals the list of files equals the folder, and checkpoints hold it."""
    table = Table(tmp_path / "t")
    for batch in range(2 * CHECKPOINT_EVERY + 7):
        gone = [table.files()[0].path] if batch % 3 == 2 else []
        table.commit(put(table, "a.parquet"), query="q", batch=batch, remove=gone, notes={"rows": 2})
    assert table.version() == 2 * CHECKPOINT_EVERY + 6
    assert sorted(f.path for f in table.files()) == visible(table)
    assert table.notes() == {"rows": 2 * (2 * CHECKPOINT_EVERY + 7)}
    # Only entries since the last checkpoint are read: the older ones may be gone.
    for version in range(2 * CHECKPOINT_EVERY - 1):
        if version not in (0, 1, 3, 7, 15, 31, 63):  # probed by name
            (table.path / "_brokerless" / "log" / f"{version:08d}.json").write_text("garbage")
    assert sorted(f.path for f in table.files()) == visible(table)


def commits(path: str, query: str, count: int) -> None:
    table = Table(path)
    for batch in range(count):
        assert table.commit(put(table, "a.parquet"), query=query, batch=batch)


def test_two_writers_never_take_the_same_version(tmp_path: Path) -> None:
    """Two processes that commit at the same time both keep all of their batches."""
    context = multiprocessing.get_context("spawn")
    path = str(tmp_path / "t")
    writers = [context.Process(target=commits, args=(path, f"q{n}", 40)) for n in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert Table(path).batches() == {"q0": 39, "q1": 39}
    assert len(visible(Table(path))) == 80


def test_a_compaction_that_was_overtaken_changes_nothing(tmp_path: Path) -> None:
    """Removing a file that another compaction removed is refused."""
    table = Table(tmp_path / "t")
    table.commit(put(table, "a.parquet"), query="q", batch=0)
    old = table.files()[0].path
    table.commit(put(table, "a.parquet"), remove=[old])
    with pytest.raises(TableError, match="another compaction"):
        table.commit(put(table, "a.parquet"), remove=[old])
    assert len(visible(table)) == 1


def test_a_damaged_log_names_the_file(tmp_path: Path) -> None:
    """A log entry that is not ours is an error that says which."""
    table = Table(tmp_path / "t")
    table.commit(put(table, "a.parquet"), query="q", batch=0)
    entry = table.path / "_brokerless" / "log" / "00000000.json"
    entry.write_text("{")
    with pytest.raises(TableError, match=r"00000000\.json"):
        table.files()


def test_object_stores_are_refused() -> None:
    """A path without atomic rename is a usage error that names the way out."""
    with pytest.raises(UsageError, match="delta"):
        local_path("s3a://bucket/table")
    assert local_path("file:///data/t") == "/data/t"
