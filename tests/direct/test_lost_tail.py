"""A power cut takes the end of a DiskJournal that subscribers have heard of: what is told, and when."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, Lost
from brokerless.direct import Publisher, Subscriber
from brokerless.direct.settings import Settings

from .conftest import eventually

KEPT, KNOWN, HAD = 80, 100, 15


class Oops(Exception):
    """What on_loss raised."""


class PowerCut:
    """A subscriber that has had some events of a publisher whose journal then comes back shorter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: list[tuple[int, int, int]] = []  # with how many events were given before
        self.got: list[int] = []
        self.fails = False
        old = Publisher("tcp://127.0.0.1:*", source="p", journal=DiskJournal(path / "j"))
        self.address = old.address
        for i in range(0, KNOWN, 10):
            if i == KEPT:
                shutil.copytree(path / "j", path / "copy")
            old.publish_many("t", [b"x" * 100] * 10)
        self.sub = self.subscriber()
        for _ in range(HAD):
            self.receive(10)
        old.close()
        shutil.rmtree(path / "j")
        shutil.copytree(path / "copy", path / "j")
        meta = path / "j" / "meta.json"
        meta.write_text(
            json.dumps(json.loads(meta.read_text()) | {"boot_id": "another boot", "clean": False})
        )
        self.pub = Publisher(self.address, source="p", journal=DiskJournal(path / "j"))
        assert self.pub.journal.next == KEPT

    def subscriber(self) -> Subscriber:
        # Small chunks, so that it has not had all of it when the cut comes.
        return Subscriber(
            self.address,
            cursor=self.path / "c",
            settings=Settings(chunk_bytes=500),
            on_loss=self.on_loss,
            commit_every_s=1000,
        )

    def on_loss(self, lost: Lost) -> None:
        self.lost.append((lost.first, lost.last, len(self.got)))
        if self.fails:
            self.fails = False
            raise Oops

    def receive(self, timeout: float) -> bool:
        event = self.sub.receive(timeout)
        if event is not None:
            self.got.append(event.offset)
        return event is not None

    def close(self) -> None:
        self.sub.close()
        self.pub.close()


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[PowerCut]:
    """Shortly after the power cut."""
    power_cut = PowerCut(tmp_path)
    yield power_cut
    power_cut.close()


def test_it_is_told_in_its_place(cut: PowerCut) -> None:
    """The lost end is told after the last event before it; the books have every event that was given."""
    eventually(lambda: not cut.receive(0.01) and cut.lost)
    assert cut.got == list(range(KEPT))
    assert cut.lost == [(KEPT, KNOWN - 1, KEPT)]
    assert cut.sub.ledger.account().delivered == KEPT
    cut.pub.publish("t", b"new")
    assert cut.receive(10)
    assert cut.got[-1] == KEPT
    assert cut.sub.ledger.account().delivered == KEPT + 1


def test_a_handler_of_the_loss_that_raises(cut: PowerCut) -> None:
    """What on_loss raises reaches the application, which goes on and has everything."""
    cut.fails = True
    cut.pub.publish_many("t", [b"new"] * 30)
    raised = 0
    while len(cut.got) < KEPT + 30:
        try:
            assert cut.receive(10)
        except Oops:
            raised += 1
    assert raised == 1
    assert cut.got == list(range(KEPT + 30))
    assert cut.lost == [(KEPT, KNOWN - 1, KEPT)]
    assert cut.sub.counters.lost == KNOWN - KEPT
    assert cut.sub.counters.joins == 2


def test_a_subscriber_that_is_closed_before(cut: PowerCut) -> None:
    """Its cursor says what it had, and not where the lost end was."""
    while cut.got[-1] < 40:
        assert cut.receive(10)
    cut.sub.close()
    cut.sub = cut.subscriber()
    eventually(lambda: not cut.receive(0.01) and cut.got[-1] >= KEPT - 1)
    assert not cut.receive(0.2)
    assert cut.got == list(range(KEPT))
    assert cut.sub.ledger.account().delivered == KEPT
