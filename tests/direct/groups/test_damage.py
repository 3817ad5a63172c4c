"""A group whose journal is damaged: what cannot be read is counted as lost, nothing else is, and the group goes on."""

from pathlib import Path

import pytest

from brokerless.core import DiskJournal, MemoryJournal, Reason
from brokerless.direct import read_dead_letters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages

FRAMES, PER_FRAME, DAMAGED = 6, 10, 3
GONE = set(range(DAMAGED * PER_FRAME, (DAMAGED + 1) * PER_FRAME))


class Damaged:
    """A group that has been given everything, before one frame of its journal became unreadable."""

    def __init__(self, path: Path, *, affinity: bool, max_deliver: int) -> None:
        self.journal = DiskJournal(path, source="p", fsync="never")
        for _ in range(FRAMES):
            self.journal.append_many("t", [b"x" * 100] * PER_FRAME, keys=["k"] * PER_FRAME)
        self.dead = MemoryJournal(source="p")
        self.groups = GroupCoordinator(self.journal, self.dead, GroupStore(None))
        self.policy = messages.Policy(1000, max_deliver, affinity)
        self.groups.join("g", "w", self.policy, "oldest", 0)
        self.group = self.groups.groups["g"]
        self.group.set_credit("w", 1000)

    def damage(self) -> None:
        chunk = self.journal.read(0)
        at = sum(4 + len(frame.raw) for frame in chunk.frames[:DAMAGED])
        path = next(Path(self.journal.path).glob("*.seg"))
        raw = bytearray(path.read_bytes())
        start = raw.index(chunk.frames[0].raw) + at
        raw[start + 100] ^= 0xFF
        path.write_bytes(bytes(raw))
        # As after a restart: nothing of it is in memory.
        self.groups._frames.clear()

    def deliver(self, now: float) -> list[int]:
        self.groups.run(now)
        given = []
        for _, raw in self.groups.outbox:
            message = messages.decode_reply(raw)
            if isinstance(message, messages.Deliver):
                given += [offset for a, b, _ in message.ranges for offset in range(a, b + 1)]
        self.groups.outbox.clear()
        return given

    def settle(
        self, *, acks: list[int] | None = None, nacks: list[tuple[int, int, float]] | None = None
    ) -> None:
        word = messages.Settle(self.journal.epoch, [(o, o) for o in acks or []], nacks or [])
        self.groups.settle("g", "w", word, 0.0)


@pytest.mark.parametrize("affinity", [False, True])
def test_events_to_be_given_out_again(tmp_path: Path, affinity: bool) -> None:
    """Given back by a worker, and unreadable now: they are lost, the others come again, and new ones after them."""
    parts = Damaged(tmp_path, affinity=affinity, max_deliver=5)
    given = parts.deliver(1.0)
    assert given == list(range(FRAMES * PER_FRAME))
    parts.settle(nacks=[(o, o, 0.0) for o in given])
    parts.damage()
    done: set[int] = set()
    new = set(range(FRAMES * PER_FRAME, FRAMES * PER_FRAME + 5))
    parts.journal.append_many("t", [b"new"] * 5, keys=["k"] * 5)
    for now in range(2, 500):
        given = parts.deliver(float(now))
        done.update(given)
        parts.settle(acks=given)
        if parts.group.cursor == parts.journal.next:
            break
    assert done == (set(range(FRAMES * PER_FRAME)) - GONE) | new
    assert parts.group.lost_by_reason == {Reason.UNATTRIBUTED: len(GONE)}
    assert parts.groups.counters.damaged == len(GONE)
    parts.journal.close()


def test_what_lies_before_the_damage_is_not_lost(tmp_path: Path) -> None:
    """A delayed event before an unreadable range still comes again."""
    parts = Damaged(tmp_path, affinity=False, max_deliver=5)
    parts.group.set_credit("w", 10)
    given = parts.deliver(1.0)
    parts.settle(acks=given[1:], nacks=[(0, 0, 50.0)])
    parts.damage()
    parts.group.set_credit("w", 1000)
    done: set[int] = set(given[1:])
    for now in range(2, 10):
        given = parts.deliver(float(now))
        done.update(given)
        parts.settle(acks=given)
    assert done == set(range(1, FRAMES * PER_FRAME)) - GONE
    assert parts.deliver(60.0) == [0]
    assert parts.group.lost == len(GONE)
    parts.journal.close()


def test_a_dead_letter_that_cannot_be_written_is_lost(tmp_path: Path) -> None:
    """Only events that are in the dead-letter journal count as dead letters."""
    parts = Damaged(tmp_path, affinity=False, max_deliver=1)
    given = parts.deliver(1.0)
    parts.damage()
    parts.settle(nacks=[(o, o, 0.0) for o in given])
    for now in range(2, 5):
        assert parts.deliver(float(now)) == []
    letters = {letter.event.offset for letter in read_dead_letters(parts.dead)}
    assert letters == set(range(FRAMES * PER_FRAME)) - GONE
    assert parts.group.dead_lettered == len(letters)
    assert parts.group.lost_by_reason == {Reason.UNATTRIBUTED: len(GONE)}
    assert parts.group.cursor == parts.journal.next
    parts.journal.close()
