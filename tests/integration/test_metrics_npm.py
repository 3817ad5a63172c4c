"""Plain servers stay happy: our client's lines at npm's daemon, and the same traffic at both daemons."""

import random
import socket
import threading
from pathlib import Path

from brokerless.metrics import MetricsServer, StatsClient
from tests.conftest import Until
from tests.metrics import npm
from tests.metrics.windows import NEVER_S


def test_audit_lines_are_valid_for_the_npm_daemon(tmp_path: Path, until: Until) -> None:
    """Numbers and totals are gauges there; neighbours are exact and no line is bad."""
    with npm.running(tmp_path) as peer:
        client = StatsClient("127.0.0.1", peer.port, prefix="app", heartbeat_s=0.1, tags={"env": "prod"})
        for i in range(1000):
            client.incr("hits")
            client.incr("bytes", i)
            client.timing("took", i / 7)
        client.gauge("level", 41)
        client.gauge("level", 1, delta=True)
        client.set("users", "ann")
        until(lambda: peer.values("counters").get("app.hits;env=prod") == 1000)
        client.close()
        # Its last datagrams: a total may be there already, as an earlier heartbeat told it.
        last = {f"_bl.{client.id}.t.app.bytes;env=prod": sum(range(1000)), "app.level;env=prod": 42}
        until(lambda: last.items() <= peer.values("gauges").items())
        counters, gauges = peer.values("counters"), peer.values("gauges")
        assert counters["app.hits;env=prod"] == 1000
        assert counters["app.bytes;env=prod"] == sum(range(1000))
        assert counters["statsd.bad_lines_seen"] == 0
        assert gauges["app.level;env=prod"] == 42
        assert gauges[f"_bl.{client.id}.t.app.hits;env=prod"] == 1000
        assert "bad_lines_seen: 0" in peer.ask("stats")


def graphite_of(listener: socket.socket, wanted: bytes) -> dict[str, str]:
    """The first payload that has `wanted`, as name → value."""
    listener.settimeout(30)
    for _ in range(30):
        connection, _ = listener.accept()
        with connection:
            payload = b""
            while data := connection.recv(65536):
                payload += data
        if wanted in payload:
            rows = [line.rsplit(" ", 2) for line in payload.decode().splitlines()]
            return {name: value for name, value, _ in rows}
    raise AssertionError(f"{wanted!r} never came")


def test_both_daemons_publish_the_same_figures_for_the_same_traffic(tmp_path: Path) -> None:
    """Counters, gauges, sets and all timer figures in Graphite lines, to the digit, from one random traffic."""
    rnd = random.Random(11)
    lines = []
    for _ in range(400):
        key = rnd.choice("abc")
        lines.append(
            rnd.choice(
                [
                    f"c.{key}:{rnd.randint(-3, 9)}|c",
                    f"c.{key}:{rnd.randint(1, 9)}|c|@0.25",
                    f"t.{key}:{rnd.randint(0, 500)}|ms",
                    # Not sampled: there the classic daemon's sums leave out what was not sent, and ours do not.
                    f"t.{key}:{rnd.random() * 100:.3f}|ms",
                    f"g.{key}:{rnd.randint(1, 50)}|g",
                    f"g.{key}:+{rnd.randint(1, 5)}|g",
                    f"s.{key}:u{rnd.randint(1, 20)}|s",
                    f"odd name/{key}:1|c",
                    f"tagged:2|c|#k:{key}",
                    "bad",
                ]
            )
        )
    payload = "\n".join(lines).encode()
    settings = {"percentThreshold": [90, 50.5, -10], "histogram": [{"metric": "t.", "bins": [10, 50.5, 200]}]}
    with (
        socket.create_server(("127.0.0.1", 0)) as theirs,
        socket.create_server(("127.0.0.1", 0)) as mine,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        backend = {"graphiteHost": "127.0.0.1", "graphitePort": theirs.getsockname()[1]}
        found: dict[str, dict[str, str]] = {}
        graphite = f"graphite:127.0.0.1:{mine.getsockname()[1]}"
        with (
            npm.running(
                tmp_path, backends=["./backends/graphite"], flushInterval=1000, **backend, **settings
            ) as peer,
            MetricsServer(
                udp=["127.0.0.1:0"],
                flush_s=NEVER_S,
                backends=[graphite],
                percentiles=[90, 50.5, -10],
                histogram=[{"metric": "t.", "bins": [10, 50.5, 200]}],
                graphite={"loss": False},
            ) as server,
        ):
            reader = threading.Thread(
                target=lambda: found.update(theirs=graphite_of(theirs, b"stats_counts.tagged;k=a 2"[:22]))
            )
            reader.start()
            sock.sendto(payload, ("127.0.0.1", peer.port))
            sock.sendto(payload, ("127.0.0.1", int(server.addresses["udp"][0].rpartition(":")[2])))
            reader.join(40)
            while not server.receive_counters()["datagrams"]:
                pass
            server.flush_now()
            found["mine"] = graphite_of(mine, b"stats_counts.tagged")
    # Rates depend on the length of the window, and each daemon has figures about itself.
    skip = ("statsd.", "stats.statsd.", "stats.odd", "stats.c.", "stats.tagged")
    shown = {
        who: {
            n: v
            for n, v in rows.items()
            if not n.startswith(skip) and not n.endswith("count_ps") and "statsd" not in n
        }
        for who, rows in found.items()
    }
    assert shown["mine"].keys() == shown["theirs"].keys()
    for name, value in shown["theirs"].items():
        # Sums of floats in another order may differ in the last digit.
        assert abs(float(shown["mine"][name]) - float(value)) <= 1e-9 * max(1, abs(float(value))), name
