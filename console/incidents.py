"""What went wrong lately, and whether it was repaired: losses, gaps and outages. Pure; `now` is an argument."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from brokerless.core.presence import Component
from brokerless.core.summary import PUBLISHERS, follows, key_of, newest_offsets

# On the page; the ledgers have all of them.
MAX_INCIDENTS = 200
# Remembered so that a range that is announced every second is listed once.
_MAX_KNOWN = 50 * MAX_INCIDENTS
# A group that loses all the time is one line a minute, not one at every look that pushes the others off the page.
_ONE_LINE_S = 60.0
Ends = Mapping[tuple[str, int], int]


class Incident(msgspec.Struct, kw_only=True):
    """One line of the page. `first` and `last` are offsets, None where only the number is known.

    `state` is `lost` for good, `open`, or `repaired`; `lost` says how many of the range were lost although the rest
    was repaired.
    """

    time: float
    by: str
    source: str
    first: int | None = None
    last: int | None = None
    count: int
    reason: str
    state: str = "lost"
    lost: int = 0


class _Open:
    """An outage or gap that waits for its repair: the consumer must come to `until`."""

    def __init__(self, incident: Incident, component: Component, epoch: int, until: int | None) -> None:
        self.incident = incident
        self.kind, self.name, self.addresses = component.kind, component.name, component.addresses
        self.started = component.started
        self.epoch = epoch
        self.until = until  # None: nobody has taken the consumer's place yet
        self.own: tuple[int, str, str] | None = key_of(component)

    def belongs(self, component: Component) -> bool:
        """Whether it is this consumer, or the one that took its place."""
        if self.own is not None:
            return key_of(component) == self.own
        same = (component.kind, component.name) == (self.kind, self.name)
        return same and component.addresses == self.addresses and component.started > self.started


class Incidents:
    """Notices losses, gaps and outages in announcements, and follows the latter two to their end."""

    def __init__(self) -> None:
        self._shown: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self._open: list[_Open] = []
        self._known: set[tuple[Any, ...]] = set()
        # by group and reason: how many are shown, from which offset on they are not, and the newest line
        self._group_losses: dict[tuple[object, ...], tuple[int, int, Incident | None]] = {}
        self._counted: dict[tuple[Any, ...], int] = {}
        self._dead: set[tuple[int, str, str]] = set()
        self._followed: set[str] = set()  # sources of the component that is being looked at

    def newest_first(self) -> list[Incident]:
        """What the page shows."""
        return list(self._shown)[::-1]

    def forget(self, key: tuple[int, str, str]) -> None:
        """The component has left the page."""
        self._dead.discard(key)
        self._counted = {k: n for k, n in self._counted.items() if k[:3] != key}
        self._group_losses = {k: n for k, n in self._group_losses.items() if k[:3] != key}

    def add(self, components: Sequence[Component], now: float) -> None:
        """What is announced at this moment (seconds since 1970)."""
        publishers = [component for component in components if component.kind in PUBLISHERS]
        ends = newest_offsets(publishers)
        for component in components:
            self._followed = {each.name for each in publishers if follows(component, each)}
            self._note_losses(component, now)
            self._note_group_losses(component, now)
            if component.alive:
                self._note_gaps(component, ends, now)
                self._note_late(component, now)
            else:
                self._note_outage(component, now)
        self._open = [each for each in self._open if not self._follow(each, components, ends)]

    def _note_losses(self, component: Component, now: float) -> None:
        for source, first, last, reason in component.state.get("losses", []):
            key = (*key_of(component), source, first, last, reason)
            if key in self._known:
                continue
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            self._known.add(key)
            by = f"{component.kind} {component.name}"
            self._shown.append(
                Incident(
                    time=now,
                    by=by,
                    source=source,
                    first=first,
                    last=last,
                    count=last - first + 1,
                    reason=reason,
                )
            )

    def _note_group_losses(self, component: Component, now: float) -> None:
        """What a group lost while none of its workers was there to declare it: the publisher knows how many."""
        for name, group in component.state.get("groups", {}).items():
            for reason, count in group.get("lost_by_reason", {}).items():
                key = (*key_of(component), name, reason)
                known, until, shown = self._group_losses.get(key, (0, 0, None))
                more = count - known
                if more <= 0:
                    continue
                # Losses of a group go upwards: new are those of its last range that were not shown yet. The range may
                # be read a moment after the number, so it counts if it is the larger one.
                first, last = group.get("unreported", {}).get(reason, (0, -1))
                first = max(first, until)
                if (in_range := last - first + 1) < more:
                    shown = self._group_loss(now, name, component, more, reason)
                elif shown is not None and shown.last == first - 1 and now - shown.time < _ONE_LINE_S:
                    shown.last, shown.count, more = last, shown.count + in_range, in_range
                else:
                    shown = self._group_loss(now, name, component, in_range, reason)
                    shown.first, shown.last, more = first, last, in_range
                self._group_losses[key] = known + more, max(until, last + 1), shown

    def _group_loss(self, now: float, name: str, component: Component, count: int, reason: str) -> Incident:
        incident = Incident(time=now, by=f"group {name}", source=component.name, count=count, reason=reason)
        self._shown.append(incident)
        return incident

    def _grown(self, component: Component, what: str, count: int) -> int:
        """By how much a figure grew since the look before; 0 the first time."""
        key = (*key_of(component), what)
        before = self._counted.get(key, count)
        self._counted[key] = count
        return count - before

    def _note_gaps(self, component: Component, ends: Ends, now: float) -> None:
        gaps = self._grown(component, "gaps", int(component.state.get("counters", {}).get("gaps", 0)))
        if gaps <= 0:
            return
        for source, (epoch, at) in component.state.get("positions", {}).items():
            if (source, epoch) in ends and source in self._followed:
                incident = Incident(
                    time=now,
                    by=f"{component.kind} {component.name}",
                    source=source,
                    count=gaps,
                    reason="gaps in the live stream",
                    state="open",
                    first=at,
                    last=max(at, ends[source, epoch]) - 1,
                )
                self._begin(_Open(incident, component, epoch, ends[source, epoch]))

    def _note_late(self, component: Component, now: float) -> None:
        late = self._grown(component, "late", int(component.state.get("account", {}).get("late", 0)))
        if late > 0:
            by = f"{component.kind} {component.name}"
            sources = ", ".join(component.state.get("positions", {}))
            self._shown.append(
                Incident(
                    time=now,
                    by=by,
                    source=sources,
                    count=late,
                    reason="declared lost, and came later",
                    state="repaired",
                )
            )

    def _note_outage(self, component: Component, now: float) -> None:
        if key_of(component) in self._dead:
            return
        self._dead.add(key_of(component))
        for source, (epoch, at) in component.state.get("positions", {}).items():
            if source not in self._followed:
                continue
            incident = Incident(
                time=now,
                by=f"{component.kind} {component.name}",
                source=source,
                first=at,
                count=0,
                reason="consumer killed",
                state="open",
            )
            opened = _Open(incident, component, epoch, None)
            opened.own = None
            self._begin(opened)

    def _begin(self, opened: _Open) -> None:
        self._shown.append(opened.incident)
        self._open = [*self._open, opened][-MAX_INCIDENTS:]

    def _follow(self, each: _Open, components: Sequence[Component], ends: Ends) -> bool:
        """Whether it is over: the consumer, or the one in its place, came to where it has to come."""
        incident = each.incident
        assert incident.first is not None
        end = ends.get((incident.source, each.epoch), incident.first)
        heirs = [c for c in components if c.alive and each.belongs(c)]
        heir = next((c for c in heirs if incident.source in c.state.get("positions", {})), None)
        if each.until is None:
            incident.last, incident.count = max(incident.first, end) - 1, max(0, end - incident.first)
            if heir is None:
                return False
            each.until = end
        if heir is None:
            return False
        epoch, at = heir.state["positions"][incident.source]
        if epoch == each.epoch and at < each.until:
            return False
        incident.lost = sum(
            max(0, min(last, each.until - 1) - max(first, incident.first) + 1)
            for source, first, last, _ in heir.state.get("losses", [])
            if source == incident.source
        )
        incident.state = "repaired"
        return True
