"""What both journals promise, tested on both."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokerless.core import DiskJournal, Event, Frame, Journal, MemoryJournal, Retention
from brokerless.core.errors import Closed, ConfigError, Evicted, InvalidEvent, JournalFull, UsageError
from brokerless.core.journal.disk import as_journal

Make = Callable[..., Journal]


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """A factory of journals of one kind; all are closed afterwards."""
    made: list[Journal] = []

    def build(**options: object) -> Journal:
        options.setdefault("source", "src")
        if request.param == "memory":
            journal: Journal = MemoryJournal(**options)  # type: ignore[arg-type]
        else:
            path = tmp_path / f"j{len(made)}"
            journal = DiskJournal(path, fsync="never", **options)  # type: ignore[arg-type]
        made.append(journal)
        return journal

    yield build
    for journal in made:
        journal.close()


def everything(journal: Journal, offset: int | None = None, max_bytes: int = 1 << 20) -> list[Event]:
    """All events from `offset` (default oldest) on."""
    at = journal.oldest if offset is None else offset
    events: list[Event] = []
    while at < journal.next:
        chunk = journal.read(at, max_bytes=max_bytes)
        assert not chunk.gone
        assert chunk.next > at
        events += [e for f in chunk.frames for e in f.events() if e.offset >= at]
        at = chunk.next
    return events


def test_append_numbers_offsets_over_all_topics_and_seqs_per_topic(make: Make) -> None:
    """Offsets are contiguous, seqs are contiguous per topic, receipts tell both."""
    journal = make()
    receipts = [journal.append(t, t.encode()) for t in ("a", "b", "a", "a", "b")]
    assert [r.offset for r in receipts] == [0, 1, 2, 3, 4]
    assert [r.seq for r in receipts] == [0, 0, 1, 2, 1]
    events = everything(journal)
    assert [(e.topic, e.offset, e.seq) for e in events] == [
        ("a", 0, 0),
        ("b", 1, 0),
        ("a", 2, 1),
        ("a", 3, 2),
        ("b", 4, 1),
    ]
    assert journal.sent() == {"a": 3, "b": 2}


def test_staged_events_are_numbered_at_once_and_readable_after_flush(make: Make) -> None:
    """stage accepts, flush makes readable as one frame, on_frame is told, append flushes what was before it."""
    journal = make()
    frames = []
    journal.on_frame = frames.append
    first = journal.stage("a", b"1", key="k")
    second = journal.stage("b", b"2", content_type="text/plain")
    assert (first.offset, second.offset) == (0, 1)
    assert (journal.next, journal.staged) == (0, 2)
    frame = journal.flush()
    assert frame is not None
    assert journal.flush() is None
    assert (journal.next, journal.staged, frame.count) == (2, 0, 2)
    assert [(e.key, e.content_type) for e in frame.events()] == [("k", ""), ("", "text/plain")]
    journal.stage("a", b"3")
    assert journal.append("a", b"4").offset == 3
    assert [f.first_offset for f in frames] == [0, 2, 3]
    assert [e.data for e in everything(journal)] == [b"1", b"2", b"3", b"4"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stage", "append", "many", "flush"]),
            st.sampled_from(["a", "b", "topic/c"]),
            st.lists(st.binary(max_size=2000), min_size=1, max_size=5),
            st.sampled_from(["", "text/plain"]),
            st.sampled_from(["", "key"]),
        ),
        max_size=40,
    ),
    st.integers(1, 5000),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mix_of_calls_reads_back_in_order(make: Make, script: list[tuple], max_bytes: int) -> None:
    """Whatever is appended in whatever way is read back once, in order, from any offset, in any chunk size."""
    journal = make(retention=Retention(max_bytes=1 << 24))
    expected: list[tuple[str, bytes, str, str]] = []
    for what, topic, datas, content_type, key in script:
        if what == "flush":
            journal.flush()
        elif what == "many":
            receipt = journal.append_many(topic, datas, content_type, keys=[key] * len(datas))
            assert (receipt.offset, receipt.count) == (len(expected), len(datas))
            expected += [(topic, d, content_type, key) for d in datas]
        else:
            assert getattr(journal, what)(topic, datas[0], content_type, key).offset == len(expected)
            expected.append((topic, datas[0], content_type, key))
    journal.flush()
    events = everything(journal, max_bytes=max_bytes)
    assert [(e.topic, e.data, e.content_type, e.key) for e in events] == expected
    assert [e.offset for e in events] == list(range(len(expected)))
    middle = len(expected) // 2
    assert [e.offset for e in everything(journal, middle)] == list(range(middle, len(expected)))


def test_append_many_larger_than_a_frame_is_cut_into_frames(make: Make) -> None:
    """A list of megabytes becomes several frames with one receipt."""
    journal = make()
    receipt = journal.append_many("t", [b"x" * 100_000] * 50)
    assert receipt.count == 50
    assert journal.counters.frames > 3
    assert [e.offset for e in everything(journal)] == list(range(50))


def test_retention_by_events_keeps_the_newest(make: Make) -> None:
    """The ring never holds more than max_events, and reading what it dropped raises Evicted with the numbers."""
    journal = make(retention=Retention(max_events=100))
    for i in range(1000):
        journal.append("t", b"%d" % i)
        assert min(i + 1, 80) <= journal.next - journal.oldest <= 100
    assert journal.next == 1000
    with pytest.raises(Evicted) as caught:
        journal.read(0)
    assert (caught.value.wanted, caught.value.oldest) == (0, journal.oldest)
    assert [e.offset for e in everything(journal)] == list(range(journal.oldest, 1000))
    assert journal.counters.dropped == journal.oldest


def test_retention_by_bytes_keeps_the_newest(make: Make) -> None:
    """The ring stays within max_bytes whatever is staged or appended."""
    journal = make(retention=Retention(max_bytes=200_000))
    for i in range(3000):
        (journal.stage if i % 3 else journal.append)("t", b"x" * 200)
    journal.flush()
    kept = everything(journal)
    assert 100 * 200 < sum(len(e.data) for e in kept) < 200_000
    assert kept[-1].offset == 2999


def test_retention_by_age_drops_the_old(make: Make) -> None:
    """What is older than max_age_s goes when something new comes."""
    journal = make(retention=Retention(max_age_s=0.2, max_bytes=1 << 20))
    journal.append("t", b"old")
    deadline = time.monotonic() + 20
    while journal.oldest == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        journal.append("t", b"new")
    assert journal.oldest > 0


def test_evict_counts_what_a_registered_cursor_has_not_had(make: Make) -> None:
    """on_full=evict goes on, and says exactly how many events the slowest cursor lost."""
    journal = make(retention=Retention(max_events=50), on_full="evict")
    journal.register("slow", 0)
    journal.append("t", b"0")
    journal.advance("slow", 1)
    for _ in range(199):
        journal.append("t", b"x")
    assert journal.counters.evicted == journal.oldest - 1
    assert journal.counters.evicted + journal.counters.dropped == journal.oldest


def test_reject_raises_and_accepts_nothing(make: Make) -> None:
    """on_full=reject raises JournalFull with numbers, keeps everything, and goes on after the cursor moved."""
    journal = make(retention=Retention(max_bytes=300_000), on_full="reject")
    journal.register("slow")
    accepted = 0
    with pytest.raises(JournalFull) as caught:
        for _ in range(10_000):
            journal.stage("t", b"x" * 500)
            accepted += 1
    assert caught.value.waiting_for == "slow"
    assert caught.value.max_bytes == 300_000
    journal.flush()
    assert len(everything(journal)) == accepted
    assert journal.oldest == 0
    assert journal.counters.rejected == 1
    journal.advance("slow", journal.next)
    assert journal.append("t", b"again").offset == accepted


def test_block_holds_the_producer_back_until_the_cursor_moves(make: Make, until: Callable[..., None]) -> None:
    """on_full=block waits, readers are not blocked meanwhile, and advancing lets the producer go on."""
    journal = make(retention=Retention(max_bytes=300_000), on_full="block", block_timeout_s=60)
    journal.register("slow")
    done = threading.Event()

    def produce() -> None:
        for _ in range(1000):
            journal.stage("t", b"x" * 500)
        journal.flush()
        done.set()

    thread = threading.Thread(target=produce)
    thread.start()
    until(lambda: journal.counters.blocked)  # a reader from the beginning might be as fast as the producer
    at = 0
    deadline = time.monotonic() + 60
    while at < 1000 and time.monotonic() < deadline:
        journal.flush()
        if journal.wait(at, 0.05):
            at = journal.read(at).next
            journal.advance("slow", at)
    thread.join(60)
    assert done.is_set()
    assert at == 1000
    assert journal.counters.evicted == journal.counters.rejected == 0


def test_block_gives_up_after_its_timeout(make: Make) -> None:
    """A producer is not held back for ever: JournalFull after block_timeout_s."""
    journal = make(retention=Retention(max_events=10), on_full="block", block_timeout_s=0.05)
    journal.register("dead")
    with pytest.raises(JournalFull):
        for _ in range(100):
            journal.append("t", b"x")


def test_many_threads_may_append_to_one_journal(make: Make) -> None:
    """Receipts of concurrent producers are unique and contiguous, and every event is where its receipt says."""
    journal = make()
    receipts: dict[bytes, int] = {}

    def produce(name: int) -> None:
        for i in range(500):
            data = b"%d/%d" % (name, i)
            receipt = (journal.stage if i % 2 else journal.append)(f"t{name}", data)
            receipts[data] = receipt.offset

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.flush()
    events = everything(journal)
    assert [e.offset for e in events] == list(range(3000))
    assert {e.data: e.offset for e in events} == receipts


def test_wait_returns_when_an_event_comes(make: Make) -> None:
    """A reader that waits is woken by append, and told by False when nothing came."""
    journal = make()
    assert not journal.wait(0, 0.01)
    timer = threading.Timer(0.05, lambda: journal.append("t", b"x"))
    timer.start()
    assert journal.wait(0, 20)
    timer.join()


def test_cursors_are_registered_moved_and_forgotten(make: Make) -> None:
    """A known name keeps its position; unknown names cannot be advanced."""
    journal = make()
    journal.append_many("t", [b"x"] * 10)
    assert journal.register("g", 3) == 3
    assert journal.register("g", 7) == 3
    journal.advance("g", 8)
    assert journal.registered() == {"g": 8}
    with pytest.raises(UsageError, match="not registered"):
        journal.advance("h", 1)
    journal.unregister("g")
    journal.unregister("g")
    assert journal.registered() == {}


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda j: j.append("", b"x"), "topic"),
        (lambda j: j.append("a\n", b"x"), "topic"),
        (lambda j: j.append("t" * 256, b"x"), "topic"),
        (lambda j: j.stage(5, b"x"), "topic"),
        (lambda j: j.stage("t", "text"), "data"),
        (lambda j: j.stage("t", None), "data"),
        (lambda j: j.append("t", b"x" * 1001), "data"),
        (lambda j: j.stage("t", b"x" * 1001), "data"),
        (lambda j: j.append_many("t", []), "data"),
        (lambda j: j.append_many("t", [b"x", "y"]), "data"),
        (lambda j: j.append_many("t", [b"x"], times=[1, 2]), "times"),
        (lambda j: j.append("t", b"x", content_type="a\nb"), "content_type"),
        (lambda j: j.stage("t", b"x", key="k" * 300), "key"),
        (lambda j: j.stage("t", b"x", key=3), "key"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_lost(make: Make, call: Callable, field: str) -> None:
    """Every wrong argument raises InvalidEvent that names it, and numbering is not disturbed."""
    journal = make(max_event_bytes=1000)
    journal.stage("t", b"before")
    with pytest.raises(InvalidEvent) as caught:
        call(journal)
    assert caught.value.field == field
    journal.stage("t", b"after")
    journal.flush()
    assert [(e.data, e.offset, e.seq) for e in everything(journal)] == [(b"before", 0, 0), (b"after", 1, 1)]


def test_an_event_larger_than_the_journal_is_refused(make: Make) -> None:
    """An event that could never fit says so instead of emptying the journal."""
    journal = make(retention=Retention(max_bytes=100_000))
    journal.append("t", b"keep")
    with pytest.raises(InvalidEvent, match="at most 100000"):
        journal.append("t", b"x" * 200_000)
    assert len(everything(journal)) == 1


def test_wrong_configuration_is_refused(make: Make) -> None:
    """Each wrong option raises ConfigError that names it."""
    for options, field in (
        ({"on_full": "drop"}, "on_full"),
        ({"block_timeout_s": -1}, "block_timeout_s"),
        ({"max_event_bytes": 0}, "max_event_bytes"),
    ):
        with pytest.raises(ConfigError) as caught:
            make(**options)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="at least one"):
        Retention()
    with pytest.raises(ConfigError, match="negative"):
        Retention(max_bytes=-1)


def test_too_many_topics_are_refused(make: Make) -> None:
    """Topics are bounded, because each costs memory for ever."""
    journal = make(max_topics=3)
    for t in "abc":
        journal.append(t, b"x")
    with pytest.raises(InvalidEvent, match="max_topics"):
        journal.append("d", b"x")
    journal.append("a", b"x")


def test_a_closed_journal_says_so(make: Make) -> None:
    """Using a closed journal raises Closed; closing twice is fine; what was staged is not lost by closing."""
    journal = make()
    journal.stage("t", b"x")
    journal.close()
    journal.close()
    for call in (
        lambda: journal.stage("t", b"x"),
        lambda: journal.append("t", b"x"),
        lambda: journal.register("g"),
    ):
        with pytest.raises(Closed):
            call()


def test_a_journal_needs_a_source_and_keeps_it(make: Make) -> None:
    """Without a source nothing is accepted; another source is refused."""
    journal = make(source=None)
    with pytest.raises(UsageError, match="bind"):
        journal.append("t", b"x")
    journal.bind("one")
    journal.bind("one")
    with pytest.raises(ConfigError, match="belongs to 'one'"):
        journal.bind("two")
    with pytest.raises(InvalidEvent, match="source"):
        make(source="a:b")


@pytest.mark.parametrize("way", ["batches", "events"])
def test_a_busy_producer_does_not_starve_readers(way: str, until: Callable[..., None]) -> None:
    """Somebody who waits to read has its turn before the producer's next one (on disk readers have files of their own).

    Otherwise a producer at full rate can overwrite a whole ring before a subscriber's repair is answered.
    """
    journal = MemoryJournal(source="src")
    reads: list[int] = []
    readers: list[threading.Thread] = []

    def read() -> None:
        reads.append(journal.read(0).next)

    def while_locked(_: Frame) -> None:
        reader = threading.Thread(target=read)
        reader.start()
        readers.append(reader)
        until(journal._lock._queue.locked)

    def append() -> None:
        if way == "batches":
            journal.append_many("t", [b"x"])
        else:
            journal.stage("t", b"x")
            journal.flush()

    journal.on_frame = while_locked
    for turn in range(5):
        append()
        assert len(reads) >= turn  # who waited during the last one; the one of now may still be reading
    for reader in readers:
        reader.join()
    assert reads == [1, 2, 3, 4, 5]


def test_two_that_wait(until: Callable[..., None]) -> None:
    """The first one to end must not take the other's place: both are told at once, and then singles wait again."""
    with MemoryJournal(source="s") as journal:
        sent: list[bytes] = []
        lane = journal.lane(
            lambda _, *a: journal.stage(*a), lambda _: journal.flush(), lambda _: None, sent.append
        )
        lane("t", b"0")  # the topic is known from here on
        journal.flush()
        keeps = journal._stage.keeps
        found: list[bool] = []
        waiters = [
            threading.Thread(target=lambda at=at, s=s: found.append(journal.wait(at, s)))
            for at, s in ((1000, 0.05), (1, 30))
        ]
        for waiter in waiters:
            waiter.start()
        until(lambda: journal._waiting == 2 or found)
        waiters[0].join()
        assert found == [False]
        assert not journal._stage.keeps
        journal.append("t", b"1")
        waiters[1].join(20)
        assert found == [False, True]
        assert journal._stage.keeps == keeps


@pytest.mark.parametrize("wrong", ["", 7, b"var", object()])
def test_what_is_no_journal(wrong: object) -> None:
    """Anything but a journal or a path is a ConfigError that names the field."""
    with pytest.raises(ConfigError, match="journal: must be a MemoryJournal, a DiskJournal or a path"):
        as_journal(wrong)  # type: ignore[arg-type]


def test_a_path_is_a_disk_journal(tmp_path: Path) -> None:
    """A path stands for a DiskJournal with its defaults; a journal stands for itself."""
    with as_journal(tmp_path / "j") as journal:
        assert isinstance(journal, DiskJournal)
        assert as_journal(journal) is journal
