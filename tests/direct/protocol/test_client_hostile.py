"""What a publisher says that it should not: the protocols of subscriber and worker believe none of it."""

import pytest

from brokerless.core import Ledger, Lost, Position, Reason
from brokerless.core.frame import encode_frame
from brokerless.core.topics import TopicFilter
from brokerless.direct.counters import SubscriberCounters, WorkerCounters
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import SourceOwners, State
from brokerless.direct.protocol.loss_accounting import EpochStarted, LossAccounting
from brokerless.direct.protocol.subscriber import SubscriberProtocol
from brokerless.direct.protocol.worker import DeliveryBatch, WorkerProtocol

from .test_subscriber import Simulation, asked, missed

EPOCH = 5


def frame(first: int, count: int, source: str = "p") -> bytes:
    """Events of one topic from an offset on."""
    return encode_frame(
        source,
        EPOCH,
        first,
        topics=[("t", first)],
        topic_index=None,
        times=[1] * count,
        datas=[b"pay 100"] * count,
    ).raw


def welcome(**changes: object) -> bytes:
    """A WELCOME as an honest publisher says it, with changes."""
    words: dict[str, object] = {
        "version": messages.VERSION,
        "source": "p",
        "instance": 7,
        "epoch": EPOCH,
        "begin": 0,
        "oldest": 0,
        "next": 0,
        "live": "live",
        "beat_s": 0.25,
    }
    return messages.encode(messages.Welcome(**(words | changes)))  # type: ignore[arg-type]


def worker_protocol(prefetch: int = 100) -> WorkerProtocol:
    """A worker's side that was welcomed."""
    worker = WorkerProtocol(
        messages.Hello(messages.VERSION, "me", group="g"),
        prefetch=prefetch,
        counters=WorkerCounters(),
        random=lambda: 0.0,
        now=0.0,
    )
    worker.handle_deadline(0.0)
    worker.receive_control(welcome(), 0.0)
    assert worker.state is State.FOLLOWING
    return worker


def subscriber_protocol(
    now: float = 0.0, address: str = "", names: SourceOwners | None = None
) -> SubscriberProtocol:
    """A subscriber's side that has greeted."""
    made = SubscriberProtocol(
        messages.Hello(messages.VERSION, "me"),
        start="oldest",
        positions={},
        counters=SubscriberCounters(),
        random=lambda: 0.0,
        now=now,
        address=address,
        names=names,
    )
    made.handle_deadline(now)
    return made


def delivered(worker: WorkerProtocol) -> list[int]:
    """The offsets that wait for the application."""
    return [e.offset for item in worker.ready if isinstance(item, DeliveryBatch) for e, _ in item.events]


def test_a_worker_takes_what_an_honest_publisher_sends() -> None:
    """Parts of frames in the order of their first ranges, which may interleave."""
    worker = worker_protocol()
    deliver = messages.Deliver(
        EPOCH, [frame(5, 6), frame(7, 14)], [(5, 5, 1), (10, 10, 1), (7, 8, 2), (20, 20, 1)]
    )
    worker.receive_control(messages.encode(deliver), 0.0)
    assert delivered(worker) == [5, 10, 7, 8, 20]


@pytest.mark.parametrize(
    ("frames", "ranges"),
    [
        ([frame(0, 10).replace(b"pay 100", b"pay 900", 1)], [(0, 0, 1)]),
        ([frame(0, 10, source="other")], [(0, 0, 1)]),
        ([frame(0, 90)], [(0, 89, 1)] * 200),
        ([frame(0, 90)], [(0, 50, 1), (50, 60, 1)]),
        ([frame(0, 90)], [(5, 4, 1)]),
        ([frame(0, 101)], [(0, 100, 1)]),
        ([frame(0, 10)], [(0, 10, 1)]),
        ([frame(10, 10)], [(5, 12, 1)]),
        ([frame(0, 10)] * 2, [(0, 9, 1)]),
    ],
    ids=[
        "damaged",
        "source",
        "repeated",
        "overlap",
        "backwards",
        "no room",
        "beyond",
        "before",
        "idle frames",
    ],
)
def test_a_worker_takes_nothing_of_a_delivery_that_is_wrong(
    frames: list[bytes], ranges: list[tuple[int, int, int]]
) -> None:
    """Damage, another's frames, and ranges that overlap, lead elsewhere or are more than was asked for."""
    worker = worker_protocol()
    worker.receive_control(messages.encode(messages.Deliver(EPOCH, frames, ranges)), 0.0)
    assert delivered(worker) == []
    assert worker._counters.bad_messages == 1


def test_deliveries_beyond_the_prefetch_do_not_pile_up() -> None:
    """Whoever sends more than a worker has room for makes it drop the oldest, which must be void by then."""
    worker = worker_protocol(prefetch=10)
    for at in range(0, 1000, 10):
        worker.receive_control(
            messages.encode(messages.Deliver(EPOCH, [frame(at, 10)], [(at, at + 9, 1)])), 0.0
        )
    assert delivered(worker) == list(range(980, 1000))
    assert worker._counters.expired == 980


def test_a_loss_that_ends_before_it_begins_is_none() -> None:
    """The count of lost events only grows."""
    worker = worker_protocol()
    worker.receive_control(messages.encode(messages.Gone(EPOCH, [(9, 3), (4, 5)], "evicted")), 0.0)
    assert worker._counters.lost == 2
    assert [(w.first, w.last) for w in worker.ready if isinstance(w, Lost)] == [(4, 5)]


def test_what_was_sent_counts_only_if_it_was_asked_for() -> None:
    """An answer to no question is ignored; an answer is taken once."""
    sub = subscriber_protocol()
    sub.receive_control(welcome(), 0.0)
    sub.ready.clear()
    sent = messages.encode(messages.Sent(EPOCH, 1 << 60, {"t": 1}))
    while sub.unanswered:
        sub.receive_control(sent, 0.0)
    sub.ready.clear()
    sub.receive_control(sent, 0.0)
    assert not sub.ready
    sub.ask_sent()
    for _ in range(10):
        sub.receive_control(sent, 0.0)
    assert len(sub.ready) == 1


def test_pages_of_what_was_sent_come_one_by_one() -> None:
    """A first page does not open the door for any number of others: each is asked for."""
    sub = subscriber_protocol()
    sub.receive_control(welcome(), 0.0)
    while sub.unanswered:
        sub.receive_control(messages.encode(messages.Sent(EPOCH, 0, {})), 0.0)
    sub.ask_sent()
    sub.ready.clear()
    sub.outbox.clear()
    page = messages.encode(messages.Sent(EPOCH, 1 << 60, {"t": 1}, more=True))
    for _ in range(10):
        sub.receive_control(page, 0.0)
    assert len(sub.ready) == len(sub.outbox) == 10
    for _ in range(10):
        sub.outbox.clear()
        sub.receive_control(messages.encode(messages.Sent(EPOCH, 1 << 60, {})), 0.0)
    assert len(sub.ready) == 11


def test_words_that_speak_of_a_far_future_do_not_pile_up() -> None:
    """Pages that wait for events that never come are bounded, and then nothing is concluded from them."""
    accounting = LossAccounting(Ledger(), TopicFilter(()))
    accounting.started(EpochStarted("p", EPOCH, False))
    for page in range(1000):
        accounting.sent(messages.Sent(EPOCH, 1 << 60, {f"{page}.{i}": 1 for i in range(1000)}, True))
    assert sum(len(word.seqs) for word in accounting._waiting) <= 500_000
    accounting.sent(messages.Sent(EPOCH, 1 << 60, {}, False))
    accounting.enter("p", EPOCH, [("t", 7, 1)], 1 << 60)
    assert accounting.ledger.account().pending == 0  # t began at 7, or before us: not known to be missing


@pytest.mark.parametrize("beat_s", [0.0, -1.0, -1e9, float("nan"), float("inf"), float("-inf")])
def test_whatever_heartbeat_is_promised_time_passes_in_reason(beat_s: float) -> None:
    """Silence is noticed neither at once nor never."""
    sub = subscriber_protocol()
    sub.receive_control(welcome(beat_s=beat_s), 0.0)
    assert 0.5 < sub.next_deadline() <= 10.0  # it shows itself every 10 s
    hellos = 0
    now = 0.0
    while now < 100.0:
        now += max(1e-6, sub.next_deadline() - now)
        sub.handle_deadline(now)
        for message in sub.outbox:
            if isinstance(messages.decode_request(message), messages.Hello):
                hellos += 1
                sub.receive_control(welcome(beat_s=beat_s), now)
        sub.outbox = []
    assert hellos <= 200


@pytest.mark.parametrize("kind", ["subscriber", "worker"])
@pytest.mark.parametrize("welcomed", [True, False])
def test_whoever_is_sent_away_again_and_again_comes_back_later_and_later(kind: str, welcomed: bool) -> None:
    """ "Say hello again" as the answer to every hello, with a welcome before or without: about one a second."""
    protocol: SubscriberProtocol | WorkerProtocol = (
        subscriber_protocol() if kind == "subscriber" else worker_protocol()
    )
    protocol.receive_control(welcome(), 0.0)
    protocol.receive_control(messages.encode(messages.Refused("forgotten", again=True)), 0.0)
    hellos, now = 0, 0.0
    for step in range(10_000):
        now = step * 0.001
        if now >= protocol.next_deadline():
            protocol.handle_deadline(now)
        sent, protocol.outbox = protocol.outbox, []
        for message in sent:
            if isinstance(messages.decode_request(message), messages.Hello):
                hellos += 1
                if welcomed:
                    protocol.receive_control(welcome(), now)
                protocol.receive_control(messages.encode(messages.Refused("forgotten", again=True)), now)
    assert 5 < hellos < 25
    # One who was followed for a while and has restarted is greeted at once.
    protocol.receive_control(welcome(), now)
    protocol.outbox = []
    protocol.receive_control(messages.encode(messages.Refused("forgotten", again=True)), now + 1.5)
    protocol.handle_deadline(now + 1.5)
    assert [type(messages.decode_request(message)) for message in protocol.outbox] == [messages.Hello]


def test_settlements_for_a_publisher_that_is_away_do_not_keep_a_worker_busy() -> None:
    """They wait for the next welcome, and until then there is nothing to send."""
    worker = worker_protocol()
    worker.receive_control(messages.encode(messages.Refused("forgotten", again=True)), 2.0)
    worker.acks.append((EPOCH, 0))
    assert not worker.has_settles_to_send
    worker.outbox = []
    worker.receive_control(welcome(), 3.0)
    said = [messages.decode_request(message) for message in worker.outbox]
    assert [request.acks for request in said if isinstance(request, messages.Settle)] == [[(0, 0)]]


def test_a_saved_position_beyond_the_end_of_the_journal_is_not_believed() -> None:
    """Whoever wrote it there: all events come, instead of none for ever."""
    simulation = Simulation(start="cursor")
    simulation.journal.append_many("t", [b"x"] * 10)
    simulation.subscriber._positions["p"] = Position(simulation.journal.epoch, 1 << 61)
    simulation.journal.append("t", b"y")
    simulation.settle()
    simulation.journal.append("t", b"z")
    simulation.settle()
    assert [offset for _, offset in simulation.events] == list(range(12))
    assert simulation.counters.bad_messages == 1
    account = simulation.ledger.account()
    assert (account.delivered, account.lost, account.duplicates) == (12, 0, 0)


def test_an_old_welcome_does_not_move_the_position_back() -> None:
    """An answer to an earlier greeting may arrive late; what it says of the end is not news."""
    simulation = Simulation()
    simulation.journal.append_many("t", [b"x"] * 10)
    simulation.control_server.receive(
        b"early", messages.encode(messages.Hello(messages.VERSION, "me")), simulation.now
    )
    ((_, old),) = simulation.control_server.outbox
    simulation.control_server.outbox = []
    simulation.settle()
    simulation.journal.append_many("t", [b"x"] * 10)
    simulation.settle()
    simulation.subscriber.receive_control(old, simulation.now)
    simulation.journal.append("t", b"y")
    simulation.settle()
    assert [offset for _, offset in simulation.events] == list(range(21))
    assert simulation.counters.bad_messages == 0


def test_no_more_can_be_gone_than_there_is() -> None:
    """A chunk that skips offsets beyond the end that it names itself is believed up to there."""
    simulation = Simulation()
    simulation.settle()
    missed(simulation, 5)
    chunk = messages.Chunk(
        asked(simulation).request, simulation.journal.epoch, 1 << 61, 3, [(0, 1 << 61, "evicted")], []
    )
    simulation.subscriber.receive_control(messages.encode(chunk), simulation.now)
    simulation.settle()
    assert [(word.first, word.last) for word in simulation.lost] == [(0, 2)]
    assert [offset for _, offset in simulation.events] == [3, 4]


@pytest.mark.parametrize("journal", [True, False])
def test_what_arrives_live_while_it_greets_again_is_not_thrown_away(journal: bool) -> None:
    """Its control connection broke and its live one did not: without a journal nobody could send these events again."""
    subscriber = subscriber_protocol()
    subscriber.receive_control(welcome(replay=journal), 0.0)
    subscriber.receive_live(frame(0, 1), 0.0)
    subscriber.receive_control(messages.encode(messages.Refused("say hello first", again=True)), 1.0)
    assert subscriber.state is State.JOINING
    for data in (frame(1, 1), frame(2, 2), frame(2, 2), frame(7, 1), b"noise"):  # 4 to 6 were dropped
        subscriber.receive_live(data, 1.1)
    assert subscriber.position == (1 if journal else 4)
    subscriber.receive_control(welcome(replay=journal, next=8), 1.2)
    for first in (4, 7, 8):  # also what was on its way when the publisher answered
        subscriber.receive_live(frame(first, 1), 1.3)
    if not journal:
        lost = [(word.first, word.last, word.reason) for word in subscriber.ready if isinstance(word, Lost)]
        assert lost == [(5, 6, Reason.OVERFLOW_SENDER)]
        assert subscriber.position == 9


def test_two_publishers_of_one_name_are_not_followed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first is, until it does not answer any more; then the other may be the same one, restarted there."""
    names = SourceOwners()
    first, second = (
        subscriber_protocol(address=address, names=names) for address in ("tcp://a:1", "tcp://b:1")
    )
    first.receive_control(welcome(), 0.0)
    for _ in range(3):
        second.receive_control(welcome(), 0.0)
    assert (first.state, second.state) == (State.FOLLOWING, State.JOINING)
    assert second._counters.bad_messages == 3
    assert [record.message for record in caplog.records] == [
        "tcp://a:1 and tcp://b:1 both publish as 'p'; only the first is followed"
    ]
    now = 60.0
    first.handle_deadline(now)  # silent for too long
    second.receive_control(welcome(), now)
    assert (first.state, second.state) == (State.JOINING, State.JOINING)
    while first.unanswered_hellos < 3:
        now = first.next_deadline()
        first.handle_deadline(now)
    second.receive_control(welcome(), now)
    first.receive_control(welcome(), now)
    assert (first.state, second.state) == (State.JOINING, State.FOLLOWING)
    first.receive_control(welcome(source="q"), now)
    assert first.state is State.FOLLOWING
