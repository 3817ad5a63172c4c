"""How far a publisher may be ahead of its subscribers."""

import threading
import time
from collections.abc import Callable

import pytest

from brokerless.core.errors import ConfigError
from brokerless.multicast import FlowControl, Publisher, Subscriber
from brokerless.multicast.send.flow_control import FlowController
from brokerless.multicast.send.positions import Positions
from brokerless.multicast.wire.status import Requester


def told(positions: Positions, who: int, taken: int, now: float, tag: int = 0) -> None:
    positions.update(Requester(1, who, taken, tag), taken, now)


def test_the_slowest_holds_back_until_the_time_out() -> None:
    """Within the window all is well; beyond it the slowest counts, unless it has said nothing for too long."""
    positions = Positions(10)
    flow = FlowController(FlowControl(window_events=100, timeout_s=5), positions, 0.0)
    assert flow.wait_s(10_000, 1, 0.0) == 0, "nobody is there"
    told(positions, 1, 1000, 0.0)
    told(positions, 2, 500, 0.0)
    assert flow.wait_s(599, 1, 1.0) == 0
    assert flow.wait_s(600, 1, 1.0) > 0
    told(positions, 2, 550, 1.5)
    assert flow.wait_s(600, 1, 2.0) == 0
    assert flow.wait_s(1050, 1, 6.0) > 0, "the first is forgotten, the second is behind"
    assert flow.wait_s(1050, 1, 7.0) == 0, "both are"


def test_only_those_with_the_tag_hold_back() -> None:
    """The others repair, or lose, as without flow control."""
    positions = Positions(10)
    flow = FlowController(FlowControl(mode="tagged", tag=7, window_events=100), positions, 0.0)
    told(positions, 1, 1, 0.0)
    assert flow.wait_s(10_000, 1, 0.0) == 0
    told(positions, 2, 1, 0.0, tag=7)
    assert flow.wait_s(10_000, 1, 0.0) > 0


def test_the_floor_is_sent_in_any_case() -> None:
    """One receiver that stands still costs speed, and not everything."""
    positions = Positions(10)
    flow = FlowController(FlowControl(window_events=1, timeout_s=1000, floor_events_s=100), positions, 0.0)
    told(positions, 1, 1, 0.0)
    sent = sum(flow.wait_s(10_000, 1, i / 1000) == 0 for i in range(2000))
    assert 200 <= sent <= 220


def test_a_slow_application_holds_the_publisher_back(group: str, until: Callable[..., None]) -> None:
    """The publisher is never more than the window (and one call) ahead of what the application has taken."""
    flow = FlowControl(window_events=1000, timeout_s=60)
    with Publisher(group, "T", flow_control=flow) as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(10)
        server = pub.request_server
        assert server is not None
        until(lambda: sub.receive(0.05) is None and len(server.positions) == 1, 10, "it told its position")
        publishing = threading.Thread(
            target=lambda: [pub.publish_many("a", [b"x" * 100] * 100) for _ in range(100)]
        )
        publishing.start()
        taken = 0
        for batch in sub.batches(20):
            assert pub.journal.next - taken <= 1000 + 200, "too far ahead"
            taken = batch.next_offset
            time.sleep(0.001)
            if taken == 10_000:
                break
        publishing.join(30)
        assert taken == 10_000
        assert pub.counters.held_back > 0
        assert sub.counters.lost == 0


def test_a_stopped_application_does_not_stop_the_others(group: str, until: Callable[..., None]) -> None:
    """A subscriber that tells nothing any more is waited for until the time-out."""
    with Publisher(group, "T", flow_control=FlowControl(window_events=10, timeout_s=0.5), linger_s=0) as pub:
        with Subscriber(group, "T") as sub:
            assert sub.wait_joined(10)
            server = pub.request_server
            assert server is not None
            until(
                lambda: sub.receive(0.05) is None and len(server.positions) == 1, 10, "it told its position"
            )
            sub._engine._cookies.clear()  # it leaves without a word
        for _ in range(5):
            pub.publish_many("a", [b"x"] * 10)
        assert pub.journal.next == 50


def test_what_cannot_work_is_refused(group: str) -> None:
    """Wrong numbers, and nowhere to tell positions."""
    with pytest.raises(ConfigError):
        FlowControl(window_events=0)
    with pytest.raises(ConfigError):
        FlowControl(mode="fastest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Publisher(group, "T", requests=None, flow_control=FlowControl())


def test_what_was_just_read_is_not_taken(group: str, until: Callable[..., None]) -> None:
    """A position that is told while packets are being read names the first event that the application lacks."""
    with Publisher(group, "T") as pub, Subscriber(group, "T", start=0) as sub:
        assert sub.wait_joined(10)
        sub._halt.release()  # the helper thread takes it and ends: this test alone reads the sockets
        sub._helper.join(10)
        pub.publish_many("a", [b"x" * 100] * 500)
        engine = sub._engine
        told: list[int] = []
        collect = engine._collect

        def position_first() -> None:
            told.append(engine._taken())
            collect()

        engine._collect = position_first  # type: ignore[method-assign]
        until(lambda: engine.step() and sub._receiver.expected == 501, 20, "all were read")
        assert set(told) == {1}
