"""What a publisher answers to those who administer it from outside: positions, lag, groups, dead letters. No sockets.

Every command is bounded: reports list the rows that are furthest behind, dead letters come in pages.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from brokerless.core import Journal
from brokerless.core.errors import BrokerlessError, Evicted, UsageError
from brokerless.core.runtime.clock import elapsed_s
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.dead_letters import DeadLetters
from brokerless.direct.groups.group import Group
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.server import ControlServer

log = logging.getLogger(__name__)
# Rows of a list in a report, those furthest behind first: more are not read by people, and have to fit a message.
MAX_ROWS = 1000
_MAX_REPORTS = 64
_CHANGING = {"retry", "drop", "forget-group", "forget-subscriber"}
_SUB = "sub."


class Administration:
    """Executes commands of administrators, in the server's thread."""

    def __init__(
        self,
        journal: Journal,
        dead: Journal,
        coordinator: GroupCoordinator,
        control_server: ControlServer,
        statuses: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`statuses` gives the accounting of every group."""
        self._journal = journal
        self._letters = DeadLetters(journal, dead)
        self._coordinator = coordinator
        self._control_server = control_server
        self._statuses = statuses
        # The last answers to commands that must not be executed twice, by the request's number.
        self._reports: dict[int, messages.Report] = {}

    def execute(self, request: messages.Admin) -> messages.Report:
        """Do what is asked for. Whatever it is, nothing is raised: the report tells."""
        if request.number in self._reports:
            return self._reports[request.number]  # the same request once more: its answer was late, or lost
        try:
            found = self._execute(request)
            report = messages.Report(request.number, True, msgspec.json.encode(found))
        except BrokerlessError as error:
            report = messages.Report(request.number, False, msgspec.json.encode(str(error)))
        if request.command in _CHANGING:
            self._reports[request.number] = report
            while len(self._reports) > _MAX_REPORTS:
                del self._reports[next(iter(self._reports))]
        return report

    def _execute(self, request: messages.Admin) -> Any:
        match request.command:
            case "status":
                return self.status(elapsed_s())
            case "letters":
                return self._letters.page(request.name, request.after)
            case "letter":
                return self._letters.show(request.numbers)
            case "retry":
                return self._letters.retry(request.numbers, self._coordinator.groups, self._coordinator.keep)
            case "drop":
                return self._letters.drop(request.numbers)
            case "forget-group":
                if request.name not in self._coordinator.groups:
                    raise UsageError(f"there is no group {request.name!r}")
                self._control_server.forget_group(request.name)
                return {"forgotten": request.name}
            case "forget-subscriber":
                if _SUB + request.name not in self._journal.registered():
                    raise UsageError(f"there is no durable subscriber {request.name!r}")
                self._journal.unregister(_SUB + request.name)
                return {"forgotten": request.name}
        raise UsageError(f"{request.command!r} is not a command that this publisher knows")

    # ---- positions and lag -----------------------------------------------------------------------------

    def status(self, now: float) -> dict[str, Any]:
        """Everything that there is to see at one moment."""
        self._journal.flush()
        journal = self._journal
        lag_s = _LagSeconds(journal)
        sessions = [s for s in list(self._control_server.sessions.values()) if not s.group]
        live: list[dict[str, Any]] = [
            {
                "client": f"mirror {session.mirror}" if session.mirror else session.client,
                "durable": session.durable,
                "position": session.position,
                "lag": max(0, journal.next - session.position) if session.position >= 0 else None,
                "heard_s": round(now - session.heard, 3),
                "live": session.ready,
            }
            for session in sessions
        ]
        live.sort(key=lambda row: -1 if row["lag"] is None else -row["lag"])
        here = {session.durable for session in sessions if session.durable}
        durable: list[dict[str, Any]] = [
            {"name": name.removeprefix(_SUB), "position": at, "lag": journal.next - at}
            for name, at in journal.registered().items()
            if name.startswith(_SUB)
        ]
        rows = [*live[:MAX_ROWS], *durable]
        for row in rows:
            row["lag_s"] = lag_s(row["position"]) if row["lag"] else 0.0
        for row in durable:
            row["connected"] = row["name"] in here
        return {
            "source": journal.source,
            "epoch": journal.epoch,
            "oldest": journal.oldest,
            "next": journal.next,
            "accepted": journal.counters.appended,
            "evicted": journal.counters.evicted,
            "subscribers": live[:MAX_ROWS],
            "subscribers_in_all": len(live),
            "durable": durable[:MAX_ROWS],
            "groups": [
                self._group(group, status, lag_s, now)
                for group, status in zip(
                    self._coordinator.groups.values(), self._statuses().values(), strict=True
                )
            ],
            "dead_letters": self._letters.total,
            "counters": self._control_server.counters.snapshot(),
        }

    def _group(self, group: Group, status: Any, lag_s: "_LagSeconds", now: float) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(status)
        found["balanced"] = status.balanced
        found["lag"] = found["pending"]
        found["lag_s"] = lag_s(group.cursor) if found["pending"] else 0.0
        found["policy"] = msgspec.structs.asdict(group.policy)
        found["members"] = [
            {
                "worker": member.name,
                "held": member.held,
                "credit": member.credit,
                "suspended": member.suspended,
                "lease_ends_s": [round(until - now, 3) for until, held in member.leases if held][:10],
            }
            for member in list(group.members.values())[:MAX_ROWS]
        ]
        return found


class _LagSeconds:
    """How long ago the first event that a consumer has not had was published."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._now = time.time()
        self._known: dict[int, float | None] = {}

    def __call__(self, position: int) -> float | None:
        position = max(position, self._journal.oldest)
        if position not in self._known:
            self._known[position] = self._look(position)
        return self._known[position]

    def _look(self, position: int) -> float | None:
        try:
            frames = self._journal.read(position, max_bytes=1).frames
        except Evicted:
            return None
        if not frames:
            return 0.0
        times = memoryview(frames[0].columns().times).cast("q")
        at = min(max(0, position - frames[0].first_offset), len(times) - 1)
        return round(max(0.0, self._now - times[at] / 1e6), 3)
