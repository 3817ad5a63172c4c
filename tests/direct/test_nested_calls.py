"""Signal handlers and finalizers that call the publisher in whose middle they run: nothing waits for itself."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.direct import Publisher, Subscriber

from .conftest import eventually

# A publisher at full rate; a handler of SIGUSR1 does ACTION again and again, wherever the signal finds it.
PROGRAM = """
import os, signal, sys, threading, time
from brokerless.core import DiskJournal, MemoryJournal
from brokerless.core.errors import BrokerlessError, Closed, UsageError
from brokerless.direct import Publisher

action, kind, path, delay = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
journal = MemoryJournal() if kind == "memory" else DiskJournal(path)
pub = Publisher("tcp://127.0.0.1:*", source="s", journal=journal, max_wait_s=0.0005)
called = []

class Final:
    def __del__(self):
        pub.close()

def handler(*_):
    called.append(1)
    if action == "close":
        pub.close()
    elif action == "finalizer":
        cycle = Final()
        del cycle
    else:
        try:
            pub.publish("t", b"from the handler")
        except UsageError:
            pass

signal.signal(signal.SIGUSR1, handler)
threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
accepted = 0
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    try:
        pub.publish("t", b"x" * 100, key="k" if accepted % 3 else "")
        if accepted % 50 == 0:
            pub.publish_many("t", [b"y" * 100] * 20)
        accepted += 1
    except Closed:
        break
    if called and action == "publish" and accepted % 100 == 0:
        break
else:
    sys.exit("still open")
pub.close()
print("ended")
"""


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("action", ["close", "publish", "finalizer"])
def test_a_handler_in_the_middle_of_publish_does_not_hang(tmp_path: Path, action: str, kind: str) -> None:
    """Whatever it interrupted, close() and publish() in a signal handler come back, and the program ends."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, action, kind, str(tmp_path / str(i)), str(0.2 + i * 0.0137)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    try:
        for process in running:
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out) == (0, "ended\n"), err
    finally:
        for process in running:
            process.kill()


def test_draining_does_not_flood_heartbeats() -> None:
    """A subscriber that does not read holds up drain(): meanwhile heartbeats stay few."""
    with (
        Publisher("tcp://127.0.0.1:*", source="s", journal=MemoryJournal()) as pub,
        Subscriber(pub.address) as sub,
    ):
        assert sub.wait_joined(20)
        pub.publish("t", b"x")
        before = pub.counters.beats
        assert not pub.drain(1.0)
        assert pub.counters.beats - before <= 20
        assert sub.receive(20) is not None
        done = threading.Event()
        thread = threading.Thread(target=lambda: pub.drain(20) and done.set())
        thread.start()
        eventually(lambda: sub.receive(0.01) is None and done.is_set())
        thread.join()


def test_a_publisher_that_cannot_bind_lets_go_of_its_journal(tmp_path: Path) -> None:
    """The address is taken: the journal's lock is free again, also for one that was given as a path."""
    with Publisher("tcp://127.0.0.1:*", source="other") as taken:
        for journal in (tmp_path / "a", DiskJournal(tmp_path / "b")):
            with pytest.raises(ConfigError, match="address"):
                Publisher(taken.address, source="s", journal=journal)
    for name in ("a", "b"):
        with Publisher("tcp://127.0.0.1:*", source="s", journal=os.fspath(tmp_path / name)) as pub:
            assert isinstance(pub.journal, DiskJournal)
            assert pub.publish("t", b"x").offset == 0


def test_signals_are_delivered_in_this_process() -> None:
    """The control: a handler outside of the publisher's work closes it at once."""
    pub = Publisher("tcp://127.0.0.1:*", source="s")
    before = signal.signal(signal.SIGUSR1, lambda *_: pub.close())
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert pub._finished
    finally:
        signal.signal(signal.SIGUSR1, before)
