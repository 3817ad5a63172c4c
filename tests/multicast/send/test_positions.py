"""Where the subscribers are."""

from brokerless.multicast.send.positions import FORGET_AFTER_S, Positions
from brokerless.multicast.wire.status import LEAVING, Requester


def told(positions: Positions, who: int, expected: int, now: float, tag: int = 0) -> None:
    positions.update(Requester(1, who, expected, tag), expected, now)


def test_who_is_behind_is_known_until_it_leaves_or_is_silent() -> None:
    """Positions rise, subscribers leave, and those that are not heard of are forgotten."""
    positions = Positions(10)
    told(positions, 1, 5, 0.0)
    told(positions, 2, 9, 1.0)
    assert positions.behind(9) == 1
    told(positions, 1, 9, 2.0)
    assert positions.behind(9) == 0
    told(positions, 2, LEAVING, 3.0)
    assert len(positions) == 1
    positions.expire(2.0 + FORGET_AFTER_S + 1)
    assert len(positions) == 0


def test_the_slowest_of_all_and_of_a_tag() -> None:
    """One that has not said anything for the time-out is not waited for."""
    positions = Positions(10)
    told(positions, 1, 5, 0.0)
    told(positions, 2, 7, 5.0, tag=1)
    told(positions, 3, 9, 5.0)
    assert positions.slowest(5.0, timeout_s=10) == 5
    assert positions.slowest(5.0, timeout_s=2) == 7
    assert positions.slowest(5.0, tag=0, timeout_s=2) == 9
    assert positions.slowest(5.0, tag=3, timeout_s=2) is None


def test_memory_is_bounded() -> None:
    """Beyond the bound the one not heard of for longest is forgotten."""
    positions = Positions(3)
    for who in range(10):
        told(positions, who, who, float(who))
    assert len(positions) == 3
    assert positions.behind(8) == 1
