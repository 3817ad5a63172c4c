"""Side by side on loopback: this StatsD daemon, npm `statsd`, and whatever else is named; then the clients.

    python bench/metrics.py [--quick] [--peer NAME=COMMAND …]

Figures: metrics per second of the daemon's CPU time when it is sent more than it can take, and the loss at fixed
offered rates. Every daemon is asked afterwards how much it counted. npm's daemon is installed into
build/npm when `npm` is there. Ends by itself; writes build/bench/metrics.json.
"""

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NPM = ROOT / "build" / "npm"
OUT = ROOT / "build" / "bench" / "metrics.json"
TICKS = os.sysconf("SC_CLK_TCK")
PACKED = 1432


# -- the load


def counter_lines(rnd: random.Random) -> list[str]:
    return [f"web01.api.checkout.requests.k{rnd.randrange(100)}:1|c" for _ in range(20_000)]


def mixed_lines(rnd: random.Random) -> list[str]:
    """Half counters, half timers, every timer value different."""
    lines = []
    for _ in range(100_000):
        key = rnd.randrange(100)
        if rnd.random() < 0.5:
            lines.append(f"web01.api.checkout.requests.k{key}:1|c")
        else:
            lines.append(f"web01.api.checkout.time.t{key}:{rnd.random() * 500:.6f}|ms")
    return lines


def wide_lines(rnd: random.Random) -> list[str]:
    lines = [f"web01.api.checkout.requests.k{i}:1|c" for i in range(100_000)]
    rnd.shuffle(lines)
    return lines


def tagged_lines(rnd: random.Random) -> list[str]:
    return [
        f"api.requests:1|c|#env:prod,host:web{rnd.randrange(20)},route:r{rnd.randrange(20)},code:200"
        for _ in range(50_000)
    ]


MIXES = {
    "counters": counter_lines,
    "counters+timers": mixed_lines,
    "100k series": wide_lines,
    "tags": tagged_lines,
}


def pack(lines: list[str], size: int) -> list[tuple[bytes, int]]:
    """Datagrams of at most `size` bytes (0: one line each), with the number of lines in each."""
    out: list[tuple[bytes, int]] = []
    block: list[str] = []
    used = 0
    for line in lines:
        if block and (not size or used + 1 + len(line) > size):
            out.append(("\n".join(block).encode(), len(block)))
            block, used = [], 0
        used += len(line) + (1 if block else 0)
        block.append(line)
    out.append(("\n".join(block).encode(), len(block)))
    return out


class Sender(threading.Thread):
    """Sends for `seconds`, at `rate` datagrams/s (0: as fast as one core can). A process of its own does the work."""

    SCRIPT = """
import json, pickle, socket, sys, time
ring, port, rate, seconds = pickle.load(sys.stdin.buffer)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("127.0.0.1", port))
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
send = s.send; datagrams = metrics = at = 0; n = len(ring)
began = time.perf_counter(); end = began + seconds
while (now := time.perf_counter()) < end:
    todo = 256 if not rate else int((now - began) * rate) - datagrams
    if todo <= 0:
        time.sleep(0.0005); continue
    for _ in range(min(todo, 2048)):
        payload, lines = ring[at]
        send(payload); metrics += lines; datagrams += 1
        at += 1
        if at == n: at = 0
print(json.dumps([datagrams, metrics, time.perf_counter() - began]))
"""

    def __init__(self, ring: list[tuple[bytes, int]], port: int, rate: float, seconds: float) -> None:
        super().__init__()
        self._args = (ring, port, rate, seconds)
        self.datagrams = self.metrics = 0
        self.seconds = 0.0

    def run(self) -> None:
        import pickle

        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT],
            input=pickle.dumps(self._args),
            capture_output=True,
            check=True,
            timeout=self._args[3] * 4 + 60,
        )
        self.datagrams, self.metrics, self.seconds = json.loads(done.stdout)


# -- the daemons


class Daemon:
    """A running daemon: its process, its UDP port, and how to ask what it counted."""

    def __init__(self, name: str, command: list[str], port: int, mgmt: int, cwd: Path) -> None:
        self.name, self.port, self.mgmt = name, port, mgmt
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, cwd=cwd, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", mgmt), 1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    text = self._log.read().decode("utf-8", "replace")
                    raise SystemExit(f"{name} did not start: {text[-2000:]}") from None
                time.sleep(0.05)

    def ask(self, command: str) -> str:
        with socket.create_connection(("127.0.0.1", self.mgmt), 60) as connection:
            connection.settimeout(60)
            connection.sendall(command.encode() + b"\n")
            answer = b""
            while b"END\n" not in answer:
                data = connection.recv(1 << 20)
                if not data:
                    break
                answer += data
        return answer.decode("utf-8", "replace")

    def lines(self) -> int:
        """Lines received, as the daemon says (npm's counter is per window, and the window is longer than the run)."""
        if self.name == "npm statsd":
            found = re.search(r"'statsd\.metrics_received': (\d+)", self.ask("counters"))
        else:
            found = re.search(r"messages\.lines: (\d+)", self.ask("stats"))
        return int(found[1]) if found else 0

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def queue(self) -> tuple[int, int]:
        """(bytes waiting in the socket, datagrams dropped), from /proc."""
        wanted = f":{self.port:04X}"
        for row in Path("/proc/net/udp").read_text().splitlines()[1:]:
            cells = row.split()
            if cells[1].endswith(wanted):
                return int(cells[4].split(":")[1], 16), int(cells[-1])
        return 0, 0

    def drain(self) -> None:
        deadline = time.monotonic() + 60
        while self.queue()[0] and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def ours(folder: Path, *extra: str, flush: float = 600.0) -> Iterator[Daemon]:
    port, mgmt = free_port(socket.SOCK_DGRAM), free_port()
    command = [str(Path(sys.executable).parent / "brokerless"), "metrics", "serve"]
    command += ["--udp", f"127.0.0.1:{port}", "--mgmt", f"127.0.0.1:{mgmt}", "--flush", str(flush), *extra]
    daemon = Daemon("brokerless", command, port, mgmt, folder)
    try:
        yield daemon
    finally:
        daemon.stop()


def npm_statsd() -> Path | None:
    """stats.js of npm's daemon, installed if it can be."""
    script = NPM / "node_modules" / "statsd" / "stats.js"
    if not script.exists() and shutil.which("npm"):
        NPM.mkdir(parents=True, exist_ok=True)
        command = [
            "npm",
            "install",
            "--no-save",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "statsd@0.9.0",
        ]
        subprocess.run(command, cwd=NPM, capture_output=True, timeout=300, check=False)
    return script if script.exists() and shutil.which("node") else None


@contextmanager
def npm(folder: Path) -> Iterator[Daemon]:
    script = npm_statsd()
    assert script is not None
    port, mgmt = free_port(socket.SOCK_DGRAM), free_port()
    config = folder / "npm.js"
    settings = {"port": port, "mgmt_port": mgmt, "address": "127.0.0.1", "mgmt_address": "127.0.0.1"}
    settings |= {"backends": [], "flushInterval": 600_000}
    config.write_text(json.dumps(settings))
    daemon = Daemon("npm statsd", ["node", str(script), str(config)], port, mgmt, folder)
    try:
        yield daemon
    finally:
        daemon.stop()


# -- the measurements


def load(daemon: Daemon, ring: list[tuple[bytes, int]], rate: float, seconds: float) -> dict[str, Any]:
    """One run: what was offered, counted and dropped, and the CPU time it took."""
    before, cpu, drops = daemon.lines(), daemon.cpu_s(), daemon.queue()[1]
    sender = Sender(ring, daemon.port, rate, seconds)
    sender.start()
    sender.join()
    daemon.drain()
    counted = (
        daemon.lines() - before
    )  # asking makes our daemon digest everything first, so that it is paid for
    used = daemon.cpu_s() - cpu
    return {
        "offered_per_s": round(sender.metrics / sender.seconds),
        "counted": counted,
        "lost_percent": round(100 * (1 - counted / sender.metrics), 3),
        "kernel_drops": daemon.queue()[1] - drops,
        "cpu_s": round(used, 2),
        "per_cpu_s": round(counted / used) if used > 0.05 else None,
    }


def flush_pause(folder: Path, seconds: float) -> dict[str, Any]:
    """100,000 series flushed every two seconds to Graphite while 100,000 single metrics arrive per second."""
    sink = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()
    taken = [0]

    def swallow() -> None:
        sink.settimeout(0.2)
        while not stop.is_set():
            try:
                connection, _ = sink.accept()
            except TimeoutError:
                continue
            with connection:
                while data := connection.recv(1 << 20):
                    taken[0] += len(data)

    thread = threading.Thread(target=swallow)
    thread.start()
    ring = pack(wide_lines(random.Random(1)), 0)
    rate = 100_000.0
    try:
        with ours(folder, "--backend", f"graphite:127.0.0.1:{sink.getsockname()[1]}", flush=2.0) as daemon:
            warm = Sender(
                pack([line for line in wide_lines(random.Random(2))], PACKED), daemon.port, 5000.0, 1.0
            )
            warm.start()
            warm.join()
            sender = Sender(ring, daemon.port, rate, seconds)
            before = daemon.queue()[1]
            sender.start()
            longest = 0
            while sender.is_alive():
                longest = max(longest, daemon.queue()[0])
                time.sleep(0.001)
            drops = daemon.queue()[1] - before
    finally:
        stop.set()
        thread.join()
        sink.close()
    # A small datagram occupies 768 bytes of the receive buffer (truesize on 64-bit Linux).
    waited = longest / 768
    return {
        "offered_per_s": round(sender.datagrams / sender.seconds),
        "kernel_drops": drops,
        "longest_pause_ms": round(waited / (sender.datagrams / sender.seconds) * 1000, 1),
        "graphite_bytes": taken[0],
    }


def clients() -> dict[str, float]:
    """Microseconds per incr(), best of several rounds."""
    import datadog.dogstatsd
    import statsd

    from brokerless.metrics import StatsClient

    sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sink.bind(("127.0.0.1", 0))
    port = sink.getsockname()[1]
    found = {}
    mine = StatsClient("127.0.0.1", port)
    plain = statsd.StatsClient("127.0.0.1", port)
    dog = datadog.dogstatsd.DogStatsd("127.0.0.1", port, disable_telemetry=True)
    for name, call in (
        ("brokerless, buffered and numbered", lambda: mine.incr("api.requests")),
        ("PyPI statsd", lambda: plain.incr("api.requests")),
        ("PyPI datadog, buffered", lambda: dog.increment("api.requests")),
    ):
        found[name] = round(min(timeit.repeat(call, number=20_000, repeat=15)) / 20_000 * 1e6, 2)
    mine.close()
    sink.close()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="shorter runs")
    options.add_argument("--only", default="", help="only mixes whose name contains this")
    options.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another daemon; {port} and {mgmt} in COMMAND are replaced; it must answer npm's management commands",
    )
    args = options.parse_args()
    seconds = 1.5 if args.quick else 3.0
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers: list[Any] = [ours]
        if npm_statsd() is not None:
            peers.append(npm)
        else:
            print("npm statsd: skipped (needs node and npm)")
        for other in ("statsite", "brubeck", "collectd", "netdata"):
            if not shutil.which(other):
                print(f"{other}: skipped (not installed)")
        peers += [custom(*text.split("=", 1)) for text in args.peer]
        print(
            f"{'mix':16} {'datagrams':8} {'daemon':12} {'metrics/CPU s':>14} {'offered/s':>12} {'lost %':>8} {'CPU s':>6}"
        )
        for mix, make in MIXES.items():
            if args.only not in mix:
                continue
            for shape, size in (("packed", PACKED), ("single", 0)):
                lines = make(random.Random(0))
                ring = pack(lines, size)
                fixed = 20_000.0 if size == 0 else 10_000.0
                for peer in peers:
                    for label, rate in (("flood", 0.0), ("fixed", fixed)):
                        with peer(folder) as daemon:
                            found = load(daemon, ring, rate, seconds)
                        found = {"mix": mix, "shape": shape, "daemon": daemon.name, "load": label, **found}
                        results.append(found)
                        print(
                            f"{mix:16} {shape:8} {daemon.name:12} {found['per_cpu_s'] or 0:14,} "
                            f"{found['offered_per_s']:12,} {found['lost_percent']:8} {found['cpu_s']:6}  {label}",
                            flush=True,
                        )
        pause = flush_pause(folder, 4.0 if args.quick else 8.0)
        print(f"flush of 100,000 series at 100,000 metrics/s: {pause}")
    costs = clients()
    for name, cost in costs.items():
        print(f"incr(): {cost:6.2f} µs  {name}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"loads": results, "flush": pause, "clients_us": costs}, indent=1))
    print(f"written: {OUT.relative_to(ROOT)}")


def custom(name: str, command: str) -> Any:
    """A peer given by --peer."""

    @contextmanager
    def run(folder: Path) -> Iterator[Daemon]:
        port, mgmt = free_port(socket.SOCK_DGRAM), free_port()
        text = command.format(port=port, mgmt=mgmt)
        daemon = Daemon(name, ["sh", "-c", f"exec {text}"], port, mgmt, folder)
        try:
            yield daemon
        finally:
            daemon.stop()

    return run


if __name__ == "__main__":
    main()
