"""What a daemon writes down after each window, so that the next one goes on where it ended.

Clients' totals are cumulative. So a daemon that knows what was published of them can publish, after its restart,
exactly what was sent while it was away. Every file is whole or not there: it is written beside and then renamed.
What dies with a killed daemon is its open window. So it also notes each client as soon as it is heard (`HeardClients`):
one that was in no other window is missed by the next daemon, and no total is exact until it is heard again.
"""

import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.core.runtime.files import FileLocked, lock_file
from brokerless.metrics.aggregate.client_ledger import ClientLedger, LedgerState
from brokerless.metrics.aggregate.grades import CounterTotals
from brokerless.metrics.aggregate.rollup import Rollup
from brokerless.metrics.aggregate.window import Timestamped
from brokerless.metrics.backends.prometheus import Carried
from brokerless.metrics.limits import PORTION
from brokerless.metrics.numbers import fit_64_bits

VERSION = 6
# Length and CRC-32 of a record.
_RECORD = struct.Struct("!II")


class Head(msgspec.Struct):
    """The first record."""

    version: int
    start_ms: int
    # Written by a daemon that ended by itself; else its last window is lost.
    ended: bool
    # What `HeardClients` has up to here is in this state.
    heard: int
    missing_clients: list[str]
    streams_cut: bool
    hidden_for_good: bool
    series_refused: bool
    gone_more: bool
    gone: dict[str, tuple[int, int, bool]]
    gauges: dict[str, int | float]
    series: int
    clients: int
    timestamped: list[Timestamped] = msgspec.field(default_factory=list)
    page: dict[str, Carried] = msgspec.field(default_factory=dict)


class HeardClients:
    """Ids of clients, a line each, in the order in which they were first heard; several processes may append.

    Survives `kill -9`, not a power cut. It is emptied when a daemon starts: eight bytes per new client until then.
    """

    def __init__(self, fd: int) -> None:
        """`fd` is open for appending, and closed with this."""
        self.fd = fd

    @classmethod
    def open(cls, path: Path) -> "HeardClients":
        """Those of a file. Raises OSError."""
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))

    @classmethod
    def temporary(cls) -> "HeardClients":
        """For as long as this process lives."""
        with tempfile.TemporaryFile("ab+") as file:
            return cls(os.dup(file.fileno()))

    def note(self, client: bytes) -> None:
        """Write one down. A disk that is full shows in the state file, too, which can then not be written."""
        with suppress(OSError):
            os.write(self.fd, client + b"\n")

    @property
    def end(self) -> int:
        """Where the next one will be."""
        return os.fstat(self.fd).st_size

    def between(self, start: int, end: int) -> list[str]:
        """Those written down from `start` to `end`."""
        lines = os.pread(self.fd, max(0, end - start), start).split(b"\n")
        return [line.decode() for line in lines if line.isalnum() and line.isascii()]

    def clear(self) -> None:
        """Forget all."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class StateFile:
    """The state of one daemon at a time, and the clients that it has heard since it was written."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where another daemon has it, or it cannot be written."""
        self.path = path
        try:
            self._lock = lock_file(str(_beside(path, "lock")))
        except FileLocked:
            raise ConfigError("state", f"{path}: another daemon is using it") from None
        except OSError as error:
            raise ConfigError("state", f"cannot write {path}: {error.strerror}") from None
        try:
            self._was_there = _beside(path, "heard").exists()
            self.heard = HeardClients.open(_beside(path, "heard"))
        except OSError as error:
            os.close(self._lock)
            raise ConfigError("state", f"cannot write {path}: {error.strerror}") from None

    def begin(self, rollup: Rollup) -> dict[str, Carried]:
        """Take over what is there, and write it down as this daemon's own. Raises ConfigError.

        Returns what the page of Prometheus must know of counters.
        """
        head = restore(rollup, self.path)
        page = head.page if head is not None else {}
        if head is not None and not head.ended:
            rollup.streams_cut = True
            rollup.were_heard(self.heard.between(head.heard, self.heard.end))
            # Without that file nobody knows who was heard in the window that is lost.
            rollup.hidden_for_good |= not self._was_there
        try:
            save(rollup, self.path, page=page)
            self.heard.clear()
        except OSError as error:
            raise ConfigError("state", f"cannot write {self.path}: {error.strerror}") from None
        return page

    def close(self) -> None:
        """Let another daemon have it; may be called twice."""
        self.heard.close()
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            os.close(lock)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def save(
    rollup: Rollup,
    path: Path,
    *,
    heard: int = 0,
    ended: bool = False,
    page: dict[str, Carried] | None = None,
) -> None:
    """Write the rollup. Raises OSError; the file of the window before is then still there.

    `heard` is the place in `HeardClients` up to which all are in it; `ended`: this daemon has read everything; `page`
    is what `PrometheusPage` carries on.
    """
    beside = _beside(path, "new")
    with beside.open("wb") as file:
        for record in _records(rollup, heard, ended, page or {}):
            file.write(_RECORD.pack(len(record), zlib.crc32(record)) + record)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _records(rollup: Rollup, heard: int, ended: bool, page: dict[str, Carried]) -> Iterator[bytes]:
    head = Head(
        VERSION,
        rollup.start_ms,
        ended,
        heard,
        list(rollup.missing_clients),
        rollup.streams_cut,
        rollup.hidden_for_good,
        rollup.series_refused,
        rollup.gone_more,
        rollup.gone,
        {name: fit_64_bits(value) for name, value in rollup.gauges.items()},
        len(rollup.series),
        len(rollup.clients),
        [msgspec.structs.replace(p, value=fit_64_bits(p.value)) for p in rollup.timestamped.values()],
        page,
    )
    yield msgspec.msgpack.encode(head)
    names = iter(rollup.series)
    while some := list(islice(names, PORTION)):
        yield _encode({name: rollup.series[name] for name in some})
    for ledger in rollup.clients.values():
        yield _encode(ledger.state())


def _encode(record: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(record)
    except OverflowError:  # a sum beyond 64 bits, which somebody must have wanted
        values = record.values() if isinstance(record, dict) else record.counters.values()
        for value in values:
            value.fit_64_bits()
        return msgspec.msgpack.encode(record)


def restore(rollup: Rollup, path: Path) -> Head | None:
    """Fill new rollup from the file; None if there is none. Raises ConfigError for one that cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError("state", f"cannot read {path}: {error.strerror}") from None
    try:
        records = _split(data)
        head = msgspec.msgpack.decode(next(records), type=Head)
        if head.version != VERSION:
            raise ValueError(f"version {head.version}")
        series: dict[str, CounterTotals] = {}
        while len(series) < head.series:
            series |= msgspec.msgpack.decode(next(records), type=dict[str, CounterTotals])
        ledgers = [
            ClientLedger.restored(msgspec.msgpack.decode(next(records), type=LedgerState))
            for _ in range(head.clients)
        ]
    except (ValueError, struct.error, StopIteration) as error:  # msgspec's errors are ValueErrors
        raise ConfigError("state", f"cannot read {path} ({error!r}): remove it to start over") from None
    rollup.take_over(
        *(head.start_ms, series, ledgers, head.gauges, head.gone),
        *(head.hidden_for_good, head.streams_cut, head.series_refused, head.gone_more),
    )
    rollup.timestamped = {point.series: point for point in head.timestamped}
    rollup.were_heard(head.missing_clients)
    return head


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, check = _RECORD.unpack_from(data, at)
        at += _RECORD.size + size
        if at > len(data):
            raise ValueError("cut short")
        record = data[at - size : at]
        if zlib.crc32(record) != check:
            raise ValueError("damaged")
        yield record
