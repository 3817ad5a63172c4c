"""Power cuts of a publisher with a group: journal, group file, registered cursor and dead letters, as one."""

import random
from pathlib import Path

from brokerless.core import DiskJournal, Retention
from brokerless.core.errors import JournalError
from brokerless.direct import read_dead_letters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages
from brokerless.direct.publisher import _status
from tests.power import Disk, PowerCuts

POLICY = messages.Policy(lease_s=1000, max_deliver=2)
GROUP, WORKER = "g", "w"


class Parts:
    """What a publisher has behind its sockets, opened from a directory."""

    def __init__(self, path: Path, fsync: str, retention: Retention) -> None:
        options = {"source": "src", "fsync": fsync, "sync_interval_s": 3600, "segment_bytes": 4096}
        self.journal = DiskJournal(path, retention=retention, **options)  # type: ignore[arg-type]
        self.dead = DiskJournal(path / "dead-letters", **options)  # type: ignore[arg-type]
        store = GroupStore(str(path / "groups"), fsync=fsync, sync_interval_s=3600)  # type: ignore[arg-type]
        self.groups = GroupCoordinator(self.journal, self.dead, store)
        self.now = 0.0
        self.settles = 0

    def join(self) -> None:
        """A worker with much room."""
        self.groups.join(GROUP, WORKER, POLICY, "oldest", 0)
        self.groups.groups[GROUP].set_credit(WORKER, 1000)

    def deliver(self) -> list[tuple[int, int]]:
        """Let the coordinator work; `(offset, attempt)` of what left for the worker."""
        self.now += 1
        self.groups.run(self.now)
        given = []
        for _, raw in self.groups.outbox:
            message = messages.decode_reply(raw)
            if isinstance(message, messages.Deliver):
                given += [(offset, attempt) for a, b, attempt in message.ranges for offset in range(a, b + 1)]
        self.groups.outbox.clear()
        return given

    def settle(self, acks: list[int], nacks: list[int]) -> None:
        """What the worker says of some events."""
        self.settles += 1
        word = messages.Settle(
            self.journal.epoch, [(o, o) for o in acks], [(o, o, 0.0) for o in nacks], number=self.settles
        )
        self.groups.settle(GROUP, WORKER, word, self.now)

    def close(self) -> None:
        self.groups.close()
        self.dead.close()
        self.journal.close()


class Run:
    """A publisher and a worker on a watched disk, and what was promised to them."""

    def __init__(self, seed: int, root: Path, fsync: str) -> None:
        self.rolls = random.Random(seed)
        self.fsync = fsync
        self.retention = self.rolls.choice([Retention(max_events=100_000), Retention(max_events=60)])
        (root / "disk").mkdir()
        self.path = root / "disk" / "journal"
        self.disk = Disk(root / "disk")
        self.published = 0
        self.promised = 0  # events before this offset must survive
        self.held: set[int] = set()
        self.delivered: dict[int, int] = {}  # highest attempt of each event
        self.acked: set[int] = set()
        self.kept: set[int] = set()  # acknowledged, and stored since
        self.joined = False

    def open(self, path: Path) -> Parts:
        return Parts(path, self.fsync, self.retention)

    def begin(self) -> None:
        self.parts = self.open(self.path)

    def step(self) -> None:
        """One thing that happens."""
        parts, roll = self.parts, self.rolls.random()
        if roll < 0.35:
            count = self.rolls.randint(1, 12)
            parts.journal.append_many("t", [b"%d" % (self.published + i) for i in range(count)])
            self.published += count
        elif roll < 0.65:
            self.joined = True
            parts.join()
            self.work()
        elif roll < 0.85 and self.held:
            some = [offset for offset in sorted(self.held) if self.rolls.random() < 0.6]
            acks = [offset for offset in some if self.rolls.random() < 0.6]
            parts.settle(acks, [offset for offset in some if offset not in acks])
            self.held.difference_update(some)
            self.acked.update(acks)
            if self.rolls.random() < 0.5:
                self.work()
        elif roll < 0.95:
            parts.journal.sync()
        else:
            parts.close()
            self.begin()
            self.held.clear()
            self.kept = set(self.acked)
        if self.fsync == "batch" or (self.fsync == "interval" and roll >= 0.85):
            self.promised = self.published

    def work(self) -> None:
        for offset, attempt in self.parts.deliver():
            self.held.add(offset)
            self.delivered[offset] = max(attempt, self.delivered.get(offset, 0))
        self.kept = set(self.acked)

    def check(self, into: Path) -> None:
        """Cut the power now, and go on with what is left: who is given what is still to be done?"""
        self.disk.cut(self.rolls, into)
        path = into / "journal"
        if self.fsync == "never" and not path.is_dir():
            return
        try:
            parts = self.open(path)
        except JournalError:
            if self.fsync != "never":
                raise
            return  # told, and never promised
        end = parts.journal.next
        assert end >= self.promised
        known = GROUP in parts.groups.groups
        if self.joined and self.fsync != "never":
            assert known, "a group that was there is forgotten: it would start over, at the oldest or live"
        first_new = parts.journal.append_many("t", [b"new"] * 20).offset
        parts.join()
        again = self.drain(parts)
        letters = {letter.event.offset for letter in read_dead_letters(parts.dead)}
        status = _status(parts.groups.groups[GROUP], parts.journal.next)
        assert status.balanced
        assert status.pending == 0
        assert set(range(first_new, first_new + 20)) <= set(again), "new events are skipped"
        told = status.lost + parts.groups.counters.tail_lost
        missing = set(range(self.promised)) - self.acked - letters - set(again)
        if self.retention.max_events == 60:
            # What was evicted is counted, by the group that lost it: nothing else may be missing.
            assert all(offset < parts.journal.oldest for offset in missing)
            assert not missing or told, f"{sorted(missing)} are gone, and nobody was told"
        else:
            assert not missing, (
                f"{sorted(missing)} were neither done nor given out again nor kept as dead letters"
            )
        if self.fsync == "batch":
            assert not self.kept & set(again), "acknowledged, stored, and given out again"
            for offset, attempt in self.delivered.items():
                if offset in again:
                    assert again[offset] > attempt or offset in self.held, (
                        "a redelivery as if for the first time"
                    )
        parts.close()

    def drain(self, parts: Parts) -> dict[int, int]:
        """Acknowledge everything that comes; the first attempt number of each event."""
        again: dict[int, int] = {}
        for _ in range(5000):
            parts.now += 500  # also beyond the time for which a last attempt is uncertain
            given = parts.deliver()
            for offset, attempt in given:
                assert offset not in again
                again[offset] = attempt
            parts.settle([offset for offset, _ in given], [])
            if not given and _status(parts.groups.groups[GROUP], parts.journal.next).pending == 0:
                return again
        raise AssertionError("something stays pending")

    def close(self) -> None:
        self.parts.close()


class TestPowerCuts(PowerCuts):
    """What `fsync` promised survives."""

    writer, steps = Run, 12
