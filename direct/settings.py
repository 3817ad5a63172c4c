"""What a subscriber counts, and what it may be told about how it follows a publisher."""

from typing import Annotated

import msgspec

from brokerless.core import Backoff, Counters
from brokerless.core.counters import count, loss


class SubscriberCounters(Counters):
    """What a Subscriber counts, over all its publishers."""

    component = "direct.subscriber"

    events: Annotated[int, count("events handed to the application")] = 0
    live_frames: Annotated[int, count("frames that arrived live and in order")] = 0
    replayed_frames: Annotated[int, count("frames that came from the journal, on joining or in repair")] = 0
    overlap_frames: Annotated[int, count("frames dropped because replay had brought them already")] = 0
    held_dropped: Annotated[int, count("live frames dropped while waiting for a repair, asked for again")] = 0
    gaps: Annotated[
        int, count("holes in the live stream, each repaired from the journal or declared lost")
    ] = 0
    joins: Annotated[int, count("WELCOMEs received: the first join and every reconnection")] = 0
    bad_messages: Annotated[int, count("messages that were not the protocol, ignored")] = 0
    lost: Annotated[int, loss("offsets declared lost: evicted, or dropped with no journal to ask")] = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a Follower may be told; every default with its reason."""

    # A chunk is a millisecond or two of work for both sides, and hides a round trip of the same length: the next one is
    # asked for before this one is worked on. A quarter of it halves the rate of a replay; more gains nothing. This is
    # the most: it begins with less, and stays there if answers take long.
    chunk_bytes: int = 1024 * 1024
    # Live frames kept while a hole is repaired: enough for a round trip at full rate (8 MiB is 20 ms of
    # 400 MB/s). When full the oldest is dropped: replay brings it again, while the newest joins up with live.
    held_bytes: int = 8 * 1024 * 1024
    # A publisher that has not answered for this long has lost the request (or was replaced): ask again.
    answer_timeout_s: float = 2.0
    # Missed heartbeats until the publisher is greeted anew. One can be late, three are not.
    missed_beats: int = 3
    # Keeps the publisher's count of us alive; it forgets clients after a minute of silence.
    alive_s: float = 10.0
    # First retry soon, because publisher and subscriber are often started together; then spread out.
    greeting: Backoff = Backoff(first_s=0.05, limit_s=1.0)
