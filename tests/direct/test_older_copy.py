"""A journal that went back within its epoch, as a rolled-back machine with its memory does: both sides say so."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brokerless.core import Cursor, DiskJournal, Journal, MemoryJournal, Position
from brokerless.core.journal.witness import Witness
from brokerless.direct import Publisher, Subscriber
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.server import ControlServer
from brokerless.losstest.harness.ports import Ports

from .conftest import eventually


def test_a_subscriber_that_has_had_more_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its position is beyond the end: it gets all that there is, and the log and a counter tell."""
    cursor = tmp_path / "cursor"
    journal = DiskJournal(tmp_path / "journal", fsync="never")
    with Publisher("tcp://127.0.0.1:*", source="p", journal=journal) as pub:
        pub.publish_many("t", [b"%d" % i for i in range(10)])
        Cursor(cursor).save({"p": Position(journal.epoch, 50)})
        with caplog.at_level(logging.ERROR), Subscriber(pub.address, cursor=cursor) as sub:
            got = [event.data for _, event in zip(range(10), sub.events(60), strict=False)]
            assert got == [b"%d" % i for i in range(10)]
            assert sub.counters.rolled_back == 1
            pub.publish("t", b"next")
            event = sub.receive(60)
            assert event is not None
            assert event.data == b"next"
        assert "restored from an older copy" in caplog.text


@pytest.mark.parametrize("durable", ["", "d"])
def test_a_publisher_hears_of_what_it_does_not_have(durable: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client names a position beyond the journal's end, in the same epoch: counted each time, logged once."""
    journal = MemoryJournal(source="p")
    journal.append_many("t", [b"x"] * 10)
    coordinator = GroupCoordinator(journal, None, GroupStore(None))
    server = ControlServer(journal, coordinator, instance=1, live="5", beat_s=1.0, begin=0, replay=True)
    server.receive(b"peer", messages.encode(messages.Hello(messages.VERSION, "c", durable=durable)), 0.0)
    word = messages.Advance(journal.epoch, 50) if durable else messages.Ready(journal.epoch, 50)
    for _ in range(3):
        server.receive(b"peer", messages.encode(word), 0.0)
    assert server.counters.ahead == 3
    assert len([record for record in caplog.records if "restored from an older copy" in record.message]) == 1
    assert all(position <= journal.next for position in journal.registered().values())
    # Of another epoch it means nothing.
    server.receive(b"peer", messages.encode(messages.Ready(journal.epoch + 1, 90)), 0.0)
    assert server.counters.ahead == 3


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_running_journal_begins_a_new_epoch(kind: str, tmp_path: Path) -> None:
    """Offsets go on, seqs start over, whatever was staged or kept; what was there can be read as before."""
    journal: Journal = (
        MemoryJournal(source="p") if kind == "memory" else DiskJournal(tmp_path, source="p", fsync="never")
    )
    with journal:
        journal.append_many("t", [b"1", b"2"])
        journal.stage("t", b"3")
        old = journal.epoch
        assert journal.begin_epoch() == journal.epoch > old
        assert journal.append("t", b"4").seq == 0
        assert journal.sent() == {"t": 1}
        frames = {frame.first_offset: frame for at in range(4) for frame in journal.read(at).frames}
        events = [event for at in sorted(frames) for event in frames[at].events()]
        assert [(e.offset, e.data) for e in events] == [(i, b"%d" % (i + 1)) for i in range(4)]
        assert [e.epoch for e in events] == [old] * 3 + [journal.epoch]
    if kind == "disk":
        with DiskJournal(tmp_path, fsync="never") as again:
            assert again.epochs()[-1][1] == 3


_PUBLISHER = """
import json, sys
from brokerless.core import DiskJournal
from brokerless.direct import Publisher
address, path = sys.argv[1:]
with Publisher(address, source="p", journal=DiskJournal(path, fsync="never"), heartbeat_s=0.05) as pub:
    for line in sys.stdin:
        for data in json.loads(line):
            pub.publish("t", data.encode())
        pub.flush()
        print(json.dumps([pub.journal.epoch, pub.journal.next]), flush=True)
"""


class Machine:
    """A publisher process, whose machine can go back to where it was: its files, and what memory proves of them."""

    def __init__(self, address: str, path: Path) -> None:
        self.address, self.path = address, path
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-c", _PUBLISHER, self.address, str(self.path / "journal")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def publish(self, *data: str) -> tuple[int, int]:
        """Publish; the epoch and the end afterwards."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(data) + "\n")
        self.process.stdin.flush()
        epoch, end = json.loads(self.process.stdout.readline())
        return epoch, end

    def _witness(self) -> Path:
        meta: dict[str, Any] = json.loads((self.path / "journal" / "meta.json").read_text())
        return Path(Witness(str(self.path / "journal"), meta["salt"])._path)

    def snapshot(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        shutil.copytree(self.path / "journal", self.path / "snapshot")
        shutil.copy(self._witness(), self.path / "witness")
        os.kill(self.process.pid, signal.SIGCONT)

    def roll_back(self) -> None:
        self.end()
        witness = self._witness()
        shutil.rmtree(self.path / "journal")
        shutil.copytree(self.path / "snapshot", self.path / "journal")
        shutil.copy(self.path / "witness", witness)
        self._start()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("reused", [5, 60])
def test_a_machine_that_goes_back_with_its_memory_is_found_out(
    ports: Ports, tmp_path: Path, reused: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A subscriber has had 50 events that the publisher knows nothing of, and other events have got their offsets, some
    of them or more than all: the subscriber says so and misses none, and the publisher begins a new epoch."""
    machine = Machine(f"tcp://127.0.0.1:{ports.take()}", tmp_path)
    try:
        with Subscriber(machine.address, start="oldest", cursor=tmp_path / "cursor") as sub:
            epoch, _ = machine.publish(*[f"a{i}" for i in range(100)])
            machine.snapshot()
            machine.publish(*[f"b{i}" for i in range(50)])
            got = [event.data.decode() for _, event in zip(range(150), sub.events(60), strict=False)]
            assert got[-1] == "b49"
            machine.roll_back()
            assert machine.publish(*[f"c{i}" for i in range(reused)]) == (epoch, 100 + reused)
            again = {
                event.data.decode() for _, event in zip(range(100 + reused), sub.events(60), strict=False)
            }
            assert again == {f"a{i}" for i in range(100)} | {f"c{i}" for i in range(reused)}
            assert sub.counters.rolled_back == 1
            eventually(lambda: machine.publish()[0] > epoch)
            machine.publish("d")
            event = sub.receive(60)
            assert event is not None
            assert (event.data, event.offset) == (b"d", 100 + reused)
        assert "restored from an older copy" in caplog.text
    finally:
        machine.end()
