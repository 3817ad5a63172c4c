"""Administering a publisher from outside: who is behind, what groups hold, dead letters, and forgetting who is gone."""

import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from brokerless.core.errors import PeerError, UsageError
from brokerless.core.runtime.closing import Closing
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import messages
from brokerless.direct.replay import ReplayClient

# As long as a publisher that is busy with a disk may take.
TIMEOUT_S = 5.0


class AdminClient(Closing):
    """Asks one publisher, which answers to programs on its machine, or to the keys in its `admin=`.

    Not thread-safe; close it.
    """

    def __init__(self, address: str, *, curve: ClientKeys | None = None, timeout: float = TIMEOUT_S) -> None:
        """Connect in the background. `timeout` is how many seconds to wait for each answer. Raises ConfigError."""
        self._client = ReplayClient(address, curve=curve)
        self._timeout = timeout
        # Random, so that no answer to another client's question is taken for ours.
        self._number = secrets.randbits(40)

    def status(self) -> dict[str, Any]:
        """Positions of all subscribers, lag in events and seconds, groups with leases, dead letters, counters.

        Raises PeerError if nobody answers or we are not allowed.
        """
        found: dict[str, Any] = self._ask("status")
        return found

    def dead_letters(self, group: str = "") -> Iterator[dict[str, Any]]:
        """All dead letters, or those of one group.

        Each has `number`, `group`, `attempts`, `id`, `topic`, `key`, `time` and `bytes`.
        """
        after: int | None = 0
        while after is not None:
            page = self._ask("letters", name=group, after=after)
            for row in page["letters"]:
                row["time"] = datetime.fromtimestamp(row["time"] / 1e6, UTC)
                yield row
            after = page["next"]

    def show(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The letters of these numbers, with `data`, `content_type` and `headers`.

        Raises UsageError for unknown ones.
        """
        rows = []
        for number in numbers:
            (row,) = self._ask("letter", numbers=[number])
            row["time"] = datetime.fromtimestamp(row["time"] / 1e6, UTC)
            row["data"] = msgspec.convert(row["data"], bytes)
            rows.append(row)
        return rows

    def retry(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Deliver the events of these letters again, to their group alone, as if for the first time.

        Returns `retried` (numbers) and `refused` (number → why). Raises UsageError for unknown ones.
        """
        done: dict[str, Any] = {"retried": [], "refused": {}}
        for at in range(0, len(numbers), messages.MAX_RANGES):
            found = self._ask("retry", numbers=list(numbers[at : at + messages.MAX_RANGES]))
            done["retried"] += found["retried"]
            done["refused"] |= found["refused"]
        return done

    def drop(self, numbers: Sequence[int]) -> None:
        """Do not list these letters any more. Raises UsageError for unknown ones."""
        for at in range(0, len(numbers), messages.MAX_RANGES):
            self._ask("drop", numbers=list(numbers[at : at + messages.MAX_RANGES]))

    def forget_group(self, name: str) -> None:
        """Drop a group that will not come back. Raises UsageError if there is none."""
        self._ask("forget-group", name=name)

    def forget_subscriber(self, durable: str) -> None:
        """Drop a durable subscriber that will not come back. Raises UsageError if there is none."""
        self._ask("forget-subscriber", name=durable)

    def _ask(self, command: str, *, name: str = "", after: int = 0, numbers: list[int] | None = None) -> Any:
        self._number += 1
        request = messages.Admin(self._number, command, name, after, numbers or [])
        report = self._client.administer(request, self._timeout)
        if report is None:
            raise PeerError(f"no publisher answers at {self._client.address}: {self._client.diagnose()}")
        found = msgspec.json.decode(report.body)
        if not report.done:
            raise UsageError(f"{self._client.address}: {found}")
        return found

    def close(self) -> None:
        """Close."""
        self._client.close()
