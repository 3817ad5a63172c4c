"""The lines of the map: which component gets events from which, how many a second, how far behind. Pure."""

import os
from collections.abc import Sequence
from typing import Any

from brokerless.core.presence import Component
from brokerless.core.summary import PUBLISHERS, follows, key_of, newest_offsets, progress_rate

# A component, its announcement before that one, and whether it is still announced.
Seen = tuple[Component, Component | None, bool]


def edges(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """Lines between components by id, each with transport, rate (events/s) and lag (None where unknown)."""
    found = [*_deliveries(seen), *_to_collectors(seen), *_to_spark(seen)]
    return sorted(found, key=lambda each: (each["from"], each["to"]))


def _id(component: Component) -> str:
    return "/".join(map(str, key_of(component)))


def _edge(
    start: Component, end: Component, transport: str, rate: float | None = None, lag: int | None = None
) -> dict[str, Any]:
    return {"from": _id(start), "to": _id(end), "transport": transport, "rate": rate, "lag": lag}


def _transport(component: Component) -> str:
    package = component.kind.partition(".")[0]
    if package == "direct":
        return "NNG" if any(a.startswith("nng+") for a in component.addresses) else "ZeroMQ"
    return package


def _deliveries(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """From publishers to subscribers, workers and request servers: by position, group or address."""
    ends = newest_offsets([component for component, _, _ in seen])
    by_source: dict[str, Component] = {}
    by_address: dict[str, Component] = {}
    for component, _, present in seen:
        if component.kind in PUBLISHERS:
            if component.alive and present:
                by_source[component.name] = component
                by_address |= dict.fromkeys(component.addresses, component)
            else:
                by_source.setdefault(component.name, component)
                for address in component.addresses:
                    by_address.setdefault(address, component)
    result = []
    for component, before, _ in seen:
        if component.kind in PUBLISHERS:
            continue
        positions = component.state.get("positions", {})
        senders = {
            _id(by_source[source]): by_source[source]
            for source in positions
            if source in by_source and follows(component, by_source[source])
        }
        named = [by_address[address] for address in component.addresses if address in by_address]
        # `group` is what a worker says of itself, and what publishers that know it list.
        group = component.state.get("group")
        if group and not named:
            named = [p for p in by_source.values() if group in p.state.get("groups", {})]
        senders |= {_id(publisher): publisher for publisher in named}
        for publisher in senders.values():
            at = positions.get(publisher.name)
            end = None if at is None else ends.get((publisher.name, at[0]))
            lag = None if at is None or end is None else max(0, end - at[1])
            if group:
                lag = publisher.state.get("groups", {}).get(group, {}).get("pending")
            rate = _rate(component, before, publisher.name)
            result.append(_edge(publisher, component, _transport(publisher), rate, lag))
    return result


def _rate(component: Component, before: Component | None, source: str) -> float | None:
    """How fast the consumer moves through the journal of a source."""
    if before is None or not component.alive:
        return 0.0 if not component.alive else None
    now, then = (each.state.get("positions", {}).get(source) for each in (component, before))
    seconds = component.updated - before.updated
    if now is None or then is None or now[0] != then[0] or seconds <= 0:
        return None
    return max(0.0, float(now[1] - then[1]) / seconds)


def _to_collectors(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """From the subscribers inside of a collector, and from dispatchers and daemons that feed one of its inputs."""
    result = []
    for collector, _, _ in seen:
        if collector.kind != "collector":
            continue
        names = {str(each.get("name", "")) for each in collector.state.get("inputs", [])}
        for other, _, _ in seen:
            if other.pid == collector.pid and other.kind.endswith((".subscriber", ".worker")):
                result.append(_edge(other, collector, "spool"))
            elif other.kind == "webhooks.dispatcher":
                listening = {each[2].partition("://")[2] for each in other.state.get("endpoints", [])}
                if listening & names:
                    result.append(_edge(other, collector, "webhooks", lag=other.state.get("pending")))
            elif other.kind == "metrics.server" and _same_path(other.state.get("paths", []), names):
                result.append(_edge(other, collector, "journal"))
    return result


def _to_spark(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """From collectors and publishers to the jobs that read their journals."""
    result = []
    for job, before, present in seen:
        if job.kind == "spark.job":
            for other, _, _ in seen:
                path = other.state.get("journal", {}).get("path")
                if path and _same_path([path], job.state.get("paths", [])):
                    rate = progress_rate(job, before) if present else 0.0
                    at = job.state.get("read_to", {}).get(path)
                    lag = None if at is None else max(0, int(other.state.get("next", 0)) - at)
                    result.append(_edge(other, job, "journal", rate, lag))
    return result


def _same_path(these: Sequence[str], those: Any) -> bool:
    others = {os.path.abspath(each) for each in those if each}
    return any(os.path.abspath(each) in others for each in these)
