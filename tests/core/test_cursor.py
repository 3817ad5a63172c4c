"""A cursor file is whole at any instant."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brokerless import direct, multicast
from brokerless.core import Cursor, Ledger, Position
from brokerless.core.errors import ConfigError, JournalError
from tests.multicast.groups import new_group


def test_positions_and_ledger_come_back(tmp_path: Path) -> None:
    """What was saved is loaded; a file that is not there is an empty cursor; directories are made."""
    cursor = Cursor(tmp_path / "a" / "b.cursor", sync=True)
    assert cursor.load().positions == {}
    ledger = Ledger()
    ledger.observe("s", 1, "t", 0, 5)
    cursor.save({"s": Position(1, 5)}, ledger.snapshot())
    saved = Cursor(tmp_path / "a" / "b.cursor").load()
    assert saved.positions == {"s": Position(1, 5)}
    assert Ledger.restore(saved.ledger).account().delivered == 5


@pytest.mark.parametrize("raw", [b"", b"x", b"\x00" * 50, b"some text that is no cursor"])
def test_a_damaged_cursor_is_refused_by_name(tmp_path: Path, raw: bytes) -> None:
    """Anything else than a cursor raises JournalError that names the file, rather than starting from 0."""
    path = tmp_path / "x.cursor"
    path.write_bytes(raw)
    with pytest.raises(JournalError, match=str(path)):
        Cursor(path).load()


def test_a_cursor_that_cannot_be_written_keeps_the_old_one(tmp_path: Path) -> None:
    """A directory in the way is an error of ours."""
    path = tmp_path / "x.cursor"
    path.mkdir()
    with pytest.raises(JournalError, match="cannot be written"):
        Cursor(path).save({})
    with pytest.raises(JournalError, match="cannot be read"):
        Cursor(path).load()
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_cursor_survives_kills_at_any_instant(tmp_path: Path) -> None:
    """A process that saves without pause is killed at random moments; the file is whole and never goes back."""
    path = tmp_path / "x.cursor"
    code = (
        "import sys\n"
        "from brokerless.core import Cursor, Position\n"
        "c = Cursor(sys.argv[1]); n = int(sys.argv[2])\n"
        "while True:\n"
        "    n += 1; c.save({'s': Position(1, n)}, b'x' * (n % 5000))\n"
        "    if n == int(sys.argv[2]) + 1: print('saving', flush=True)\n"
    )
    rng = random.Random(3)
    last = 0
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", code, str(path), str(last)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        saved = Cursor(path).load()
        position = saved.positions["s"].offset if saved.positions else 0
        assert position > last
        assert len(saved.ledger) == position % 5000
        last = position


@pytest.mark.parametrize("kind", ["direct", "multicast"])
def test_a_place_where_it_cannot_be_is_refused_before_anything_is_received(tmp_path: Path, kind: str) -> None:
    """By every subscriber, when it is made: not at the first save, after events were handed out."""
    (tmp_path / "file").write_bytes(b"")
    place = tmp_path / "file" / "cursor"
    with pytest.raises(ConfigError, match=r"cursor: .*File exists"):
        if kind == "direct":
            direct.Subscriber("tcp://127.0.0.1:1", cursor=place)
        else:
            multicast.Subscriber(new_group(), cursor=place)
