"""The files of a table: every row in one file of its partition values, with bounded memory and open files."""

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.spark_collector.jobs import parquet
from brokerless.spark_collector.jobs.parquet import Target, WrittenFile, write_files

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("day", pa.date32()),
        ("n", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("more", pa.map_(pa.string(), pa.string())),
        ("json", pa.struct([("a", pa.string())])),
    ]
)


def batches(values: list[tuple[str | None, int | None]], sizes: int) -> list[pa.RecordBatch]:
    """Rows with these partition values, numbered, in batches of this size, as Spark hands them over."""
    rows: list[dict[str, Any]] = [
        {
            "topic": topic,
            "day": None if day is None else datetime.date(1970, 1, 1) + datetime.timedelta(day),
            "n": n,
            "at": n,
            "more": [("k", "v")],
            "json": {"a": str(n)},
        }
        for n, (topic, day) in enumerate(values)
    ]
    elsewhere = SCHEMA.set(3, pa.field("at", pa.timestamp("us", tz="Asia/Tokyo"), nullable=False))
    return [pa.RecordBatch.from_pylist(rows[at : at + sizes], elsewhere) for at in range(0, len(rows), sizes)]


def contents(path: Path, files: list[WrittenFile]) -> list[tuple[tuple[str | None, ...], int]]:
    """(values of the file, n) of each row; each file's rows and size are what it says."""
    found = []
    for file in files:
        assert (path / file.path).stat().st_size == file.size
        table = pq.ParquetFile(path / file.path).read()
        assert table.schema.equals(SCHEMA)
        assert table.num_rows == file.rows
        for topic, day, n in zip(*(table[c].to_pylist() for c in ("topic", "day", "n")), strict=True):
            own = {"topic": topic, "day": None if day is None else day.isoformat()}
            assert file.values == {name: own[name] for name in file.values}
            found.append((tuple(file.values.values()), n))
    return found


VALUES = st.tuples(
    st.sampled_from(["a", "a/b=%", "", "None", "ü" * 200, None]), st.sampled_from([-1, 0, 9, None])
)


@given(st.lists(VALUES, max_size=60), st.integers(1, 20), st.sampled_from([(), ("day",), ("topic", "day")]))
def test_every_row_is_in_one_file_of_its_values(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[tuple[str | None, int | None]],
    sizes: int,
    by: tuple[str, ...],
) -> None:
    """Whatever the values are, null too, and however small the groups and the number of open files."""
    path = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_GROUP_BYTES", 300)
        patch.setattr(parquet, "_HELD_BYTES", 900)
        patch.setattr(parquet, "_FILE_BYTES", 3000)
        patch.setattr(parquet, "_MOST_OPEN", 2)
        files = list(write_files(iter(batches(values, sizes)), SCHEMA, Target(str(path), True, by, {}), "f"))
    rows = contents(path, files)
    assert sorted(n for _, n in rows) == list(range(len(values)))
    assert {p.name for p in (path / "f").iterdir()} == {Path(f.path).name for f in files}


def test_memory_and_open_files_do_not_grow_with_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 topics in turns: few files are open at a time, and few rows wait."""
    monkeypatch.setattr(parquet, "_HELD_BYTES", 200_000)
    monkeypatch.setattr(parquet, "_MOST_OPEN", 4)
    target = Target(str(tmp_path), True, ("topic",), {})
    (tmp_path / "f").mkdir()
    writer = parquet._Writer(SCHEMA, target, "f")
    files: list[WrittenFile] = []
    for batch in batches([(f"t{n % 200}", 0) for n in range(20_000)], 1000):
        files += writer.add(batch)
        assert len(writer._open) <= 4
        assert sum(writer._bytes.values()) < 200_000
    files += writer.end()
    assert sum(file.rows for file in files) == 20_000
    assert Counter(values for values, _ in contents(tmp_path, files)) == {(f"t{n}",): 100 for n in range(200)}


def test_one_file_for_what_belongs_together(tmp_path: Path) -> None:
    """A batch of one day is one file for each task, in few row groups."""
    target = Target(str(tmp_path), True, ("day",), {})
    files = list(write_files(iter(batches([("a", 3)] * 5000, 100)), SCHEMA, target, "f"))
    assert [file.rows for file in files] == [5000]
    assert pq.ParquetFile(tmp_path / files[0].path).metadata.num_row_groups == 1


def test_a_file_that_is_not_there_or_has_another_size(tmp_path: Path) -> None:
    """What the driver asks before a commit: -1 where there is none."""
    target = Target(str(tmp_path), True, (), {})
    (file,) = write_files(iter(batches([("a", 1)] * 3, 3)), SCHEMA, target, "f")
    assert target.size(file.path) == file.size
    (tmp_path / file.path).write_bytes(b"x")
    assert target.size(file.path) == 1
    (tmp_path / file.path).unlink()
    assert target.size(file.path) == -1
