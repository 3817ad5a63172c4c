"""The daemon: collector or workers, rollup, backends, management port and HTTP, put together.

Question 1, a producer faster than this daemon: the socket's buffer absorbs what it holds, then the kernel
drops; the drops are counted exactly, numbered clients' counters are corrected. Streams are held back instead
(TCP's window). Question 2: what the network or a full buffer lost is healed by the clients' totals, which
are cumulative; what the daemon had received of an open window dies with `kill -9`, and is published on SIGTERM.
"""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from brokerless.core.errors import Closed, ConfigError
from brokerless.core.loss_log import LossLog
from brokerless.core.presence import announce
from brokerless.metrics.aggregate.filters import FilterConfig, SeriesFilter
from brokerless.metrics.aggregate.flush import Flush
from brokerless.metrics.aggregate.rollup import Rollup
from brokerless.metrics.aggregate.window import Window
from brokerless.metrics.backends.base import Backend
from brokerless.metrics.backends.make import make_backends
from brokerless.metrics.backends.mapping import Mapper, load
from brokerless.metrics.backends.prometheus import PrometheusPage
from brokerless.metrics.backends.repeater import Repeater
from brokerless.metrics.counters import AggregateCounters, ReceiveCounters
from brokerless.metrics.server.admin import ManagementServer
from brokerless.metrics.server.config import MetricsConfig, check_backend
from brokerless.metrics.server.receive import Receiver
from brokerless.metrics.server.saved_state import HeardClients, StateFile, save
from brokerless.metrics.server.status import window_status
from brokerless.metrics.server.streams import StreamServer, listen_tcp
from brokerless.metrics.server.udp import (
    DatagramSocket,
    bind_udp,
    bind_unix_datagram,
    format_address,
    steer_by_client,
    wait_until_free,
)
from brokerless.metrics.server.workers import Worker, WorkerPool, WorkerSetup, add_counts

START_S = 20.0
# Workers of a daemon that was killed end by themselves, within a fraction of a second on an idle machine.
ORPHANS_S = 5.0
STOP_S = 30.0
# Settings that a running daemon cannot change: they belong to sockets, processes and files.
FIXED = (
    "udp",
    "tcp",
    "unix",
    "unix_dgram",
    "mgmt",
    "http",
    "workers",
    "receive_buffer",
    "max_clients",
    "max_streams",
    "journal_source",
    "state",
    "auth_key_file",
)


class MetricsServer:
    """A StatsD daemon in this process: `with MetricsServer(udp=["127.0.0.1:0"]) as server: …`.

    Settings are those of MetricsConfig. Addresses are bound when it is made, so that a wrong or used one
    raises ConfigError here. `start` runs it in threads of its own; `stop` publishes what was received and
    ends them.
    """

    def __init__(self, config: MetricsConfig | None = None, **settings: Any) -> None:
        self.config = config or _configured(settings)
        self.last: Flush | None = None
        self._shown: dict[str, Any] = {}
        self._loss_log = LossLog("brokerless.metrics.server", unit="datagrams")
        # In text and OpenMetrics, with what they were made of.
        self._pages: dict[bool, tuple[Any, bytes]] = {}
        self._page_lock = threading.Lock()
        self.health = "up"
        self.started_at = time.time()
        self._folded_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self.state_error = ""
        self._closed = False
        self._stopping = self._last_window = False
        self._leaving: list[asyncio.Future[None]] = []
        self._opened: list[Any] = []
        try:
            self._open()
        except BaseException:
            for thing in reversed(self._opened):
                thing.close()
            raise

    def _open(self) -> None:
        config = self.config
        keys = config.read_auth_keys()
        self._state: StateFile | None = self._keep(StateFile(Path(config.state))) if config.state else None
        # Without state, a daemon of one process has nothing that could die before it does.
        self._heard: HeardClients | None = self._state.heard if self._state is not None else None
        if self._heard is None and config.workers > 1:
            self._heard = self._keep(HeardClients.temporary())
        self._heard_upto = 0
        sockets = self._bind_udp()
        unix = [
            self._keep(bind_unix_datagram(p, receive_buffer=config.receive_buffer)) for p in config.unix_dgram
        ]
        self._streams = StreamServer(config.tcp, config.unix, max_streams=config.max_streams)
        self._opened.append(self._streams)
        self._mgmt_socket = self._keep(listen_tcp(config.mgmt, "mgmt")) if config.mgmt else None
        self._http_socket = self._keep(listen_tcp(config.http, "http")) if config.http else None
        targets = [a for kind, a in map(check_backend, config.backends) if kind == "repeater"]
        self.repeaters = [self._keep(Repeater(f"repeater:{target}", target)) for target in targets]
        self.addresses: dict[str, list[str]] = {
            "udp": [sock.address for sock in sockets[0]],
            "tcp": self._streams.addresses[: len(config.tcp)],
            "unix": self._streams.addresses[len(config.tcp) :],
            "unix_dgram": [sock.address for sock in unix],
            "mgmt": [format_address(self._mgmt_socket)] if self._mgmt_socket else [],
            "http": [format_address(self._http_socket)] if self._http_socket else [],
        }
        self.backends: list[Backend] = [self._keep(backend) for backend in make_backends(config)]
        series_filter = SeriesFilter(config)
        self.rollup = Rollup(
            config, start=self.started_at, authenticated=bool(keys), series_filter=series_filter
        )
        self._set_up_page(_read_mapping(config))
        if self._state is not None:
            # After all that may fail: a start that fails must not change what is there.
            self._page.resume(self.rollup.standing(), self._state.begin(self.rollup))
        self.pool: WorkerPool | None = None
        local = unix
        if config.workers == 1:
            local = sockets[0] + unix
        else:
            assert self._heard is not None
            filters = _filters(config)
            setup = WorkerSetup(
                [],
                config.max_series,
                config.max_clients,
                targets,
                [],
                config.parser_options,
                filters,
                keys,
                self.rollup.start_ms,
                self._heard.fd,
            )
            self.pool = WorkerPool([Worker(group, setup) for group in sockets])
            self._worker_sockets = sockets
        self._receiver = Receiver(
            local,
            self._streams,
            max_series=config.max_series,
            max_clients=config.max_clients,
            options=config.parser_options,
            series_filter=series_filter,
            auth_keys=keys,
            since_ms=self.rollup.start_ms,
            taps=list(self.repeaters),
            heard=self._heard.note if self._heard is not None else None,
        )

    def _keep(self, thing: Any) -> Any:
        self._opened.append(thing)
        return thing

    def _bind_udp(self) -> list[list[DatagramSocket]]:
        """For each worker, one socket per address; a numbered client always comes to the same one."""
        config = self.config
        groups: list[list[DatagramSocket]] = [[] for _ in range(config.workers)]
        for address in config.udp:
            target = address
            if config.workers > 1:
                # Sharing a port would let another daemon that shares it, too, take half of the datagrams.
                wait_until_free(address, ORPHANS_S)
            for group in groups:
                sock = bind_udp(target, receive_buffer=config.receive_buffer, reuse_port=config.workers > 1)
                group.append(self._keep(sock))
                target = sock.address
            if config.workers > 1:
                steer_by_client(groups[0][-1].sock, config.workers)
        return groups

    # -- running

    def start(self) -> "MetricsServer":
        """Run in a thread; returns when it receives."""
        self._thread = threading.Thread(target=self._run_thread, name="metrics-server")
        self._thread.start()
        if not self._ready.wait(START_S) or self._failure is not None:
            self._thread.join(1.0)
            raise self._failure or Closed("metrics server")
        return self

    def _run_thread(self) -> None:
        try:
            asyncio.run(self.serve())
        except BaseException as error:  # handed to the thread that waits in start()
            self._failure = error
        finally:
            self._ready.set()

    async def serve(self) -> None:
        """Run in the current event loop until `stop` (or `request_stop`)."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._flushing = asyncio.Lock()
        await self._receiver.start()
        if self.pool is not None:
            await self.pool.start()
        mgmt = None
        if self._mgmt_socket is not None:
            mgmt = ManagementServer(self._mgmt_socket, self)
            await mgmt.start()
        web = self._start_web()
        self._ready.set()
        shown = [a for kind, found in self.addresses.items() for a in found if kind != "mgmt"]
        presence = announce("metrics.server", self.config.journal_source, shown, self._announced)
        try:
            await self._flush_until_stopped()
        finally:
            presence.close()
            if mgmt is not None:
                await mgmt.stop()
            await self._receiver.stop()
            if self.pool is not None:
                await self.pool.stop()
            self._last_window = True
            await self.flush()
            if self.pool is not None:
                await self.pool.end()
            if self._leaving:
                await asyncio.wait(self._leaving, timeout=STOP_S)
            await asyncio.to_thread(self._close_all, web)

    def _announced(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        state: dict[str, Any] = {"counters": {**self.receive_counters(), **self.rollup.counters.snapshot()}}
        journals = [path for kind, path in map(check_backend, self.config.backends) if kind == "journal"]
        state["paths"] = [os.path.abspath(path) for path in journals]
        # Once per window: looking for the busiest of 100,000 series every second would cost 3 % of a core.
        last = self.last
        if last is not None and self._shown.get("of") is not last:
            shown = window_status(last, "", 20)
            self._shown = {"of": last, "series": shown["counters"], "window": shown["window"]}
        return state | {key: self._shown[key] for key in ("series", "window") if key in self._shown}

    def _start_web(self) -> Any:
        if self._http_socket is None:
            return None
        from brokerless.metrics.server.http import WebServer

        return WebServer(
            self._http_socket,
            metrics=self.metrics_page,
            state=self.state,
            health=lambda: self.health,
        )

    def _close_all(self, web: Any) -> None:
        self._loss_log.close()
        self._closed = True
        if web is not None:
            web.stop()
        for backend in self.backends:
            backend.close()
        for repeater in self.repeaters:
            repeater.close()
        self._receiver.close()
        if self.pool is not None:
            for group in self._worker_sockets:
                for sock in group:
                    sock.close()
        if self._heard is not None:
            self._heard.close()
        if self._state is not None:
            self._state.close()

    async def _flush_until_stopped(self) -> None:
        while not self._stopping:
            now = time.time()
            interval = self.config.flush_s
            # At multiples of the interval, so that several daemons' windows are the same.
            delay = interval - now % interval
            try:
                await asyncio.wait_for(self._wake.wait(), delay)
                self._wake.clear()  # to stop, or because the interval has changed
            except TimeoutError:
                await self.flush()

    async def flush(self) -> Flush:
        """Close the window now and publish it."""
        async with self._flushing:
            heard_upto = self._heard.end if self._heard is not None else 0
            window = await self._receiver.close_window()
            if self.pool is not None:
                others = await self.pool.close_window()
                self.rollup.counters.worker_crashes = self.pool.crashes
                await self._receiver.in_aggregator(lambda: window.merge(others))
            receive = self.receive_counters()
            flush = await self._receiver.in_aggregator(lambda: self._fold(window, receive, heard_upto))
            if self.rollup.expired:
                gone, self.rollup.expired = self.rollup.expired, []
                await self._receiver.forget(gone)
                if self.pool is not None:
                    await self.pool.forget(gone)
            if self.pool is not None and self.pool.crowded:
                await self.pool.retain(await self.in_rollup(lambda rollup: list(rollup.all_series())))
            return flush

    def _fold(self, window: Window, receive: dict[str, int], heard_upto: int) -> Flush:
        began = time.perf_counter()
        heard = self._heard.between(self._heard_upto, heard_upto) if self._heard is not None else []
        self._heard_upto = heard_upto
        before, self._folded_at = self._folded_at, time.monotonic()
        flush = self.rollup.fold(window, time.time(), heard, self._folded_at - before)
        if self._receiver.aggregator.crowded:
            self._receiver.aggregator.retain(self.rollup.all_series())
        flush.receive = receive
        flush.processing_s = time.perf_counter() - began
        self.last = flush
        self._loss_log.add("clients", "in_flight", flush.lost_datagrams)
        self._loss_log.add("clients", "overflow_receiver", flush.kernel_drops)
        for backend in self.backends:
            backend.put(flush)
        if self._state is not None:
            self._save(self._state)
        return flush

    def _save(self, state: StateFile) -> None:
        try:
            page = self._page.carried
            save(self.rollup, state.path, heard=self._heard_upto, ended=self._last_window, page=page)
        except OSError as error:
            # Publishing goes on; the next window tries again.
            self.rollup.counters.state_errors += 1
            self.state_error = f"{self.config.state}: {error.strerror}"
        else:
            self.state_error = ""

    def receive_counters(self) -> dict[str, int]:
        """What the sockets gave, over all processes."""
        total = self._receiver.counters.snapshot()
        if self.pool is not None:
            add_counts(total, self.pool.counters.snapshot())
        return total

    async def peek(self, table: str = "") -> Window:
        """A copy of the open window, as far as received: its counts, and `counters`, `gauges` or `timers`."""
        window = await self._receiver.peek(lambda window: window.part(table))
        if self.pool is not None:
            window.merge(await self.pool.peek(table))
        return window

    async def delete(self, what: str, names: list[str]) -> None:
        """Forget `counters`, `gauges` or `timers`, in the rollup and in the open window."""
        await self.in_rollup(lambda rollup: rollup.delete(what, names))
        await self._receiver.delete(what, names)
        if self.pool is not None:
            await self.pool.delete(what, names)

    async def in_rollup(self, work: Any) -> Any:
        """Run `work(rollup)` in the thread that owns the rollup."""
        return await self._receiver.in_aggregator(lambda: work(self.rollup))

    # -- from other threads

    def flush_now(self, timeout_s: float = STOP_S) -> Flush:
        """Close the window now and publish it; for any thread but the server's own."""
        if self._closed or self._thread is None:
            raise Closed("metrics server")
        return asyncio.run_coroutine_threadsafe(self.flush(), self._loop).result(timeout_s)

    def request_stop(self) -> None:
        """Ask `serve` to end; safe from signal handlers of its loop and from other threads."""
        self._stopping = True
        self._loop.call_soon_threadsafe(self._wake.set)

    def stop(self) -> None:
        """Publish what was received, then end all threads and processes. May be called twice."""
        if self._thread is None:
            if not self._closed:
                self._close_all(None)
                for thing in reversed(self._opened):
                    thing.close()
            return
        if self._thread.is_alive():
            self.request_stop()
        self._thread.join(STOP_S)
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "MetricsServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def metrics_page(self, openmetrics: bool = False) -> bytes:
        """The Prometheus page after the last flush; made once, however often it is asked for."""
        flush, page = self.last, self._page
        with self._page_lock:
            of, found = self._pages.get(openmetrics, (None, b""))
            if flush is None or of is None or of[0] is not flush or of[1] is not page:
                shown = flush or self._before_the_first()
                own = [(ReceiveCounters(), shown.receive), (AggregateCounters(), shown.rollup)]
                found = page.render(shown, own, openmetrics=openmetrics).encode()
                self._pages[openmetrics] = (flush, page), found
            return found

    def _before_the_first(self) -> Flush:
        """What is shown until a window has ended: nothing received, and every key there."""
        counters = self.rollup.counters.snapshot()
        return Flush(self.started_at, self.started_at, 0.0, rollup=counters, receive=self.receive_counters())

    def _set_up_page(self, mapper: Mapper | None, before: PrometheusPage | None = None) -> None:
        """The Prometheus page; its mapping rules also say which timers have which buckets."""
        self._mapper = mapper
        page = PrometheusPage(self.config.prometheus, mapper)
        if before is not None and mapper == before._mapper:
            page.go_on(before)
        self._page = page
        self.rollup.buckets_for = lambda series: (
            (mapper.buckets(series) if mapper is not None else []) or self.config.buckets
        )

    @property
    def outputs(self) -> list[Backend | Repeater]:
        """Backends and repeaters."""
        return [*self.backends, *self.repeaters]

    def state(self, prefix: str = "", limit: int = 1000) -> dict[str, Any]:
        """What /state shows: the daemon, clients, and up to `limit` series that begin with `prefix`."""
        out: dict[str, Any] = {
            "started_at": self.started_at,
            "health": self.health,
            "state_error": self.state_error,
            "addresses": self.addresses,
            "workers": self.pool.pids if self.pool is not None else [],
            "backends": [
                {"name": output.name, "last_error": output.last_error, **output.counters.snapshot()}
                for output in self.outputs
            ],
        }
        return out | window_status(self.last or self._before_the_first(), prefix, limit)

    def reload(self, config: MetricsConfig) -> list[str]:
        """Take a new configuration without a pause; returns the settings that would need a restart.

        Backends that are new are started, those that are gone deliver what waits and end. For the event loop.
        """
        kept = [name for name in FIXED if getattr(config, name) != getattr(self.config, name)]
        repeaters = {text for text in config.backends if text.startswith("repeater:")}
        if repeaters != {repeater.name for repeater in self.repeaters}:
            kept.append("repeaters")
        fixed = {name: getattr(self.config, name) for name in FIXED}
        config = msgspec.structs.replace(config, **fixed)
        wanted = [text for text in config.backends if not text.startswith("repeater:")]
        renamed = config.graphite != self.config.graphite
        stay = [
            backend
            for backend in self.backends
            if backend.name in wanted and not (renamed and backend.name.startswith("graphite"))
        ]
        have = {backend.name for backend in stay}
        # Rules and new ones first: if something cannot be made, nothing has changed.
        mapper = _read_mapping(config)
        new = make_backends(msgspec.structs.replace(config, backends=[b for b in wanted if b not in have]))
        leave = [backend for backend in self.backends if backend not in stay]
        before, self.config = self.config, config
        series_filter = SeriesFilter(config)
        self._receiver.configure(config.max_series, config.parser_options, series_filter)
        if self.pool is not None:
            told = self.pool.configure(config.max_series, config.parser_options, _filters(config))
            self._leaving.append(asyncio.ensure_future(told))
        self.rollup.set_config(config, series_filter)
        if config.prometheus != before.prometheus or mapper != self._mapper:
            self._set_up_page(mapper, self._page)
        self.backends = stay + new
        for backend in leave:
            # Delivering what waits may take seconds, in which receiving must go on.
            self._leaving.append(self._loop.run_in_executor(None, backend.close))
        self._wake.set()
        return kept


def _read_mapping(config: MetricsConfig) -> Mapper | None:
    return load(config.prometheus.mapping) if config.prometheus.mapping else None


def _filters(config: MetricsConfig) -> FilterConfig:
    return FilterConfig(**{name: getattr(config, name) for name in FilterConfig.__struct_fields__})


def _configured(settings: dict[str, Any]) -> MetricsConfig:
    try:
        return msgspec.convert(settings, MetricsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError("metrics", str(error)) from None
