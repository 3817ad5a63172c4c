"""Receiver-driven flow control: how far a publisher may be ahead of its subscribers. Pure: `now` is given.

Subscribers tell their positions (see `positions.py`). The publisher holds back while it is more than a window ahead of
the slowest of them, or of the slowest with a tag. A subscriber that was not heard for the time-out does not count, and
the floor rate is sent in any case, so that one stopped receiver does not stop the others.
"""

from brokerless.core.rate_limit import TokenBucket
from brokerless.multicast.policy import FlowControl
from brokerless.multicast.send.positions import Positions

# How long to wait before looking again: positions are asked for as often.
LOOK_S = 0.01


class FlowController:
    """Says whether more may be published."""

    def __init__(self, policy: FlowControl, positions: Positions, now: float) -> None:
        self._policy = policy
        self._positions = positions
        self._floor = TokenBucket(policy.floor_events_s, max(1.0, policy.floor_events_s / 10), now)

    def wait_s(self, next_sequence: int, events: int, now: float) -> float:
        """How long to wait before asking again whether `events` more may be published; 0: they may now."""
        policy = self._policy
        tag = policy.tag if policy.mode == "tagged" else None
        slowest = self._positions.slowest(now, tag=tag, timeout_s=policy.timeout_s)
        if slowest is None or next_sequence - slowest < policy.window_events:
            return 0.0
        if policy.floor_events_s and self._floor.take(events, now):
            return 0.0
        return LOOK_S
