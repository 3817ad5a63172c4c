"""Follow components by name: `discover:orders-*` instead of an address. Looks at presence and DNS, connects nothing.

`direct/io/client.py` (`Discovered`) connects to what was found. `Discovery` looks in a thread of its own and calls
`on_change` when something came, moved or went. `decide` says what a client has to do about it, and is pure.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.core.presence import Component, default_directory, matching
from brokerless.core.srv import PREFIX, SrvLookup

SCHEME = "discover:"
# A publisher that appears is followed after this, at most. A look at a hundred files costs some 5 ms.
LOOK_S = 0.25
_log = logging.getLogger("brokerless.core.discovery")


class Found(msgspec.Struct, frozen=True):
    """A component that can be connected to. `since_start`: the offset at which its process began, -1 if unknown."""

    name: str
    address: str
    started: float
    since_start: int = -1


class Action(Enum):
    """What to do about one name."""

    NOTHING = "nothing"
    CONNECT = "connect"  # there was no connection, or it was to another address
    DISCONNECT = "disconnect"  # keep its position: it may come back, here or elsewhere


def decide(current: str | None, answers: bool, found: Sequence[Found]) -> tuple[Action, Found | None]:
    """What to do about a name that we are connected to at `current` (None: not), and where it was found.

    Announcements decide where to look, never whom to leave: a publisher that answers is kept although nobody
    announces it. If it is announced at several addresses, the one that we have stays, else the newest is taken.
    """
    if any(each.address == current for each in found):
        return Action.NOTHING, None
    if found:
        return Action.CONNECT, max(found, key=lambda each: (each.started, each.address))
    if current is not None and not answers:
        return Action.DISCONNECT, None
    return Action.NOTHING, None


def pattern_of(address: str) -> str | None:
    """The pattern of a `discover:` address, None for any other. Raises ConfigError."""
    if not address.startswith(SCHEME):
        return None
    pattern = address.removeprefix(SCHEME)
    if not pattern or "/" in pattern:
        raise ConfigError(
            "address", f"{address!r} needs the name of a source, * and ? allowed: discover:orders-*"
        )
    return pattern


class Discovery:
    """The components of these kinds whose name matches one of the patterns, looked for until it is closed."""

    def __init__(
        self,
        patterns: Sequence[str],
        kinds: Iterable[str],
        on_change: Callable[[], None],
        *,
        directory: Path | None = None,
        every_s: float = LOOK_S,
    ) -> None:
        """Look once, then every `every_s` seconds.

        A pattern `srv:NAME` is looked up in DNS (see `core.srv`), the others in the announcements. Raises ConfigError
        if these are switched off or a name is none, and MissingDependency where DNS needs a package.
        """
        self._lookups = [SrvLookup(each.removeprefix(PREFIX)) for each in patterns if each.startswith(PREFIX)]
        self._patterns = [each for each in patterns if not each.startswith(PREFIX)]
        if self._patterns and directory is None and default_directory() is None:
            raise ConfigError(
                "address", "discover: needs announcements, and BROKERLESS_PRESENCE=off switched them off"
            )
        self._kinds = list(kinds)
        self._directory = directory
        self._on_change = on_change
        self.since = time.time()
        self.version = 1  # rises whenever `found` changes
        self.found: Mapping[str, list[Found]] = self._look()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every_s,), name="discovery", daemon=True)
        self._thread.start()

    def _look(self) -> dict[str, list[Found]]:
        found: dict[str, list[Found]] = {}
        for pattern in self._patterns:
            for component in matching(pattern, self._kinds, directory=self._directory):
                each = _found(component)
                if each is not None and each not in found.setdefault(component.name, []):
                    found[component.name].append(each)
        for lookup in self._lookups:
            for name, addresses in lookup.targets().items():
                found[name] = [Found(name, address, 0.0) for address in addresses]
        return found

    def _run(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                found = self._look()
            except Exception as error:
                _log.warning("discovery could not look, and goes on: %s", error)
                continue
            if found != self.found:
                self.found = found
                self.version += 1
                self._on_change()

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5)


def _found(component: Component) -> Found | None:
    address = component.addresses[0]
    if address.startswith("inproc://") and component.pid != os.getpid():
        return None
    began = component.state.get("began", -1)
    return Found(component.name, address, component.started, began if isinstance(began, int) else -1)
