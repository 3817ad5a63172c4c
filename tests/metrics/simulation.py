"""Numbered clients, a channel that loses, repeats and reorders, and the daemon's pure parts: no sockets, no clock."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

from brokerless.metrics.aggregate.aggregator import Aggregator
from brokerless.metrics.aggregate.collect import Collector
from brokerless.metrics.aggregate.flush import CounterPoint, Flush
from brokerless.metrics.aggregate.rollup import Rollup, RollupConfig
from brokerless.metrics.sequence_lines import number_line
from brokerless.metrics.server.saved_state import restore

Lines = Callable[[random.Random], list[tuple[str, int]]]


class SimulatedClient:
    """Makes the datagrams that the real client makes; remembers the truth."""

    def __init__(self, client: str, start_ms: int = 1) -> None:
        self.client = client
        self.start_ms = start_ms
        self.number = 0
        self.beats = 0
        self.lines = 0
        self.truth: dict[str, int] = {}
        # What had been counted up to each number.
        self.truth_at: dict[int, dict[str, int]] = {}

    def datagram(self, lines: list[tuple[str, int]]) -> bytes:
        self.number += 1
        self.lines += len(lines)
        for key, amount in lines:
            self.truth[key] = self.truth.get(key, 0) + amount
        self.truth_at[self.number] = dict(self.truth)
        body = "\n".join(f"{key}:{amount}|c" for key, amount in lines)
        return f"{number_line(self.client, self.number, self.beats)}\n{body}".encode()

    def heartbeat(self, *, tell: bool = True) -> bytes:
        """All totals, or none: one of several datagrams, that holds others'."""
        self.number += 1
        self.beats += 1
        self.truth_at[self.number] = dict(self.truth)
        own = f"_bl.{self.client}"
        rows = [
            number_line(self.client, self.number, self.beats),
            f"{own}.start:{self.start_ms}|g",
            f"{own}.lines:{self.lines}|g",
            f"{own}.counters:{len(self.truth)}|g",
        ]
        if tell:
            rows += [f"{own}.t.{key}:{total}|g" for key, total in self.truth.items()]
        return "\n".join(rows).encode()


class Channel:
    """Loses, repeats and reorders with a seed; counts what it lost."""

    def __init__(self, rnd: random.Random, *, loss: float = 0, repeat: float = 0, reorder: float = 0) -> None:
        self._rnd, self._loss, self._repeat, self._reorder = rnd, loss, repeat, reorder
        self.lost = 0

    def carry(self, datagrams: list[bytes]) -> list[bytes]:
        rnd = self._rnd
        out = []
        for datagram in datagrams:
            if rnd.random() < self._loss:
                self.lost += 1
                continue
            out.append(datagram)
            if rnd.random() < self._repeat:
                out.append(datagram)
        for i in range(len(out)):
            if rnd.random() < self._reorder:
                j = min(len(out) - 1, i + rnd.randint(1, 20))
                out[i], out[j] = out[j], out[i]
        return out


class SimulatedDaemon:
    """Collector, aggregator and rollup of one daemon (or of several workers) in virtual time."""

    def __init__(
        self, workers: int = 1, config: RollupConfig | None = None, auth_key: bytes | None = None
    ) -> None:
        self._keys = [auth_key] if auth_key else []
        self._workers = workers
        self.now = 0.0
        self._start(config or RollupConfig())

    def _start(self, config: RollupConfig) -> None:
        since_ms = int(self.now * 1000)
        self.collectors = [Collector(auth_keys=self._keys, since_ms=since_ms) for _ in range(self._workers)]
        self.aggregators = [Aggregator() for _ in range(self._workers)]
        self.rollup = Rollup(config, start=self.now, authenticated=bool(self._keys))

    def restart(self, path: Path) -> None:
        """Killed and started again: what is left is the file, and it knows nothing of the open window."""
        self.start_anew()
        restore(self.rollup, path)

    def start_anew(self) -> None:
        """Killed: nothing is left in memory."""
        self._start(self.rollup.config)

    def receive(self, datagrams: list[bytes], worker: int = 0) -> None:
        for at in range(0, len(datagrams), 64):
            self.collectors[worker].datagrams(datagrams[at : at + 64], self.now)

    def flush(
        self, kernel_drops: int = 0, heard: Iterable[str] = (), elapsed_s: float | None = None
    ) -> Flush:
        self.now += 10.0
        windows = []
        for receive, aggregator in zip(self.collectors, self.aggregators, strict=True):
            aggregator.take(receive.snapshot(end_window=True), unnumbered_lossy=kernel_drops > 0)
            windows.append(aggregator.close())
        for other in windows[1:]:
            windows[0].merge(other)
        windows[0].kernel_drops = kernel_drops
        flush = self.rollup.fold(windows[0], self.now, heard, elapsed_s)
        for receive in self.collectors:
            receive.forget(self.rollup.expired)
        self.rollup.expired = []
        return flush


def points(flush: Flush) -> dict[str, CounterPoint]:
    """Counters of a flush by name."""
    return {point.series: point for point in flush.counters}
