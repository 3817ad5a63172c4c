"""Witness files: what is written is read back, and damage ends the file instead of inventing records."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from brokerless.losstest.witness import MAGIC, RECORD_SIZE, Kind, Record, Tail, Witness, read

u64 = st.integers(0, 2**64 - 1)
records = st.builds(
    Record,
    kind=st.sampled_from(list(Kind)),
    flags=st.integers(0, 255),
    attempt=st.integers(0, 65535),
    count=st.integers(0, 2**32 - 1),
    n=u64,
    t=u64,
    position=u64,
    epoch=st.integers(0, 2**32 - 1),
)


def write(path: Path, items: list[Record]) -> None:
    path.unlink(missing_ok=True)
    witness = Witness(path)
    for r in items:
        fields = r._asdict()
        witness.write(Kind(fields.pop("kind")), fields.pop("n"), **fields)
    witness.close()


@settings(max_examples=60, deadline=None)
@given(items=st.lists(records, max_size=20))
def test_round_trip(tmp_path_factory: object, items: list[Record]) -> None:
    """Every field of every record comes back."""
    path = tmp_path_factory.getbasetemp() / "round.wit"  # type: ignore[attr-defined]
    write(path, items)
    assert read(path) == (items, 0)


@settings(max_examples=150, deadline=None)
@given(items=st.lists(records, min_size=1, max_size=10), data=st.data())
def test_damage_never_invents_a_record(
    tmp_path_factory: object, items: list[Record], data: st.DataObject
) -> None:
    """Cut or change bytes anywhere: what is read is a prefix of what was written, the rest is told."""
    path = tmp_path_factory.getbasetemp() / "damage.wit"  # type: ignore[attr-defined]
    write(path, items)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(len(MAGIC), len(raw) - 1))
    if data.draw(st.booleans()):
        del raw[at:]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(raw))
    reading = read(path)
    good = (at - len(MAGIC)) // RECORD_SIZE
    assert reading.records == items[:good]
    assert reading.damaged == len(raw) - len(MAGIC) - good * RECORD_SIZE


def test_a_foreign_file_is_no_witness(tmp_path: Path) -> None:
    """Bytes without the magic give no records, and are all counted as damaged."""
    path = tmp_path / "x.wit"
    path.write_bytes(b"hello world" * 10)
    assert read(path) == ([], 110)


def test_tail_gives_each_record_once(tmp_path: Path) -> None:
    """A follower sees every complete record once, also when it reads a torn one first."""
    path = tmp_path / "t.wit"
    tail = Tail(path)
    assert list(tail.poll()) == []
    witness = Witness(path)
    witness.write(Kind.OFFERED, 1)
    assert [r.n for r in tail.poll()] == [1]
    whole = path.read_bytes()
    witness.write(Kind.OFFERED, 2)
    complete = path.read_bytes()
    path.write_bytes(complete[: len(whole) + 7])
    assert list(tail.poll()) == []
    path.write_bytes(complete)
    assert [r.n for r in tail.poll()] == [2]
    witness.close()


def test_records_survive_sigkill(tmp_path: Path) -> None:
    """A process killed in the middle of writing leaves every record that it had reported as written."""
    path = tmp_path / "killed.wit"
    code = (
        "import sys; from pathlib import Path; from brokerless.losstest.witness import Kind, Witness\n"
        f"w = Witness(Path({str(path)!r}))\n"
        "n = 0\n"
        "while True:\n    w.write(Kind.OFFERED, n); n += 1\n"
        "    if n % 100 == 0: sys.stdout.write(f'{n}\\n'); sys.stdout.flush()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    told = 0
    while told < 5000:
        told = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    reading = read(path)
    assert [r.n for r in reading.records] == list(range(len(reading.records)))
    assert len(reading.records) >= told
