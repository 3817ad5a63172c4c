"""Key affinity, without I/O: all events of one key go to one worker, in order, as long as any is unsettled.

A key without unsettled events is free; its next event chooses a worker by rendezvous hashing, so that keys
stay where they are when other workers come and go. Events without a key go where the queue is shortest.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from zlib import crc32

# A key of which an event was given back has at most this many under way, half as many after each further time, and one
# more with each that is settled. What is under way behind such an event has to come back and be sent again: without
# this, one nack in twenty events of a busy key made each of them travel six times.
_FIRST_WINDOW = 8


class KeyQueue:
    """Offsets waiting for the worker that owns their key."""

    def __init__(self) -> None:
        # worker → key → offsets waiting, oldest first
        self._queues: dict[str, dict[str, list[int]]] = {}
        self._owner: dict[str, str] = {}
        self._unsettled: dict[str, int] = {}
        self._key_of: dict[int, str] = {}
        self._blocked: dict[str, float] = {}
        # key → offsets that are elsewhere and must come before the later ones that wait here
        self._ahead: dict[str, set[int]] = {}
        self._homeless: list[tuple[int, str]] = []
        self._windows: dict[
            str, int
        ] = {}  # key → how many of its events may be under way, if that is limited
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def join(self, worker: str) -> None:
        """A worker is there."""
        self._queues.setdefault(worker, {})
        homeless, self._homeless = self._homeless, []
        for offset, key in sorted(homeless):
            self._enqueue(offset, key)

    def leave(self, worker: str) -> None:
        """A worker is gone: its keys are free, and what waited for it finds another one."""
        queue = self._queues.pop(worker, {})
        for key in [key for key, owner in self._owner.items() if owner == worker]:
            del self._owner[key]
        for offset, key in sorted((offset, key) for key, offsets in queue.items() for offset in offsets):
            self._enqueue(offset, key)

    def add(self, offset: int, key: str, due: float | None = None) -> None:
        """A new event; offsets rise. With `due` it is one that was given back with a delay."""
        self._know(offset, key)
        self.give_back(offset, due)

    def hold(self, offset: int, key: str, worker: str = "") -> None:
        """An event that does not wait here: `worker` has it, or it is not known who had it."""
        self._know(offset, key)
        if key and worker in self._queues:
            self._owner.setdefault(key, worker)
        self.wait_for(offset)

    def wait_for(self, offset: int) -> None:
        """Later events of its key wait until this one, which is elsewhere, is settled or given back."""
        key = self._key_of.get(offset)
        if key:
            self._ahead.setdefault(key, set()).add(offset)

    def slow_down(self, offset: int) -> None:
        """A worker gave this event back: fewer events of its key at a time."""
        key = self._key_of.get(offset)
        if key:
            self._windows[key] = max(1, self._windows.get(key, 2 * _FIRST_WINDOW) // 2)

    def keep_order(self, returned: Iterable[int], held: Iterable[tuple[int, int]]) -> None:
        """`wait_for` those that are held and have the key of one that was returned."""
        keys = {self._key_of.get(offset) for offset in returned}
        for first, last in held:
            for offset in range(first, last + 1):
                if self._key_of.get(offset) in keys:
                    self.wait_for(offset)

    def _know(self, offset: int, key: str) -> None:
        self._key_of[offset] = key
        if key:
            self._unsettled[key] = self._unsettled.get(key, 0) + 1

    def _arrived(self, offset: int, key: str) -> None:
        ahead = self._ahead.get(key)
        if ahead is not None:
            ahead.discard(offset)
            if not ahead:
                del self._ahead[key]

    def _enqueue(self, offset: int, key: str) -> None:
        if not self._queues:
            self._homeless.append((offset, key))
            return
        if not key:
            worker = min(self._queues, key=lambda w: sum(map(len, self._queues[w].values())))
        else:
            owner = self._owner.get(key)
            if owner is None:
                owner = self._owner[key] = max(self._queues, key=lambda w: crc32(f"{key}\0{w}".encode()))
            worker = owner
        offsets = self._queues[worker].setdefault(key, [])
        if offsets and offset < offsets[-1]:
            insort(offsets, offset)
        else:
            offsets.append(offset)

    def give_back(self, offset: int, due: float | None) -> bool:
        """An event comes again, before the later ones of its key; until `due` the key waits as a whole.

        False if the event is not known here (it was granted by a publisher that is gone).
        """
        key = self._key_of.get(offset)
        if key is None:
            return False
        if due is not None:
            where = key or f"\0{offset}"
            self._blocked[where] = max(due, self._blocked.get(where, due))
        self._arrived(offset, key)
        self._waiting += 1
        self._enqueue(offset, key)
        return True

    def take(self, worker: str, limit: int, now: float) -> list[int]:
        """Up to `limit` offsets for a worker; the rest of a key stays in order."""
        queue = self._queues.get(worker, {})
        taken: list[int] = []
        for key in list(queue):
            if len(taken) >= limit:
                break
            if key and self._is_blocked(key, now):
                continue
            offsets = queue.pop(key)
            if key:
                end = limit - len(taken)
                if key in self._windows:
                    under_way = self._unsettled[key] - len(offsets)
                    end = min(end, max(0, self._windows[key] - under_way))
                if key in self._ahead:
                    end = min(end, bisect_left(offsets, min(self._ahead[key])))
                part, rest = offsets[:end], offsets[end:]
            else:
                free = [o for o in offsets if not self._is_blocked(f"\0{o}", now)]
                part = free[: limit - len(taken)]
                chosen = set(part)
                rest = [o for o in offsets if o not in chosen]
            taken += part
            if rest:
                queue[key] = rest  # to the end: other keys come first
        self._waiting -= len(taken)
        return sorted(taken)

    def _is_blocked(self, where: str, now: float) -> bool:
        due = self._blocked.get(where)
        if due is None:
            return False
        if due <= now:
            del self._blocked[where]
            return False
        return True

    def settle(self, first: int, last: int) -> None:
        """These events are done; a key with none left is free."""
        for offset in self._known(first, last):
            key = self._key_of.pop(offset)
            self._drop(offset, key)
            self._arrived(offset, key)
            if not key:
                self._blocked.pop(f"\0{offset}", None)
                continue
            left = self._unsettled[key] - 1
            if left:
                self._unsettled[key] = left
                if key in self._windows:
                    self._windows[key] += 1
            else:
                self._windows.pop(key, None)
                del self._unsettled[key]
                self._owner.pop(key, None)
                self._blocked.pop(key, None)

    def remove(self, first: int, last: int) -> None:
        """These events cannot be sent any more."""
        self.settle(first, last)

    def _known(self, first: int, last: int) -> list[int]:
        if last - first < len(self._key_of):
            return [offset for offset in range(first, last + 1) if offset in self._key_of]
        return [offset for offset in self._key_of if first <= offset <= last]

    def _drop(self, offset: int, key: str) -> None:
        """Take an offset out of the queue that it waits in."""
        for queue in self._candidates(key):
            offsets = queue.get(key)
            if offsets and offset in offsets:
                offsets.remove(offset)
                self._waiting -= 1
                if not offsets:
                    del queue[key]
                return
        if (offset, key) in self._homeless:
            self._homeless.remove((offset, key))
            self._waiting -= 1

    def _candidates(self, key: str) -> Iterator[dict[str, list[int]]]:
        if not key:
            yield from self._queues.values()
        elif key in self._owner:
            yield self._queues[self._owner[key]]

    def unblock(self, now: float) -> None:
        """End the delays that are over, also of what nobody can take now: nothing is to be done when they end."""
        if self.next_due() <= now:
            self._blocked = {where: due for where, due in self._blocked.items() if due > now}

    def next_due(self) -> float:
        """When a delayed key may go on."""
        return min(self._blocked.values(), default=float("inf"))
