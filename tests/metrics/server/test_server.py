"""metrics/server/server.py with real sockets: clients of others, streams, management port, HTTP, backends."""

import asyncio
import json
import pickle
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import statsd
from datadog.dogstatsd import DogStatsd

from brokerless.core import JournalReader
from brokerless.core.errors import Closed, ConfigError
from brokerless.losstest.harness.ports import Ports
from brokerless.metrics import Flush, Grade, MetricsConfig, MetricsServer, StatsClient
from brokerless.metrics.aggregate.flush import CounterPoint
from brokerless.metrics.backends.prometheus import PrometheusOptions
from brokerless.metrics.numbers import format_number
from tests.conftest import Until
from tests.metrics.windows import NEVER_S

LOCAL = "127.0.0.1:0"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def udp(server: MetricsServer) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(("127.0.0.1", port_of(server.addresses["udp"][0])))
    return sock


def counters(flush: Flush) -> dict[str, CounterPoint]:
    return {point.series: point for point in flush.counters}


def received(server: MetricsServer, until: Until, datagrams: int) -> Flush:
    """Wait until so many datagrams were read, then flush."""
    until(lambda: server.receive_counters()["datagrams"] >= datagrams, what=f"{datagrams} datagrams")
    return server.flush_now()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(
        udp=[LOCAL], tcp=[LOCAL], mgmt=LOCAL, http=LOCAL, flush_s=NEVER_S, percentiles=[90, -10]
    ) as made:
        yield made


def test_the_unmodified_statsd_client_works(server: MetricsServer, until: Until) -> None:
    """PyPI statsd over UDP, and its TCP client: all types arrive and are right."""
    client = statsd.StatsClient("127.0.0.1", port_of(server.addresses["udp"][0]), prefix="app")
    for i in range(50):
        client.incr("hits", 2)
        client.timing("took", i + 1)
    client.decr("hits")
    client.gauge("level", 10)
    client.gauge("level", -4)
    client.gauge("level", 1, delta=True)
    client.set("users", "ann")
    client.set("users", "bob")
    client.set("users", "ann")
    with client.pipeline() as pipe:
        for _ in range(100):
            pipe.incr("piped")
    client.close()
    tcp = statsd.TCPStatsClient("127.0.0.1", port_of(server.addresses["tcp"][0]))
    for _ in range(20):
        tcp.incr("by.tcp")
    tcp.close()
    until(
        lambda: (
            server.receive_counters()["datagrams"] >= 107 and server.receive_counters()["stream_connections"]
        )
    )
    flush = server.flush_now()
    found: dict[str, CounterPoint] = {}

    def all_read() -> bool:
        """Whether the last lines of each client are counted: a stream may be read in pieces."""
        found.update(counters(server.flush_now()))
        return [getattr(found.get(name), "total", 0) for name in ("app.piped", "by.tcp")] == [100, 20]

    until(all_read)
    assert found["app.hits"].total == 99
    assert found["by.tcp"].total_grade is Grade.EXACT
    assert found["app.hits"].total_grade is Grade.SOCKET_ONLY
    assert flush.gauges == {"app.level": -3}
    assert flush.sets == {"app.users": 2}
    took = flush.timers["app.took"]
    assert (took["count"], took["sum"], took["lower"], took["upper"]) == (50, 1275, 1, 50)
    assert (took["upper_90"], took["lower_top10"], took["median"]) == (45, 46, 25.5)


def test_the_unmodified_datadog_client_works(server: MetricsServer, until: Until, tmp_path: Path) -> None:
    """PyPI datadog over UDP and over a Unix datagram socket: tags, distributions, events and checks."""
    path = str(tmp_path / "dsd.sock")
    with MetricsServer(unix_dgram=[path], flush_s=NEVER_S) as unix:
        for target, address in (
            (server, {"host": "127.0.0.1", "port": port_of(server.addresses["udp"][0])}),
            (unix, {"socket_path": path, "socket_timeout": 5}),
        ):
            client = DogStatsd(
                **address, disable_telemetry=True, disable_buffering=True, constant_tags=["env:prod"]
            )
            for i in range(40):
                client.increment("hits", tags=["route:/a"])
                client.distribution("size", i)
                client.histogram("wait", i)
            client.gauge("level", 4.5)
            client.set("users", "ann")
            client.event("deploy", "it is done", tags=["x:y"])
            client.service_check("db.up", 0, message="fine")
            client.timing("took", 30, sample_rate=1)
            client.close_socket()
            flush = received(target, until, 125)
            assert counters(flush)["hits;env=prod;route=/a"].total == 40
            assert flush.timers["size;env=prod"]["count"] == 40
            assert flush.timers["wait;env=prod"]["upper"] == 39
            assert flush.gauges == {"level;env=prod": 4.5}
            assert len(flush.passed) == 2
            assert (flush.rollup["events"], flush.rollup["checks"]) == (1, 1)
            assert flush.refused == {}
    assert not Path(path).exists()


@pytest.mark.parametrize("how", ["detected", "?dialect=dogstatsd", "?dialect=statsd"])
def test_negative_gauges_of_the_datadog_client_do_not_add_up(how: str, until: Until) -> None:
    """DogStatsD sets gauges, whatever their sign: by the listener, or once the client sends its own figures."""
    with MetricsServer(udp=[LOCAL, LOCAL + how.replace("detected", "")], flush_s=NEVER_S) as server:
        other, address = server.addresses["udp"]
        client = DogStatsd(
            host="127.0.0.1",
            port=port_of(address),
            disable_buffering=True,
            disable_telemetry=how != "detected",
            telemetry_min_flush_interval=0,
            origin_detection_enabled=False,
        )
        sent = 0

        def level() -> float | None:
            nonlocal sent
            sent += 1
            client.gauge("level", -5)
            until(lambda: server.receive_counters()["datagrams"] >= sent)
            return server.flush_now().gauges.get("level")

        if how == "?dialect=statsd":
            assert [level() for _ in range(3)] == [-5, -10, -15]
        elif how == "?dialect=dogstatsd":
            assert [level() for _ in range(3)] == [-5, -5, -5]
        else:
            # What came before the client had said what it is was read as a movement.
            until(lambda: level() == -5 and level() == -5 and level() == -5)
        client.close_socket()
        # Another listener still speaks StatsD.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for value in (b"7", b"-2"):
                sock.sendto(b"plain:%s|g" % value, ("127.0.0.1", port_of(other)))
            until(lambda: server.flush_now().gauges.get("plain") == 5)


class Carbon:
    """A Graphite receiver: keeps what each connection sent."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.1)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.payloads: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(10)
                payload = b""
                while data := connection.recv(65536):
                    payload += data
            self.payloads.append(payload)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._server.close()


@pytest.fixture
def carbon() -> Iterator[Carbon]:
    made = Carbon()
    yield made
    made.close()


TRAFFIC = b"a.b:3|c\na.b:1|c|@0.5\nt:10|ms\nt:20|ms\ng:2.5|g\ns:x|s\ntag:1|c|#k:v"


def expected_points(
    flush: Flush, *, legacy: bool, loss: bool, more: Sequence[str] = ()
) -> list[tuple[str, float]]:
    """What the classic daemon sends for TRAFFIC and `more` counters of 1, by hand; rates depend on the window."""
    w = flush.window_s
    out: list[tuple[str, float]] = []
    for name, tags, count in (("a.b", "", 5), ("tag", ";k=v", 1), *((name, "", 1) for name in more)):
        if legacy:
            out += [(f"stats.{name}{tags}", count / w), (f"stats_counts.{name}{tags}", count)]
            base = "stats_counts"
        else:
            out += [
                (f"stats.counters.{name}.rate{tags}", count / w),
                (f"stats.counters.{name}.count{tags}", count),
            ]
            base = "stats.counters"
        if loss:
            out += [(f"{base}.{name}.corrected{tags}", count), (f"{base}.{name}.bound{tags}", 0)]
            out += [(f"{base}.{name}.grade{tags}", 2)]
    figures = {"count_90": 2, "mean_90": 15, "upper_90": 20, "sum_90": 30, "sum_squares_90": 500, "std": 5}
    figures |= {"upper": 20, "lower": 10, "count": 2, "count_ps": 2 / w, "sum": 30, "sum_squares": 500}
    figures |= {"mean": 15, "median": 15}
    out += [(f"stats.timers.t.{name}", value) for name, value in figures.items()]
    out += [("stats.gauges.g", 2.5), ("stats.sets.s.count", 1)]
    out += [("statsd.numStats" if legacy else "stats.statsd.numStats", 5 + len(more))]
    return [*out, ("stats.statsd.processing_time", round(flush.processing_s * 1000))]


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("loss", [True, False])
def test_graphite_lines_are_right_byte_by_byte(
    carbon: Carbon, until: Until, legacy: bool, loss: bool
) -> None:
    """Legacy and new namespaces, with and without the loss figures, as a Graphite receiver gets them."""
    config = {"legacy": legacy, "loss": loss}
    with MetricsServer(
        udp=[LOCAL], flush_s=NEVER_S, backends=[f"graphite:{carbon.address}"], graphite=config
    ) as server:
        udp(server).send(TRAFFIC)
        flush = received(server, until, 1)
        until(lambda: carbon.payloads)
        wanted = expected_points(flush, legacy=legacy, loss=loss)
        text = "".join(f"{name} {format_number(value)} {round(flush.end)}\n" for name, value in wanted)
        assert carbon.payloads[0].decode() == text


@pytest.mark.parametrize("legacy", [True, False])
def test_graphite_pickles_are_right_byte_by_byte(carbon: Carbon, until: Until, legacy: bool) -> None:
    """The pickle protocol: length, then a list of (name, (time, value)), in batches that Carbon accepts."""
    config = {"legacy": legacy}
    more = [f"n{i}" for i in range(600)]
    with MetricsServer(
        udp=[LOCAL], flush_s=NEVER_S, backends=[f"graphite-pickle:{carbon.address}"], graphite=config
    ) as server:
        sock = udp(server)
        sock.send(TRAFFIC)
        sock.send("\n".join(f"{name}:1|c" for name in more).encode())
        flush = received(server, until, 2)
        until(lambda: carbon.payloads)
        payload = carbon.payloads[0]
        found = []
        while payload:
            size = struct.unpack("!L", payload[:4])[0]
            body, payload = payload[4 : 4 + size], payload[4 + size :]
            batch = pickle.loads(body)
            assert pickle.dumps(batch, protocol=2) == body
            assert len(batch) <= 500
            found += batch
        at = round(flush.end)
        wanted = expected_points(flush, legacy=legacy, loss=True, more=more)
        assert found == [(name, (at, value)) for name, value in wanted]


def test_graphite_that_was_away_gets_the_windows_it_missed(until: Until, ports: Ports) -> None:
    """Windows wait in a short queue, in order; beyond it the oldest is dropped and counted."""
    address = f"127.0.0.1:{ports.take()}"
    with MetricsServer(udp=[LOCAL], flush_s=NEVER_S, backends=[f"graphite:{address}"]) as server:
        for _ in range(12):
            server.flush_now()
        backend = server.backends[0]
        until(lambda: backend.counters.errors and backend.counters.dropped)
        listener = socket.create_server(("127.0.0.1", port_of(address)))
        listener.settimeout(20)
        for _ in range(6):
            connection, _ = listener.accept()
            connection.close()
        until(lambda: backend.counters.flushes >= 6)
        assert backend.counters.flushes + backend.counters.dropped <= 12
        listener.close()


def test_points_with_their_own_time_keep_it(carbon: Carbon, until: Until) -> None:
    """DogStatsD 1.3 timestamps: not aggregated into the window, sent with the time they came with."""
    with MetricsServer(udp=[LOCAL], flush_s=NEVER_S, backends=[f"graphite:{carbon.address}"]) as server:
        udp(server).send(b"old:7|c|T1700000000\nlevel:3|g|T1700000001")
        flush = received(server, until, 1)
        until(lambda: carbon.payloads)
        assert flush.counters == []
        assert b"stats_counts.old 7 1700000000\n" in carbon.payloads[0]
        assert b"stats.gauges.level 3 1700000001\n" in carbon.payloads[0]


def test_the_journal_backend_appends_every_figure(tmp_path: Path, until: Until) -> None:
    """Name, tags, type, value, corrected, bound, grade and window of each series, as Events."""
    path = tmp_path / "journal"
    with MetricsServer(udp=[LOCAL], flush_s=NEVER_S, backends=[f"journal:{path}"]) as server:
        udp(server).send(TRAFFIC + b"\n_sc|db|0")
        flush = received(server, until, 1)
        until(lambda: server.backends[0].counters.flushes)
    with JournalReader(path) as reader:
        events = [e for frame in reader.read(0).frames for e in frame.events()]
    rows = [json.loads(e.data) for e in events if e.topic == "metrics"]
    window = [flush.start, flush.end]
    assert {
        "name": "tag",
        "tags": {"k": "v"},
        "type": "counter",
        "value": 1,
        "corrected": 1,
        "bound": 0.0,
    } | {
        "grade": "socket-only",
        "window": window,
    } in rows
    first = [row for row in rows if row["window"] == window]
    assert sorted(row["type"] for row in first) == ["counter", "counter", "gauge", "set", "timer"]
    assert [e.data for e in events if e.topic == "metrics.passed"] == [b"_sc|db|0"]


def test_the_repeater_sends_on_what_came(server: MetricsServer, until: Until) -> None:
    """Every datagram reaches the other daemon unchanged."""
    target = server.addresses["udp"][0]
    with MetricsServer(udp=[LOCAL], flush_s=NEVER_S, backends=[f"repeater:{target}"]) as first:
        sock = udp(first)
        for _ in range(20):
            sock.send(b"a:1|c\nbad line\ng:5|g")
        flush = received(server, until, 20)
        assert counters(flush)["a"].total == 20
        assert flush.refused == {"no_value": 20}
        until(lambda: first.repeaters[0].counters.flushes == 20)  # counted after it was sent


def ask(server: MetricsServer, *commands: str) -> str:
    """Send management commands, then quit, and return all that was answered."""
    with socket.create_connection(("127.0.0.1", port_of(server.addresses["mgmt"][0])), 10) as connection:
        connection.sendall("".join(f"{command}\n" for command in (*commands, "quit")).encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer.decode()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_classic_management_commands(until: Until, workers: int) -> None:
    """stats, counters, gauges, timers, del…, health, config, help, quit; unknown ones are an error."""
    with MetricsServer(udp=[LOCAL], mgmt=LOCAL, flush_s=NEVER_S, workers=workers) as server:
        sock = udp(server)
        sock.send(b"a.x:2|c\na.y:3|c\nb:1|c\ng:4|g\nt:5|ms\nt:6|ms\nbad")
        until(lambda: "'b': 1" in ask(server, "counters"))
        assert ask(server, "counters").replace("\n", "") == "{  'a.x': 2,  'a.y': 3,  'b': 1}END"
        assert ask(server, "gauges").replace("\n", "") == "{  'g': 4}END"
        assert "'t': [ 5, 6 ]" in ask(server, "timers")
        stats = ask(server, "stats")
        assert "messages.bad_lines_seen: 1\n" in stats
        assert stats.endswith("END\n\n")
        assert (
            ask(server, "delcounters a.* nope")
            == "deleted: a.x\ndeleted: a.y\nmetric nope not found\nEND\n\n"
        )
        server.flush_now()
        assert ask(server, "counters").replace("\n", "") == "{  'b': 0}END"
        assert "deleted: g" in ask(server, "delgauges g")
        assert "deleted: t" in ask(server, "deltimers t")
        assert ask(server, "gauges") == "{}\nEND\n\n"
        assert ask(server, "health", "health down", "health") == "health: up\nhealth: down\nhealth: down\n"
        assert f"flush_s: {NEVER_S}" in ask(server, "config")
        assert ask(server, "nonsense") == "ERROR\n"
        assert "delcounters" in ask(server, "help")


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://{server.addresses['http'][0]}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


def test_http_shows_metrics_state_and_health(server: MetricsServer, until: Until) -> None:
    """Prometheus text, OpenMetrics by content negotiation, JSON state with refused samples, health by status."""
    assert get(server, "/state")[0] == 200
    udp(server).send(b"a.b:3|c|#k:v\nlevel:2.5|g\nt:10|ms\nusers:x|s\nwrong\n\xff:1|c")
    received(server, until, 1)
    status, kind, text = get(server, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert '# TYPE a_b_total counter\na_b_total{k="v"} 3\n' in text
    assert 'a_b_raw_total{k="v"} 3\n' in text
    assert 'a_b_bound{k="v"} 0\n' in text
    assert 't{quantile="0.9"} 10\n' in text
    assert "t_sum 10\nt_count 1\n" in text
    assert "level 2.5\n" in text
    assert 'brokerless_metrics_refused_lines_total{reason="no_value"} 1\n' in text
    assert "brokerless_metrics_receive_datagrams_total 1\n" in text
    status, kind, text = get(server, "/metrics", Accept="application/openmetrics-text")
    assert kind.startswith("application/openmetrics-text")
    assert '# TYPE a_b counter\na_b_total{k="v"} 3\n' in text
    assert text.endswith("# EOF\n")
    state = json.loads(get(server, "/state?prefix=a.&limit=5")[2])
    assert state["counters"]["a.b;k=v"]["grade"] == "socket-only"
    assert state["gauges"] == {}
    assert {"reason": "no_value", "line": "wrong"} in state["refused_samples"]
    assert get(server, "/state?limit=x")[0] == 400
    assert get(server, "/health")[0] == 200
    server.health = "down"
    assert get(server, "/health")[0] == 503


def test_unix_streams_and_long_lines(tmp_path: Path, until: Until) -> None:
    """The PyPI client's Unix socket; lines cut into pieces; an endless line is skipped and harms nobody."""
    path = str(tmp_path / "s.sock")
    with MetricsServer(unix=[path], flush_s=NEVER_S) as server:
        client = statsd.UnixSocketStatsClient(path)
        client.incr("a", 5)
        client.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.connect(path)
            for piece in (b"b:", b"1|c\nb:2", b"|c\n" + b"x" * 300_000, b":1|c\nb:4|c\nc:1|c"):
                stream.sendall(piece)
        until(lambda: server.receive_counters()["stream_unfinished"] == 1)
        until(lambda: server.receive_counters()["stream_connections"] == 2)
        flush = server.flush_now()
        assert {p.series: p.raw for p in flush.counters} == {"a": 5, "b": 7}
        assert server.receive_counters()["stream_overlong"] == 1


def test_a_unix_datagram_that_is_cut_short_takes_exact_from_what_came_that_way(
    tmp_path: Path, until: Until
) -> None:
    """More than 64 KiB in one: what was cut off may have been any counter, in this window and in all totals."""
    path = str(tmp_path / "d.sock")
    with (
        MetricsServer(unix_dgram=[path], flush_s=NEVER_S) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
    ):
        sock.connect(path)
        sock.send(b"a:1|c\nb:1|c")
        found = counters(received(server, until, 1))
        assert {point.total_grade for point in found.values()} == {Grade.EXACT}
        sock.send(b"b:1|c\n" * 11_000)
        flush = received(server, until, 2)
        assert flush.receive["truncated"] == 1
        assert counters(flush)["b"].total < 11_001
        assert {(p.grade, p.total_grade) for p in flush.counters} == {(Grade.SOCKET_ONLY, Grade.SOCKET_ONLY)}
        found = counters(server.flush_now())
        assert {(p.grade, p.total_grade) for p in found.values()} == {(Grade.EXACT, Grade.SOCKET_ONLY)}


def test_a_path_left_by_a_dead_daemon_is_taken_over_and_a_living_one_is_not(tmp_path: Path) -> None:
    """A stale socket file does not stop the daemon; a used one does, and so does a used port."""
    for setting, kind in (("unix", socket.SOCK_STREAM), ("unix_dgram", socket.SOCK_DGRAM)):
        path = str(tmp_path / setting)
        left = socket.socket(socket.AF_UNIX, kind)
        left.bind(path)
        left.close()
        with MetricsServer(**{setting: [path]}), pytest.raises(ConfigError, match="in use"):
            MetricsServer(**{setting: [path]})
    with MetricsServer(udp=[LOCAL], tcp=[LOCAL], http=LOCAL) as server:
        for field in ("udp", "tcp", "http"):
            address = server.addresses[field][0]
            with pytest.raises(ConfigError, match="in use"):
                MetricsServer(**{field: address if field == "http" else [address]})


def test_kernel_drops_are_counted_and_add_up(until: Until) -> None:
    """With a tiny receive buffer: received and dropped by the kernel are together what was sent."""
    with MetricsServer(udp=[LOCAL], flush_s=NEVER_S, receive_buffer=4096) as server:
        sock = udp(server)
        sent = 3000
        for _ in range(sent):
            sock.send(b"a:1|c\nb:2|c" * 1)

        def total() -> int:
            flush = server.flush_now()
            return flush.receive["datagrams"] + flush.receive["kernel_drops"]

        until(lambda: total() == sent)
        flush = server.flush_now()
        point = counters(flush)["a"]
        assert point.total_raw == flush.receive["datagrams"]
        if flush.receive["kernel_drops"]:
            assert point.total_grade >= Grade.SOCKET_ONLY
            assert point.total > point.total_raw


def test_configuration_is_checked_where_it_is_made() -> None:
    """Wrong settings raise ConfigError that names the field, before anything is opened."""
    for settings in (
        {"udp": ["x"]},
        {"flush_s": 0},
        {"workers": 0},
        {"percentiles": [0]},
        {"backends": ["foo"]},
        {"backends": ["journal:"]},
        {"histogram": [{"metric": "", "bins": [2, 1]}]},
        {"nonsense": 1},
        {"flush_s": "often"},
        {"workers": 100_000},
        {"receive_buffer": 10**11},
        {"histogram": [{"metric": "", "bins": [nan, 1]}]},
        {"buckets": [2, 1]},
        {"buckets": [nan]},
        {"buckets": [1, inf]},
        {"tag_limits": {"user": -1}},
        {"namespace": "a\nb:1|c"},
    ):
        with pytest.raises(ConfigError):
            MetricsServer(**settings)
    assert MetricsConfig().flush_s == 10.0


def test_stop_publishes_what_was_received_and_may_be_called_twice(carbon: Carbon, until: Until) -> None:
    """The last window is published at the end; afterwards the server says that it is closed."""
    server = MetricsServer(udp=[LOCAL], flush_s=NEVER_S, backends=[f"graphite:{carbon.address}"]).start()
    sock = udp(server)
    for _ in range(300):
        sock.send(b"a:1|c")
    server.stop()
    server.stop()
    assert server.last is not None
    assert counters(server.last)["a"].total == 300
    until(lambda: carbon.payloads)  # all was sent; its reader may not have got to the end yet
    assert b"stats_counts.a 300 " in carbon.payloads[-1]
    with pytest.raises(Closed):
        server.flush_now()


def test_gauges_and_series_expire_when_asked(until: Until) -> None:
    """gauge_ttl_s forgets gauges; series_ttl_s idle counters; delete_idle says nothing of idle ones."""
    with MetricsServer(
        udp=[LOCAL], flush_s=NEVER_S, gauge_ttl_s=0.05, series_ttl_s=0.05, delete_idle=True
    ) as server:
        udp(server).send(b"g:1|g\nc:1|c\nt:1|ms\ns:1|s")
        flush = received(server, until, 1)
        assert flush.gauges == {"g": 1}
        flush = server.flush_now()
        assert (flush.counters, flush.timers, flush.sets) == ([], {}, {})
        until(lambda: server.flush_now().gauges == {})
        until(lambda: server.flush_now().rollup["series_expired"] == 4)


def test_the_accounts_balance_for_a_client_that_says_what_it_sent(until: Until) -> None:
    """Datagrams told = received + dropped by the kernel; lines told = counted + refused + in lost datagrams."""
    with MetricsServer(udp=[LOCAL], http=LOCAL, flush_s=NEVER_S, receive_buffer=8192) as server:
        port = port_of(server.addresses["udp"][0])
        with StatsClient("127.0.0.1", port, maxudpsize=200, heartbeat_s=inf, flush_s=60) as client:
            for i in range(20_000):
                client.incr(f"k{i % 7}")
                if i % 10 == 0:
                    client.gauge("bad value", float("nan"))  # a line that the daemon refuses
            client.flush()

            def told() -> bool:
                """A heartbeat that arrived, all of its datagrams, after everything else was read or dropped."""
                client.heartbeat()
                flush = server.flush_now()
                return (
                    bool(flush.clients)
                    and flush.clients[0].sent == client.counters.datagrams
                    and {point.total_grade for point in flush.counters} == {Grade.EXACT}
                )

            until(told)
            flush = server.flush_now()
            report, loss = flush.clients[0], server.state()["loss"]
            assert report.sent == report.received + report.lost == client.counters.datagrams
            assert report.lost == flush.receive["kernel_drops"] == loss["kernel_drops"]
            assert loss["elsewhere"] == 0
            assert report.lines_reported == client.counters.lines == 22_000
            assert report.lines <= report.lines_reported
            if not report.lost:
                assert report.lines == report.lines_reported
            assert 0 < flush.refused["bad_number"] <= 2000
            totals = {point.series: point.total for point in flush.counters}
            assert totals == {f"k{i}": len(range(i, 20_000, 7)) for i in range(7)}


def test_reloading_reads_the_mapping_rules_again_or_changes_nothing(tmp_path: Path, until: Until) -> None:
    """Rules that have changed in the same file are used; wrong ones leave everything as it was, backends included."""
    rules = tmp_path / "rules.yml"
    rules.write_text("mappings:\n- {match: web.*, name: before, timer_type: histogram, buckets: [1]}\n")
    config = MetricsConfig(udp=[LOCAL], flush_s=NEVER_S, prometheus=PrometheusOptions(mapping=str(rules)))
    with MetricsServer(config) as server:

        async def reload(**changed: Any) -> list[str]:
            return server.reload(msgspec.structs.replace(config, **changed))

        def page(wanted: str, **changed: Any) -> str:
            asyncio.run_coroutine_threadsafe(reload(**changed), server._loop).result(20)
            udp(server).send(b"web.a:500|ms")
            until(lambda: server.flush_now() and wanted in server.metrics_page().decode())
            return server.metrics_page().decode()

        page('before_bucket{le="1"} 1\n')
        rules.write_text(
            "mappings:\n- {match: web.*, name: after, timer_type: histogram, buckets: [0.1, 1, 2]}\n"
        )
        # Of the first value nobody knows how it compares with the new limits.
        shown = page("after_count 1\n")
        assert "before" not in shown
        for limit, n in (("0.1", 0), ("1", 1), ("+Inf", 1)):
            assert f'after_bucket{{le="{limit}"}} {n}\n' in shown
        rules.write_text("mappings: [wrong]")
        with pytest.raises(ConfigError, match="a rule needs"):
            page("", backends=["graphite:127.0.0.1:1"], percentiles=[50.0])
        assert (server.backends, server.config.percentiles) == ([], config.percentiles)
