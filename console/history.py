"""Five minutes of announcements in memory, and what the page shows of them. `now` is an argument: no clock, no I/O."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from brokerless.core.presence import Component
from brokerless.core.summary import PUBLISHERS, key_of, summarise

# What a person looks back at while something is going wrong; Prometheus has the rest.
HISTORY_S = 300.0
# Losses on the page; the ledgers have all of them.
MAX_LOSSES = 200
# A component that was closed in order leaves the page after this; one that was killed stays for the whole history.
LEAVE_S = 15.0


class _Seen:
    """One component over time."""

    def __init__(self, component: Component, now: float) -> None:
        self.component = component
        self.first = self.last = now
        self.present = True
        self.rate: float | None = None
        self.points: deque[tuple[float, float, int, int]] = deque()  # time, rate, lag, lost


class History:
    """What was announced in the last minutes."""

    def __init__(self, *, seconds: float = HISTORY_S) -> None:
        self._seconds = seconds
        self._seen: dict[tuple[int, str, str], _Seen] = {}
        self._before: list[Component] = []
        self._losses: deque[dict[str, Any]] = deque(maxlen=MAX_LOSSES)
        self._known_losses: set[tuple[Any, ...]] = set()
        self._group_losses: dict[tuple[Any, ...], int] = {}

    def add(self, components: Sequence[Component], now: float) -> None:
        """What is announced at this moment (seconds since 1970)."""
        present = {key_of(component) for component in components}
        # A component that was killed and swept, or closed: what it said last stays for a while.
        absent = [seen.component for key, seen in self._seen.items() if key not in present]
        for component, summary in summarise([*components, *absent], self._before):
            key = key_of(component)
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = _Seen(component, now)
            seen.component = component
            seen.present = key in present
            if seen.present:
                seen.last = now
            # Announcements come once a second, looks more often: a look without news keeps the rate.
            rate = summary["rate"] if component.alive and seen.present else 0.0
            if rate is not None:
                seen.rate = rate
            seen.points.append((now, seen.rate or 0.0, summary["lag"] or 0, summary["lost"]))
            while seen.points and seen.points[0][0] < now - self._seconds:
                seen.points.popleft()
            self._note_losses(component, now)
        self._before = self._newer(components)
        for key, seen in list(self._seen.items()):
            limit = self._seconds if not seen.component.alive else LEAVE_S
            if not seen.present and now - seen.last > limit:
                del self._seen[key]

    def _newer(self, components: Sequence[Component]) -> list[Component]:
        """What rates are measured against next: the announcement before the newest one of each component."""
        before = {key_of(component): component for component in self._before}
        result = []
        for component in components:
            old = before.get(key_of(component))
            result.append(component if old is None or component.updated > old.updated else old)
        return result

    def _note_losses(self, component: Component, now: float) -> None:
        self._note_group_losses(component, now)
        for source, first, last, reason in component.state.get("losses", []):
            key = (*key_of(component), source, first, last, reason)
            if key in self._known_losses:
                continue
            self._known_losses.add(key)
            if len(self._known_losses) > 50 * MAX_LOSSES:
                self._known_losses.clear()
            self._losses.append(
                {
                    "time": now,
                    "by": f"{component.kind} {component.name}",
                    "source": source,
                    "first": first,
                    "last": last,
                    "count": last - first + 1,
                    "reason": reason,
                }
            )

    def _note_group_losses(self, component: Component, now: float) -> None:
        """What a group lost while none of its workers was there to declare it: the publisher knows how many."""
        for name, group in component.state.get("groups", {}).items():
            for reason, count in group.get("lost_by_reason", {}).items():
                key = (*key_of(component), name, reason)
                more = count - self._group_losses.get(key, 0)
                self._group_losses[key] = count
                if more > 0:
                    self._losses.append(
                        {
                            "time": now,
                            "by": f"group {name}",
                            "source": component.name,
                            "first": None,
                            "last": None,
                            "count": more,
                            "reason": reason,
                        }
                    )

    def page(self, now: float, *, points: int = 60) -> dict[str, Any]:
        """Everything that the page shows, as plain data."""
        shown = []
        summaries = dict_of_summaries([seen.component for seen in self._seen.values()])
        for key, seen in self._seen.items():
            component = seen.component
            state = "dead" if not component.alive else "up" if seen.present else "closed"
            summary = summaries[key]
            every = max(1, len(seen.points) // points)
            shown.append(
                {
                    "id": "/".join(map(str, key)),
                    "kind": component.kind,
                    "name": component.name,
                    "addresses": component.addresses,
                    "pid": component.pid,
                    "host": component.host,
                    "version": component.version,
                    "started": component.started,
                    "status": state,
                    "rate": seen.rate,
                    "lag": summary["lag"],
                    "lost": summary["lost"],
                    "balanced": summary["balanced"],
                    "history": [list(point) for point in list(seen.points)[::every]],
                    "state": component.state,
                }
            )
        shown.sort(key=lambda c: (c["kind"], c["name"], c["started"]))
        return {
            "time": now,
            "components": shown,
            "edges": self._edges(),
            "losses": list(self._losses)[::-1],
        }

    def _edges(self) -> list[dict[str, str]]:
        """Who gets events from whom: by address, or by the source that a consumer has a position for."""
        by_address: dict[str, str] = {}
        by_source: dict[str, str] = {}
        consumers: list[tuple[str, Component]] = []
        for key, seen in self._seen.items():
            name = "/".join(map(str, key))
            component = seen.component
            if component.kind in PUBLISHERS:
                if component.alive and seen.present:
                    by_source[component.name] = name
                else:
                    by_source.setdefault(component.name, name)
                by_address |= dict.fromkeys(component.addresses, name)
            else:
                consumers.append((name, component))
        edges: set[tuple[str, str]] = set()
        for name, component in consumers:
            sources = set(component.state.get("positions", {}))
            edges |= {(by_source[source], name) for source in sources if source in by_source}
            edges |= {(by_address[a], name) for a in component.addresses if a in by_address}
            if component.kind == "collector":
                pid = component.pid
                inputs = [other for other, each in consumers if each.pid == pid and other != name]
                edges |= {(other, name) for other in inputs}
        return [{"from": start, "to": end} for start, end in sorted(edges)]


def dict_of_summaries(components: Sequence[Component]) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Lag, loss and balance of each component, by its key."""
    return {key_of(component): summary for component, summary in summarise(components)}
