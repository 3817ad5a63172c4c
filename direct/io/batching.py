"""When staged events are sent: at once when idle, in batches when busy, and never later than `max_wait_s`.

The lane looks at `due` after every event. If the last frame went out long enough ago, the frame goes out
in the caller's thread: no hand-over, no waking of threads. Otherwise the event is batched; the first
publish after the deadline flushes. When publishing stops, a thread flushes; every batch moves its timer, so
that it sleeps as long as publishing goes on.

How long "long enough" is follows from what sending costs, which depends on the journal, the machine and its
load: a publisher spends at most a fifth of its time on sending while frames are small, and a twentieth once
they are well filled; never longer than half of `max_wait_s`. The cost is the smaller of the last two: being
interrupted once while sending is no reason to let the next event wait. While frames are small, time in which nothing
was sent counts, up to a millisecond: a few events in quick succession after a pause all go out at once. This does not
apply while the publisher is busy.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable

from brokerless.core import Journal, Receipt
from brokerless.core.errors import BrokerlessError
from brokerless.direct.counters import PublisherCounters

log = logging.getLogger(__name__)
# From this many events on a frame is well filled: sending it costs less than making the events.
_WELL_FILLED = 16
_SHARE_SMALL = 5
_SHARE_FILLED = 20
# How much time without sending counts: some ten events in a row, and nothing at full rate.
_CREDIT_NS = 1_000_000
# After a well filled frame it does not count for so long: a busy publisher that sends nothing has not paused, it waits
# for Python's lock, which another thread may hold for 5 ms.
_BUSY_NS = 20_000_000
# What a lone event counts as: telling it takes some 10 µs, and sending at most a fifth of the time.
_PAUSE_NS = 50_000


class Batcher:
    """Owns the thread; `stop` joins it. Times are nanoseconds since 1970, as events have them."""

    __slots__ = (
        "_busy",
        "_cost",
        "_counters",
        "_failing",
        "_grace",
        "_journal",
        "_longest",
        "_stopping",
        "_thread",
        "_timer",
        "_wait",
        "lane",
    )

    def __init__(
        self,
        journal: Journal,
        max_wait_s: float,
        counters: PublisherCounters,
        otherwise: Callable[..., Receipt],
        *,
        send_single: Callable[[bytes], None] | None = None,
        name: str,
    ) -> None:
        """`lane` stages events and calls us in time; what is not ordinary goes to `otherwise`, which calls `staged`.

        `send_single` is called with the frame of an event that is due and alone, where the journal keeps such ones.
        """
        self._journal = journal
        self.lane = journal.lane(otherwise, self.flush, self.arm, send_single)
        self.lane.credit = _CREDIT_NS
        self.lane.pause = min(_PAUSE_NS, int(max_wait_s * 1e9) // 2)
        self._counters = counters
        self._wait = int(max_wait_s * 1e9)
        self._longest = self._wait // 2
        self._grace = self._wait // 5
        self._cost = 0
        self._busy = 0
        self._failing = False
        self._stopping = False
        self._timer = Timer()
        self._thread = threading.Thread(target=self._run, name=f"brokerless flush {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and join; what is staged stays staged."""
        self._stopping = True
        if self._thread.is_alive():
            # Again and again, because somebody may move the timer at the same time.
            while self._thread.is_alive():
                self._timer.set(1)
                self._thread.join(0.01)
        self._timer.close()

    def staged(self, now: int) -> None:
        """An event was staged: send it if it is time."""
        if now >= self.lane.due:
            self.flush(now)
        elif not self.lane.armed:
            self.arm(now)

    def arm(self, now: int) -> None:
        """An event was staged that is not sent now: see to it that it is, in time."""
        if self.lane.due - now > self._longest:
            self.flush(now)  # the clock was set back
        else:
            # Some time after it is due: a publisher that goes on does it by then, and the thread sleeps.
            self.lane.armed = True
            self._timer.set(min(self._wait, self.lane.due - now + self._grace))

    def flush(self, now: int) -> None:
        """Send what is staged, and decide when the next batch is due."""
        self.lane.armed = False
        try:
            frame = self._journal.flush()
        except BrokerlessError as error:
            # The events stay accepted and staged. The caller's next one is refused if there is no room left.
            self._counters.flush_errors += 1
            if not self._failing:
                log.error("batch not written, it will be tried again: %s", error)
            self._failing = True
            self.lane.due = now + self._longest
            self._timer.set(100_000_000)
            return
        self._failing = False
        if frame is not None:
            since = done = time.time_ns()
            cost, before = max(0, done - now), self._cost
            self._cost = cost
            share = _SHARE_FILLED
            if frame.header.count >= _WELL_FILLED:
                self._busy, self.lane.credit = done + _BUSY_NS, 0
            else:
                share = _SHARE_SMALL
                if not self.lane.credit and not self._busy - _BUSY_NS <= done < self._busy:
                    self.lane.credit = _CREDIT_NS
                since = min(done, max(self.lane.due, done - self.lane.credit))
            self.lane.due = since + min(self._longest, min(cost, before) * share)

    def _run(self) -> None:
        while True:
            self._timer.wait()
            if self._stopping:
                return
            # Before looking: an event that came while this was set is seen now, a later one sets the timer again.
            # A flush may have sent the event that set it.
            self.lane.armed = False
            if self._journal.staged:
                self.flush(time.time_ns())


_CLOEXEC = os.O_CLOEXEC
_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


# PyDLL keeps the interpreter lock during the call, which is shorter than giving it away.
_libc = ctypes.PyDLL(None, use_errno=True)


class Timer:
    """A one-shot timer that one thread sets and another waits for. `set` may be called from any thread.

    A `threading.Event` with a timeout cannot be moved without waking the waiter, which costs a busy Python program two
    changes of the interpreter lock. Linux' timerfd can: moving it is one system call.
    """

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(_MONOTONIC, _CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._value = self._spec.value
        self._pointer = ctypes.byref(self._spec)
        self._settime = _libc.timerfd_settime

    def set(self, nanoseconds: int) -> None:
        """Fire once, so long from now; replaces what was set before. At least 1 ns."""
        value = self._value
        value.sec, value.nsec = divmod(max(1, nanoseconds), 1_000_000_000)
        self._settime(self._fd, 0, self._pointer, None)

    def wait(self) -> None:
        """Wait until it fires."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Release it; nobody may wait any more."""
        fd, self._fd = self._fd, -1  # a late `set` must not hit whatever gets this number next
        if fd >= 0:
            os.close(fd)
