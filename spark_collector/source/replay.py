"""A publisher's journal over its address: the executors of a Spark job replay ranges of offsets themselves.

Only the control socket is used, so the live stream of others is not touched. The publisher's journal must hold the
wanted range; a publisher that is away is behind, not lost.
"""

from bisect import bisect_left
from collections.abc import Iterator

from brokerless.core import Frame
from brokerless.core.errors import Fault, PeerError
from brokerless.direct import ReplayChunk, ReplayClient
from brokerless.spark_collector.source.locations import Extent, MissingRange, Replaced

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


class EndpointLocation:
    """A publisher as a location of the data source."""

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
        epochs = welcome.epochs or [(welcome.epoch, welcome.begin)]
        return Extent(welcome.source, welcome.oldest, welcome.next, epochs, welcome.source)

    def frames(
        self, first: int, stop: int, *, id: str = "", epoch: int = 0
    ) -> Iterator[Frame | MissingRange]:
        """Replay a range. Raises PublisherAway if it stops answering, or if it is a mirror that has not got all of it;
        Replaced if the range is of a journal that it has lost, or of events that a promoted mirror never had."""
        client = ReplayClient(self.key)
        try:
            welcome = client.welcome(READ_TIMEOUT_S)
            if welcome is None:
                raise PublisherAway(self.key, READ_TIMEOUT_S)
            if id and (welcome.source != id or (welcome.epoch > epoch and welcome.begin == 0)):
                raise Replaced(self.key)
            if epoch and any(e > epoch and begin < stop for e, begin in welcome.epochs):
                raise Replaced(self.key)
            if welcome.copy and welcome.next < stop:
                raise PublisherAway(self.key, 0.0)
            client.ask(welcome.epoch, first)
            while first < stop:
                chunk = client.answer(READ_TIMEOUT_S)
                if chunk is None:
                    raise PublisherAway(self.key, READ_TIMEOUT_S)
                if first < chunk.next < stop:
                    client.ask(welcome.epoch, chunk.next)
                yield from self._parts(chunk, first, stop)
                if chunk.next <= first:
                    yield MissingRange(first, stop - 1, "evicted")
                    return
                first = chunk.next
        finally:
            client.close()

    def offset_at(self, time_us: int, extent: Extent) -> int:
        """A binary search over the publisher's journal: each step replays one frame."""
        low, high = extent.oldest, extent.next
        while low < high:
            middle = (low + high) // 2
            frame = next((p for p in self.frames(middle, middle + 1) if isinstance(p, Frame)), None)
            if frame is None:  # evicted meanwhile
                low = middle + 1
                continue
            times = memoryview(frame.columns().times).cast("q")
            if times[-1] < time_us:
                low = frame.next_offset
            elif times[0] < time_us:
                return frame.first_offset + bisect_left(times, time_us)
            else:
                high = frame.first_offset
        return max(low, extent.oldest)

    def _parts(self, chunk: ReplayChunk, first: int, stop: int) -> Iterator[Frame | MissingRange]:
        parts: list[tuple[int, Frame | MissingRange]] = []
        for begin, after, reason in chunk.gone:
            low, high = max(begin, first), min(after, stop) - 1
            if high >= low:
                parts.append((low, MissingRange(low, high, "evicted" if reason == "evicted" else "corrupt")))
        for raw in chunk.frames:
            frame = Frame.parse(raw)
            if frame.first_offset < stop and frame.next_offset > first:
                parts.append((frame.first_offset, frame))
        for _, part in sorted(parts, key=lambda p: p[0]):
            yield part

    def corruption_error(self, gone: MissingRange) -> Exception:
        """The error for a range that the publisher's journal cannot read."""
        return PeerError(
            f"{self.key}: its journal is damaged at offsets {gone.first} to {gone.last}; "
            "set onCorrupt=quarantine to go on without them"
        )
