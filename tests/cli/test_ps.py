"""`brokerless ps` and what real components announce."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless import direct, multicast
from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.core.presence import announced_here, present
from tests.multicast.groups import new_group

CONSUMER = """
import sys
from brokerless.direct import Subscriber
with Subscriber(sys.argv[1], start="oldest") as sub:
    for event in sub:
        print(event.offset, flush=True)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Presence, switched on for this test alone."""
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "presence"))
    return tmp_path / "presence"


def ps(directory: Path) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "brokerless.cli", "ps", "--json", "--directory", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_components_are_listed_with_lag_and_loss(
    directory: Path, tmp_path: Path, until: Callable[..., None]
) -> None:
    """A publisher, a subscriber in another process that is killed, and a group that lost something."""
    journal = DiskJournal(tmp_path / "j")
    with direct.Publisher("tcp://127.0.0.1:*", source="orders", journal=journal) as publisher:
        publisher.publish("t", b"0")
        publisher.flush()
        consumer = subprocess.Popen(
            [sys.executable, "-c", CONSUMER, publisher.address], stdout=subprocess.PIPE, text=True
        )
        try:
            assert consumer.stdout is not None
            assert consumer.stdout.readline() == "0\n"

            def seen() -> list[dict[str, object]]:
                return [c.state for c in present(directory) if c.kind == "direct.subscriber" and c.state]

            until(lambda: seen() and seen()[0]["account"]["delivered"] == 1)
            rows = {row["kind"]: row for row in ps(directory)}
            assert (rows["direct.subscriber"]["lag"], rows["direct.subscriber"]["state"]) == (0, "up")
            assert rows["direct.publisher"]["address"] == publisher.address
            consumer.send_signal(signal.SIGKILL)
            consumer.wait(30)
            for number in range(1, 8):
                publisher.publish("t", b"%d" % number)
            publisher.flush()

            def publisher_state() -> dict[str, object]:
                return next(c.state for c in present(directory) if c.kind == "direct.publisher")

            until(lambda: publisher_state().get("next") == 8)
            rows = {row["kind"]: row for row in ps(directory)}
            assert (rows["direct.subscriber"]["lag"], rows["direct.subscriber"]["state"]) == (7, "dead")
        finally:
            consumer.kill()
            consumer.communicate()
    assert [c.kind for c in present(directory, dead=False)] == []


def test_a_pipe_gets_the_same_table_as_a_terminal(directory: Path) -> None:
    """With a header, columns that are aligned, and one line per component however long its name is."""
    name = "n" * 120
    with direct.Publisher("tcp://127.0.0.1:*", source=name, journal=MemoryJournal()):
        command = [sys.executable, "-m", "brokerless.cli", "ps", "--directory", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    header, _, row = done.stdout.splitlines()
    assert header.split()[:3] == ["kind", "name", "pid"]
    assert row.index(name) == header.index("name")
    assert "\t" not in done.stdout


def test_every_kind_announces_its_state(directory: Path, until: Callable[..., None]) -> None:
    """Publisher, subscriber, worker, request server: each with counters; losses with their ranges."""
    group = new_group()
    tiny = MemoryJournal(retention=Retention(max_events=10))
    with (
        direct.Publisher("tcp://127.0.0.1:*", source="s", journal=tiny) as publisher,
        multicast.Publisher(group, "T") as ticks,
        multicast.Subscriber(group, "T", start="oldest") as listener,
        direct.Worker(publisher.address, group="g") as worker,
    ):
        for number in range(50):
            publisher.publish("t", b"%d" % number)
        ticks.publish("t", b"x")
        assert listener.receive(timeout=30) is not None
        delivery = worker.receive(timeout=30)
        assert delivery is not None
        delivery.ack()
        with direct.Subscriber(publisher.address, start=0, on_loss=lambda _: None) as subscriber:
            assert subscriber.receive(timeout=30) is not None

            def states() -> dict[str, dict[str, object]]:
                return {c.kind: c.state for c in present(directory)}

            wanted = {"direct.publisher", "direct.subscriber", "direct.worker"}
            wanted |= {"multicast.publisher", "multicast.subscriber"}
            until(lambda: wanted <= set(states()) and all("counters" in states()[kind] for kind in wanted))
            until(lambda: states()["direct.subscriber"]["account"]["lost"] == 40)
            assert states()["direct.subscriber"]["losses"] == [["s", 0, 39, "evicted"]]
            assert states()["direct.subscriber"]["account"]["balanced"] is True
            until(lambda: "g" in states()["direct.publisher"]["groups"])


def test_a_mirror_is_listed_with_what_it_lacks(
    directory: Path, tmp_path: Path, until: Callable[..., None]
) -> None:
    """As a consumer of its publisher, also while that one is away; and no more when it was closed."""

    def row() -> dict[str, object] | None:
        found = [row for row in ps(directory) if row["kind"] == "direct.mirror"]
        return found[0] if found else None

    journal = DiskJournal(tmp_path / "j")
    with direct.Publisher("tcp://127.0.0.1:*", source="orders", journal=journal) as publisher:
        with direct.Mirror(publisher.address, journal=tmp_path / "copy", serve="tcp://127.0.0.1:*") as mirror:
            publisher.publish_many("t", [b"x"] * 5)
            publisher.flush()
            until(lambda: mirror.journal.next == 5, timeout=60)
            state = {c.kind: c for c in announced_here()}["direct.mirror"].state
            assert state["positions"] == {"orders": [journal.epoch, 5]}
            until(lambda: (row() or {}).get("lag") == 0, timeout=60)
            found = row()
            assert found is not None
            assert (found["state"], found["lost"], found["address"]) == ("up", 0, mirror.address)
        assert row() is None


def test_it_can_be_switched_off_for_one_component(directory: Path, until: Callable[..., None]) -> None:
    """announce=False keeps it out; others are listed all the same."""
    with (
        direct.Publisher("tcp://127.0.0.1:*", source="quiet", announce=False),
        direct.Publisher("tcp://127.0.0.1:*", source="loud"),
    ):
        until(lambda: [c.name for c in present(directory)] == ["loud"])
