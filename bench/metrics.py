"""Side by side on loopback: this StatsD daemon, npm `statsd`, and whatever else is named; then the clients.

    python bench/metrics.py [--quick] [--only MIX] [--peer NAME=PATH or NAME=COMMAND …]

Figures: metrics per second of the daemon's CPU time when it is sent more than it can take, the best of three floods
of each daemon, and the loss at fixed offered rates. Every daemon is asked afterwards how much it counted. npm's
daemon is installed into build/npm when `npm` is there. Ends by itself; writes build/bench/metrics.json.
"""

import argparse
import json
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
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Report, human

ROOT = Path(__file__).resolve().parent.parent
NPM = ROOT / "build" / "npm"
PACKED = 1432


# -- the load


def counter_lines(rnd: random.Random) -> list[str]:
    return [f"web01.api.checkout.requests.k{rnd.randrange(100)}:1|c" for _ in range(20_000)]


def mixed(timers: float) -> Callable[[random.Random], list[str]]:
    """Counters, and this share of timers, every timer value different."""

    def lines(rnd: random.Random) -> list[str]:
        out = []
        for _ in range(100_000):
            key = rnd.randrange(100)
            if rnd.random() < timers:
                out.append(f"web01.api.checkout.time.t{key}:{rnd.random() * 500:.6f}|ms")
            else:
                out.append(f"web01.api.checkout.requests.k{key}:1|c")
        return out

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
    "counters+30% timers": mixed(0.3),
    "counters+50% timers": mixed(0.5),
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
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self.process = subprocess.Popen(command, cwd=cwd, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 20
        while True:
            try:
                if mgmt:
                    socket.create_connection(("127.0.0.1", mgmt), 1).close()
                elif self.queue() is None:
                    raise OSError("no socket yet")
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
        """CPU time of all its threads; in nanoseconds, where `stat` has hundredths of a second."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def queue(self) -> tuple[int, int] | None:
        """(bytes waiting in the socket, datagrams dropped), from /proc; None while there is no socket."""
        wanted = f":{self.port:04X}"
        for row in Path("/proc/net/udp").read_text().splitlines()[1:]:
            cells = row.split()
            if cells[1].endswith(wanted):
                return int(cells[4].split(":")[1], 16), int(cells[-1])
        return None

    def waiting(self) -> int:
        found = self.queue()
        return found[0] if found else 0

    def drops(self) -> int:
        found = self.queue()
        return found[1] if found else 0

    def drain(self) -> None:
        deadline = time.monotonic() + 60
        while self.waiting() and time.monotonic() < deadline:
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
    command = [sys.executable, "-m", "brokerless.cli", "metrics", "serve"]
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


# Options before the configuration file, and its text, with nothing published during the run.
PEER_CONFIGS = {
    "collectd": (
        ["-f", "-C"],
        'BaseDir "{folder}"\nPIDFile "{folder}/collectd.pid"\nTypesDB "/usr/share/collectd/types.db"\n'
        'Interval 600\nLoadPlugin statsd\n<Plugin statsd>\n  Host "127.0.0.1"\n  Port "{port}"\n</Plugin>\n',
    ),
    "statsite": (
        ["-f"],
        "[statsite]\nport = 0\nudp_port = {port}\nbind_address = 127.0.0.1\nflush_interval = 600\nlog_level = WARN\n",
    ),
    "brubeck": (
        ["--config"],
        '{"sharding": false, "server_name": "bench", "dumpfile": "{folder}/brubeck.dump", "capacity": 20, '
        '"backends": [{"type": "carbon", "address": '
        '"127.0.0.1", "port": 1, "frequency": 600}], "samplers": [{"type": "statsd", "address": "127.0.0.1", '
        '"port": {port}, "workers": 1, "multisock": true, "multimsg": 8}]}',
    ),
}


# -- the measurements


def load(daemon: Daemon, ring: list[tuple[bytes, int]], rate: float, seconds: float) -> dict[str, Any]:
    """One run: what was offered, counted and dropped, and the CPU time it took."""
    before = daemon.lines() if daemon.mgmt else 0
    cpu, drops = daemon.cpu_s(), daemon.drops()
    sender = Sender(ring, daemon.port, rate, seconds)
    sender.start()
    sender.join()
    daemon.drain()
    dropped = daemon.drops() - drops
    if daemon.mgmt:
        # Asking makes our daemon aggregate everything first, so that it is paid for.
        counted = daemon.lines() - before
    else:
        counted = round(sender.metrics * (1 - dropped / sender.datagrams))
    used = daemon.cpu_s() - cpu
    return {
        "offered_per_s": round(sender.metrics / sender.seconds),
        "counted": counted,
        "lost_percent": round(100 * (1 - counted / sender.metrics), 3),
        "kernel_drops": dropped,
        "cpu_s": round(used, 2),
        "per_cpu_s": round(counted / used) if used > 0.05 else None,
    }


def flush_pause(folder: Path, seconds: float) -> dict[str, float]:
    """100,000 series flushed every two seconds to Graphite while 100,000 single metrics arrive per second."""
    sink = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def swallow() -> None:
        sink.settimeout(0.2)
        while not stop.is_set():
            try:
                connection, _ = sink.accept()
            except TimeoutError:
                continue
            with connection:
                while connection.recv(1 << 20):
                    pass

    thread = threading.Thread(target=swallow)
    thread.start()
    ring = pack(wide_lines(random.Random(1)), 0)
    backend = f"graphite:127.0.0.1:{sink.getsockname()[1]}"
    http = free_port()
    wall, cpu = [0.0], [0.0]
    try:
        with ours(folder, "--backend", backend, "--http", f"127.0.0.1:{http}", flush=2.0) as daemon:
            # All series are known before the measurement, as in a daemon that has run for a while.
            warm = Sender(pack(wide_lines(random.Random(2)), PACKED), daemon.port, 5000.0, 3.0)
            warm.start()
            warm.join()
            time.sleep(4.0)
            sender = Sender(ring, daemon.port, 100_000.0, seconds)
            before = daemon.drops()
            sender.start()
            while sender.is_alive():
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/state?limit=0", timeout=30) as answer:
                    window = json.load(answer).get("window") or {}
                wall.append(window.get("pause_s", 0.0))
                cpu.append(window.get("pause_cpu_s", 0.0))
                time.sleep(0.2)
            daemon.drain()
            drops = daemon.drops() - before
    finally:
        stop.set()
        thread.join()
        sink.close()
    return {
        "offered": sender.datagrams / sender.seconds,
        "drops": float(drops),
        "pause_ms": max(wall) * 1000,
        "pause_cpu_ms": max(cpu) * 1000,
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
        ("brokerless", lambda: mine.incr("api.requests")),
        ("PyPI statsd", lambda: plain.incr("api.requests")),
        ("PyPI datadog, buffered", lambda: dog.increment("api.requests")),
    ):
        rounds = timeit.repeat(call, timer=time.thread_time, number=20_000, repeat=15)
        found[name] = round(min(rounds) / 20_000 * 1e6, 2)
    mine.close()
    sink.close()
    return found


def measure(
    peer: Any, folder: Path, ring: list[tuple[bytes, int]], rate: float, seconds: float, runs: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(flood, fixed rate) of one daemon; of the floods the one with most metrics per CPU second, least disturbed."""
    with peer(folder) as daemon:
        # Before the floods: a daemon that has just been swamped is not in its usual state.
        steady = load(daemon, ring, rate, seconds)
        floods = [load(daemon, ring, 0.0, seconds) for _ in range(runs)]
    best = max(floods, key=lambda run: run["per_cpu_s"] or 0)
    return {"daemon": daemon.name, **best}, {"daemon": daemon.name, **steady}


def compare(
    report: Report, peers: list[Any], folder: Path, mix: str, size: int, seconds: float, runs: int
) -> None:
    """One mix in one shape: flood for the cost, a fixed rate for the loss, all daemons."""
    shape = "packed" if size else "single"
    ring = pack(MIXES[mix](random.Random(0)), size)
    rate = 10_000.0 if size else 20_000.0
    measured = [measure(peer, folder, ring, rate, seconds, runs) for peer in peers]
    flood = [run for run, _ in measured]
    mine = flood[0]["per_cpu_s"] or 0
    goals = {
        ("counters", "packed"): 4_000_000,
        ("counters+30% timers", "packed"): 2_000_000,
        ("counters+50% timers", "packed"): 2_000_000,
    }
    for run in flood:
        value = run["per_cpu_s"] or 0
        goal, met = "", None
        if run is flood[0]:
            wanted = goals.get((mix, shape))
            if wanted:
                goal, met = f">= {human(wanted)}", value >= wanted
            report.add(f"{mix}, {shape}: {run['daemon']}", value, "metrics/CPU s", goal=goal, met=met)
            continue
        ratio = mine / value if value else 0.0
        if (mix, shape) == ("counters", "packed"):
            goal, met = "ours >= 10x", ratio >= 10
        elif (mix, shape) == ("counters", "single"):
            goal, met = "ours >= 1x", ratio >= 1
        report.add(
            f"{mix}, {shape}: {run['daemon']}",
            value,
            "metrics/CPU s",
            against="ours",
            ratio=ratio,
            goal=goal,
            met=met,
        )
    for _, run in measured:
        offered = human(run["offered_per_s"])
        report.add(f"{mix}, {shape} at {offered} metrics/s: {run['daemon']}", run["lost_percent"], "% lost")
    print(f"{mix}, {shape}: done", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="shorter runs, one each")
    options.add_argument("--only", default="", help="only mixes whose name contains this")
    options.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="another daemon: collectd, statsite or brubeck by the path of its program, or any other by a command in "
        "which {port} is replaced; what it counted is not asked, the socket's own drops are",
    )
    args = options.parse_args()
    seconds, runs = (1.0, 1) if args.quick else (1.2, 3)
    report = Report("metrics")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers: list[Any] = [ours]
        if npm_statsd() is not None:
            peers.append(npm)
        else:
            print("npm statsd: skipped (needs node and npm)")
        named = [text.split("=", 1)[0] for text in args.peer]
        for other in ("statsite", "brubeck", "collectd", "netdata"):
            if other not in named:
                print(f"{other}: skipped (give --peer {other}=PATH)")
        peers += [custom(*text.split("=", 1)) for text in args.peer]
        for mix in MIXES:
            for size in (PACKED, 0):
                if args.only in mix:
                    compare(report, peers, folder, mix, size, seconds, runs)
        pause = flush_pause(folder, 4.0 if args.quick else 8.0)
    what = f"flush of 100,000 series at {human(pause['offered'])} metrics/s"
    report.add(f"{what}: dropped", pause["drops"], "datagrams", goal="0", met=pause["drops"] == 0)
    met = pause["pause_cpu_ms"] < 50
    report.add(f"{what}: not receiving for", pause["pause_cpu_ms"], "ms of CPU", goal="< 50 ms", met=met)
    report.add(f"{what}: not receiving for", pause["pause_ms"], "ms by the clock (with what others take)")
    costs = clients()
    mine = costs.pop("brokerless")
    report.add("incr(): brokerless, buffered, numbered", mine, "µs", goal="<= 1.5", met=mine <= 1.5)
    for name, cost in costs.items():
        report.add(f"incr(): {name}", cost, "µs", against="ours", ratio=cost / mine)
    report.close()


def custom(name: str, command: str) -> Any:
    """A peer given by --peer. It need not have a management port: received is sent less dropped by its socket."""

    @contextmanager
    def run(folder: Path) -> Iterator[Daemon]:
        port = free_port(socket.SOCK_DGRAM)
        if name in PEER_CONFIGS and "{port}" not in command:
            options, text = PEER_CONFIGS[name]
            config = folder / f"{name}.conf"
            config.write_text(text.replace("{port}", str(port)).replace("{folder}", str(folder)))
            started = [command, *options, str(config)]
        else:
            started = ["sh", "-c", f"exec {command.format(port=port)}"]
        daemon = Daemon(name, started, port, 0, folder)
        try:
            yield daemon
        finally:
            daemon.stop()

    return run


if __name__ == "__main__":
    main()
