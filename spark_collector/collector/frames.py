"""Events to frames, for inputs that get events and not frames; pure."""

from collections.abc import Iterable, Iterator

from brokerless.core import Event, Frame, encode_frame

# Far below a frame's limits; inputs hand over what came within a moment.
MAX_EVENTS = 10_000
MAX_BYTES = 8 * 1024 * 1024


def frames_of(events: Iterable[Event]) -> Iterator[Frame]:
    """Frames of events with consecutive offsets, in the order given; a new one wherever the numbers jump."""
    run: list[Event] = []
    size = 0
    following: dict[str, int] = {}
    for event in events:
        if run:
            last = run[-1]
            same = (event.source, event.epoch, event.offset) == (last.source, last.epoch, last.offset + 1)
            if (
                not same
                or following.get(event.topic, event.seq) != event.seq
                or len(run) >= MAX_EVENTS
                or size + len(event.data) > MAX_BYTES
            ):
                yield _frame(run)
                run, size, following = [], 0, {}
        run.append(event)
        size += len(event.data)
        following[event.topic] = event.seq + 1
    if run:
        yield _frame(run)


def _frame(run: list[Event]) -> Frame:
    topics: dict[str, int] = {}
    where: dict[str, int] = {}
    for event in run:
        if event.topic not in topics:
            where[event.topic] = len(topics)
            topics[event.topic] = event.seq
    keys = [event.key for event in run]
    return encode_frame(
        run[0].source,
        run[0].epoch,
        run[0].offset,
        topics=list(topics.items()),
        topic_index=[where[event.topic] for event in run],
        times=[event.time for event in run],
        datas=[event.data for event in run],
        content_types=[event.content_type for event in run],
        keys=keys if any(keys) else None,
    )
