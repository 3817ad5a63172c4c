"""Presence: every component of a process announces what it is and how it is doing, for people and programs.

A process with components has one file in a directory of this user, rewritten once a second and removed when the last
component is closed. Nothing depends on it for correctness: a file that cannot be written or read costs nothing but
the line in `brokerless ps`.

    directory   $BROKERLESS_PRESENCE, else $XDG_RUNTIME_DIR/brokerless, else /tmp/brokerless-UID; mode 0700
    file        PID.START.json, mode 0600; START is the process's start time, so that a reused PID is no confusion
    off         BROKERLESS_PRESENCE=off, or `announce=False` where a component is made

A file whose process is gone tells who died; readers show it as such, and it is swept `SWEEP_S` seconds later.
Nothing leaves the machine unless the process joined a LAN (`core.beacons`).
"""

import atexit
import contextlib
import itertools
import logging
import math
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import msgspec

from brokerless.core.runtime.process import process_start
from brokerless.core.version import __version__

ENVIRONMENT = "BROKERLESS_PRESENCE"
INTERVAL_S = 1.0
# A component that comes or goes is written at once, but not more often than this.
_SOON_S = 0.05
# Long enough that a person who looks sees who died, short enough that the directory stays small.
SWEEP_S = 600.0
# A file larger than this was not written by us.
MAX_BYTES = 1 << 22
# Streams that a consumer announces one by one; with more than the second, looking at each would cost too much.
_STREAMS_SHOWN = 20
_MAX_STREAMS = 1000
_log = logging.getLogger("brokerless.core.presence")
_numbers = itertools.count(1)  # ids of this process's components


class Component(msgspec.Struct, kw_only=True):
    """One component as it announced itself. `state` has its counters and whatever else its kind shows."""

    kind: str  # "direct.publisher", "direct.subscriber", "metrics.server", …
    name: str  # the source, the group, or the name that the user gave
    addresses: list[str] = []
    id: str = ""  # unique within its process
    started: float = 0.0  # seconds since 1970
    state: dict[str, Any] = {}
    pid: int = 0
    host: str = ""
    version: str = ""
    updated: float = 0.0
    alive: bool = True


class ProcessFile(msgspec.Struct, kw_only=True):
    """What one file holds."""

    pid: int
    start: int
    host: str
    version: str
    updated: float
    components: list[Component]


def default_directory() -> Path | None:
    """Where this user's processes announce themselves; None if that is switched off."""
    chosen = os.environ.get(ENVIRONMENT, "")
    if chosen.lower() in ("off", "0", "no"):
        return None
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "brokerless"
    return Path(tempfile.gettempdir()) / f"brokerless-{os.getuid()}"


class Lan(Protocol):
    """Announcements to and from other machines; see `core.beacons`."""

    def send(self, components: Sequence[Component]) -> None:
        """Tell the LAN about these components of this process."""

    def components(self) -> list[Component]:
        """What was heard, of this machine as well."""


class ExporterInterface(Protocol):
    """Serves components for Prometheus; see `core.exporter`."""

    def remove(self, announcement: "Announcement") -> None:
        """Serve it no more."""


def _host() -> str:
    return socket.gethostname()


class Announcement:
    """A component that is announced until it is closed. `snapshot` is called once a second, in another thread."""

    def __init__(
        self, kind: str, name: str, addresses: Sequence[str], snapshot: Callable[[], dict[str, Any]]
    ) -> None:
        self.component = Component(
            kind=kind, name=name, addresses=list(addresses), id=str(next(_numbers)), started=time.time()
        )
        self.snapshot = snapshot
        self.ends = math.inf  # when a lingering announcement is taken away (monotonic clock)
        self.metrics_address = ""  # where Prometheus finds it, if somewhere
        self.exporter: ExporterInterface | None = None

    def now(self) -> Component:
        """The component as it is at this moment. If it changes while it is read, as it was announced last."""
        with contextlib.suppress(Exception):
            self.component.state = self.snapshot()
        return msgspec.structs.replace(
            self.component, pid=os.getpid(), host=_host(), version=__version__, updated=time.time()
        )

    def close(self, *, linger_s: float = 0.0) -> None:
        """Take the component away. Closing twice is fine.

        With `linger_s` its last state stays announced for so many seconds, or until the process ends, so that those
        who look once a second see how it ended; the call does not wait for that.
        """
        if linger_s > 0:
            self.ends = min(self.ends, time.monotonic() + linger_s)
        else:
            _process.remove(self)
        if self.exporter is not None:
            self.exporter.remove(self)


class _Process:
    """The announcements of this process, and the thread that writes them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close what its own thread is announcing
        self._announced: list[Announcement] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._changed = threading.Event()  # something came or went: do not wait for the next second
        self.lan: Lan | None = None
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._end_lingering)

    def _forked(self) -> None:
        # The parent's components, thread and file are the parent's.
        self._lock = threading.RLock()
        self._announced, self._thread, self.lan = [], None, None
        self._stop, self._changed = threading.Event(), threading.Event()

    def add(self, announcement: Announcement, directory: Path) -> None:
        with self._lock:
            self._announced.append(announcement)
            self._changed.set()
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(directory, self._stop), name="presence", daemon=True
                )
                self._thread.start()

    def remove(self, announcement: Announcement) -> None:
        with self._lock:
            if announcement not in self._announced:
                return
            self._announced.remove(announcement)
            self._changed.set()
            if self._announced:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)

    def _end_lingering(self, until: float = math.inf) -> None:
        for announcement in self.announced():
            if announcement.ends < until:
                self.remove(announcement)

    def announced(self) -> list[Announcement]:
        """What is announced now."""
        with self._lock:
            return list(self._announced)

    def _run(self, directory: Path, stop: threading.Event) -> None:
        start = process_start(os.getpid())
        path = directory / f"{os.getpid()}.{start}.json"
        try:
            make_directory(directory)
            sweep(directory)
            while True:
                self._changed.clear()
                self._write(path, start or 0)
                if stop.wait(_SOON_S):
                    break
                self._changed.wait(INTERVAL_S - _SOON_S)
                self._end_lingering(time.monotonic())
                if stop.is_set():
                    break
        except OSError as error:
            _log.info("not announced: %s: %s", directory, error.strerror)
        finally:
            with self._lock:
                # Another thread may have begun meanwhile, for components that came after.
                if self._thread is None or self._thread is threading.current_thread():
                    with contextlib.suppress(OSError):
                        path.unlink()
                    if self.lan is not None:
                        self.lan.send([])

    def _write(self, path: Path, start: int) -> None:
        announced = self.announced()
        for each in announced:
            # A component may change while it is read from here: the state of a second ago is then good enough.
            with contextlib.suppress(Exception):
                each.component.state = each.snapshot()
        content = ProcessFile(
            pid=os.getpid(),
            start=start,
            host=_host(),
            version=__version__,
            updated=time.time(),
            components=[each.component for each in announced],
        )
        if self.lan is not None:
            for each in announced:
                each.component.pid, each.component.host = content.pid, content.host
                each.component.version, each.component.updated = content.version, content.updated
            self.lan.send(content.components)
        data = msgspec.json.encode(content, enc_hook=str)
        temporary = path.with_suffix(".tmp")
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb"
        ) as file:
            file.write(data)
        temporary.replace(path)


_process = _Process()


def attach_lan(lan: Lan | None) -> None:
    """Announce to a LAN from now on, and show what is heard there; None ends it."""
    _process.lan = lan


def announce(
    kind: str,
    name: str,
    addresses: Sequence[str],
    snapshot: Callable[[], dict[str, Any]],
    *,
    enabled: bool = True,
    directory: Path | None = None,
) -> Announcement:
    """Announce a component until the returned object is closed; does nothing where presence is switched off.

    `snapshot` returns the component's state (counters, positions, lag) as something that JSON can hold. It must be
    cheap and safe to call from another thread; what it raises is ignored.
    """
    announcement = Announcement(kind, name, addresses, snapshot)
    chosen = directory if directory is not None else default_directory()
    if enabled and chosen is not None:
        _process.add(announcement, chosen)
    return announcement


def announced_here() -> list[Component]:
    """The announced components of this process, as they are now."""
    return [each.now() for each in _process.announced()]


def journal_state(journal: Any) -> dict[str, Any]:
    """What a producer announces of its journal: where it begins and ends, its limits, and who is behind."""
    next_offset = journal.next
    return {
        "next": next_offset,
        "oldest": journal.oldest,
        "epoch": journal.epoch,
        "journal": {
            "kind": type(journal).__name__,
            "path": os.path.abspath(path) if (path := getattr(journal, "path", "")) else "",
            "retention": msgspec.structs.asdict(journal.retention),
            "on_full": journal.on_full,
            "counters": journal.counters.snapshot(),
            "behind": {name: next_offset - at for name, at in journal.registered().items()},
        },
    }


def ledger_state(ledger: Any) -> dict[str, Any]:
    """What a consumer announces of its ledger: the sum, and the streams one by one, those with trouble first."""
    account = ledger.account()
    state: dict[str, Any] = {"account": {**msgspec.structs.asdict(account), "balanced": account.balanced}}
    streams = ledger.accounts() if sum(1 for _ in ledger.streams()) <= _MAX_STREAMS else {}
    worst = sorted(streams.items(), key=lambda each: (each[1].balanced, -each[1].lost, -each[1].pending))
    state["streams"] = [
        [*key, each.accepted, each.delivered, each.pending, each.lost, each.balanced]
        for key, each in worst[:_STREAMS_SHOWN]
    ]
    return state


def make_directory(directory: Path) -> None:
    """Make the directory for this user alone. Raises OSError if it belongs to somebody else."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(1, "belongs to another user", str(directory))
    if stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)


def present(directory: Path | None = None, *, dead: bool = True) -> list[Component]:
    """Every component that is announced; with `dead`, also those whose process was killed, with `alive=False`."""
    chosen = directory if directory is not None else default_directory()
    found: list[Component] = []
    for content in _files(chosen) if chosen is not None else []:
        alive = process_start(content.pid) == content.start
        if not alive and not dead:
            continue
        for component in content.components:
            component.pid, component.host = content.pid, content.host
            component.version, component.updated, component.alive = content.version, content.updated, alive
            found.append(component)
    if _process.lan is not None:
        # What a file on this machine says is newer than its beacon.
        local = {(c.host, c.pid, c.id) for c in found}
        heard = [c for c in _process.lan.components() if (c.host, c.pid, c.id) not in local]
        found += [c for c in heard if c.alive or dead]
    return sorted(found, key=lambda c: (c.kind, c.name, c.started))


def matching(pattern: str, kinds: Iterable[str], *, directory: Path | None = None) -> list[Component]:
    """The live components of these kinds with an address whose name matches the pattern (`orders-*`)."""
    wanted = set(kinds)
    return [
        component
        for component in present(directory, dead=False)
        if component.kind in wanted and component.addresses and fnmatchcase(component.name, pattern)
    ]


def sweep(directory: Path, *, older_than_s: float = SWEEP_S) -> int:
    """Remove the files of processes that are gone for so long; how many."""
    removed = 0
    for path in _paths(directory):
        content = _read(path)
        with contextlib.suppress(OSError):
            old = time.time() - path.lstat().st_mtime > older_than_s
            gone = content is None or process_start(content.pid) != content.start
            if old and gone:
                path.unlink()
                removed += 1
    return removed


def _paths(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.suffix in (".json", ".tmp")]
    except OSError:
        return []


def _files(directory: Path) -> list[ProcessFile]:
    contents = (_read(path) for path in _paths(directory) if path.suffix == ".json")
    return [content for content in contents if content is not None]


def _read(path: Path) -> ProcessFile | None:
    """What a file holds; None for one that is not ours, is being removed, or is not a regular file of this user."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size > MAX_BYTES:
                return None
            return msgspec.json.decode(file.read(), type=ProcessFile)
    except (OSError, msgspec.MsgspecError):
        return None
