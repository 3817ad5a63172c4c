"""Witness files: what is written is read back, and damage ends the file instead of inventing records."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from evidence_builder import cell
from hypothesis import given, settings
from hypothesis import strategies as st

from brokerless.losstest import judge, load
from brokerless.losstest.evidence.reader import Tail, read
from brokerless.losstest.evidence.witness import (
    FIRST_BYTES,
    HEADER_SIZE,
    MAGIC,
    RECORD_SIZE,
    Kind,
    Record,
    Witness,
    copy_records,
)
from brokerless.losstest.model import to_json

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
    at = data.draw(st.integers(HEADER_SIZE, len(raw) - 1))
    if data.draw(st.booleans()):
        del raw[at:]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(raw))
    reading = read(path)
    good = (at - HEADER_SIZE) // RECORD_SIZE
    assert reading.records == items[:good]
    assert reading.damaged == len(items) - good


@settings(max_examples=60, deadline=None)
@given(items=st.lists(records, max_size=10), count=u64)
def test_a_wrong_count_hides_nothing(tmp_path_factory: object, items: list[Record], count: int) -> None:
    """Whatever a damaged header says: every good record is read, and a larger number is told as damage."""
    path = tmp_path_factory.getbasetemp() / "count.wit"  # type: ignore[attr-defined]
    write(path, items)
    raw = path.read_bytes()
    path.write_bytes(MAGIC + count.to_bytes(8, "little") + raw[HEADER_SIZE:])
    assert read(path) == (items, max(0, count - len(items)))


def test_a_record_that_was_being_stored_is_no_damage(tmp_path: Path) -> None:
    """Killed in the middle of a record: those before it are there, and the file is in order."""
    path = tmp_path / "incomplete.wit"
    witness = Witness(path)
    for n in range(3):
        witness.write(Kind.OFFERED, n)
    raw = bytearray(path.read_bytes())  # as a killed process leaves it, with what was reserved
    witness.close()
    assert len(raw) > HEADER_SIZE + 4 * RECORD_SIZE
    at = HEADER_SIZE + 3 * RECORD_SIZE
    raw[at : at + 20] = b"\x02" * 20
    path.write_bytes(bytes(raw))
    assert ([r.n for r in read(path).records], read(path).damaged) == ([0, 1, 2], 0)


def test_it_grows(tmp_path: Path) -> None:
    """More records than were reserved for at first, and the file is as long as they are when it is closed."""
    path = tmp_path / "long.wit"
    witness, tail = Witness(path), Tail(path)
    number = 3 * FIRST_BYTES // RECORD_SIZE
    for n in range(number):
        witness.write(Kind.OFFERED, n)
    assert tail.poll()["n"].tolist() == list(range(number))
    witness.close()
    tail.close()
    assert path.stat().st_size == HEADER_SIZE + number * RECORD_SIZE
    assert read(path) == (read(path).records, 0)


def test_through_a_fifo(tmp_path: Path) -> None:
    """What goes through a FIFO arrives as if it had been written to the file."""
    fifo, target = tmp_path / "w.fifo", tmp_path / "w.wit"
    os.mkfifo(fifo)
    copier = threading.Thread(target=copy_records, args=(fifo, target))
    copier.start()
    witness = Witness(fifo)
    for n in range(2000):
        witness.write(Kind.OFFERED, n)
    witness.close()
    copier.join(10)
    assert ([r.n for r in read(target).records], read(target).damaged) == (list(range(2000)), 0)


def test_a_foreign_file_is_no_witness(tmp_path: Path) -> None:
    """Bytes without the magic give no records, and are counted as damaged ones."""
    path = tmp_path / "x.wit"
    path.write_bytes(b"hello world" * 10)
    assert read(path) == ([], 3)


def test_a_record_of_another_version_is_told(tmp_path: Path) -> None:
    """What this version does not know is a problem of the run, and not passed over."""
    (tmp_path / "cell.json").write_bytes(to_json(cell()))
    witness = Witness(tmp_path / "consumer-0.1.wit")
    witness.write(99)  # type: ignore[arg-type]
    witness.write(Kind.IDLE)
    witness.close()
    [problem] = judge(load(tmp_path)).problems[:1]
    assert "consumer-0.1.wit" in problem
    assert "99" in problem


def test_tail_gives_each_record_once(tmp_path: Path) -> None:
    """A reader that follows sees every complete record once, and one that is being stored only when it is complete."""
    path = tmp_path / "t.wit"
    tail = Tail(path)
    assert not len(tail.poll())
    witness = Witness(path)
    assert not len(tail.poll())
    witness.write(Kind.OFFERED, 1)
    assert tail.poll()["n"].tolist() == [1]
    raw = path.read_bytes()
    witness.write(Kind.OFFERED, 2)
    complete = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(raw[:HEADER_SIZE])  # the record is stored before the header counts it
        file.flush()
        assert not len(tail.poll())
        file.seek(0)
        file.write(complete[:HEADER_SIZE])
    assert tail.poll()["n"].tolist() == [2]
    assert not len(tail.poll())
    witness.close()
    tail.close()


def test_records_survive_sigkill(tmp_path: Path) -> None:
    """A process killed in the middle of writing leaves every record that it had reported as written."""
    path = tmp_path / "killed.wit"
    code = (
        "import sys; from pathlib import Path; from brokerless.losstest.evidence.witness import Kind, Witness\n"
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
