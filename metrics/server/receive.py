"""Sockets, receive and aggregator of one process: what comes in becomes one Window per flush.

Two threads: the event loop receives, and one helper thread aggregates. The loop never parses.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from brokerless.metrics.aggregate.aggregator import Aggregator
from brokerless.metrics.aggregate.collect import TELEMETRY, Collector, Snapshot
from brokerless.metrics.aggregate.filters import SeriesFilter
from brokerless.metrics.aggregate.window import Window
from brokerless.metrics.counters import ReceiveCounters
from brokerless.metrics.limits import LOSSY_WINDOWS
from brokerless.metrics.parser import DEFAULT_OPTIONS, ParserOptions
from brokerless.metrics.server.streams import StreamServer
from brokerless.metrics.server.udp import DatagramSocket

T = TypeVar("T")
# A wake-up costs as much as reading ten datagrams. When a read found few, look again only after this time:
# at 100,000 datagrams/s that is 200 per look, a hundredth of the receive buffer.
READ_INTERVAL_S = 0.002
# Reads in a row before other tasks get their turn.
READS = 32
# So many full batches waiting mean that reading was late.
BEHIND = 4
# Cuts waiting to be aggregated. When the helper is that far behind, receiving pauses and the kernel drops, counted.
MAX_BACKLOG = 4

Tap = Callable[[list[bytes]], None]


class Receiver:
    """Receives until `stop`; `close_window` ends a window. All methods belong to the event loop's thread."""

    def __init__(
        self,
        sockets: list[DatagramSocket],
        streams: StreamServer | None = None,
        *,
        max_series: int,
        max_clients: int,
        options: ParserOptions = DEFAULT_OPTIONS,
        series_filter: SeriesFilter | None = None,
        auth_keys: list[bytes] | None = None,
        since_ms: int = 0,
        taps: list[Tap] | None = None,
        heard: Callable[[bytes], None] | None = None,
    ) -> None:
        self.counters = ReceiveCounters()
        self.collector = Collector(
            max_clients=max_clients,
            counters=self.counters,
            auth_keys=auth_keys,
            since_ms=since_ms,
            heard=heard,
        )
        self.aggregator = Aggregator(max_series=max_series, options=options, series_filter=series_filter)
        self._sockets = sockets
        self._streams = streams
        self._taps = taps or []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="metrics-aggregator")
        self._backlog = 0
        self._paused: list[DatagramSocket] = []
        self._timers: dict[DatagramSocket, asyncio.TimerHandle] = {}
        self._lossy_windows = 0
        self._stopped = False
        self._window_drops = 0
        # A Unix datagram was longer than what is read of one.
        self._lossless_cut = False
        self.pause_s = self.pause_cpu_s = 0.0
        self._was_busy = False
        self._read_at = self._idle_since = time.perf_counter()
        self._read_cpu = self._idle_cpu = time.process_time()

    async def start(self) -> None:
        """Begin to receive."""
        self._loop = asyncio.get_running_loop()
        for sock in self._sockets:
            self._loop.add_reader(sock.sock, self._readable, sock)
        if self._streams is not None:
            await self._streams.start(self._lines, self.counters)

    def _lines(self, payload: bytes, dialect: str) -> None:
        for tap in self._taps:
            tap([payload])
        self.collector.lines(payload, time.time(), dialect=self._dialect(dialect))
        self._maybe_snapshot()

    def _dialect(self, of_listener: str) -> str:
        return of_listener if of_listener != "auto" else self.aggregator.options.dialect

    def _readable(self, sock: DatagramSocket) -> None:
        found = self._read(sock, READS)
        self._note_pause(found)
        if self._stopped:
            return
        if self._backlog >= MAX_BACKLOG:
            self._loop.remove_reader(sock.sock)
            self._paused.append(sock)
        elif found < READS and not sock.lossless:
            # A Unix socket's queue is ten datagrams by default; its senders would be refused meanwhile.
            self._loop.remove_reader(sock.sock)
            self._timers[sock] = self._loop.call_later(READ_INTERVAL_S, self._again, sock)

    def _note_pause(self, found: int) -> None:
        """How long nothing was read although datagrams waited: by the clock, and in CPU time of this process.

        The second leaves out what other processes took from us.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        # After a read that found little the socket may just have been idle.
        if found >= BEHIND and self._was_busy:
            self.pause_s = max(self.pause_s, self._read_at - self._idle_since)
            self.pause_cpu_s = max(self.pause_cpu_s, self._read_cpu - self._idle_cpu)
        self._idle_since, self._idle_cpu = wall, cpu
        self._was_busy = found > 1

    def _again(self, sock: DatagramSocket) -> None:
        self._timers.pop(sock, None)
        if not self._stopped:
            self._loop.add_reader(sock.sock, self._readable, sock)

    def _read(self, sock: DatagramSocket, reads: int) -> int:
        """Read up to `reads` batches; returns how many were found."""
        now = time.time()
        self._read_at, self._read_cpu = time.perf_counter(), time.process_time()
        for done in range(reads):
            datagrams, truncated = sock.read()
            if not datagrams:
                return done
            if truncated:
                self.counters.truncated += truncated
                self._lossless_cut |= sock.lossless
            for tap in self._taps:
                tap(datagrams)
            if (
                self.aggregator.telemetry
                and sock.dialect == "auto"
                and any(TELEMETRY in datagram for datagram in datagrams)
            ):
                sock.dialect = "dogstatsd"
            self.collector.datagrams(
                datagrams, now, lossless=sock.lossless, dialect=self._dialect(sock.dialect)
            )
            self._maybe_snapshot()
        return reads

    def _maybe_snapshot(self) -> None:
        if self.collector.wants_snapshot:
            self._submit(self.collector.snapshot(end_window=False))

    def _take_drops(self) -> None:
        drops = sum(sock.drops() for sock in self._sockets)
        if drops:
            self._lossy_windows = LOSSY_WINDOWS
            self._window_drops += drops
            self.counters.kernel_drops += drops

    def _submit(self, snapshot: Snapshot) -> None:
        self._take_drops()
        lossy = self._lossy_windows > 0
        self._backlog += 1
        future = self._executor.submit(self.aggregator.take, snapshot, unnumbered_lossy=lossy)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._aggregated))
        self._last = future

    def _aggregated(self) -> None:
        self._backlog -= 1
        if self._backlog < MAX_BACKLOG:
            paused, self._paused = self._paused, []
            for sock in paused:
                self._again(sock)

    async def in_aggregator(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread that owns the aggregator, after everything submitted before."""
        return await self._loop.run_in_executor(self._executor, work)

    async def close_window(self) -> Window:
        """End the window: everything that has reached the sockets until now is in it (2048 datagrams of each)."""
        if not self._stopped:
            for sock in self._sockets:
                self._read(sock, READS)
        self._submit(self.collector.snapshot(end_window=True))
        drops, self._window_drops = self._window_drops, 0
        self._lossy_windows = max(0, self._lossy_windows - 1)
        window = await self.in_aggregator(self._close_aggregator)
        window.kernel_drops = drops
        window.lossless_cut, self._lossless_cut = self._lossless_cut, False
        window.pause_s, window.pause_cpu_s = self.pause_s, self.pause_cpu_s
        self.pause_s = self.pause_cpu_s = 0.0
        return window

    def _close_aggregator(self) -> Window:
        window = self.aggregator.close()
        if not gc.isenabled():
            # The daemon's process collects by itself only here, and only what the last windows left.
            gc.collect(1)
        return window

    async def peek(self, look: Callable[[Window], T]) -> T:
        """Look at the open window, everything received until now included."""
        self._submit(self.collector.snapshot(end_window=False))
        return await self.in_aggregator(lambda: look(self.aggregator.window))

    async def delete(self, table: str, names: list[str]) -> None:
        """Remove `counters`, `gauges` or `timers` from the open window."""

        def work() -> None:
            found = getattr(self.aggregator.window, table)
            for name in names:
                found.pop(name, None)

        await self.in_aggregator(work)

    def configure(self, max_series: int, options: ParserOptions, series_filter: SeriesFilter) -> None:
        """Use other limits and rules from now on."""
        self.aggregator.max_series = max_series
        self.aggregator.set_filter(options, series_filter)

    async def forget(self, clients: list[str]) -> None:
        """Drop the state of numbered clients that are gone."""
        self.collector.forget(clients)

    async def stop(self) -> None:
        """Stop receiving; what is in the sockets' buffers is read first, so that nothing received is lost."""
        if self._stopped:
            return
        self._stopped = True
        for sock in self._sockets:
            self._loop.remove_reader(sock.sock)
        for timer in self._timers.values():
            timer.cancel()
        if self._streams is not None:
            await self._streams.stop()
        # Bounded, because a sender that never stops could keep us here for ever.
        deadline = time.monotonic() + 2.0
        for sock in self._sockets:
            while time.monotonic() < deadline:
                if not self._read(sock, READS):
                    break
                await asyncio.sleep(0)  # other tasks get their turn

    def close(self) -> None:
        """Close the sockets and end the helper thread; after the last `close_window`."""
        for sock in self._sockets:
            sock.close()
        self._executor.shutdown(wait=True)
