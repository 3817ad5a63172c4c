"""A receiver without I/O: packets in, messages in order out, each exactly once, or one `Missing` instead.

Packets of the lines A and B meet here: what the other line brought first is not wanted again.

The caller looks at a packet's header, asks `wants`, takes the packet apart, and gives it to `accept`; calls
`heartbeat`, `end` and `gone` for the other packets; takes what is in `ready`; and sends what `due_requests` returns,
again when `next_deadline` has come. Payloads are opaque, but for `part(skip, take)`.

A signal's handler can raise in the middle of any call: whenever a function is entered, a call of C code has returned or
a loop goes round. What is handed over, what is held and what is given up each change between two such points; gaps and
their timers do not, so after an interrupted call `recover` finds out again what is missing.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

from brokerless.core.event import Reason
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.receive.gaps import Gap, GapTable, Missing, RepairRequest
from brokerless.multicast.wire.moldudp64 import Gone, session_matches
from brokerless.multicast.wire.status import Status

# Sessions that were closed, so that a late packet of one does not begin it again.
REMEMBERED_SESSIONS = 16


class Payload(Protocol):
    """The messages of one packet."""

    def part(self, skip: int, take: int) -> Self:
        """Without the first `skip`, and only `take` of them."""


P = TypeVar("P", bound=Payload)
T = TypeVar("T")

# Where to begin in a session that is seen for the first time: a sequence; `LIVE`; or `OLDEST`.
LIVE = -1
OLDEST = 0


class Receiver(Generic[P]):
    """Follows one session at a time. `start(session)` says where to begin in the first one.

    A session that begins while another one is followed is wanted from its beginning, and closes the other:
    what was missing there is lost, because its sender is gone. (Should the other one be the only one that is
    heard for a while, it is followed again from where it was left.)
    """

    def __init__(
        self,
        *,
        start: Callable[[bytes], int],
        policy: RepairPolicy,
        servers: int,
        random: Callable[[], float],
        session: str | None = None,
        lines: int = 1,
        tcp: bool = True,
        counters: SubscriberCounters | None = None,
        now: float = 0.0,
    ) -> None:
        self.counters = counters if counters is not None else SubscriberCounters()
        self.policy = policy
        self.session: bytes | None = None
        self.expected = 0  # the next to deliver
        self.highest = 0  # one more than the last that is known to exist
        self.ready: deque[tuple[bytes, P | Missing]] = deque()
        self._wanted = session
        self._start = start
        self._servers = servers
        self._random = random
        self._tcp = tcp
        self._wait_s = policy.reorder_wait_s if lines == 1 else policy.line_wait_s
        self._closed: dict[bytes, int] = {}  # where we were in sessions that others have followed
        self._heard_at = now
        self._live_at = now  # when a packet proved last that a sender is alive and heard
        self.stale = False
        self.sessions_heard: dict[bytes, int] = {}  # that were not followed: packets of each
        self.stale_attempts = 0  # times that a stale receiver asked; the caller joins again
        self._stale_attempt = 0
        self._stale_due = 0.0  # when a stale receiver asks again
        self._status_due = [now] * servers
        self._next_status = now if servers else math.inf  # the first of them
        self._status_at = now - 1.0
        self._behind: tuple[float, int, int] | None = (
            None  # since when, how many packets, the lowest sequence
        )
        self._unconfirmed: tuple[bytes, int] | None = None
        self._held: dict[int, tuple[int, int, P]] = {}  # first → last, bytes, payload
        self._missing: dict[int, Missing] = {}
        self._held_bytes = 0
        self._new_gaps: list[Gap] = []
        self._oldest_wanted = False
        self._base = 1  # the first sequence that the session ever had, as far as is known
        self._receivers = 1  # subscribers that the publisher knows of
        self._ended_at: int | None = None
        self._gaps = self._table()

    def _table(self) -> GapTable:
        return GapTable(
            self.policy,
            self._servers,
            self._random,
            self.counters,
            tcp=self._tcp,
            given_up=self._missing,
            receivers=self._receivers,
        )

    # -- state -------------------------------------------------------------------------------------------

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """What is missing now, as (first, last)."""
        return list(self._gaps)

    @property
    def session_text(self) -> str | None:
        """The session that is followed, as text."""
        return None if self.session is None else self.session.decode("ascii", "replace").rstrip()

    def silent_s(self, now: float) -> float:
        """How long no living sender was heard."""
        return now - self._live_at

    @property
    def held_bytes(self) -> int:
        """What waits behind gaps."""
        return self._held_bytes

    @property
    def complete(self) -> bool:
        """The session has ended, and everything of it was delivered or is lost."""
        return self._ended_at is not None and self.expected >= self._ended_at

    @property
    def open_missing(self) -> int:
        """Messages counted as missing, and neither repaired nor lost yet."""
        return self._gaps.open_confirmed

    # -- in ----------------------------------------------------------------------------------------------

    def in_order(self, session: bytes, first: int, count: int, payload: P) -> bool:
        """The fast way: True, and the payload is in `ready`, if it is just what is expected next."""
        if first != self.expected or first != self.highest or session != self.session:
            return False
        self.expected = self.highest = first + count
        self.counters.delivered += count
        self._oldest_wanted = False
        self._ended_at = None
        self._behind = None
        self.ready.append((session, payload))
        return True

    def next_in_order(self, count: int, now: float, into: deque[T], item: T) -> None:
        """`wants` and `in_order` at once, for a live packet that begins with `expected` where no gap is open.

        `item` is handed over by way of `into`: `ready`, or what the caller has if `ready` is empty.
        """
        self._heard_at = self._live_at = now
        self._unconfirmed = self._behind = self._ended_at = None
        self._oldest_wanted = False
        if self.stale:
            self._alive(now)
        self.expected = self.highest = self.expected + count
        self.counters.delivered += count
        into.append(item)

    def wants(
        self,
        session: bytes,
        first: int,
        count: int,
        now: float,
        *,
        live: bool = True,
        proven: bool = True,
    ) -> bool:
        """Is there something new in a packet with these messages? Call `accept` at once if so.

        `live`: it came by multicast and proves that its sender is alive. `proven`: it may begin a session.
        """
        if not self._follow(session, first, now, live=live, proven=proven):
            return False
        last = first + count - 1
        if last < self.expected or (last < self.highest and not self._gaps.overlaps(first, last)):
            if live and self._went_back(first, last + 1, now):
                return False
            self.counters.duplicates += count
            return False
        return True

    def accept(
        self,
        first: int,
        count: int,
        payload: P,
        size: int,
        now: float,
        *,
        repair: bool = False,
        shared: bool = False,
    ) -> None:
        """Take a packet that is wanted. `repair`: it came from a request server; `shared`: to the whole group."""
        last = first + count - 1
        self._behind = None
        known = self._fill(first, min(last, self.highest - 1), count, payload, size, now, repair, shared)
        if last >= self.highest:
            start = max(first, self.highest)
            known += last - start + 1
            if self._ended_at is not None and last >= self._ended_at:
                self._ended_at = None  # the sender goes on after all
            no_room = self._crowded(size) or (self._gaps.full and start > self.highest)
            if start == self.expected or not no_room:
                self._miss(start, now)
                self.highest = last + 1
                self._hold(start, last, first, count, payload, size)
            else:
                self._miss(last + 1, now)
                self.counters.not_held += last - start + 1
        self.counters.duplicates += count - known
        self._advance()

    def _crowded(self, size: int) -> bool:
        return self._held_bytes + size > self.policy.max_held_bytes

    def _fill(
        self, first: int, last: int, count: int, payload: P, size: int, now: float, repair: bool, shared: bool
    ) -> int:
        """Put the parts of a packet where they are missing; return how many of its messages were missing."""
        if last < first or not self._gaps:
            return 0
        no_room = self._crowded(size) or (self._gaps.full and self._gaps.would_split(first, last))
        if no_room and not first <= self._gaps.first <= last:
            # Only what can be handed over at once is taken; the rest stays missing and is asked for again.
            self.counters.not_held += last - first + 1
            return last - first + 1
        parts = self._gaps.fill(first, last, now, repair=repair, shared=shared)
        for a, b in parts:
            self._hold(a, b, first, count, payload, size)
        return sum(b - a + 1 for a, b in parts)

    def wants_shared(self, session: bytes, first: int, count: int, asked: int, now: float) -> bool:
        """Is there something new in a repair that came to the whole group? Call `accept` at once if so.

        It begins no session and proves nothing of its sender, but tells how many messages an answer holds.
        """
        if session != self.session:
            self.counters.other_session += 1
            return False
        if asked > count:
            self._gaps.learn_capacity(count)
        return self.wants(session, first, count, now, live=False)

    def share_among(self, receivers: int) -> None:
        """The publisher knows so many subscribers: what several lack is asked for by one of them."""
        self._receivers = self._gaps.receivers = max(1, receivers)

    def heartbeat(self, session: bytes, following: int, now: float, *, live: bool = True) -> None:
        """`following` is the next sequence that will be sent."""
        if self._follow(session, following, now, live=live, proven=live):
            if live and self._went_back(following, following, now):
                return
            self._miss(following, now)
            self._advance()

    def status(self, answer: Status, now: float, *, proven: bool = True) -> None:
        """A request server says what it has. Without a living publisher this is how a session is found."""
        following, new = answer.next, answer.session != self.session
        if self._follow(answer.session, following, now, live=False, proven=proven):
            self._base = max(self._base, answer.base)
            self.share_among(answer.receivers)
            if new or self.stale:  # otherwise what is newest is on its way to us
                self._miss(following, now)
                self._advance()

    def want_status(self, now: float) -> None:
        """The publisher wants to know where we are; told at most every `retry.first_s / 2`."""
        due = max(now, self._status_at + self.policy.retry.first_s / 2)
        self._status_due = [min(before, due) for before in self._status_due]
        self._next_status = min(self._status_due, default=math.inf)

    def end(self, session: bytes, following: int, now: float) -> None:
        """Nothing comes after `following - 1`."""
        if self._follow(session, following, now, live=True, proven=True) and following >= self.highest:
            self._miss(following, now)
            self._ended_at = following
            self._advance()
            self.want_status(now)  # the publisher need not stay for us

    def gone(self, server: int, answer: Gone, now: float) -> None:
        """A request server says that it has a range no longer."""
        if answer.session != self.session or answer.oldest > self.highest + self.policy.max_jump:
            return
        self.counters.gone += 1
        self._base = max(self._base, answer.base)
        self._gaps.gone(server, answer.first, min(answer.oldest, self.highest), now)

    def failed(self, repair_request: RepairRequest, now: float) -> None:
        """A TCP fetch ended without bringing everything."""
        self._gaps.failed(repair_request.first, now)

    def attribute_to_kernel(self, drops: int) -> int:
        """The kernel dropped so many packets that no gap showed yet: as many of the new gaps are its doing.

        Returns how many were.
        """
        attributed = [gap for gap in self._new_gaps if not gap.confirmed][:drops]
        for gap in attributed:
            gap.kernel = True
        self._new_gaps.clear()
        return len(attributed)

    @property
    def has_new_gaps(self) -> bool:
        """Gaps appeared since `blame` was called."""
        return bool(self._new_gaps)

    # -- out ---------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When to call `due_requests` again, if no packet comes before."""
        due = min(self._next_status, self._stale_deadline())
        gap = self._gaps.next_deadline()
        return due if gap is None or due < gap else gap

    def _stale_deadline(self) -> float:
        if self.stale:
            return self._stale_due
        return math.inf if self.complete else self._live_at + self.policy.stale_after_s

    def due_requests(self, now: float) -> list[RepairRequest]:
        """What to send now; `messages` 0 is a question for the status. May put `Missing` into `ready`."""
        if now >= self._stale_deadline():
            self._handle_stale(now)
        due_requests, lost = self._gaps.due_requests(now)
        if lost:
            self._advance()
        if now < self._next_status:
            return due_requests
        for server, due in enumerate(self._status_due):
            if due <= now:
                self._status_due[server] = now + self.policy.status_every_s
                self._status_at = now
                self.counters.statuses += 1
                due_requests.append(RepairRequest(server, self.expected, 0, False))
        self._next_status = min(self._status_due, default=math.inf)
        return due_requests

    def _handle_stale(self, now: float) -> None:
        """No living sender was heard for too long: ask the servers what there is, again and again."""
        if not self.stale:
            self.stale = True
            self.counters.stale += 1
            self._stale_attempt = 0
        self._stale_due = now + self.policy.stale_retry.delay_s(self._stale_attempt, self._random)
        self._stale_attempt += 1
        self.stale_attempts += 1
        self._ask_all(now)

    def _ask_all(self, now: float) -> None:
        """Ask every server for its status at once."""
        self._status_due = [now] * len(self._status_due)
        self._next_status = now if self._status_due else math.inf

    def _went_back(self, first: int, following: int, now: float) -> bool:
        """A living sender says something lower than before. True if it has done nothing else for a while."""
        if following >= self.highest:
            self._behind = None
            return False
        since, packets, lowest = self._behind or (now, 0, first)
        self._behind = (since, packets + 1, min(first, lowest))
        if packets < 2 or now < since + self.policy.rewind_after_s:
            return False
        session = self.session
        assert session is not None
        self.counters.rewinds += 1
        self._close()
        self._closed.pop(session, None)
        self._open(session, self._behind[2], self._behind[2])
        self._behind = None
        return True

    def take(self) -> list[tuple[bytes, P | Missing]]:
        """What can be handed over, in order, each with its session."""
        ready = list(self.ready)
        self.ready.clear()
        return ready

    def recover(self, now: float) -> None:
        """A call was interrupted: whatever is neither handed over, held nor given up is missing.

        A packet that was swallowed is asked for as if it were lost on its way.
        """
        if self.session is None:
            return
        known = [(first, held[0]) for first, held in self._held.items()]
        known += [(first, missing.last) for first, missing in self._missing.items()]
        self.highest = max([self.highest, self.expected, *(last + 1 for _, last in known)])
        following = self.expected
        gaps = []
        for first, last in sorted([*known, (self.highest, self.highest)]):
            if first > following:
                gaps.append((following, first - 1))
            following = last + 1
        self._new_gaps.clear()
        table = self._table()
        table.resume(gaps, now + self._wait_s)
        self._gaps = table
        self._advance()

    # -- sessions ----------------------------------------------------------------------------------------

    def _follow(self, session: bytes, first: int, now: float, *, live: bool, proven: bool) -> bool:
        """Is this packet's session the one that we follow, or will follow from now on?"""
        if session == self.session:
            if live:
                self._heard_at = self._live_at = now
                if self.stale:
                    self._alive(now)
            if first > self.highest + self.policy.max_jump and not self._seen_twice(session, first):
                self.counters.implausible += 1
                return False
            self._unconfirmed = None
            return True
        if not proven:
            self.counters.replayed += 1
            return False
        if not session_matches(session, self._wanted):
            self._refuse(session)
            return False
        if self.session is None:
            if live:
                self._alive(now)
            self._heard_at = now
            self._open(session, self._start(session), first)
            return True
        silence_s = self.policy.session_silence_s if session in self._closed else self.policy.session_switch_s
        if now < self._heard_at + silence_s or not self._seen_twice(session, first):
            self._refuse(session)
            return False
        self._close()
        if live:
            self._alive(now)
        self._heard_at = now
        self._open(session, self._closed.get(session, 1), first)
        self._closed.pop(session, None)
        return True

    def _alive(self, now: float) -> None:
        self._heard_at = self._live_at = now
        if self.stale:
            self.stale = False
            self._ask_all(now)

    def _refuse(self, session: bytes) -> None:
        self.counters.other_session += 1
        if session in self.sessions_heard or len(self.sessions_heard) < REMEMBERED_SESSIONS:
            self.sessions_heard[session] = self.sessions_heard.get(session, 0) + 1

    def _seen_twice(self, session: bytes, sequence: int) -> bool:
        """A second packet that agrees with a first one makes a rumour a fact."""
        before = self._unconfirmed
        self._unconfirmed = (session, sequence)
        if before is None or before[0] != session:
            return False
        if abs(sequence - before[1]) > self.policy.max_jump:
            return False
        self._unconfirmed = None
        return True

    def _open(self, session: bytes, start: int, seen: int) -> None:
        self._behind = None
        begin = max(1, seen if start == LIVE else start)
        self.session = session
        self.counters.sessions += 1
        self._oldest_wanted = start == OLDEST
        self.expected = self.highest = begin
        self._base = 1
        self._ended_at = None

    def _close(self) -> None:
        assert self.session is not None
        self._gaps.drop_all(Reason.PRODUCER_CRASH)
        self._advance()
        self._closed[self.session] = self.expected
        if len(self._closed) > REMEMBERED_SESSIONS:
            del self._closed[next(iter(self._closed))]
        self._gaps = self._table()
        self._held.clear()
        self._missing.clear()
        self._held_bytes = 0
        self._new_gaps.clear()

    # -- order -------------------------------------------------------------------------------------------

    def _miss(self, following: int, now: float) -> None:
        """Everything below `following` exists; what is above `highest` is missing."""
        if following > self.highest:
            first, self.highest = self.highest, following
            gap = self._gaps.add(first, following - 1, now, self._wait_s)
            if gap is not None:
                self._new_gaps.append(gap)

    def _hold(self, a: int, b: int, first: int, count: int, payload: P, size: int) -> None:
        """Keep the messages `a` to `b` of a packet."""
        take = b - a + 1
        part = payload if take == count else payload.part(a - first, take)
        size = size if take == count else size * take // count
        self._held[a] = (b, size, part)
        self._held_bytes += size

    def _advance(self) -> None:
        """Hand over what is next, as far as it goes."""
        session = self.session
        assert session is not None
        while True:
            first = self.expected
            held = self._held.get(first)
            if held is not None:
                last, size, payload = held
                del self._held[first]
                self._held_bytes -= size
                self.counters.delivered += last - first + 1
                self.expected = last + 1
                self._oldest_wanted = False
                self.ready.append((session, payload))
                continue
            missing = self._missing.get(first)
            if missing is None:
                return
            self._report(session, missing)

    def _report(self, session: bytes, missing: Missing) -> None:
        """Hand over that something is lost, but for what was never promised to this receiver."""
        first, last, reason = missing
        unwanted = 0
        if reason is Reason.EVICTED:
            wanted_from = last + 1 if self._oldest_wanted else min(last + 1, self._base)
            unwanted = max(0, wanted_from - first)
        begin = first + unwanted
        before = self._loss_before(session, reason)
        if before is not None:
            begin = before.first  # one loss is one Lost, however many requests it took to find out
        told = (session, Missing(begin, last, reason))
        del self._missing[first]
        self.counters.lost -= unwanted
        self.counters.skipped += unwanted
        self.expected = last + 1
        if first + unwanted > last:
            return
        self._oldest_wanted = False
        if before is not None:
            self.ready[-1] = told
        else:
            self.ready.append(told)

    def _loss_before(self, session: bytes, reason: Reason) -> Missing | None:
        """The loss that was handed over last, if another one would go on with it."""
        if self.ready:
            where, before = self.ready[-1]
            if isinstance(before, Missing) and where == session and before.reason == reason:
                return before
        return None
