"""Damage of any kind: opening never crashes, never gives a wrong event, and says which offsets are gone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokerless.core import DiskJournal, JournalReader, encode_frame

EVENTS = 240


def data_of(offset: int) -> bytes:
    """What the event at an offset holds; some hold whole frames, as a collector's spool does."""
    if offset % 5 == 0:
        inner = encode_frame(
            "inner", 1, offset + 7, topics=[("x", 0)], topic_index=None, times=[0], datas=[b"nested"]
        )
        return inner.raw
    return b"event %d " % offset * (1 + offset % 7)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed journal of several segments."""
    path = tmp_path_factory.mktemp("pristine") / "journal"
    with DiskJournal(path, source="src", fsync="never", segment_bytes=4096) as journal:
        for first in range(0, EVENTS, 6):
            for offset in range(first, first + 6):
                journal.stage(f"t{offset % 3}", data_of(offset))
            journal.flush()
    assert len(list(path.glob("*.seg"))) >= 4
    return path


def read_with_gone(path: Path) -> tuple[dict[int, bytes], set[int]]:
    """What a reader gets, and what it is told to be gone."""
    found: dict[int, bytes] = {}
    gone: set[int] = set()
    with JournalReader(path) as reader:
        at = reader.oldest
        gone |= set(range(at))
        while True:
            chunk = reader.read(at, max_bytes=3000)
            for event in (e for f in chunk.frames for e in f.events() if e.offset >= at):
                assert event.offset not in found
                found[event.offset] = event.data
            for first, last in chunk.gone:
                gone |= set(range(first, last + 1))
            if chunk.next == at:
                return found, gone
            at = chunk.next


damages = st.lists(
    st.tuples(
        st.sampled_from(["flip", "zero", "cut", "insert", "delete", "duplicate"]),
        st.floats(0, 1),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 400),
        st.integers(1, 255),
    ),
    min_size=1,
    max_size=4,
)


def damage(path: Path, plan: list[tuple[str, float, float, int, int]]) -> Iterator[str]:
    """Harm segments as planned."""
    for what, which, where, length, bits in plan:
        segments = sorted(path.glob("*.seg"))
        if not segments:
            return
        segment = segments[min(int(which * len(segments)), len(segments) - 1)]
        raw = bytearray(segment.read_bytes())
        at = int(where * len(raw))
        if what == "flip" and raw:
            raw[at] ^= bits
        elif what == "zero":
            raw[at : at + length] = b"\x00" * len(raw[at : at + length])
        elif what == "cut":
            del raw[at:]
        elif what == "insert":
            raw[at:at] = bytes([bits]) * length
        elif what == "duplicate":
            raw[at:at] = raw[max(0, at - length) : at]
        if what == "delete" and length < 40:
            segment.unlink()
        else:
            segment.write_bytes(raw)
        yield what


@given(damages)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_any_damage_to_segments_is_survived_and_told(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, float, float, int, int]]
) -> None:
    """Readers get right events only, each once; what they do not get is in `gone`; a writer opens and goes on."""
    path = tmp_path_factory.mktemp("damaged") / "journal"
    shutil.copytree(pristine, path)
    list(damage(path, plan))
    found, gone = read_with_gone(path)
    assert all(data == data_of(offset) for offset, data in found.items())
    assert set(found) | gone == set(range(EVENTS))
    assert not set(found) & gone
    with DiskJournal(path, fsync="never") as journal:
        receipt = journal.append("t0", b"after")
        assert receipt.offset == EVENTS  # no number is used twice
        if gone & set(range(journal.recovered.gone[0][0], EVENTS) if journal.recovered.gone else ()):
            assert journal.recovered.epoch_raised
        assert receipt.seq == EVENTS // 3 or receipt.epoch != journal.epochs()[0][0]
    again, gone_again = read_with_gone(path)
    assert again.pop(EVENTS) == b"after"
    assert set(again) | gone_again == set(range(EVENTS))
    assert all(data == data_of(offset) for offset, data in again.items())
    shutil.rmtree(path)


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_head_file_costs_nothing(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory, where: float, bits: int
) -> None:
    """The head is a hint: any changed byte of it leaves all events readable."""
    path = tmp_path_factory.mktemp("head") / "journal"
    shutil.copytree(pristine, path)
    raw = bytearray((path / "head").read_bytes())
    raw[8 + int(where * 56)] ^= bits
    (path / "head").write_bytes(raw)
    found, gone = read_with_gone(path)
    assert (len(found), gone) == (EVENTS, set())
    with DiskJournal(path, fsync="never") as journal:
        assert journal.append("t0", b"x").offset == EVENTS
    shutil.rmtree(path)


def test_an_interrupted_write_is_cut_off_and_reported(pristine: Path, tmp_path: Path) -> None:
    """Half a record at the end, as a killed writer leaves it, is cut, and the report says how much."""
    path = tmp_path / "journal"
    shutil.copytree(pristine, path)
    shutil.copytree(pristine, tmp_path / "newer")
    DiskJournal(tmp_path / "newer", fsync="never").close()  # from here on, `path` is a copy of an older state
    last = max(path.glob("*.seg"))
    whole = last.read_bytes()
    half = encode_frame("src", 1, EVENTS, topics=[("t0", 0)], topic_index=None, times=[0], datas=[b"x"]).raw[
        :20
    ]
    salt = bytes.fromhex(json.loads((path / "meta.json").read_text())["salt"])
    last.write_bytes(whole + salt + half)
    with DiskJournal(path, fsync="never") as journal:
        assert journal.recovered.cut_bytes == 24
        assert journal.recovered.cut_segment == int(last.stem)
        assert not journal.recovered.gone
        assert not journal.recovered.proven
        assert journal.append("t0", b"x").offset == EVENTS
    assert len(read_with_gone(path)[0]) == EVENTS + 1
