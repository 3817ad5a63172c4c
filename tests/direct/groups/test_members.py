"""Groups after a power cut: what the journal does not have any more is not skipped, and every step is told."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import DiskJournal, IntervalSet
from brokerless.direct import Publisher, Worker
from brokerless.direct.groups.members import GroupState, clip

from ..conftest import eventually

DEADLINE = 20.0


def work(address: str, count: int, **options: object) -> list[bytes]:
    """Take and acknowledge `count` events as a worker of the group "g"."""
    with Worker(address, group="g", **options) as worker:  # type: ignore[arg-type]
        taken = []
        for delivery in worker.deliveries(DEADLINE):
            taken.append(delivery.event.data)
            delivery.ack()
            if len(taken) == count:
                break
    return taken


def group_after_cut(path: Path, *, kept: int, written: int) -> Path:
    """A journal of `kept` events whose group had acknowledged `written`: what a power cut can leave behind."""
    journal = path / "journal"
    with Publisher("tcp://127.0.0.1:*", source="s", journal=DiskJournal(journal)) as pub:
        pub.publish_many("t", [b"%d" % i for i in range(kept)])
        assert len(work(pub.address, kept)) == kept
    shutil.copytree(journal, path / "copy")
    with Publisher("tcp://127.0.0.1:*", source="s", journal=DiskJournal(journal)) as pub:
        pub.publish_many("t", [b"%d" % i for i in range(kept, written)])
        assert len(work(pub.address, written - kept)) == written - kept
    shutil.copytree(journal / "groups", path / "copy" / "groups", dirs_exist_ok=True)
    return path / "copy"


def test_a_group_newer_than_its_journal_skips_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The group's file outlived the journal's end: it goes on at that end, and the clipping is logged."""
    copy = group_after_cut(tmp_path, kept=50, written=150)
    with (
        caplog.at_level(logging.ERROR),
        Publisher("tcp://127.0.0.1:*", source="s", journal=DiskJournal(copy)) as pub,
    ):
        assert "group g had been given offsets up to 150" in caplog.text
        new = [b"new %d" % i for i in range(100)]
        pub.publish_many("t", new)
        assert work(pub.address, 100) == new
        eventually(lambda: pub.groups()["g"].pending == 0)  # the last acknowledgements are on their way
        status = pub.groups()["g"]
        assert (status.lost, status.pending, status.offered) == (0, 0, 250)
        assert status.balanced


def test_a_group_is_clipped_although_the_journal_has_grown(tmp_path: Path) -> None:
    """Somebody appended to the journal before the publisher came: the state's epoch tells that it is older."""
    copy = group_after_cut(tmp_path, kept=50, written=150)
    meta = copy / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"boot_id": "another boot", "clean": False}))
    new = [b"new %d" % i for i in range(200)]
    with DiskJournal(copy) as journal:
        assert len(journal.epochs()) == 2
        journal.append_many("t", new)
    with Publisher("tcp://127.0.0.1:*", source="s", journal=DiskJournal(copy)) as pub:
        assert work(pub.address, 200) == new
        assert pub.groups()["g"].balanced


@pytest.mark.parametrize("damage", ["empty", "missing", "garbage"])
def test_a_lost_state_is_told_and_never_begins_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Without its file a group goes on where the journal's cursor was, also if its workers say start="live"."""
    path = tmp_path / "journal"
    with Publisher("tcp://127.0.0.1:*", source="s", journal=DiskJournal(path)) as pub:
        pub.publish_many("t", [b"%d" % i for i in range(20)])
        assert len(work(pub.address, 10, prefetch=1)) == 10
    (file,) = (path / "groups").iterdir()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else os.urandom(200))
    with (
        caplog.at_level(logging.ERROR),
        Publisher("tcp://127.0.0.1:*", source="s", journal=DiskJournal(path)) as pub,
    ):
        assert "group g: its state is missing or unreadable" in caplog.text
        rest = work(pub.address, 10, start="live")
        assert rest == [b"%d" % i for i in range(10, 20)]


@given(
    cursor=st.integers(0, 60),
    ahead=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=8),
    leased=st.integers(0, 30),
    end=st.integers(0, 120),
)
def test_a_clipped_state_balances(cursor: int, ahead: list[tuple[int, int]], leased: int, end: int) -> None:
    """offered = settled + lost + pending holds after clipping as it did before."""
    settled = IntervalSet((cursor + 1 + a, cursor + 1 + a + n) for a, n in ahead)
    following = max(cursor, settled.last + 1 if settled else 0) + leased
    acked = cursor + settled.total
    state = clip(GroupState(cursor, following, list(settled), acked=acked, started=0), end)
    assert state.cursor <= max(end, 0)
    assert state.next <= max(end, state.cursor)
    assert all(last < end for _, last in state.settled)
    pending = max(end, state.next) - state.cursor - sum(b - a + 1 for a, b in state.settled)
    assert max(end, state.next) - state.started == state.acked + state.lost + pending
