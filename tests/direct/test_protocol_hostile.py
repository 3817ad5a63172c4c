"""What a publisher says that it should not: the protocols of subscriber and worker believe none of it."""

import pytest

from brokerless.core import Lost
from brokerless.core.frame import encode_frame
from brokerless.direct import wire
from brokerless.direct.protocol import State
from brokerless.direct.work import Labour, Parcel, WorkerCounters

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
        "version": wire.VERSION,
        "source": "p",
        "instance": 7,
        "epoch": EPOCH,
        "begin": 0,
        "oldest": 0,
        "next": 0,
        "live": "live",
        "beat_s": 0.25,
    }
    return wire.encode(wire.Welcome(**(words | changes)))  # type: ignore[arg-type]


def labour(prefetch: int = 100) -> Labour:
    """A worker's side that was welcomed."""
    worker = Labour(
        wire.Hello(wire.VERSION, "me", group="g"),
        prefetch=prefetch,
        counters=WorkerCounters(),
        random=lambda: 0.0,
        now=0.0,
    )
    worker.handle_deadline(0.0)
    worker.receive_control(welcome(), 0.0)
    assert worker.state is State.FOLLOWING
    return worker


def delivered(worker: Labour) -> list[int]:
    """The offsets that wait for the application."""
    return [e.offset for item in worker.ready if isinstance(item, Parcel) for e, _ in item.events]


def test_a_worker_takes_what_an_honest_publisher_sends() -> None:
    """Parts of frames in the order of their first ranges, which may interleave."""
    worker = labour()
    deliver = wire.Deliver(
        EPOCH, [frame(5, 6), frame(7, 14)], [(5, 5, 1), (10, 10, 1), (7, 8, 2), (20, 20, 1)]
    )
    worker.receive_control(wire.encode(deliver), 0.0)
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
    worker = labour()
    worker.receive_control(wire.encode(wire.Deliver(EPOCH, frames, ranges)), 0.0)
    assert delivered(worker) == []
    assert worker._counters.bad_messages == 1


def test_deliveries_beyond_the_prefetch_do_not_pile_up() -> None:
    """Whoever sends more than a worker has room for makes it drop the oldest, which must be void by then."""
    worker = labour(prefetch=10)
    for at in range(0, 1000, 10):
        worker.receive_control(wire.encode(wire.Deliver(EPOCH, [frame(at, 10)], [(at, at + 9, 1)])), 0.0)
    assert delivered(worker) == list(range(980, 1000))
    assert worker._counters.expired == 980


def test_a_loss_that_ends_before_it_begins_is_none() -> None:
    """The count of lost events only grows."""
    worker = labour()
    worker.receive_control(wire.encode(wire.Gone(EPOCH, [(9, 3), (4, 5)], "evicted")), 0.0)
    assert worker._counters.lost == 2
    assert [(w.first, w.last) for w in worker.ready if isinstance(w, Lost)] == [(4, 5)]
