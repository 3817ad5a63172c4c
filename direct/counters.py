"""What a Publisher counts; the other parts declare theirs where they count."""

from typing import Annotated

from brokerless.core import Counters
from brokerless.core.counters import count, loss


class PublisherCounters(Counters):
    """What a Publisher sent."""

    component = "direct.publisher"

    frames: Annotated[int, count("frames sent on the live socket")] = 0
    live_errors: Annotated[int, count("frames that the live socket refused; subscribers repair them")] = 0
    flush_errors: Annotated[
        int, loss("times the disk refused a batch; it stays accepted and is tried again")
    ] = 0
    beats: Annotated[int, count("heartbeats sent")] = 0
    live_renewed: Annotated[
        int, count("times the live socket was made anew, because strangers had filled it with subscriptions")
    ] = 0
