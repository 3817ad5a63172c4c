"""`discover:` with real processes: publishers appear, move and die, and nothing that a journal has is missed."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core import JournalReader
from brokerless.core.errors import ConfigError
from brokerless.direct import Publisher, Subscriber, Worker

PUBLISHER = """
import sys, time
from brokerless.core import DiskJournal
from brokerless.direct import Publisher
path, source, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
with Publisher("tcp://127.0.0.1:*", source=source, journal=DiskJournal(path, fsync="never")) as publisher:
    until = time.monotonic() + seconds
    print("ready", flush=True)
    while time.monotonic() < until:
        publisher.publish("t", b"x")
        time.sleep(0.002)
    publisher.flush()
    sys.stdin.read()
"""


class Fleet:
    """Publishers in processes of their own; each journal has at most one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, source: str, seconds: float = 1e9) -> None:
        command = [sys.executable, "-c", PUBLISHER, str(self.path / source), source, str(seconds)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # ended by Ctrl-C, too
            text=True,
        )
        self.running[source] = process
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    def end(self, source: str, how: signal.Signals) -> None:
        process = self.running.pop(source)
        process.send_signal(how)
        process.communicate(timeout=60)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()


@pytest.fixture
def presence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "presence"))


@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_publishers_come_move_and_die(tmp_path: Path, presence: None, seconds: float) -> None:
    """A subscriber that began before all of them gets every event of every journal, once and in order."""
    dice = random.Random(7)
    fleet = Fleet(tmp_path)
    names = [f"orders-{n}" for n in range(4)]
    got: dict[str, list[int]] = defaultdict(list)
    try:
        with Subscriber("discover:orders-*", start="live") as subscriber:
            reader = threading.Thread(
                target=lambda: [got[e.source].append(e.offset) for e in subscriber], daemon=True
            )
            reader.start()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                name = dice.choice(names)
                if name in fleet.running:
                    # A new start is at another port: it moved. Killed ones leave their announcement behind.
                    fleet.end(name, dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT]))
                if dice.random() < 0.8:
                    fleet.start(name)
                time.sleep(dice.random())
            for name in names:
                if name in fleet.running:
                    fleet.end(name, signal.SIGKILL)
                fleet.start(name, 0.0)
            ends = {}
            for name in names:
                with JournalReader(tmp_path / name) as journal:
                    ends[name] = journal.next
            deadline = time.monotonic() + 60
            while {n: len(got[n]) for n in names} != ends and time.monotonic() < deadline:
                time.sleep(0.05)
            assert {n: len(got[n]) for n in names} == ends
            assert all(got[name] == list(range(ends[name])) for name in names)
            assert sum(ends.values()) > 100
            assert subscriber.ledger.account().lost == 0
            assert list(subscriber.losses) == []
            subscriber.stop()
            reader.join(30)
    finally:
        fleet.close()


def test_workers_follow_too(tmp_path: Path, presence: None) -> None:
    """A group gets the events of publishers that come later, and of one that moved."""
    with Worker("discover:jobs-*", group="g", lease_s=5) as worker:
        for data in (b"one", b"two"):
            with Publisher("tcp://127.0.0.1:*", source="jobs-1", journal=tmp_path / "j") as publisher:
                publisher.publish("t", data)
                delivery = worker.receive(timeout=30)
                assert delivery is not None
                assert delivery.event.data == data
                delivery.ack()
                deadline = time.monotonic() + 30
                while publisher.groups()["g"].pending and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert publisher.groups()["g"].pending == 0


def test_what_a_group_was_not_sent_comes_at_the_new_address(tmp_path: Path, presence: None) -> None:
    """An acknowledgement given while the publisher is away is not lost either: the event does not come again."""
    with Worker("discover:jobs-*", group="g", lease_s=30) as worker:
        with Publisher("tcp://127.0.0.1:*", source="jobs-1", journal=tmp_path / "j") as publisher:
            publisher.publish("t", b"one")
            first = worker.receive(timeout=30)
            assert first is not None
        first.ack()
        with Publisher("tcp://127.0.0.1:*", source="jobs-1", journal=tmp_path / "j") as publisher:
            publisher.publish("t", b"two")
            second = worker.receive(timeout=30)
            assert second is not None
            assert second.event.data == b"two"
            second.ack()


def test_a_publisher_that_refuses_costs_no_other(tmp_path: Path, presence: None) -> None:
    """One with CURVE does not answer us, another at an address that cannot be: the third is followed."""
    from brokerless.core.presence import announce

    wrong = announce("direct.publisher", "orders-0", ["tcp://nowhere"], dict)
    try:
        with (
            Subscriber("discover:orders-*") as subscriber,
            Publisher("tcp://127.0.0.1:*", source="orders-1", journal=tmp_path / "j") as publisher,
        ):
            publisher.publish("t", b"one")
            event = subscriber.receive(timeout=30)
            assert event is not None
            assert event.data == b"one"
            assert subscriber.connected == 1
    finally:
        wrong.close()


def test_addresses_and_patterns_mix(tmp_path: Path, presence: None) -> None:
    """One publisher by its address, others by name; the same one twice is followed once."""
    with (
        Publisher("tcp://127.0.0.1:*", source="orders-1", journal=tmp_path / "a", announce=False) as quiet,
        Publisher("tcp://127.0.0.1:*", source="orders-2", journal=tmp_path / "b") as loud,
        Subscriber([quiet.address, "discover:orders-*", "discover:*-2"], start="oldest") as subscriber,
    ):
        quiet.publish("t", b"quiet")
        loud.publish("t", b"loud")
        found = [subscriber.receive(timeout=30) for _ in range(2)]
        assert sorted(e.data for e in found if e is not None) == [b"loud", b"quiet"]
        assert subscriber.wait_joined(30)
        assert subscriber.connected == 2
        assert subscriber.receive(timeout=0.3) is None


def test_a_publisher_needs_a_real_address(presence: None) -> None:
    """`discover:` is for consumers."""
    with pytest.raises(ConfigError, match="consumers"):
        Publisher("discover:orders-1", source="s")


def test_reconcile_does_not_wait_for_the_gone(
    tmp_path: Path, presence: None, until: Callable[..., None]
) -> None:
    """A publisher that left for good is not asked for ever."""
    with Subscriber("discover:orders-*", start="oldest") as subscriber:
        with Publisher("tcp://127.0.0.1:*", source="orders-1", journal=tmp_path / "a") as publisher:
            publisher.publish("t", b"one")
            assert subscriber.receive(timeout=30) is not None
        with Publisher("tcp://127.0.0.1:*", source="orders-2", journal=tmp_path / "b") as publisher:
            publisher.publish("t", b"two")
            assert subscriber.receive(timeout=30) is not None
            until(lambda: subscriber.receive(timeout=0) is None and subscriber.connected == 1, timeout=60)
            until(lambda: subscriber.reconcile(timeout=5), timeout=60)
