"""What a daemon writes down after each window, so that the next one goes on where it ended.

Clients' totals are cumulative. So a daemon that knows what was published of them can publish, after its restart,
exactly what was sent while it was away. Every file is whole or not there: it is written beside and then renamed.
"""

import os
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.metrics.aggregate.client_ledger import ClientLedger, LedgerState
from brokerless.metrics.aggregate.rollup import CounterTotals, Rollup
from brokerless.metrics.limits import PORTION
from brokerless.metrics.numbers import fit_64_bits

VERSION = 3
_LENGTH = struct.Struct("!I")


class Head(msgspec.Struct):
    """The first record."""

    version: int
    start_ms: int
    hidden_for_good: bool
    gone: dict[str, tuple[int, int, bool]]
    gauges: dict[str, int | float]
    series: int
    clients: int


def save(rollup: Rollup, path: Path) -> None:
    """Write the rollup. Raises OSError; the file of the window before is then still there."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        for record in _records(rollup):
            file.write(_LENGTH.pack(len(record)) + record)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _records(rollup: Rollup) -> Iterator[bytes]:
    head = Head(
        VERSION,
        rollup.start_ms,
        rollup.hidden_for_good,
        rollup.gone,
        {name: fit_64_bits(value) for name, value in rollup.gauges.items()},
        len(rollup.series),
        len(rollup.clients),
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


def restore(rollup: Rollup, path: Path) -> bool:
    """Fill new rollup from the file; False if there is none. Raises ConfigError for one that cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
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
        raise ConfigError("state", f"cannot read {path} ({error!r}): remove it to begin anew") from None
    rollup.take_over(head.start_ms, series, ledgers, head.gauges, head.gone, head.hidden_for_good)
    return True


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += 4 + size
        if at > len(data):
            raise ValueError("cut short")
        yield data[at - size : at]
