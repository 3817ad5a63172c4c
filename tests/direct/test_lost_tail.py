"""A power cut takes the end of a DiskJournal that subscribers have heard of: what is told, and when."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, Lost
from brokerless.direct import Publisher, Subscriber
from brokerless.direct.protocol.subscriber import SubscriberSettings

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
            settings=SubscriberSettings(chunk_bytes=500),
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
def power_cut(tmp_path: Path) -> Iterator[PowerCut]:
    """Shortly after the power power_cut."""
    power_cut = PowerCut(tmp_path)
    yield power_cut
    power_cut.close()


def test_it_is_told_in_its_place(power_cut: PowerCut) -> None:
    """The lost end is told after the last event before it; the accounting have every event that was given."""
    eventually(lambda: not power_cut.receive(0.01) and power_cut.lost)
    assert power_cut.got == list(range(KEPT))
    assert power_cut.lost == [(KEPT, KNOWN - 1, KEPT)]
    assert power_cut.sub.ledger.account().delivered == KEPT
    power_cut.pub.publish("t", b"new")
    assert power_cut.receive(10)
    assert power_cut.got[-1] == KEPT
    assert power_cut.sub.ledger.account().delivered == KEPT + 1


def test_a_handler_of_the_loss_that_raises(power_cut: PowerCut) -> None:
    """What on_loss raises reaches the application, which goes on and has everything."""
    power_cut.fails = True
    power_cut.pub.publish_many("t", [b"new"] * 30)
    raised = 0
    while len(power_cut.got) < KEPT + 30:
        try:
            assert power_cut.receive(10)
        except Oops:
            raised += 1
    assert raised == 1
    assert power_cut.got == list(range(KEPT + 30))
    assert power_cut.lost == [(KEPT, KNOWN - 1, KEPT)]
    assert power_cut.sub.counters.lost == KNOWN - KEPT
    assert power_cut.sub.counters.joins == 2


def test_a_subscriber_that_is_closed_before(power_cut: PowerCut) -> None:
    """Its cursor says what it had, and not where the lost end was."""
    while power_cut.got[-1] < 40:
        assert power_cut.receive(10)
    power_cut.sub.close()
    power_cut.sub = power_cut.subscriber()
    eventually(lambda: not power_cut.receive(0.01) and power_cut.got[-1] >= KEPT - 1)
    assert not power_cut.receive(0.2)
    assert power_cut.got == list(range(KEPT))
    assert power_cut.sub.ledger.account().delivered == KEPT
