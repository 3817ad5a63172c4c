"""One lane per endpoint: what it holds, how many attempts it may make, and when. No clock, no I/O.

The caller gives `now` in seconds of a monotonic clock, and moves items: `offer` and `loaded` bring them, `take` hands
them out for an attempt, `settle` takes the verdict, and `committed` tells that the result is in the database. Until
then an item is `held`, so that reading the database again cannot bring it a second time. Reads run beside the writer:
`begin_load` starts one, and what is committed or asked for meanwhile is remembered until `loaded`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import urlsplit

from brokerless.core.rate_limit import Backoff, TokenBucket
from brokerless.webhooks.delivery.budget import Health
from brokerless.webhooks.delivery.retry import Outcome, Verdict
from brokerless.webhooks.models import Endpoint, Item

# A pause after an attempt that says "too much" or nothing: one second, then twice as long, up to a minute, so that a
# consumer that came back is found within a minute whatever the schedule of single deliveries says.
BREAKER = Backoff(first_s=1.0, factor=2.0, limit_s=60.0, jitter=0.2)
# Items in memory per lane: some rounds of attempts, so that one read of the database serves several.
MIN_WINDOW, MAX_WINDOW = 32, 512
# One request in batch mode carries at most this much data: common servers accept 1 MiB.
MAX_BATCH_BYTES = 512 * 1024


class Lane:
    """State of one endpoint's deliveries."""

    def __init__(self, endpoint: Endpoint, now: float, bucket: TokenBucket | None = None) -> None:
        self.window: deque[Item] = deque()
        self.in_flight: dict[int, Item] = {}
        self.held: set[int] = set()
        self.attempts = 0
        self.parked = 0
        self.waiting = False
        self.more = True
        self.loading = False
        self.load = 0
        self.next_due: float | None = None
        self.paused_until = 0.0
        self.failures = 0
        self.worked = False
        self.failing_since: int | None = endpoint.failing_since
        self.bytes = 0
        self.limit = 1
        # A new lane begins with one request and not with a second's worth: another process may just have sent those.
        self.bucket = bucket or TokenBucket(0.0, 1.0, now)
        self._settled: set[int] = set()
        self._asked_again = False
        self._due_meanwhile: float | None = None
        self.update(endpoint, now)
        self.limit = self.width

    def update(self, endpoint: Endpoint, now: float) -> None:
        """The endpoint was changed. Another rate brings no requests that the one before had used up."""
        self.endpoint = endpoint
        self.host = urlsplit(endpoint.url).netloc
        self.width = 1 if endpoint.fifo else endpoint.concurrency
        self.limit = min(max(1, self.limit), self.width)
        rates = [rate for rate in (endpoint.rate, endpoint.allowed_rate / 60) if rate > 0]
        rate = min(rates, default=0.0)
        if rate != self.bucket.rate:
            # A burst of one second's worth, at least one request; it has to be saved up first.
            self.bucket.change(rate, max(1.0, rate), now)

    @property
    def health(self) -> Health:
        """Judged by recent answers, and by attempts that have long been unanswered."""
        if self.failures or self.parked:
            return Health.FAILING
        return Health.WORKING if self.worked else Health.UNKNOWN

    @property
    def target(self) -> int:
        """How many items it wants in memory."""
        return min(MAX_WINDOW, max(MIN_WINDOW, 8 * self.width))

    # ── items in ─────────────────────────────────────────────────────────────

    def offer(self, items: Iterable[Item], room: bool) -> int:
        """New deliveries, already in the database; kept if nothing older waits there. Returns bytes taken."""
        before = self.bytes
        for item in items:
            if item.n in self.held:
                continue  # a read of the database was quicker
            if self.more or not room or len(self.window) >= self.target:
                self.ask_for_more()
                break
            self._hold(item)
        return self.bytes - before

    def ask_for_more(self) -> None:
        """The database has something that the lane has not; a read under way may have missed it."""
        self.more = True
        self._asked_again = self.loading

    def begin_load(self) -> int:
        """A read of the database begins; returns its number, which `loaded` takes back."""
        self.loading = True
        self.load += 1
        self._settled.clear()
        self._asked_again = False
        self._due_meanwhile = None
        return self.load

    def loaded(self, load: int, items: Iterable[Item], *, more: bool, next_due: float | None) -> int:
        """What a read of the database brought; `next_due` (monotonic) is when the rest comes due. Returns bytes taken.

        A read that began before the lane was cleared is ignored: its order may be an old one.
        """
        if load != self.load or not self.loading:
            return 0
        before = self.bytes
        for item in items:
            if item.n not in self.held and item.n not in self._settled:
                self._hold(item)
        self.more = more or self._asked_again
        dues = [due for due in (next_due, self._due_meanwhile) if due is not None]
        self.next_due = min(dues, default=None)
        self.loading = False
        return self.bytes - before

    def load_failed(self, load: int) -> None:
        """The read failed: it has to be made again."""
        if load == self.load:
            self.loading = False
            self.more = True

    def _hold(self, item: Item) -> None:
        self.window.append(item)
        self.held.add(item.n)
        self.bytes += len(item.event.data)

    @property
    def idle(self) -> bool:
        """Whether it knows of nothing that is pending."""
        return not (self.held or self.more or self.loading) and self.next_due is None

    def wants(self) -> bool:
        """Whether it should read the database."""
        return self.more and not self.loading and len(self.window) <= self.target // 2

    # ── items out ────────────────────────────────────────────────────────────

    def take(self, now: float, most: int = 1) -> list[Item]:
        """Up to `most` items for one attempt; empty if there is none or it may not be made yet."""
        if not self.window or now < self.paused_until or self.attempts >= self.limit:
            return []
        if not self.bucket.take(1, now):
            return []
        self.attempts += 1
        taken: list[Item] = []
        size = 0
        while self.window and len(taken) < most:
            size += len(self.window[0].event.data)
            if taken and size > MAX_BATCH_BYTES:
                break
            item = self.window.popleft()
            self.in_flight[item.n] = item
            taken.append(item)
        return taken

    def can_start(self, now: float) -> int:
        """How many more attempts may begin now."""
        if not self.window or now < self.paused_until or self.bucket.wait_s(1, now) > 0:
            return 0
        return max(0, min(self.limit - self.attempts, len(self.window)))

    def ready_in(self, now: float) -> float | None:
        """Seconds until it is worth looking again; None: only an event from outside can help."""
        waits = []
        if self.window and self.attempts < self.limit:
            waits.append(max(self.paused_until - now, self.bucket.wait_s(1, now)))
        if self.next_due is not None and not self.more:
            waits.append(max(self.next_due, self.paused_until) - now)
        return max(0.0, min(waits)) if waits else None

    # ── results ──────────────────────────────────────────────────────────────

    def settle(
        self, items: Iterable[Item], verdict: Verdict, now: float, random: Callable[[], float]
    ) -> None:
        """The attempt for these items ended: widen, or narrow and pause."""
        self.attempts -= 1
        for item in items:
            del self.in_flight[item.n]
        if verdict.outcome is Outcome.DELIVERED:
            self.failures = 0
            self.worked = True
            self.limit = min(self.width, self.limit + 1)
            return
        # Attempts that began together fail together: they count once.
        if now >= self.paused_until:
            self.failures += 1
        if verdict.outcome is Outcome.RETRY:
            self.limit = 1 if verdict.slow else max(1, self.limit // 2)
            if verdict.slow:
                delay = BREAKER.delay_s(max(0, self.failures - 1), random)
                self.paused_until = max(self.paused_until, now + max(delay, verdict.pause_s or 0.0))
            elif verdict.pause_s is not None:
                self.paused_until = max(self.paused_until, now + verdict.pause_s)

    def not_attempted(self, items: Sequence[Item]) -> None:
        """The attempt could not be made for a reason of our own: the items wait again, first and untouched."""
        self.attempts -= 1
        for item in items:
            del self.in_flight[item.n]
        self.window.extendleft(reversed(items))

    def put_back(self, items: Iterable[Item], until: float) -> None:
        """FIFO: the failed ones stay first, and the lane waits for them."""
        self.window.extendleft(reversed(list(items)))
        self.paused_until = max(self.paused_until, until)

    def let_go(self, item: Item) -> int:
        """The item left memory (its result is on the way to the database). Returns its bytes."""
        size = len(item.event.data)
        self.bytes -= size
        return size

    def committed(self, number: int, due: float | None) -> None:
        """The result is in the database, with the time (monotonic) of the next attempt if there is one."""
        self.held.discard(number)
        if self.loading:
            self._settled.add(number)
        if due is not None:
            self.next_due = due if self.next_due is None else min(self.next_due, due)
            if self.loading:
                self._due_meanwhile = due if self._due_meanwhile is None else min(self._due_meanwhile, due)

    def drop(self, number: int) -> int:
        """An item was evicted: forget it if it waits, mark it if it is in flight. Returns the bytes freed."""
        if self.loading:
            self._settled.add(number)
        attempted = self.in_flight.get(number)
        if attempted is not None:
            attempted.evicted = True
            return 0
        if number in self.held:
            for index, item in enumerate(self.window):
                if item.n == number:
                    del self.window[index]
                    self.held.discard(number)
                    return self.let_go(item)
        return 0

    def clear(self) -> None:
        """Forget what waits (disabled, deleted or no longer ours); attempts in flight end by themselves."""
        for item in self.window:
            self.held.discard(item.n)
            self.bytes -= len(item.event.data)
        self.window.clear()
        self.more = True
        self.next_due = None
        self.loading = False
        self.load += 1
