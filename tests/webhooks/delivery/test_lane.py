"""One lane's rules, in virtual time."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from brokerless.webhooks.delivery.budget import Health
from brokerless.webhooks.delivery.lane import Lane
from brokerless.webhooks.delivery.retry import Outcome, Verdict
from brokerless.webhooks.models import Endpoint, Item, StoredEvent

FINE, FAILED, SLOW = Verdict(Outcome.DELIVERED), Verdict(Outcome.RETRY), Verdict(Outcome.RETRY, slow=True)


def endpoint(**fields: object) -> Endpoint:
    return Endpoint(id="ep", tenant="t", url="http://x", topics=["**"], **fields)  # type: ignore[arg-type]


def item(number: int, size: int = 10) -> Item:
    return Item(number, StoredEvent(number, f"m{number}", "t", "t", 0, b"x" * size, ""))


def fresh(**fields: object) -> Lane:
    lane = Lane(endpoint(**fields), 0.0)
    lane.more = False
    return lane


def test_concurrency_is_kept() -> None:
    """No more attempts at a time than the endpoint allows."""
    lane = fresh(concurrency=3)
    lane.offer([item(n) for n in range(10)], True)
    taken = [lane.take(0.0) for _ in range(5)]
    assert [len(items) for items in taken] == [1, 1, 1, 0, 0]
    lane.settle(taken[0], FINE, 0.0, lambda: 0.0)
    assert lane.take(0.0)


def test_slow_narrows_and_success_widens() -> None:
    """After a time-out one attempt at a time is made; each success allows one more."""
    lane = fresh(concurrency=8)
    lane.offer([item(n) for n in range(30)], True)
    lane.settle(lane.take(0.0), SLOW, 0.0, lambda: 0.0)
    assert lane.health is Health.FAILING
    assert lane.take(0.5) == []
    assert lane.ready_in(0.5) is not None
    first = lane.take(1.0)
    assert first
    assert lane.take(1.0) == []
    lane.settle(first, FINE, 1.0, lambda: 0.0)
    assert lane.health is Health.WORKING
    assert [len(lane.take(1.0)) for _ in range(3)] == [1, 1, 0]


def test_pause_grows_to_a_minute_and_honours_the_server() -> None:
    """Repeated time-outs pause longer, up to a minute; Retry-After is kept in full."""
    lane = fresh(concurrency=1)
    lane.offer([item(n) for n in range(30)], True)
    now, pauses = 0.0, []
    for _ in range(9):
        lane.settle(lane.take(now), SLOW, now, lambda: 0.0)
        pauses.append(lane.paused_until - now)
        now = lane.paused_until
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    lane.settle(lane.take(now), Verdict(Outcome.RETRY, slow=True, pause_s=500), now, lambda: 0.0)
    assert lane.paused_until == now + 500


def test_attempts_that_fail_together_count_once() -> None:
    """Eight attempts that time out at the same moment are one failure of the lane, not eight."""
    lane = fresh(concurrency=8)
    lane.offer([item(n) for n in range(8)], True)
    for taken in [lane.take(0.0) for _ in range(8)]:
        lane.settle(taken, SLOW, 10.0, lambda: 0.0)
    assert lane.failures == 1
    assert lane.paused_until == 11.0


@given(st.floats(0.5, 50), st.lists(st.floats(0, 0.2), min_size=1, max_size=60))
def test_rate_is_kept(rate: float, steps: list[float]) -> None:
    """Over any stretch of time no more attempts are made than the rate and one second's burst allow."""
    lane = fresh(concurrency=256, rate=rate)
    lane.offer([item(n) for n in range(500)], True)
    now, made = 0.0, 0
    for step in steps:
        now += step
        while lane.take(now):
            made += 1
    assert made <= 1 + rate * now + 1e-6


@given(st.floats(1, 20), st.lists(st.booleans(), min_size=1, max_size=40))
def test_rate_is_kept_when_the_endpoint_changes(rate: float, flaps: list[bool]) -> None:
    """Changes of an endpoint (also those that its failures cause) never renew the burst."""
    lane = fresh(concurrency=256, rate=rate)
    lane.offer([item(n) for n in range(500)], True)
    now, made = 0.0, 0
    for failing in flaps:
        now += 0.05
        lane.update(endpoint(concurrency=256, rate=rate, failing_since=1 if failing else None), now)
        while taken := lane.take(now):
            made += 1
            lane.settle(taken, FINE, now, lambda: 0.0)
    assert made <= 1 + rate * now + 1e-6


@given(st.floats(1, 20), st.lists(st.floats(0.1, 1.0), min_size=1, max_size=40))
def test_another_rate_brings_nothing_extra(rate: float, shares: list[float]) -> None:
    """However often the rate itself is changed: no more requests than the highest of them allows."""
    lane = fresh(concurrency=256, rate=rate)
    lane.offer([item(n) for n in range(500)], True)
    now, made = 0.0, 0
    for share in shares:
        now += 0.05
        lane.update(endpoint(concurrency=256, rate=rate * share), now)
        while taken := lane.take(now):
            made += 1
            lane.settle(taken, FINE, now, lambda: 0.0)
    assert made <= 1 + rate * now + 1e-6


def test_allowed_rate_of_the_handshake_wins() -> None:
    """The lower of the own rate and what the endpoint allowed per minute counts."""
    assert fresh(rate=100, allowed_rate=60).bucket.rate == 1
    assert fresh(rate=0.5, allowed_rate=60).bucket.rate == 0.5
    assert fresh(allowed_rate=120).bucket.rate == 2


def test_failed_ones_stay_first_in_fifo() -> None:
    """A FIFO lane gives the failed item out again, first, and not before its time."""
    lane = fresh(fifo=True, concurrency=8)
    lane.offer([item(n) for n in range(3)], True)
    taken = lane.take(0.0)
    assert lane.take(0.0) == []
    lane.settle(taken, FAILED, 0.0, lambda: 0.0)
    lane.put_back(taken, 5.0)
    assert lane.take(4.9) == []
    assert [found.n for found in lane.take(5.0)] == [0]


def test_batches_stay_below_their_size() -> None:
    """A batch ends before its data would pass half a megabyte; one larger item goes alone."""
    lane = fresh(mode="batch")
    lane.offer([item(n, 200_000) for n in range(4)] + [item(9, 900_000)], True)
    assert [len(lane.take(0.0, 100)) for _ in range(3)] == [2, 2, 1]


class LaneMachine(RuleBasedStateMachine):
    """Items move between database, memory and flight in any order; none is ever twice in memory or forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane(endpoint(concurrency=3), 0.0)
        self.pending: dict[int, Item] = {}
        self.queued: list[int] = []
        self.attempts: list[list[Item]] = []
        self.number = 0
        self.now = 0.0
        self.reads: list[tuple[int, list[int], bool, float | None]] = []
        self.due: dict[int, float] = {}
        self.committed: list[list[Item]] = []

    @rule(count=st.integers(1, 50))
    def publish(self, count: int) -> None:
        new = [item(self.number + n) for n in range(count)]
        self.number += count
        self.pending |= {made.n: made for made in new}
        self.committed.append(new)

    @precondition(lambda self: self.committed)
    @rule()
    def offer(self) -> None:
        """The loop hears of a commit later than a read of the database may see it."""
        self.lane.offer(self.committed.pop(0), True)

    @precondition(lambda self: self.lane.wants())
    @rule()
    def begin_load(self) -> None:
        limit = self.lane.target + len(self.lane.held)
        rows = sorted(n for n in self.pending if self.due.get(n, 0.0) <= self.now)[:limit]
        later = [due for n, due in self.due.items() if n in self.pending and due > self.now]
        number = self.lane.begin_load()
        self.reads.append((number, rows, len(rows) == limit, min(later, default=None)))

    @precondition(lambda self: self.reads)
    @rule()
    def load(self) -> None:
        number, rows, more, next_due = self.reads.pop(0)
        self.lane.loaded(number, [item(n) for n in rows], more=more, next_due=next_due)

    @rule()
    def clear(self) -> None:
        self.lane.clear()

    @rule(step=st.floats(0, 3))
    def take(self, step: float) -> None:
        self.now += step
        if self.lane.next_due is not None and self.now >= self.lane.next_due:
            self.lane.next_due = None
            self.lane.ask_for_more()
        taken = self.lane.take(self.now)
        if taken:
            self.attempts.append(taken)

    @precondition(lambda self: self.attempts)
    @rule(verdict=st.sampled_from([FINE, FAILED, SLOW]))
    def settle(self, verdict: Verdict) -> None:
        items = self.attempts.pop(0)
        self.lane.settle(items, verdict, self.now, lambda: 0.5)
        for done in items:
            self.lane.let_go(done)
            self.queued.append(done.n if verdict is FINE else -done.n - 1)

    @precondition(lambda self: self.queued)
    @rule()
    def commit(self) -> None:
        while self.committed:  # transactions are told in their order
            self.offer()
        for result in self.queued:
            number = result if result >= 0 else -result - 1
            if result >= 0:
                del self.pending[number]
            if result < 0:
                self.due[number] = self.now + 1.0
            self.lane.committed(number, None if result >= 0 else self.now + 1.0)
        self.queued.clear()

    @precondition(lambda self: self.pending)
    @rule()
    def evict(self) -> None:
        while self.committed:
            self.offer()
        oldest = min(self.pending)
        if oldest not in self.lane.in_flight and oldest not in [r if r >= 0 else -r - 1 for r in self.queued]:
            del self.pending[oldest]
            self.lane.drop(oldest)

    @invariant()
    def sums_hold(self) -> None:
        lane = self.lane
        waiting = [held.n for held in lane.window]
        assert len(waiting) == len(set(waiting))
        assert not set(waiting) & set(lane.in_flight)
        assert set(waiting) | set(lane.in_flight) <= lane.held
        assert lane.held <= set(self.pending)
        assert lane.attempts == len(self.attempts) <= lane.width
        assert lane.bytes == 10 * (len(waiting) + len(lane.in_flight))
        if not lane.more and not lane.loading:
            waits = set(self.pending) - lane.held - {made.n for new in self.committed for made in new}
            if waits:
                assert lane.next_due is not None, "something waits in the database and nobody will look"
                assert lane.next_due <= min(self.due[n] for n in waits)


TestLane = LaneMachine.TestCase
