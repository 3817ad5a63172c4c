"""Which sequence numbers are missing, whom to ask for them, and when to stop asking. Pure: `now` is given.

The caller adds gaps when it sees them, fills them when packets come, and sends what `due_requests` returns (`io.py`
does all of that, the requests in `SubscriberIo._send_request`). A gap is first left alone (packets overtake each
other), then *confirmed*, left alone once more if there are other receivers (one of them may ask, and all get the
answer), then asked for, then asked again with back-off at the next server, and at last given up. A gap that is long
goes over TCP, one at a time.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from brokerless.core.event import Reason
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.policy import RepairPolicy

# The `due` of a gap that has no timer: it is first when a place in flight is free.
_WAITING = -1.0
# When no server has answered over TCP (a firewall, too many connections), long gaps are asked for by datagrams for so
# long: a refused connection for each of them would cost more time than the datagrams.
_NO_TCP_S = 10.0


class RepairRequest(NamedTuple):
    """Send this: `messages` messages from `first` are wanted from server number `server`."""

    server: int
    first: int
    messages: int
    tcp: bool


class Missing(NamedTuple):
    """Sequence numbers `first` to `last` will not come."""

    first: int
    last: int
    reason: Reason


class Gap:
    """Consecutive missing sequence numbers and what was done about them."""

    __slots__ = (
        "asked_at",
        "attempt",
        "confirmed",
        "due",
        "first",
        "gone_by",
        "in_flight",
        "kernel",
        "last",
        "server",
        "tcp",
    )

    def __init__(self, first: int, last: int, due: float) -> None:
        self.first = first
        self.last = last
        self.due = due  # when to do the next thing about it
        self.attempt = 0
        self.confirmed = False  # still missing after the reorder wait, and counted
        self.asked_at: float | None = None  # the first time, or the last time that an answer brought a part
        self.in_flight = False  # asked, and neither answered nor overdue
        self.tcp = False
        self.server = -1
        self.gone_by = 0  # bit per server that said it no longer has it
        self.kernel = False  # the kernel dropped packets here, not the network

    def __len__(self) -> int:
        return self.last - self.first + 1

    def split(self, first: int) -> "Gap":
        """Cut off the part from `first` on, and return it with the same history."""
        other = Gap(first, self.last, self.due)
        other.attempt, other.confirmed, other.asked_at = self.attempt, self.confirmed, self.asked_at
        other.server, other.gone_by, other.kernel = self.server, self.gone_by, self.kernel
        self.last = first - 1
        return other


class GapTable:
    """All gaps of one session, in order. Counts `gaps`, `missing_*`, `repaired`, `late`, `requests`."""

    def __init__(
        self,
        policy: RepairPolicy,
        servers: int,
        random: Callable[[], float],
        counters: SubscriberCounters,
        *,
        tcp: bool = True,
        given_up: dict[int, Missing] | None = None,
        receivers: int = 1,
    ) -> None:
        self.policy = policy
        self.receivers = receivers  # as many as the publisher knows of
        self.servers = servers
        # What will not come, by its first number, until the caller takes it out.
        self.given_up = {} if given_up is None else given_up
        self.tcp = tcp
        self._random = random
        self._counters = counters
        self._firsts: list[int] = []
        self._gaps: list[Gap] = []
        self._timers: list[tuple[float, int, Gap]] = []
        self._ticket = 0
        self._waiting: deque[Gap] = deque()  # due, but too many are in flight
        self._in_flight = 0
        self._fetching: Gap | None = None
        self._fetch_first = 0  # what the fetch was asked to begin with: which fetch it is
        self._fetches_failed = 0  # one after another, that brought nothing
        self._tcp_after = -math.inf  # when to fetch again
        # How many messages one answer holds, once an answer held fewer than were asked for.
        self._capacity: int | None = None
        self._full_answers = 0

    def __len__(self) -> int:
        return len(self._gaps)

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(gap.first, gap.last) for gap in self._gaps])

    @property
    def full(self) -> bool:
        """No more gaps may be kept apart: the caller keeps no packet that would make one more."""
        return len(self._gaps) >= self.policy.max_gaps

    @property
    def first(self) -> int:
        """The lowest missing number. Raises IndexError when nothing is missing."""
        return self._firsts[0]

    @property
    def messages(self) -> int:
        """How many are missing."""
        return sum(map(len, self._gaps))

    @property
    def open_confirmed(self) -> int:
        """How many of them were counted as missing."""
        return sum(len(gap) for gap in self._gaps if gap.confirmed)

    # -- what is missing ---------------------------------------------------------------------------------

    def add(self, first: int, last: int, now: float, wait_s: float) -> Gap | None:
        """`first` to `last`, which lie after all others, are missing. Returns the gap if it is a new one."""
        if self._gaps:
            tail = self._gaps[-1]
            if tail.last == first - 1 and (self.full or not (tail.confirmed or tail.in_flight)):
                tail.last = last
                if tail.confirmed:
                    self._count_missing(tail, last - first + 1)
                return None
        gap = Gap(first, last, now + wait_s * (1 - 0.5 * self._random()))
        self._insert(gap)
        return gap

    def resume(self, missing: list[tuple[int, int]], due: float) -> None:
        """These are missing: a new table takes over from one that a signal's handler left half-way.

        They had been missing before, most of them; the counters are made to agree.
        """
        for first, last in missing:
            gap = Gap(first, last, due)
            gap.confirmed = True
            self._insert(gap)
        messages = self.messages
        c = self._counters
        counted = c.missing_kernel + c.missing_network - c.repaired - c.late - c.lost - c.skipped
        if counted <= messages:
            c.missing_network += messages - counted
        else:
            c.repaired += counted - messages

    def fill(
        self, first: int, last: int, now: float, *, repair: bool, shared: bool = False
    ) -> list[tuple[int, int]]:
        """These arrived: returns the parts of them that were missing, and closes the gaps they fill.

        `shared`: a repair that came to the whole group, whoever asked for it.
        """
        found = []
        at = max(0, bisect_right(self._firsts, first) - 1)
        while at < len(self._gaps) and self._gaps[at].first <= last:
            gap = self._gaps[at]
            if gap.last < first:
                at += 1
                continue
            a, b = max(first, gap.first), min(last, gap.last)
            found.append((a, b))
            if gap.confirmed:
                if repair:
                    self._counters.repaired += b - a + 1
                else:
                    self._counters.late += b - a + 1
            if gap.last > b:
                self._keep_rest(at, gap, a, b, now, repair, shared)
                break
            if gap.first < a:
                gap.last = a - 1
                at += 1
            else:
                if repair and gap.in_flight and not gap.tcp and b - a + 1 == self._capacity:
                    self._grow_capacity()
                self._remove(at)
        return found

    def _grow_capacity(self) -> None:
        """Answers are always full: maybe more would fit. Tried seldom: being wrong costs a request."""
        self._full_answers += 1
        if self._full_answers >= 16 and self._capacity:
            self._full_answers = 0
            self._capacity += self._capacity // 4 + 1

    def learn_capacity(self, messages: int) -> None:
        """An answer held so many, and fewer than were asked for."""
        self._capacity = max(messages, (self._capacity or 0) // 2)
        self._full_answers = 0

    def _keep_rest(self, at: int, gap: Gap, a: int, b: int, now: float, repair: bool, shared: bool) -> None:
        """A gap was filled up to `b` and goes on behind it."""
        if gap.first < a:
            self._insert(gap.split(b + 1))
            gap.last = a - 1
            return
        gap.first = self._firsts[at] = b + 1
        if not (repair and gap.in_flight):
            return
        gap.asked_at = now
        if gap.tcp:
            self._fetches_failed = 0
            self._schedule(gap, now + self.policy.tcp_idle_s)
            return
        self._clear_in_flight(gap)
        gap.attempt = 0
        if shared:  # maybe somebody else asked for it: one of us asks for the rest
            self._schedule(gap, now + self._share_wait_s())
            return
        # The answer held fewer than were asked for: now it is known how many fit, ask for the rest at once.
        self.learn_capacity(b - a + 1)
        self._schedule(gap, now)

    def drop_all(self, reason: Reason) -> list[Missing]:
        """Give up everything."""
        gone = [self._lose(gap, reason) for gap in self._gaps]
        self._firsts.clear()
        self._gaps.clear()
        self._timers.clear()
        self._waiting.clear()
        self._in_flight = 0
        self._fetching = None
        return gone

    def overlaps(self, first: int, last: int) -> bool:
        """Is any of these missing?"""
        at = bisect_right(self._firsts, last) - 1
        return at >= 0 and self._gaps[at].last >= first

    def would_split(self, first: int, last: int) -> bool:
        """Do these lie in the middle of one gap, so that filling it would make two of it?"""
        at = bisect_right(self._firsts, first) - 1
        return at >= 0 and self._firsts[at] < first and self._gaps[at].last > last

    # -- whom to ask, and when ---------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When to call `due_requests` again; None: when a packet comes."""
        if self._waiting and self._in_flight < self.policy.max_outstanding:
            return 0.0
        timers = self._timers
        while timers and (timers[0][2].due != timers[0][0] or len(timers[0][2]) <= 0):
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def due_requests(self, now: float) -> tuple[list[RepairRequest], list[Missing]]:
        """What to send now, and what is given up now."""
        requests: list[RepairRequest] = []
        lost: list[Missing] = []
        limit = self.policy.max_outstanding
        while self._in_flight < limit and self._waiting:
            gap = self._waiting.popleft()
            if gap.due == _WAITING:
                self._handle_due(gap, now, requests, lost)
        while True:
            due = self.next_deadline()
            if due is None or due > now or (due == 0.0 and self._waiting):
                break
            gap = heapq.heappop(self._timers)[2]
            if gap.in_flight:
                self._counters.unanswered += 1
                if gap is self._fetching:
                    self._count_empty_fetch(now)
                self._clear_in_flight(gap)
            self._handle_due(gap, now, requests, lost)
        return requests, lost

    def _handle_due(self, gap: Gap, now: float, requests: list[RepairRequest], lost: list[Missing]) -> None:
        """A gap's time has come: ask, wait for a free place, or give up."""
        if len(gap) <= 0:
            return
        if not gap.confirmed:
            gap.confirmed = True
            self._counters.gaps += 1
            self._count_missing(gap, len(gap))
            wait_s = self._share_wait_s()
            if wait_s and not (self.tcp and len(gap) > self.policy.tcp_threshold):
                self._schedule(gap, now + wait_s)
                return
        every = (1 << self.servers) - 1
        overdue = gap.asked_at is not None and now >= gap.asked_at + self.policy.give_up_s
        if gap.gone_by == every or overdue:
            reason = Reason.GAVE_UP
            if not self.servers:
                reason = Reason.OVERFLOW_RECEIVER if gap.kernel else Reason.IN_FLIGHT
            elif gap.gone_by == every:
                reason = Reason.EVICTED
            lost.append(self._lose(gap, reason))
            self._remove(bisect_left(self._firsts, gap.first))
            return
        if self._in_flight >= self.policy.max_outstanding:
            gap.due = _WAITING
            self._waiting.append(gap)
            return
        over_tcp = self.tcp and len(gap) > self.policy.tcp_threshold and now >= self._tcp_after
        if over_tcp and self._fetching is not None:
            self._schedule(gap, now + self.policy.reorder_wait_s + self.policy.retry.first_s)
            return
        if not (over_tcp or self.full) and self._capacity is not None and len(gap) > self._capacity:
            rest = gap.split(gap.first + self._capacity)
            rest.due = now
            self._insert(rest)
        if gap.asked_at is None:
            gap.asked_at = now
        gap.server = self._choose(gap)
        gap.in_flight = True
        self._in_flight += 1
        gap.tcp = over_tcp
        if over_tcp:
            self._fetching = gap
            self._fetch_first = gap.first
            self._counters.fetches += 1
            wait = self.policy.tcp_idle_s
        else:
            self._counters.requests += 1
            wait = self.policy.retry.delay_s(gap.attempt, self._random)
        gap.attempt += 1
        self._schedule(gap, min(now + wait, gap.asked_at + self.policy.give_up_s))
        requests.append(RepairRequest(gap.server, gap.first, len(gap), over_tcp))

    def _share_wait_s(self) -> float:
        """How long to wait for a repair that somebody else asks for: exponentially distributed and truncated.

        So few are early, and the others hear the answer of the first (RFC 5401, section 3.2.2).
        """
        longest_s = min(self.policy.share_slot_s * self.receivers, self.policy.share_wait_s)
        if self.receivers < 2 or not self.servers or not longest_s:
            return 0.0
        rate = math.log(self.receivers) + 1
        return longest_s / rate * math.log1p(self._random() * math.expm1(rate))

    def gone(self, server: int, first: int, oldest: int, now: float) -> None:
        """Server number `server` has nothing from `first` up to `oldest` (exclusive) any more."""
        at = max(0, bisect_right(self._firsts, first) - 1)
        while at < len(self._gaps) and self._gaps[at].first < oldest:
            gap = self._gaps[at]
            at += 1
            if not gap.confirmed or gap.last < first:
                continue
            if gap.first < first:
                self._insert(gap.split(first))
                continue
            if gap.last >= oldest:
                rest = gap.split(oldest)
                rest.due = now
                self._insert(rest)
            gap.gone_by |= 1 << server
            if gap.in_flight and gap.server == server:
                self._clear_in_flight(gap)
            if not gap.in_flight:
                self._schedule(gap, now)

    def failed(self, first: int, now: float) -> None:
        """The TCP fetch that was asked for from `first` on ended without bringing everything."""
        gap = self._fetching
        if gap is None or first != self._fetch_first:
            return
        if gap.first == first:
            self._count_empty_fetch(now)
        self._clear_in_flight(gap)
        wait = self.policy.retry.delay_s(max(0, gap.attempt - 1), self._random)
        self._schedule(gap, now + wait)

    def _count_empty_fetch(self, now: float) -> None:
        """A fetch brought nothing. After every server had its turn, go on with datagrams."""
        self._fetches_failed += 1
        if self._fetches_failed >= self.servers:
            self._fetches_failed = 0
            self._tcp_after = now + _NO_TCP_S

    def _choose(self, gap: Gap) -> int:
        """The next server that has not said that it no longer has this gap.

        The first one depends on the gap alone, so that all receivers that lack the same ask the same server.
        """
        first = gap.server + 1 if gap.attempt else gap.first
        following = ((first + i) % self.servers for i in range(self.servers))
        return next(server for server in following if not gap.gone_by >> server & 1)

    # -- bookkeeping -------------------------------------------------------------------------------------

    def _insert(self, gap: Gap) -> None:
        if not self._firsts or gap.first > self._firsts[-1]:
            self._firsts.append(gap.first)
            self._gaps.append(gap)
        else:
            at = bisect_left(self._firsts, gap.first)
            self._firsts.insert(at, gap.first)
            self._gaps.insert(at, gap)
        self._schedule(gap, gap.due)

    def _remove(self, at: int) -> None:
        gap = self._gaps.pop(at)
        del self._firsts[at]
        self._clear_in_flight(gap)
        gap.last = gap.first - 1  # empty: timers and queues that still name it pass it over

    def _schedule(self, gap: Gap, due: float) -> None:
        gap.due = due
        self._ticket += 1
        heapq.heappush(self._timers, (due, self._ticket, gap))

    def _clear_in_flight(self, gap: Gap) -> None:
        if gap.in_flight:
            gap.in_flight = False
            self._in_flight -= 1
        if self._fetching is gap:
            self._fetching = None

    def _lose(self, gap: Gap, reason: Reason) -> Missing:
        if not gap.confirmed:
            self._counters.gaps += 1
            self._count_missing(gap, len(gap))
        missing, messages = Missing(gap.first, gap.last, reason), len(gap)
        # Counted when it is kept: a signal's handler that raises comes before both or after both.
        self._counters.lost += messages
        self.given_up[missing.first] = missing
        return missing

    def _count_missing(self, gap: Gap, messages: int) -> None:
        if gap.kernel:
            self._counters.missing_kernel += messages
        else:
            self._counters.missing_network += messages
