"""What the page shows of five minutes of announcements."""

from brokerless.console.history import HISTORY_S, LEAVE_S, History
from brokerless.core.exposition import exposition
from brokerless.core.presence import Component
from brokerless.core.summary import summarise


def publisher(sent: int, updated: float, *, alive: bool = True) -> Component:
    return Component(
        kind="direct.publisher",
        name="s",
        addresses=["tcp://h:1"],
        id="1",
        pid=1,
        updated=updated,
        alive=alive,
        state={"next": sent, "epoch": 1, "counters": {"accepted": sent}},
    )


def subscriber(at: int, updated: float, *, alive: bool = True, lost: int = 0) -> Component:
    losses = [["s", 0, lost - 1, "evicted"]] if lost else []
    account = {"accepted": at, "delivered": at - lost, "pending": 0, "lost": lost, "balanced": True}
    return Component(
        kind="direct.subscriber",
        name="r",
        addresses=["tcp://h:1"],
        id="1",
        pid=2,
        updated=updated,
        alive=alive,
        state={
            "positions": {"s": [1, at]},
            "counters": {"events": at},
            "account": account,
            "losses": losses,
        },
    )


def test_rate_and_lag() -> None:
    """Rates come from two announcements, lag from the publisher's end and the consumer's position."""
    before = [publisher(100, 10.0), subscriber(100, 10.0)]
    now = [publisher(300, 12.0), subscriber(150, 12.0)]
    (_, first), (_, second) = summarise(now, before)
    assert (first["rate"], second["rate"], second["lag"]) == (100.0, 25.0, 150)


def test_another_epoch_is_no_lag() -> None:
    """A position of an old epoch says nothing about the new one."""
    old = subscriber(500, 1.0)
    old.state["positions"] = {"s": [0, 500]}
    assert dict(list(summarise([publisher(10, 1.0), old]))[1][1])["lag"] is None


def test_the_lag_of_a_dead_consumer_grows() -> None:
    """It keeps its last position on the page, and the publisher goes on, even when its file is swept."""
    history = History()
    history.add([publisher(100, 1.0), subscriber(100, 1.0)], 1.0)
    history.add([publisher(200, 2.0), subscriber(100, 1.0, alive=False)], 2.0)
    history.add([publisher(300, 3.0)], 3.0)
    shown = {c["kind"]: c for c in history.page(3.0)["components"]}
    assert (shown["direct.subscriber"]["status"], shown["direct.subscriber"]["lag"]) == ("dead", 200)
    assert shown["direct.publisher"]["rate"] == 100.0
    (edge,) = history.page(3.0)["edges"]
    assert edge == {
        "from": "1/1/direct.publisher",
        "to": "2/1/direct.subscriber",
        "transport": "ZeroMQ",
        "rate": 0.0,
        "lag": 200,
    }


def test_a_look_without_news_keeps_the_rate() -> None:
    """Announcements come once a second, looks may come more often."""
    history = History()
    history.add([publisher(0, 1.0)], 1.0)
    history.add([publisher(100, 2.0)], 2.0)
    history.add([publisher(100, 2.0)], 2.4)
    assert history.page(2.4)["components"][0]["rate"] == 100.0
    history.add([publisher(300, 3.0)], 3.0)
    assert history.page(3.0)["components"][0]["rate"] == 200.0


def test_losses_are_listed_once() -> None:
    """With range, reason and who declared it."""
    history = History()
    for now in (1.0, 2.0, 3.0):
        history.add([subscriber(100, now, lost=10)], now)
    (loss,) = history.page(3.0)["incidents"]
    assert (loss["source"], loss["first"], loss["last"], loss["count"], loss["reason"]) == (
        *("s", 0, 9),
        *(10, "evicted"),
    )


def test_groups_without_workers_lose_in_public() -> None:
    """The publisher knows what a group lost while nobody was there; each increase is one line."""
    history = History()
    for now, lost in ((1.0, 5), (2.0, 5), (3.0, 12)):
        component = publisher(100, now)
        component.state["groups"] = {"g": {"lost_by_reason": {"evicted": lost}, "balanced": True}}
        history.add([component], now)
    assert [loss["count"] for loss in history.page(3.0)["incidents"]] == [7, 5]


def test_the_closed_leave_soon_and_the_dead_later() -> None:
    """Memory is bounded by time, for both."""
    history = History()
    history.add([publisher(1, 1.0), subscriber(1, 1.0, alive=False)], 1.0)
    history.add([], 2.0)
    assert {c["status"] for c in history.page(2.0)["components"]} == {"closed", "dead"}
    history.add([], 2.0 + LEAVE_S)
    assert {c["status"] for c in history.page(3.0)["components"]} == {"dead"}
    history.add([], 3.0 + HISTORY_S)
    assert history.page(3.0 + HISTORY_S)["components"] == []


def test_a_killed_one_in_whose_place_another_was_started_leaves_soon() -> None:
    """It is behind with nothing any more; of two that were killed, one is still missing."""
    dead, other = subscriber(100, 1.0, alive=False), subscriber(100, 1.0, alive=False)
    new, elder = subscriber(200, 3.0), subscriber(200, 3.0)
    other.pid, new.pid, elder.pid = 3, 4, 5
    new.started, elder.started = 2.0, 0.5  # the elder ran beside them, and took nobody's place
    history = History()
    history.add([publisher(200, 3.0), dead, other, new, elder], 3.0)
    shown = {c["id"]: (c["status"], c["lag"]) for c in history.page(3.0)["components"]}
    assert sorted(shown[f"{pid}/1/direct.subscriber"] for pid in (2, 3)) == [
        ("dead", 100),
        ("replaced", None),
    ]
    assert shown["4/1/direct.subscriber"] == shown["5/1/direct.subscriber"] == ("up", 0)
    later = 4.0 + LEAVE_S
    history.add([publisher(200, later), dead, other, new, elder], later)
    page = history.page(later)
    assert sorted(c["status"] for c in page["components"]) == ["dead", "up", "up", "up"]
    assert {edge["to"] for edge in page["edges"]} <= {c["id"] for c in page["components"]}
    assert exposition([dead, new]).count("brokerless_up{") == 1


def test_a_position_alone_is_no_connection() -> None:
    """A consumer that knows the position of a source that it does not follow has no lag there, and no edge."""
    other = publisher(5000, 1.0)
    other.name, other.addresses, other.id = "elsewhere", ["tcp://h:2"], "2"
    reader = subscriber(100, 1.0)
    reader.state["positions"]["elsewhere"] = [1, 7]
    history = History()
    history.add([publisher(150, 1.0), other, reader], 1.0)
    shown = {c["kind"]: c for c in history.page(1.0)["components"]}
    assert shown["direct.subscriber"]["lag"] == 50
    assert [edge["from"] for edge in history.page(1.0)["edges"]] == ["1/1/direct.publisher"]
    history.add([publisher(150, 2.0), other, subscriber(100, 1.0, alive=False)], 2.0)
    assert [each["source"] for each in history.page(2.0)["incidents"]] == ["s"]


def job(rows: int, read_to: dict[str, int], updated: float) -> Component:
    state = {"counters": {"rows": rows}, "paths": ["/spool"], "read_to": read_to}
    return Component(kind="spark.job", name="land", id="1", pid=4, updated=updated, state=state)


def spool(end: int, updated: float) -> Component:
    state = {"next": end, "journal": {"path": "/spool"}, "counters": {"events": end}, "inputs": []}
    return Component(kind="collector", name="c", id="1", pid=3, updated=updated, state=state)


def test_the_edge_from_collector_to_spark() -> None:
    """It is there before the first batch, with unknown lag; then it shows rate and lag; a job that ended is at rest."""
    history = History()

    def edge() -> tuple[object, object]:
        (found,) = [e for e in history.page(1.0)["edges"] if e["to"].endswith("spark.job")]
        return found["rate"], found["lag"]

    history.add([spool(100, 1.0), job(0, {}, 1.0)], 1.0)
    assert edge() == (None, None)
    history.add([spool(100, 2.0), job(80, {"/spool": 80}, 2.0)], 2.0)
    assert edge() == (80.0, 20)
    history.add([spool(130, 3.0)], 3.0)
    assert edge() == (0.0, 50)
