"""Losses, gaps and outages in what is announced, and when they count as repaired."""

from typing import Any

from brokerless.console.incidents import Incident, Incidents
from brokerless.core.presence import Component


def publisher(end: int) -> Component:
    return Component(
        kind="direct.publisher",
        name="s",
        addresses=["tcp://h:1"],
        id="1",
        pid=1,
        state={"next": end, "epoch": 1},
    )


def consumer(at: int, *, pid: int = 2, alive: bool = True, epoch: int = 1, **state: Any) -> Component:
    return Component(
        kind="direct.subscriber",
        name="billing",
        addresses=["tcp://h:1"],
        id="1",
        pid=pid,
        started=float(pid),
        alive=alive,
        state={"positions": {"s": [epoch, at]}, **state},
    )


def only(incidents: Incidents) -> Incident:
    (found,) = incidents.newest_first()
    return found


def test_an_outage_is_open_until_its_range_was_delivered() -> None:
    """It grows while nobody takes the place, and is repaired when the new consumer came to where that began."""
    incidents = Incidents()
    incidents.add([publisher(100), consumer(100)], 1.0)
    assert incidents.newest_first() == []
    dead = consumer(100, alive=False)
    for now, end in ((2.0, 150), (3.0, 300)):
        incidents.add([publisher(end), dead], now)
    found = only(incidents)
    assert (found.state, found.first, found.last, found.count) == ("open", 100, 299, 200)
    incidents.add([publisher(400), dead, consumer(250, pid=3)], 4.0)
    assert (only(incidents).state, only(incidents).last) == ("open", 399)
    incidents.add([publisher(900), dead, consumer(400, pid=3)], 5.0)
    assert (found.state, found.lost, found.last) == ("repaired", 0, 399)


def test_the_range_that_a_group_lost_without_workers() -> None:
    """As far as the publisher knows it: one line that grows for a minute, and no offset in two lines."""
    incidents = Incidents()
    group: dict[str, Any] = {"lost_by_reason": {"evicted": 20}, "unreported": {"evicted": [1, 20]}}
    one = publisher(100)
    one.state["groups"] = {"late": group}
    incidents.add([one], 1.0)
    assert (only(incidents).first, only(incidents).last, only(incidents).count) == (1, 20, 20)
    group.update({"lost_by_reason": {"evicted": 50}, "unreported": {"evicted": [1, 50]}})
    incidents.add([one], 2.0)
    assert (only(incidents).first, only(incidents).last, only(incidents).count) == (1, 50, 50)
    # The number was read a moment before the range.
    group.update({"lost_by_reason": {"evicted": 55}, "unreported": {"evicted": [1, 60]}})
    incidents.add([one], 3.0)
    group.update({"lost_by_reason": {"evicted": 65}, "unreported": {"evicted": [1, 65]}})
    incidents.add([one], 70.0)
    shown = [(each.first, each.last, each.count) for each in incidents.newest_first()]
    assert shown == [(61, 65, 5), (1, 60, 60)]
    group.update({"lost_by_reason": {"evicted": 75}, "unreported": {"evicted": [72, 75]}})
    incidents.add([one], 71.0)
    assert (incidents.newest_first()[0].first, incidents.newest_first()[0].count) == (None, 10)
    group.update({"lost_by_reason": {"evicted": 80}, "unreported": {"evicted": [72, 80]}})
    incidents.add([one], 72.0)
    newest = incidents.newest_first()[0]
    assert (newest.first, newest.last, newest.count) == (76, 80, 5)


def test_what_an_outage_cost_is_told() -> None:
    """The part that was lost all the same is not called repaired."""
    incidents = Incidents()
    dead = consumer(100, alive=False)
    incidents.add([publisher(300), dead], 1.0)
    heir = consumer(300, pid=3, losses=[["s", 100, 149, "evicted"], ["other", 0, 999, "evicted"]])
    incidents.add([publisher(300), dead, heir], 2.0)
    outage = next(each for each in incidents.newest_first() if each.reason == "consumer killed")
    assert (outage.state, outage.lost, outage.count) == ("repaired", 50, 200)
    assert [each.state for each in incidents.newest_first() if each.reason == "evicted"] == ["lost", "lost"]


def test_another_consumer_is_no_heir() -> None:
    """Neither one that was there before, nor one of another name."""
    incidents = Incidents()
    dead = consumer(100, alive=False)
    older = consumer(500, pid=1)
    other = consumer(500, pid=9)
    other.name = "audit"
    incidents.add([publisher(500), dead, older, other], 1.0)
    assert only(incidents).state == "open"


def test_gaps_are_followed() -> None:
    """A hole in the live stream is open until the consumer is past it."""
    incidents = Incidents()
    incidents.add([publisher(100), consumer(100, counters={"gaps": 4})], 1.0)
    assert incidents.newest_first() == []  # from before the console began
    incidents.add([publisher(200), consumer(120, counters={"gaps": 5})], 2.0)
    assert (only(incidents).state, only(incidents).count) == ("open", 1)
    incidents.add([publisher(300), consumer(250, counters={"gaps": 5})], 3.0)
    assert only(incidents).state == "repaired"


def test_late_ones_are_repaired() -> None:
    """What had been declared lost and came after all is one line."""
    incidents = Incidents()
    for now, late in ((1.0, 0), (2.0, 7), (3.0, 7)):
        incidents.add([publisher(10), consumer(10, account={"late": late})], now)
    assert (only(incidents).state, only(incidents).count) == ("repaired", 7)


def test_memory_is_bounded() -> None:
    """A consumer that dies a thousand times costs no more than the lines on the page."""
    incidents = Incidents()
    for pid in range(2, 1000):
        incidents.add([publisher(10), consumer(5, pid=pid, alive=False)], float(pid))
        incidents.forget((pid, "1", "direct.subscriber"))
    assert len(incidents.newest_first()) == 200
    assert len(incidents._open) <= 200
