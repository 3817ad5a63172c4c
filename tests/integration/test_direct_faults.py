"""Direct messaging with real processes that are killed, stopped and restarted: what is lost, and who knows."""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from brokerless.core import Cursor
from brokerless.losstest.harness.ports import Ports
from tests.forked import Forked
from tests.integration import direct_actors

DEADLINE = 60.0


class Actor(Forked):
    """One process of direct_actors.py."""

    def __init__(self, *args: object) -> None:
        super().__init__(direct_actors.main, *map(str, args))
        assert self.out.readline() == "ready\n"

    def finish(self) -> int:
        """Have a publisher publish no more; how many events there are."""
        self.signal(signal.SIGUSR1)
        return int(self.out.readline())

    def groups(self) -> dict[str, list[int]]:
        """What the groups of a publisher that has finished have: acknowledged, pending, lost, and if that balances."""
        self.signal(signal.SIGUSR2)
        return json.loads(self.out.readline())

    def stop(self) -> Any:
        """Ask it to end, and read its accounting."""
        self.signal(signal.SIGTERM)
        lines = self.out.read().splitlines()
        self.wait(DEADLINE)
        return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None


@pytest.fixture
def start() -> Iterator[Callable[..., Actor]]:
    """Starts actors, and ends those that a test leaves behind."""
    actors: list[Actor] = []

    def begin(*args: object) -> Actor:
        actor = Actor(*args)
        actors.append(actor)
        return actor

    yield begin
    for actor in actors:
        if actor.alive:
            actor.kill()
        actor.out.close()


@pytest.fixture(params=["tcp", "nng+tcp"])
def address(request: pytest.FixtureRequest, ports: Ports) -> str:
    """Nobody else takes it while a publisher is down."""
    return f"{request.param}://127.0.0.1:{ports.take()}"


def lines(path: Path) -> list[tuple[int, ...]]:
    """The complete lines of a witness."""
    if not path.exists():
        return []
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines() if line]


def wait(condition: Callable[[], object], what: str, timeout: float = DEADLINE) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def has(path: Path, offset: int) -> bool:
    """Whether a witness ends with that offset."""
    if size(path) == 0:
        return False
    with path.open("rb") as file:
        file.seek(max(0, size(path) - 64))
        last = file.read().splitlines()[-1].split()
    return bool(last) and last[0] == b"%d" % offset


def wait_committed(cursor: Path, total: int) -> None:
    """Until a subscriber has processed everything. The witness does not tell that: one that was killed may have
    written the last line, and what it had not committed comes again."""

    def committed() -> bool:
        position = Cursor(cursor).load().positions.get("p")
        return position is not None and position.offset == total

    wait(committed, "the last event", 120)


def wait_acked(pub: Actor, groups: Iterable[str], total: int) -> None:
    """Until the groups have acknowledged everything, with nothing lost. The witnesses do not tell that, either."""
    wanted = {group: [total, 0, 0, True] for group in groups}
    wait(lambda: pub.groups() == wanted, "all events acknowledged", 120)


def check_exact(got: list[tuple[int, ...]], total: int) -> None:
    """Nothing is lost, and every duplicate is marked as one."""
    seen: Counter[int] = Counter()
    for offset, mark in got:
        if seen[offset]:
            assert mark, f"offset {offset} came again unmarked"
        seen[offset] += 1
    assert sorted(seen) == list(range(total))


def test_subscriber_killed_and_restarted_with_its_cursor(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """A subscriber that is killed again and again loses nothing, and is told which events it may have had."""
    witness, cursor = tmp_path / "sub", tmp_path / "cursor"
    pub = start("publisher", address, tmp_path / "journal", tmp_path / "pub", 4000)
    chance = random.Random(1)
    for _ in range(5):
        had = len(lines(witness))
        sub = start("subscriber", address, cursor, witness)
        wait(lambda had=had: len(lines(witness)) > had, "events after a restart")
        time.sleep(chance.uniform(0.0, 0.3))
        sub.kill()
    total = pub.finish()
    sub = start("subscriber", address, cursor, witness)
    wait_committed(cursor, total)
    accounting = sub.stop()
    check_exact(lines(witness), total)
    assert accounting["lost"] == 0
    assert accounting["balanced"]
    assert accounting["delivered"] == total


def check_stopped(
    start: Callable[..., Actor], address: str, tmp_path: Path, rate: float, meanwhile: Callable[[Path], None]
) -> None:
    """SIGSTOP, `meanwhile` with the file of what is accepted, then SIGCONT: everything arrives, once, in order."""
    witness, accepted = tmp_path / "sub", tmp_path / "pub"
    pub = start("publisher", address, tmp_path / "journal", accepted, rate)
    sub = start("subscriber", address, "-", witness)
    wait(lambda: lines(witness), "first events")
    sub.signal(signal.SIGSTOP)
    meanwhile(accepted)
    total = pub.finish()
    sub.signal(signal.SIGCONT)
    wait(lambda: has(witness, total - 1), "the last event")
    accounting = sub.stop()
    assert [offset for offset, _ in lines(witness)] == list(range(total))
    assert (accounting["delivered"], accounting["lost"], accounting["duplicates"]) == (total, 0, 0)
    assert accounting["balanced"]


def test_subscriber_stopped_for_longer_than_every_buffer(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """SIGSTOP while far more is published than queues and sockets hold: after SIGCONT everything arrives, once."""

    def overflow(accepted: Path) -> None:
        before = size(accepted)
        # Some 150,000 events in 15 MB; the queues of both sides and of the kernel hold less than 10 MB.
        wait(lambda: size(accepted) > before + 1_000_000, "events while the subscriber is stopped")

    check_stopped(start, address, tmp_path, 1e9, overflow)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_subscriber_stopped_until_the_connection_is_given_up(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """Stopped for longer than the kernel waits for a peer (15 s): it joins again, and everything arrives, once."""
    # The fault itself, not a wait for something.
    check_stopped(start, address, tmp_path, 5000, lambda _: time.sleep(22))


def test_publisher_killed_mid_stream_and_restarted(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """A publisher killed with kill -9 and restarted on its DiskJournal loses nothing that it had accepted."""
    witness, accepted = tmp_path / "sub", tmp_path / "pub"
    sub = start("subscriber", address, "-", witness)
    workers = [start("worker", address, "g", tmp_path / f"w{i}", 5) for i in range(2)]
    chance = random.Random(2)
    for _ in range(4):
        had = len(lines(accepted))
        pub = start("publisher", address, tmp_path / "journal", accepted, 4000)
        wait(lambda had=had: len(lines(accepted)) > had + 200, "accepted events")
        time.sleep(chance.uniform(0.0, 0.2))
        pub.kill()
    pub = start("publisher", address, tmp_path / "journal", accepted, 4000)
    total = pub.finish()
    wait(lambda: has(witness, total - 1), "the last event")
    accounting = sub.stop()
    assert [offset for offset, _ in lines(witness)] == list(range(total))
    assert {offset for (offset,) in lines(accepted)} <= set(range(total))
    assert (accounting["delivered"], accounting["lost"], accounting["duplicates"]) == (total, 0, 0)
    assert accounting["balanced"]
    witnesses = [tmp_path / "w0", tmp_path / "w1"]
    wait_acked(pub, "g", total)
    for worker in workers:
        worker.stop()
    check_marked([lines(w) for w in witnesses], total)


def check_marked(witnesses: list[list[tuple[int, ...]]], total: int) -> None:
    """All events were worked on; of each event at most one delivery was a first attempt."""
    first: Counter[int] = Counter()
    seen: set[int] = set()
    for witness in witnesses:
        for offset, attempt in witness:
            seen.add(offset)
            first[offset] += attempt == 1
    assert seen == set(range(total))
    assert max(first.values()) == 1


def test_workers_killed_while_they_hold_leases(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """Flapping workers, killed at random, and a time with none at all: nothing is lost, repeats have attempt > 1."""
    pub = start("publisher", address, tmp_path / "journal", tmp_path / "pub", 4000)
    chance = random.Random(3)
    witnesses = [tmp_path / f"w{i}" for i in range(8)]
    running: list[Actor] = []
    for i, witness in enumerate(witnesses[:6]):
        running.append(start("worker", address, "g", witness, 30))
        wait(lambda witness=witness: lines(witness), "a worker gets events")
        time.sleep(chance.uniform(0.0, 0.2))
        if i % 2:
            for worker in running:
                worker.kill()  # nobody is left
            running.clear()
    total = pub.finish()
    running = [start("worker", address, "g", witness, 30) for witness in witnesses[6:]]
    wait_acked(pub, "g", total)
    for worker in running:
        worker.stop()
    check_marked([lines(w) for w in witnesses], total)


def test_a_subscriber_stopped_in_order_again_and_again(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """SIGTERM at any moment of a busy stream, handled by stop(): every event exactly once, in order."""
    witness, cursor = tmp_path / "sub", tmp_path / "cursor"
    pub = start("publisher", address, tmp_path / "journal", tmp_path / "pub", 10_000)
    for _ in range(8):
        had = len(lines(witness))
        sub = start("subscriber", address, cursor, witness)
        wait(lambda had=had: len(lines(witness)) > had, "events after a restart")
        accounting = sub.stop()
        assert accounting["delivered"] == len(lines(witness))
    total = pub.finish()
    sub = start("subscriber", address, cursor, witness)
    wait(lambda: has(witness, total - 1), "the last event")
    accounting = sub.stop()
    assert [offset for offset, _ in lines(witness)] == list(range(total))
    assert (accounting["delivered"], accounting["lost"], accounting["duplicates"]) == (total, 0, 0)
    assert accounting["balanced"]


def test_an_outage_longer_than_a_memory_journal(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """With a MemoryJournal smaller than the outage exactly the evicted events are lost, with reason and range."""
    witness, cursor, accepted = tmp_path / "sub", tmp_path / "cursor", tmp_path / "pub"
    pub = start("publisher", address, "mem:1000000", accepted, 10_000)
    sub = start("subscriber", address, cursor, witness)
    wait(lambda: len(lines(witness)) > 1000, "first events")
    # On a busy machine it can fall behind a second, which is all that the journal has.
    early = sub.stop()["losses"]
    had = [offset for offset, _ in lines(witness)]
    before = len(lines(accepted))
    wait(lambda: len(lines(accepted)) > before + 15_000, "more events than the journal holds")
    total = pub.finish()
    sub = start("subscriber", address, cursor, witness)
    wait(lambda: has(witness, total - 1), "the last event")
    accounting = sub.stop()
    got = {offset for offset, _ in lines(witness)}
    oldest = pub.stop()["oldest"]
    missing = set(range(total)) - got
    assert accounting["losses"] == [[max(had) + 1, oldest - 1, "evicted"]]
    assert missing == {o for first, last, _ in early + accounting["losses"] for o in range(first, last + 1)}
    assert (accounting["delivered"], accounting["lost"]) == (len(got), len(missing))
    assert accounting["by_reason"] == {"evicted": len(missing)}
    assert accounting["balanced"]


def stopped_subscriber_growth(
    start: Callable[..., Actor], address: str, tmp_path: Path, seconds: float
) -> tuple[int, int]:
    """RSS of a publisher at full rate before and after its subscriber was stopped for some time."""
    pub = start("publisher", address, "mem:16000000", tmp_path / "pub", 1e9)
    sub = start("subscriber", address, "-", tmp_path / "sub")
    wait(lambda: lines(tmp_path / "sub"), "first events")
    process = psutil.Process(pub.pid)
    wait(lambda: size(tmp_path / "pub") > 2_000_000, "a full journal")
    before = process.memory_info().rss
    sub.signal(signal.SIGSTOP)
    most = before
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        most = max(most, process.memory_info().rss)
        time.sleep(0.1)
    sub.signal(signal.SIGCONT)
    return before, most


# The journal is full before; what may come on top: a queue of LIVE_QUEUE frames of at most about 64 kB each at
# this size of events, answers under way, and what malloc keeps. The stated worst case is 64 MiB.
GROWTH_BYTES = 64 * 1024 * 1024


def test_memory_stays_bounded_while_a_subscriber_is_stopped(
    start: Callable[..., Actor], address: str, tmp_path: Path
) -> None:
    """A stopped subscriber costs a publisher at full rate no more than its live queue."""
    before, most = stopped_subscriber_growth(start, address, tmp_path, 4)
    assert most - before < GROWTH_BYTES


@pytest.mark.slow
def test_memory_stays_bounded_for_a_minute(start: Callable[..., Actor], address: str, tmp_path: Path) -> None:
    """The same for a whole minute."""
    before, most = stopped_subscriber_growth(start, address, tmp_path, 60)
    assert most - before < GROWTH_BYTES


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_everything_at_once(start: Callable[..., Actor], address: str, tmp_path: Path, seed: int) -> None:
    """For 40 s all of them are killed, stopped and ended at random: nothing is lost, and repetitions are marked."""
    chance = random.Random(seed)
    journal, accepted = tmp_path / "journal", tmp_path / "pub"
    pub = start("publisher", address, journal, accepted, 3000)
    subs = {name: start("subscriber", address, tmp_path / f"{name}.cursor", tmp_path / name) for name in "ab"}
    witnesses: dict[str, list[Path]] = {"g": [], "h": []}

    def work(group: str) -> Actor:
        witnesses[group].append(tmp_path / f"{group}{len(witnesses[group])}")
        return start("worker", address, group, witnesses[group][-1], 3)

    workers = [(group, work(group)) for group in "gghh"]
    until = time.monotonic() + 40
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.05, 0.5))
        match chance.choice(
            ["publisher", "kill sub", "stop sub", "kill worker", "end worker", "stop worker"]
        ):
            case "publisher":
                pub.kill()
                pub = start("publisher", address, journal, accepted, 3000)
            case "kill sub":
                name = chance.choice("ab")
                subs[name].kill()
                subs[name] = start("subscriber", address, tmp_path / f"{name}.cursor", tmp_path / name)
            case "stop sub":
                subs[chance.choice("ab")].signal(chance.choice([signal.SIGSTOP, signal.SIGCONT]))
            case "stop worker":
                chance.choice(workers)[1].signal(chance.choice([signal.SIGSTOP, signal.SIGCONT]))
            case how:
                group, worker = workers.pop(chance.randrange(4))
                worker.signal(signal.SIGCONT)
                if how == "kill worker":
                    worker.kill()
                else:
                    worker.stop()
                workers.append((group, work(group)))
    for actor in [*subs.values(), *(worker for _, worker in workers)]:
        actor.signal(signal.SIGCONT)
    total = pub.finish()
    for name, sub in subs.items():
        wait_committed(tmp_path / f"{name}.cursor", total)
        accounting = sub.stop()
        check_exact(lines(tmp_path / name), total)
        assert (accounting["delivered"], accounting["lost"], accounting["balanced"]) == (total, 0, True)
    wait_acked(pub, witnesses, total)
    for _, worker in workers:
        worker.stop()
    for files in witnesses.values():
        check_marked([lines(file) for file in files], total)
