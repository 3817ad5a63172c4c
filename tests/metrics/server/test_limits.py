"""What a stranger with a socket can cost: no file but stale sockets, bounded memory, no connection for good."""

import base64
import os
import socket
import time
from math import inf
from pathlib import Path

import pytest

from brokerless.core.errors import BrokerlessError, ConfigError
from brokerless.metrics import MetricsServer, StatsClient
from brokerless.metrics.aggregate.aggregator import Aggregator
from brokerless.metrics.aggregate.collect import Collector
from brokerless.metrics.aggregate.filters import SeriesFilter
from brokerless.metrics.aggregate.flush import Flush
from brokerless.metrics.aggregate.rollup import Rollup, RollupConfig
from brokerless.metrics.backends.base import Backend, Console
from brokerless.metrics.backends.prometheus import PrometheusPage
from brokerless.metrics.server import admin
from brokerless.metrics.server.http import MAX_CONNECTIONS
from tests.metrics.backends.test_prometheus import samples
from tests.metrics.simulation import SimulatedDaemon
from tests.metrics.windows import NEVER_S


@pytest.mark.parametrize("setting", ["unix", "unix_dgram"])
def test_only_a_stale_socket_is_removed(tmp_path: Path, setting: str) -> None:
    """A file, a directory, a link to a file: refused by name, and still there."""
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.write_text("precious")
    folder.mkdir()
    link.symlink_to(file)
    for path in (file, folder, link):
        with pytest.raises(ConfigError, match=f"{path.name} exists and is not a socket"):
            MetricsServer(**{setting: [str(path)]})
        assert path.exists()
    assert file.read_text() == "precious"


def test_at_the_end_only_the_own_socket_is_removed(tmp_path: Path) -> None:
    """Somebody put a file where the socket was: it stays."""
    stream, datagrams = tmp_path / "stream", tmp_path / "datagrams"
    with MetricsServer(unix=[str(stream)], unix_dgram=[str(datagrams)], flush_s=NEVER_S):
        for path in (stream, datagrams):
            path.unlink()
            path.write_text("mine")
    assert stream.read_text() == datagrams.read_text() == "mine"


def test_held_datagrams_are_bounded_in_bytes() -> None:
    """1,000 clients with a gap and 64 KB datagrams behind it: nothing beyond the limit is held back."""
    collector = Collector()
    big = b"x" * 60_000
    for client in range(1000):
        collector.datagrams([b"_bl.c%07d:1|g\na:1|c" % client, b"_bl.c%07d:3|g\n%s" % (client, big)], 0.0)
    assert collector._held_bytes <= 32 * 1024 * 1024 + 70_000
    assert collector.counters.not_held
    snapshot = collector.snapshot(end_window=True)
    assert collector._held_bytes == 0
    assert len(snapshot.clients) == 1000


@pytest.mark.parametrize("kind", ["c", "g", "ms", "s"])
def test_series_are_bounded_over_windows(kind: str) -> None:
    """New names in every window: no more than max_series are remembered, and each refused line is counted once."""
    aggregator, collector = Aggregator(max_series=100), Collector()
    rollup = Rollup(RollupConfig(max_series=100), start=0.0)
    for window in range(5):
        collector.datagrams(["\n".join(f"n{window}.{i}:1|{kind}" for i in range(60)).encode()] * 2, 0.0)
        aggregator.take(collector.snapshot(end_window=True), unnumbered_lossy=False)
        flush = rollup.fold(aggregator.close(), 10.0 * (window + 1))
    assert len(list(rollup.all_series())) == 100
    assert flush.refused == {"series_limit": 2 * (5 * 60 - 100)}
    assert flush.rollup["refused"] == 2 * (5 * 60 - 100)


def test_series_are_bounded_over_all_types_together() -> None:
    """A name of several types costs as many series, and what does not fit is counted."""
    daemon = SimulatedDaemon(config=RollupConfig(max_series=100))
    lines = [f"n{i}:1|{kind}" for kind in ("c", "g", "ms", "s") for i in range(40)]
    daemon.receive(["\n".join([*lines, "t:1|c|T1700000000"]).encode()])
    flush = daemon.flush()
    assert len(list(daemon.rollup.all_series())) == 100
    assert flush.rollup["series_dropped"] == 161 - 100


def test_long_names_and_members_are_bounded() -> None:
    """Names count by their bytes, members of sets are hashed."""
    daemon = SimulatedDaemon(config=RollupConfig(max_series=100))
    daemon.aggregators = [Aggregator(max_series=100)]
    daemon.receive([b"n%d.%s:1|c" % (i, b"x" * 2000) for i in range(100)])
    flush = daemon.flush()
    assert len(flush.counters) <= 100 * 256 // 2000 + 1
    assert flush.refused["series_limit"]
    daemon.aggregators = [Aggregator(max_series=100)]
    daemon.receive([b"s:%d%s|s" % (i, b"y" * 5000) for i in range(50)])
    aggregator = daemon.aggregators[0]
    aggregator.take(daemon.collectors[0].snapshot(end_window=True), unnumbered_lossy=False)
    members = next(iter(aggregator.window.sets.values()))
    assert len(members) == 50
    assert max(map(len, members)) == 32


def test_idle_connections_do_not_take_the_http_port(until: object) -> None:
    """More idle connections than are allowed: the others are closed, and a scrape still gets its answer."""
    with MetricsServer(udp=["127.0.0.1:0"], http="127.0.0.1:0", flush_s=NEVER_S) as server:
        host, _, port = server.addresses["http"][0].rpartition(":")
        idle = [socket.create_connection((host, int(port)), 10) for _ in range(MAX_CONNECTIONS + 40)]
        closed = 0
        deadline = time.monotonic() + 20
        while closed < 40 and time.monotonic() < deadline:
            closed = sum(_is_closed(connection) for connection in idle)
        assert closed >= 40
        # The idle ones that were let in are closed after IDLE_S: then there is room again.
        answer = b""
        deadline = time.monotonic() + 60
        while not answer and time.monotonic() < deadline:
            with socket.create_connection((host, int(port)), 10) as scrape:
                scrape.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                try:
                    answer = scrape.recv(100)
                except OSError:
                    answer = b""
        assert b" 200 " in answer
        for connection in idle:
            connection.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_idle_connections_do_not_take_the_management_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many as are allowed, the longest idle one makes room: commands are still answered."""
    monkeypatch.setattr("brokerless.metrics.server.admin.ROOM_S", 0.0)
    with MetricsServer(udp=["127.0.0.1:0"], mgmt="127.0.0.1:0", flush_s=NEVER_S) as server:
        host, _, port = server.addresses["mgmt"][0].rpartition(":")
        idle = [socket.create_connection((host, int(port)), 10) for _ in range(admin.MAX_CONNECTIONS + 5)]
        for _ in range(3):
            with socket.create_connection((host, int(port)), 10) as asking:
                asking.sendall(b"health\n")
                assert asking.recv(100) == b"health: up\n"
        assert idle[0].recv(1) == b""
        for connection in idle:
            connection.close()


def test_an_idle_stream_makes_room_for_a_new_one(monkeypatch: pytest.MonkeyPatch, until: object) -> None:
    """With max_streams connections the longest idle one is closed; nobody is locked out for good."""
    monkeypatch.setattr("brokerless.metrics.server.streams.IDLE_S", 0.0)
    with MetricsServer(tcp=["127.0.0.1:0"], max_streams=2, flush_s=NEVER_S) as server:
        host, _, port = server.addresses["tcp"][0].rpartition(":")
        for i in range(5):
            with socket.create_connection((host, int(port)), 10) as stream:
                stream.sendall(b"a:1|c\n")
                deadline = time.monotonic() + 20
                while server.flush_now().rollup["lines"] < i + 1 and time.monotonic() < deadline:
                    time.sleep(0.01)
                keep = socket.create_connection((host, int(port)), 10)
                assert server.flush_now().rollup["lines"] == i + 1
                os.set_inheritable(keep.fileno(), False)
        assert server.receive_counters()["streams_refused"] == 0


WRONG = [
    lambda c: c.incr("a", "x"),
    lambda c: c.incr("a", None),
    lambda c: c.decr("a", "x"),
    lambda c: c.gauge("a", "x"),
    lambda c: c.gauge("a", None),
    lambda c: c.timing("a", "x"),
    lambda c: c.timing("a", None),
    lambda c: c.histogram("a", object()),
    lambda c: c.distribution("a", "x"),
    lambda c: c.incr("a", rate="x"),
    lambda c: c.set("a", 1, rate=None),
    lambda c: c.incr("a", tags=5),
    lambda c: c.incr(5),
    lambda c: c.incr(None, 2),
    lambda c: c.incr(["a"], 2),
    lambda c: c.incr("a\nb"),
    lambda c: c.incr("a\nb", 2, tags=["x:1"]),
    lambda c: c.gauge("a\nb", 1),
]


@pytest.mark.parametrize("at", range(len(WRONG)))
def test_the_client_never_raises_whatever_it_is_given(at: int) -> None:
    """Wrong types are counted, and the next call works."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink:
        sink.bind(("127.0.0.1", 0))
        with StatsClient(*sink.getsockname(), flush_s=3600, heartbeat_s=inf) as client:
            WRONG[at](client)
            with client.pipeline() as pipe:
                WRONG[at](pipe)
            assert client.counters.invalid == 2
            client.incr("ok")
            client.flush()
            sink.settimeout(10)
            assert b"ok:1|c" in sink.recv(2000)


def test_filters_limits_and_global_tags() -> None:
    """Allow and deny by name and tag, a limit on a tag's values, namespace, tags, host; refusals are visible."""
    config = RollupConfig(
        allow=["web.*", "db.*"],
        deny=["web.debug*"],
        deny_tags=["secret", "env:test"],
        tag_limits={"user": 2},
        namespace="shop",
        tags={"region": "eu", "env": "prod"},
        host_tag="h1",
    )
    daemon = SimulatedDaemon(config=config)
    daemon.aggregators = [Aggregator(series_filter=SeriesFilter(config))]
    daemon.receive(
        [
            b"web.hits:1|c\nother:1|c\nweb.debug.x:1|c\nweb.a:1|c|#secret:1\nweb.a:1|c|#env:test\nweb.a:1|c|#env:dev",
            b"web.u:1|c|#user:1\nweb.u:1|c|#user:2\nweb.u:1|c|#user:3\nweb.u:1|c|#user:1\ndb.g:5|g",
        ]
    )
    flush = daemon.flush()
    assert {point.series: point.raw for point in flush.counters} == {
        "shop.web.hits;env=prod;host=h1;region=eu": 1,
        "shop.web.a;env=dev;host=h1;region=eu": 1,
        "shop.web.u;env=prod;host=h1;region=eu;user=1": 2,
        "shop.web.u;env=prod;host=h1;region=eu;user=2": 1,
    }
    assert flush.gauges == {"shop.db.g;env=prod;host=h1;region=eu": 5}
    assert flush.refused == {"filtered": 4, "tag_limit": 1}


def test_what_one_worker_lets_in_is_not_lost_behind_it() -> None:
    """Each has limits of its own for a tag's values: what is let in is published, and what is not is counted."""
    config = RollupConfig(tag_limits={"user": 2})
    daemon = SimulatedDaemon(workers=2, config=config)
    daemon.aggregators = [Aggregator(series_filter=SeriesFilter(config)) for _ in range(2)]
    for worker in range(2):
        daemon.receive([f"a:1|c|#user:{worker}{n}".encode() for n in range(3)], worker)
    flush = daemon.flush()
    assert (len(flush.counters), flush.refused) == (4, {"tag_limit": 2})


def test_series_that_global_tags_make_equal_are_one() -> None:
    """Some clients send the tag themselves: counters and timers add up, members unite, the latest gauge wins."""
    config = RollupConfig(tags={"env": "prod"}, percentiles=[])
    daemon, page = SimulatedDaemon(config=config), PrometheusPage()
    daemon.receive([b"c:1|c\nt:5|ms\nd:1|d\ns:x|s\ng:1|g\nT:1|c|T1700000000\nalone:1|ms"])
    daemon.flush()
    lines = [
        f"{line}|#env:prod" for line in ("c:2|c", "t:7|ms", "d:3|d", "s:y|s", "g:2|g", "T:2|c|T1700000000")
    ]
    daemon.receive([b"c:10|c\nt:9|ms\nd:2|d\ns:x|s\ns:y|s", "\n".join(lines).encode()])
    flush = daemon.flush()
    assert [(p.series, p.raw, p.total) for p in flush.counters] == [("c;env=prod", 12, 13)]
    assert flush.gauges == {"g;env=prod": 2}
    assert flush.sets == {"s;env=prod": 2}
    timer = flush.timers["t;env=prod"]
    assert (timer["count"], timer["sum"], timer["lower"], timer["upper"]) == (2, 16, 7, 9)
    assert (flush.sketches["d;env=prod"].count, flush.timer_totals["t;env=prod"].sum) == (2, 21)
    assert len(flush.timers) == 3
    found = samples(page.render(flush))
    labels = (("env", "prod"),)
    assert (found["c_total", labels], found["T_total", labels], found["t_sum", labels]) == (13, 3, 21)


def test_an_event_that_looks_like_a_timer_is_an_event() -> None:
    """`_e{1,1}:5|h` has a title `5` and a text `h`."""
    daemon = SimulatedDaemon()
    daemon.receive([b"_e{1,1}:5|h", b"_sc|x|1|d"] * 3)
    flush = daemon.flush()
    assert (flush.timers, flush.rollup["events"], flush.rollup["checks"]) == ({}, 3, 3)


def test_signed_clients_are_numbered_in_workers_and_no_command_line_has_the_key(tmp_path: Path) -> None:
    """What everybody on the machine can read of a process must not be enough to sign."""
    key = b"0123456789abcdef"
    (tmp_path / "keys").write_bytes(key)
    settings = {"udp": ["127.0.0.1:0"], "workers": 2, "auth_key_file": str(tmp_path / "keys")}
    with MetricsServer(flush_s=NEVER_S, **settings) as server:
        host, _, port = server.addresses["udp"][0].rpartition(":")
        with StatsClient(host, int(port), auth_key=key) as client:
            client.incr("a")
        assert server.pool is not None
        assert len(server.pool.pids) == 2
        for pid in server.pool.pids:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert key not in shown
            assert base64.b64encode(key)[:-2] not in shown
        point = next(point for point in server.flush_now().counters if point.series == "a")
        assert (point.total, point.total_grade.label) == (1, "exact")


def test_a_start_that_fails_changes_no_state(tmp_path: Path) -> None:
    """A port in use, a journal of somebody else: the state of the daemon that ended is as it was."""
    state = tmp_path / "state"
    MetricsServer(state=str(state)).start().stop()
    before = state.read_bytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="cannot bind"):
            MetricsServer(state=str(state), udp=[f"127.0.0.1:{taken.getsockname()[1]}"])
    with pytest.raises(BrokerlessError):
        MetricsServer(state=str(state), backends=[f"journal:{tmp_path / 'state'}"])
    assert state.read_bytes() == before


def test_a_window_that_cannot_be_written_down_does_not_stop_a_backend(until: object) -> None:
    """An exception of any kind costs that window and is counted; the next one is written."""
    windows = []

    class Odd(Backend):
        def deliver(self, flush: Flush) -> int:
            windows.append(flush)
            if len(windows) == 1:
                raise ValueError("made by the test")
            return 1

    backend = Odd("odd")
    for _ in range(2):
        backend.put(Flush(0.0, 1.0, 1.0))
    until(lambda: backend.counters.flushes == 1)  # type: ignore[operator]
    backend.close()
    assert (backend.counters.errors, backend.counters.dropped) == (1, 1)
    assert "made by the test" in backend.last_error


def test_a_reader_of_the_console_that_is_stuck_does_not_keep_the_daemon(
    monkeypatch: pytest.MonkeyPatch, until: object
) -> None:
    """Nobody reads the pipe: windows are dropped and counted, and the daemon can end."""
    monkeypatch.setattr("brokerless.metrics.backends.base.STUCK_S", 0.05)
    reader, writer = os.pipe()
    backend = Console(fd=writer)
    for _ in range(2):
        backend.put(Flush(0.0, 1.0, 1.0, gauges={f"g{i}": i for i in range(20_000)}))
    until(lambda: backend.counters.errors)  # type: ignore[operator]
    backend.close(0.2)
    assert not backend._thread.is_alive()
    assert backend.counters.dropped == 2
    assert os.read(reader, 9).count(b":") == 2  # the time of day
    os.close(reader)
    os.close(writer)
