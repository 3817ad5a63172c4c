"""What the announcements of all components mean together: rates, lag and loss. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from brokerless.core.presence import Component

# kind → the counter that says how many events went through it
PROGRESS = {
    "direct.publisher": "accepted",
    "multicast.publisher": "accepted",
    "direct.subscriber": "events",
    "multicast.subscriber": "events",
    "direct.worker": "delivered",
    "multicast.request_server": "answered",
    "webhooks.dispatcher": "delivered",
    "metrics.server": "lines",
    "collector": "events",
    "spark.job": "rows",
    "losstest.run": "done",
}
PUBLISHERS = ("direct.publisher", "multicast.publisher")


def key_of(component: Component) -> tuple[int, str, str]:
    """What tells one component from another, for as long as its process lives."""
    return component.pid, component.id, component.kind


def summarise(
    now: Sequence[Component], before: Sequence[Component] = ()
) -> Iterator[tuple[Component, dict[str, Any]]]:
    """Each component with rate (events/s, None if unknown), lag (events), lost, balanced, done (events) and state.

    The state is "up", "dead" for one whose process was killed, or "replaced" if another one was started in its place:
    that one is as far behind as it says itself, the old one is behind with nothing any more.
    """
    earlier = {key_of(component): component for component in before}
    publishers = [component for component in now if component.kind in PUBLISHERS]
    old = replaced(now)
    for component in now:
        # A position is no proof of a connection: a collector's inputs know the positions of all of its sources.
        ends = newest_offsets([each for each in publishers if follows(component, each)])
        yield (
            component,
            {
                "rate": progress_rate(component, earlier.get(key_of(component))),
                "lag": None if key_of(component) in old else lag_of(component, ends),
                "lost": lost_of(component),
                "balanced": balanced(component),
                "done": done_of(component),
                "state": "up" if component.alive else "replaced" if key_of(component) in old else "dead",
            },
        )


def replaced(components: Sequence[Component]) -> set[tuple[int, str, str]]:
    """The killed ones in whose place another one was started later: of the same kind, name and address."""
    heirs = sorted((each for each in components if each.alive), key=lambda each: each.started)
    found = set()
    for dead in sorted((each for each in components if not each.alive), key=lambda each: each.updated):
        for heir in heirs:
            same = (heir.kind, heir.name, heir.host) == (dead.kind, dead.name, dead.host)
            # A publisher is its source, wherever it listens.
            if (
                same
                and heir.started > dead.updated
                and (dead.kind in PUBLISHERS or heir.addresses == dead.addresses)
            ):
                found.add(key_of(dead))
                heirs.remove(heir)  # of two killed workers, one is still missing
                break
    return found


def newest_offsets(components: Sequence[Component]) -> dict[tuple[str, int], int]:
    """The end of each source's journal by source and epoch, as its publisher announced it last."""
    ends: dict[tuple[str, int], int] = {}
    for component in components:
        if component.kind in PUBLISHERS and "next" in component.state:
            where = (component.name, int(component.state.get("epoch", 0)))
            ends[where] = max(ends.get(where, 0), int(component.state["next"]))
    return ends


def follows(consumer: Component, publisher: Component) -> bool:
    """Whether the consumer gets events from the publisher, by what it was told to connect to."""
    if consumer.kind.partition(".")[0] != publisher.kind.partition(".")[0]:
        return False
    ports = {address.rpartition(":")[2] for address in publisher.addresses}
    return any(
        fnmatchcase(publisher.name, address.removeprefix("discover:"))
        if address.startswith("discover:")
        else address in publisher.addresses or address.rpartition(":")[2] in ports
        for address in consumer.addresses
    )


def lag_of(component: Component, ends: Mapping[tuple[str, int], int]) -> int | None:
    """How many events a consumer is behind its publishers; None if that cannot be known."""
    if component.kind in PUBLISHERS:
        behind = component.state.get("journal", {}).get("behind", {})
        return max(behind.values(), default=0)
    if component.kind == "webhooks.dispatcher":
        return int(component.state.get("pending", 0))
    if component.kind == "collector":
        return sum(max(0, int(each.get("behind", 0))) for each in component.state.get("inputs", []))
    if component.kind == "spark.job":
        behind = component.state.get("behind")
        return None if behind is None else int(behind)
    positions = component.state.get("positions", {})
    known = [
        max(0, ends[source, epoch] - offset)
        for source, (epoch, offset) in positions.items()
        if (source, epoch) in ends
    ]
    return sum(known) if known else None


def lost_of(component: Component) -> int:
    """How many events it declared lost, or evicted before somebody registered had them."""
    state = component.state
    counters = state.get("counters", {})
    if "account" in state:
        return int(state["account"].get("lost", 0))
    if component.kind in PUBLISHERS:
        return int(state.get("journal", {}).get("counters", {}).get("evicted", 0))
    if component.kind == "webhooks.dispatcher":
        return int(counters.get("gave_up", 0)) + int(counters.get("evicted", 0))
    if component.kind == "metrics.server":
        return int(counters.get("lost_datagrams", 0)) + int(counters.get("kernel_drops", 0))
    return int(counters.get("lost", 0))


def balanced(component: Component) -> bool | None:
    """Whether accepted = delivered + pending + lost + compacted holds; None where there is no such sum."""
    state = component.state
    if "account" in state:
        return bool(state["account"].get("balanced"))
    groups = state.get("groups")
    return all(group.get("balanced") for group in groups.values()) if groups else None


def done_of(component: Component) -> int | None:
    """How many events went through it; None if it does not say."""
    done = component.state.get("counters", {}).get(PROGRESS.get(component.kind, "events"))
    return None if done is None else int(done)


def progress_rate(component: Component, earlier: Component | None) -> float | None:
    """Events a second since an earlier announcement of the component; None if that cannot be known."""
    if earlier is None or component.updated <= earlier.updated:
        return None
    done, before = done_of(component), done_of(earlier)
    if done is None or before is None:
        return None
    return max(0.0, float(done - before) / (component.updated - earlier.updated))
