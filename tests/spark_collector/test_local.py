"""`brokerless loss`, `counts` and `export` without Spark."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from brokerless.cli.main import main
from brokerless.core import encode_frame
from brokerless.core.errors import ConfigError, UsageError
from brokerless.spark_collector import Windows, local
from brokerless.spark_collector.collector.spool import NESTED
from brokerless.spark_collector.source.locations import LocationMissing
from tests.spark_collector.spools import fill, fill_journal, open_spool


@pytest.fixture
def spool(tmp_path: Path) -> str:
    """200 events of one source without ten of them, and 25 that came twice."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        fill(spool, "p", 75, 25)
        fill(spool, "p", 110, 90)
    return str(tmp_path / "s")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code: Any = 0
    try:
        main(list(arguments))
    except SystemExit as ended:
        code = ended.code or 0
    shown = capsys.readouterr()
    return int(code), shown.out, shown.err


def test_loss_and_counts(spool: str) -> None:
    """Sums per topic and per window, each event once."""
    rows = local.loss({"path": spool}, settle_s=0, by="topic").to_pylist()
    found = [(r["topic"], r["sent"], r["received"], r["lost"], r["duplicates"]) for r in rows]
    assert found == [("a", 100, 95, 5, 12), ("b", 100, 95, 5, 13)]
    windows = local.loss({"path": spool}, windows=Windows(3600), settle_s=0).to_pylist()
    assert sum(r["lost"] for r in windows) == 10
    assert sum(r["events"] for r in local.counts({"path": spool}, window_s=3600).to_pylist()) == 190


def test_the_commands(spool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As tables and as JSON; mistakes are one line and code 2."""
    code, out, _ = call(capsys, "loss", spool, "--settle", "0", "--by", "topic", "--json")
    assert code == 0
    assert [json.loads(line)["lost"] for line in out.splitlines()] == [5, 5]
    code, out, _ = call(capsys, "loss", spool, "--settle", "0")
    assert "unattributed 5" in out
    code, out, _ = call(capsys, "counts", spool, "--json")
    assert sum(json.loads(line)["events"] for line in out.splitlines()) == 190
    code, out, _ = call(capsys, "export", spool, "--out", str(tmp_path / "e.parquet"))
    assert (code, out) == (0, f"exported 215 events to {tmp_path / 'e.parquet'}\n")
    for wrong in (
        ["loss"],
        ["loss", f"{spool}x"],
        ["loss", f"{tmp_path}/none*"],
        ["counts", "s3a://bucket/spool"],
        ["counts", "hdfs://host/spool"],
        ["export", spool, "--out", "file.txt"],
        ["export", spool, "--out", str(tmp_path / "no" / "file.csv")],
    ):
        code, out, err = call(capsys, *wrong)
        assert (code, out) == (2, ""), wrong
        assert len(err.splitlines()) == 1, err


def test_formats_of_the_export(spool: str, tmp_path: Path) -> None:
    """Parquet, Arrow and CSV hold the same rows; data that is not text is there in CSV, too."""
    with open_spool(Path(spool)) as journal:
        frame = encode_frame(
            "p",
            1,
            200,
            topics=[("a", 100)],
            topic_index=None,
            times=[1],
            datas=[b"\xff\x00"],
            headers=[{"a": "ü"}],
        )
        journal.append("direct/event", frame.raw, NESTED)
        journal.append("direct/sent", frame.raw, NESTED)
    for name in ("e.parquet", "e.arrow", "e.csv"):
        assert local.export({"path": spool}, tmp_path / name) == 216
    table = pq.read_table(tmp_path / "e.parquet")
    assert pa.ipc.open_file(tmp_path / "e.arrow").read_all().equals(table)
    text = csv.read_csv(tmp_path / "e.csv")
    assert text["offset"].to_pylist() == table["offset"].to_pylist()
    for name in ("time", "received"):
        assert text[name].cast(table.schema.field(name).type).equals(table[name])
    assert text["headers"].to_pylist()[-1] == '{"a": "ü"}'
    assert text["data_base64"].to_pylist()[-1] == "/wA="
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [], "nothing is left aside"


def test_a_failed_export_leaves_nothing(spool: str, tmp_path: Path) -> None:
    """The file that was there stays as it was."""
    (tmp_path / "e.csv").write_text("old")
    segment = next(Path(spool).glob("*.seg"))
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    segment.write_bytes(raw)
    with contextlib.suppress(Exception):
        local.export({"path": spool}, tmp_path / "e.csv")
    assert (tmp_path / "e.csv").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_missing_locations_are_mistakes(spool: str, tmp_path: Path) -> None:
    """A directory without a journal, a name that is not there, a location that startingOffsets invents."""
    (tmp_path / "empty").mkdir()
    for path in (f"{spool}x", str(tmp_path / "empty"), f"{tmp_path}/*/none", f"{spool},{spool}x"):
        with pytest.raises(LocationMissing):
            local.counts({"path": path})
    with pytest.raises(ConfigError, match="startingOffsets"):
        local.counts({"path": spool, "startingOffsets": json.dumps({"/elsewhere": 3})})
    with pytest.raises(UsageError, match="does not answer"):
        local.counts({"endpoint": "tcp://127.0.0.1:9"})


def test_a_million_events_in_a_second(tmp_path: Path) -> None:
    """In proportion: what 200,000 events take on this machine, at its load, is far below what one by one would."""
    fill_journal(tmp_path / "j", "p", 200_000)
    began = time.process_time()
    rows = local.loss({"path": str(tmp_path / "j")}, windows=Windows(3600), by="topic").to_pylist()
    assert time.process_time() - began < 5
    assert [(r["sent"], r["received"], r["lost"]) for r in rows] == [(200_000, 200_000, 0)]
