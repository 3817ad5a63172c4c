"""A publisher's journal over its address: the executors of a Spark job replay ranges of offsets themselves.

Only the control socket is used, so the live stream of others is not touched. The publisher's journal must
hold the
wanted range; a publisher that is away is behind, not lost.
"""

from collections.abc import Iterator

from brokerless.core import Frame
from brokerless.core.errors import Fault, PeerError
from brokerless.direct import ReplayChunk, ReplayClient
from brokerless.spark_collector.places import Extent, Gone

# A publisher on the same network answers within milliseconds; one that is starting within a second.
ANSWER_TIMEOUT_S = 3.0
# A task that has begun to read waits longer, because giving up means doing its whole range again.
READ_TIMEOUT_S = 20.0


class PublisherAway(Fault):
    """A publisher did not answer while its journal was being read; Spark tries the task again."""

    def __init__(self, address: str, waited_s: float) -> None:
        super().__init__(f"the publisher at {address} has not answered for {waited_s:.0f} s")
        self.address = address
        self.waited_s = waited_s


class EndpointPlace:
    """A publisher as a place of the data source."""

    def __init__(self, address: str) -> None:
        self.key = address

    def extent(self) -> Extent | None:
        """What its journal holds; None while it is away."""
        client = ReplayClient(self.key)
        try:
            welcome = client.welcome(ANSWER_TIMEOUT_S)
        finally:
            client.close()
        if welcome is None:
            return None
        if not welcome.replay:
            raise PeerError(f"{self.key} has no journal, so nothing can be replayed: collect it instead")
        return Extent(
            welcome.source, welcome.oldest, welcome.next, [(welcome.epoch, welcome.begin)], welcome.source
        )

    def frames(self, first: int, stop: int) -> Iterator[Frame | Gone]:
        """Replay a range. Raises PublisherAway if it stops answering."""
        client = ReplayClient(self.key)
        try:
            welcome = client.welcome(READ_TIMEOUT_S)
            if welcome is None:
                raise PublisherAway(self.key, READ_TIMEOUT_S)
            client.ask(welcome.epoch, first)
            while first < stop:
                chunk = client.answer(READ_TIMEOUT_S)
                if chunk is None:
                    raise PublisherAway(self.key, READ_TIMEOUT_S)
                if first < chunk.next < stop:
                    client.ask(welcome.epoch, chunk.next)
                yield from self._parts(chunk, first, stop)
                if chunk.next <= first:
                    yield Gone(first, stop - 1, "evicted")
                    return
                first = chunk.next
        finally:
            client.close()

    def _parts(self, chunk: ReplayChunk, first: int, stop: int) -> Iterator[Frame | Gone]:
        parts: list[tuple[int, Frame | Gone]] = []
        for begin, after, reason in chunk.gone:
            low, high = max(begin, first), min(after, stop) - 1
            if high >= low:
                parts.append((low, Gone(low, high, "evicted" if reason == "evicted" else "corrupt")))
        for raw in chunk.frames:
            frame = Frame.parse(raw)
            if frame.first_offset < stop and frame.next_offset > first:
                parts.append((frame.first_offset, frame))
        for _, part in sorted(parts, key=lambda p: p[0]):
            yield part

    def blame(self, gone: Gone) -> Exception:
        """The error for a range that the publisher's journal cannot read."""
        return PeerError(
            f"{self.key}: its journal is damaged at offsets {gone.first} to {gone.last}; "
            "set onCorrupt=quarantine to go on without them"
        )
