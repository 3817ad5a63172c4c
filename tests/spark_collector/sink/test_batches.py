"""Batches are in the journal once, whatever is killed when, and nothing of a wrong one is."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, JournalReader
from brokerless.core.errors import ConfigError, InvalidEvent, JournalError
from brokerless.spark_collector.sink.batches import ONLY, BatchAppender, append_batch
from brokerless.spark_collector.sink.events import (
    SinkEvent,
    check_columns,
    encode_events,
    make_event,
    parse_sink_options,
)

# Appends batch after batch as Spark does: it says which one is done, and after a crash the one after that comes again.
_WRITER = """
import os, sys
from brokerless.spark_collector.sink.batches import append_batch
from brokerless.spark_collector.sink.events import SinkEvent, encode_events, parse_sink_options
path, done = sys.argv[1:]
options = parse_sink_options({"path": path})
try:
    first = int(open(done).read()) + 1
except FileNotFoundError:
    first = 0
for batch in range(first, 40):
    tasks = [[SinkEvent(f"t{n % 3}", b"%d:%d:%d" % (batch, task, n)) for n in range(1000)] for task in (0, 1)]
    append_batch(options, [encode_events(t) for t in tasks], "q", batch)
    with open(done + ".tmp", "w") as file:
        file.write(str(batch))
    os.replace(done + ".tmp", done)
"""


def datas(path: Path) -> list[bytes]:
    """What the journal holds."""
    with JournalReader(path) as reader:
        at, found = reader.oldest, []
        while at < reader.next:
            chunk = reader.read(at)
            found += [event.data for frame in chunk.frames for event in frame.events()]
            at = chunk.next
    return found


def message(*names: str, **fields: object) -> bytes:
    return encode_events([SinkEvent("a", name.encode(), **fields) for name in names])  # type: ignore[arg-type]


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Every event of every batch is there once and in order, although the writer was killed at any moment."""
    rng = random.Random(5)
    path, done = tmp_path / "j", tmp_path / "done"
    command = [sys.executable, "-c", _WRITER, str(path), str(done)]
    kills = 0
    deadline = time.monotonic() + 120
    while kills < 8:
        before = done.read_text() if done.exists() else ""
        process = subprocess.Popen(command)
        while process.poll() is None and (done.read_text() if done.exists() else "") == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 4
    subprocess.run(command, check=True, timeout=60)
    assert datas(path) == [b"%d:%d:%d" % (b, t, n) for b in range(40) for t in (0, 1) for n in range(1000)]
    assert not (path / "spark_sink.pending").exists()


def test_interrupted_in_the_middle(tmp_path: Path) -> None:
    """What is missing of a batch is appended by whoever comes next, before anything else."""
    with DiskJournal(tmp_path / "j", source="s", fsync="never") as journal:
        appender = BatchAppender(journal)
        assert appender.append([message("0")], "q", 0) == 1
        stage, accepted = journal.stage, []

        def fail(*arguments: object) -> object:
            if len(accepted) == 2:
                raise JournalError(journal.path, "no space")
            accepted.append(arguments)
            return stage(*arguments)  # type: ignore[arg-type]

        journal.stage = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(JournalError, match="no space"):
            appender.append([message("1", "2"), message("3", "4")], "q", 1)
    options = parse_sink_options({"path": str(tmp_path / "j"), "source": "s"})
    assert append_batch(options, [message("5")], "other", ONLY) == 1
    assert append_batch(options, [message("1", "2"), message("3", "4")], "q", 1) == 0, "it was finished"
    assert append_batch(options, [message("6")], "q", 2) == 1
    assert datas(tmp_path / "j") == [b"%d" % n for n in range(7)]


def test_somebody_else_wrote_after_the_interruption(tmp_path: Path) -> None:
    """Then nobody can tell what of the batch is there: an error that says so, and nothing is appended."""
    path = tmp_path / "j"
    with DiskJournal(path, source="s", fsync="never") as journal:
        appender = BatchAppender(journal)
        journal.stage = None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            appender.append([message("1")], "q", 0)
    with DiskJournal(path, source="s", fsync="never") as journal:
        journal.append_many("x", [b"other"] * 2)
        with pytest.raises(JournalError, match="somebody else"):
            BatchAppender(journal).append([message("1")], "q", 0)
    assert datas(path) == [b"other"] * 2


def test_batches_of_an_older_checkpoint(tmp_path: Path) -> None:
    """The newest batch may come again with what it had; older ones, or more events, are no repetition."""
    options = parse_sink_options({"path": str(tmp_path / "j")})
    for batch in range(3):
        assert append_batch(options, [message("a", "b")], "q", batch) == 2
    assert append_batch(options, [message("a"), message("b")], "q", 2) == 0
    for batch, again in ((1, ["a", "b"]), (2, ["a", "b", "c"])):
        with pytest.raises(JournalError, match="the checkpoint is older"):
            append_batch(options, [message(*again)], "q", batch)
    assert len(datas(tmp_path / "j")) == 6


def test_a_wrong_row_refuses_the_batch(tmp_path: Path) -> None:
    """Nothing of it is appended, and the error names what is wrong."""
    options = parse_sink_options({"path": str(tmp_path / "j")})
    for wrong, match in (
        (message("1", headers={"a": "\n"}), "headers"),
        (encode_events([SinkEvent("", b"")]), "topic"),
        (b"\x91\x92\xa1a\xc0", "data"),
        (b"nonsense", "row"),
    ):
        with pytest.raises(InvalidEvent, match=match):
            append_batch(options, [message("0"), wrong], "q", 0)
    assert append_batch(options, [message("0", key="k", headers={"h": "1"})], "q", 0) == 1
    assert datas(tmp_path / "j") == [b"0"]


def test_options_and_columns() -> None:
    """Mistakes are named before any row is read."""
    for wrong, match in (
        ({}, "path"),
        ({"path": "s3://bucket/x"}, "path"),
        ({"path": "/x", "maxBytes": "1"}, "maxBytes"),
        ({"path": "/x", "onFull": "explode"}, "onFull"),
        ({"path": "/x", "nonsense": "1"}, "nonsense"),
        ({"path": "/x", "source": "a:b"}, "source"),
    ):
        with pytest.raises(ConfigError, match=match):
            parse_sink_options(wrong)
    assert parse_sink_options({"path": "file:///x/orders/"}).source == "orders"
    good = {"topic": "string", "data": "binary"}
    check_columns(good, "")
    check_columns({"data": "string", "offset": "bigint"}, "fixed")
    for columns in (
        {"data": "binary"},
        {"topic": "string"},
        good | {"key": "int"},
        good | {"colour": "string"},
    ):
        with pytest.raises(ConfigError):
            check_columns(columns, "")
    assert make_event({"topic": "a", "data": "ü", "kind": "lost"}, "") is None
    assert make_event({"topic": "a", "data": "ü", "time": 5}, "b") == SinkEvent("b", "ü".encode(), time=5)
    with pytest.raises(InvalidEvent, match="data"):
        make_event({"topic": "a", "data": None}, "")
