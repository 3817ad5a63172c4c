"""Five minutes of announcements in memory, and what the page shows of them. `now` is an argument: no clock, no I/O."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from brokerless.console.edges import edges
from brokerless.console.incidents import Incidents
from brokerless.core.presence import Component
from brokerless.core.summary import key_of, summarise

# What a person looks back at while something is going wrong; Prometheus has the rest.
HISTORY_S = 300.0
# A component that was closed in order, or was killed and has been replaced, leaves the page after this; one that was
# killed and is missing stays for the whole history.
LEAVE_S = 15.0
# These end by themselves, and their results are what people look at.
_STAY = ("spark.job", "losstest.run")


class _Seen:
    """One component over time."""

    def __init__(self, component: Component, now: float) -> None:
        self.component = component
        self.before: Component | None = None  # its announcement before the newest
        self.first = self.last = now
        self.present = True
        self.replaced = math.inf  # when another one was first seen in its place
        self.rate: float | None = None
        self.points: deque[tuple[float, float, int, int]] = deque()  # time, rate, lag, lost


class History:
    """What was announced in the last minutes."""

    def __init__(self, *, seconds: float = HISTORY_S) -> None:
        self._seconds = seconds
        self._seen: dict[tuple[int, str, str], _Seen] = {}
        self._before: list[Component] = []
        self._incidents = Incidents()

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
            if component.updated > seen.component.updated:
                seen.before = seen.component
            seen.component = component
            seen.present = key in present
            if seen.present:
                seen.last = now
            if summary["state"] == "replaced":
                seen.replaced = min(seen.replaced, now)
            # Announcements come once a second, looks more often: a look without news keeps the rate.
            rate = summary["rate"] if component.alive and seen.present else 0.0
            if rate is not None:
                seen.rate = rate
            seen.points.append((now, seen.rate or 0.0, summary["lag"] or 0, summary["lost"]))
            while seen.points and seen.points[0][0] < now - self._seconds:
                seen.points.popleft()
        self._incidents.add([*components, *absent], now)
        self._before = self._newer(components)
        for key, seen in list(self._seen.items()):
            stays = not seen.component.alive or seen.component.kind in _STAY
            limit = self._seconds if stays else LEAVE_S
            if not seen.present and now - seen.last > limit:
                del self._seen[key]
                self._incidents.forget(key)

    def _newer(self, components: Sequence[Component]) -> list[Component]:
        """What rates are measured against next: the announcement before the newest one of each component."""
        before = {key_of(component): component for component in self._before}
        result = []
        for component in components:
            old = before.get(key_of(component))
            result.append(component if old is None or component.updated > old.updated else old)
        return result

    def page(self, now: float, *, points: int = 60) -> dict[str, Any]:
        """Everything that the page shows, as plain data; `points` of each component's history, at most."""
        shown = []
        known = [seen.component for seen in self._seen.values()]
        summaries = {key_of(component): summary for component, summary in summarise(known)}
        for key, seen in self._seen.items():
            component = seen.component
            summary = summaries[key]
            state = summary["state"] if seen.present or not component.alive else "closed"
            if now - seen.replaced > LEAVE_S:
                continue
            every = max(1, len(seen.points) // points) if points else 1
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
                    "history": [list(point) for point in list(seen.points)[::every]] if points else [],
                    "point": list(seen.points[-1]) if seen.points else [],
                    "state": component.state,
                }
            )
        ids = {each["id"] for each in shown}
        drawn = edges([(seen.component, seen.before, seen.present) for seen in self._seen.values()])
        shown.sort(key=lambda c: (c["kind"], c["name"], c["started"]))
        return {
            "time": now,
            "components": shown,
            "edges": [edge for edge in drawn if {edge["from"], edge["to"]} <= ids],
            "incidents": [msgspec.structs.asdict(each) for each in self._incidents.newest_first()],
        }
