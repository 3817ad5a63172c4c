"""Webhooks against plain HTTP loops and a peer that persists, to the same loopback receiver in the same run.

64 requests in flight, bodies of 500 bytes. Ours has the durable outbox (synchronous=FULL), signatures, CloudEvents
headers, the SSRF guard and the attempt log on. Peers and ours take turns three times, and the best turn of each
counts, so that a noisy neighbour cannot make us look good. Ends by itself after a few minutes on a quiet machine.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import pwd
import resource
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Report

from brokerless.core.runtime.process import collect_seldom

IN_FLIGHT = 64
BODY = b'{"text":"' + b"x" * 489 + b'"}'
PATIENCE_S = 120.0


# ── the receiver: a process of its own ───────────────────────────────────────


class Receiver(asyncio.Protocol):
    """The least that a server can do: find the end of each request and answer 200; /lat notes how old it is."""

    ages: ClassVar[list[float]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.data = b""

    def data_received(self, data: bytes) -> None:
        data = self.data + data if self.data else data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head = data[:end].lower() + b"\r\n"
            at = head.find(b"content-length:")
            length = int(head[at + 15 : head.index(b"\r\n", at)]) if at >= 0 else 0
            if len(data) < end + 4 + length:
                break
            body, path = data[end + 4 : end + 4 + length], head.split(b" ", 2)[1]
            data = data[end + 4 + length :]
            answer = b""
            if path.startswith(b"/lat"):
                self.ages.append(time.time() - float(body.split(b" ", 1)[0]))
            elif path == b"/ages":
                answer = b" ".join(b"%.6f" % age for age in self.ages)
                self.ages.clear()
            if not path.startswith(b"/hang"):
                status = b"500 No" if path.startswith(b"/fail") else b"200 OK"
                self.transport.write(
                    b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(answer), answer)
                )  # type: ignore[attr-defined]
        self.data = data


async def receive() -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the benchmark ends


@contextlib.contextmanager
def receiver() -> Iterator[int]:
    """A receiver in a process of its own; its port."""
    command = [sys.executable, __file__, "--receiver"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


# ── peers ────────────────────────────────────────────────────────────────────


async def in_flight(count: int, work: Callable[[], Awaitable[object]]) -> float:
    """Requests per second with 64 loops."""

    async def loop(turns: int) -> None:
        for _ in range(turns):
            await work()

    began = time.perf_counter()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(loop(count // IN_FLIGHT) for _ in range(IN_FLIGHT)))
    return count // IN_FLIGHT * IN_FLIGHT / (time.perf_counter() - began)


HEADERS = {"content-type": "application/json"}


async def plain_httpx(url: str, count: int) -> float:
    import httpx

    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=30) as client:
        return await in_flight(count, lambda: client.post(url, content=BODY, headers=HEADERS))


async def httpx_aiohttp(url: str, count: int) -> float:
    import httpx
    from httpx_aiohttp import AiohttpTransport

    limits = httpx.Limits(max_connections=IN_FLIGHT)
    async with httpx.AsyncClient(
        transport=AiohttpTransport(limits=limits), trust_env=False, timeout=30
    ) as client:
        return await in_flight(count, lambda: client.post(url, content=BODY, headers=HEADERS))


async def bare_aiohttp(url: str, count: int) -> float:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def post() -> None:
            async with session.post(url, data=BODY, headers=HEADERS) as response:
                await response.read()

        return await in_flight(count, post)


# ── ours ─────────────────────────────────────────────────────────────────────


def dispatcher(outbox: Path | str):  # type: ignore[no-untyped-def]
    from brokerless.webhooks import AddressPolicy, Dispatcher, DispatcherConfig

    policy = AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",))
    return Dispatcher(outbox, config=DispatcherConfig(policy=policy, verification="none"))


async def publish_many(ours, count: int, callers: int) -> float:  # type: ignore[no-untyped-def]
    async def loop(caller: int, turns: int) -> None:
        for _ in range(turns):
            await ours.publish(f"bench.event{caller % 64}", BODY)

    began = time.perf_counter()
    await asyncio.gather(*(loop(caller, count // callers) for caller in range(callers)))
    return count // callers * callers / (time.perf_counter() - began)


async def until_delivered(ours, count: int) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + PATIENCE_S
    while ours.counters.delivered < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ours.counters.delivered} of {count} delivered within {PATIENCE_S} s")
        await asyncio.sleep(0.002)


async def end_to_end(directory: Path, url: str, count: int) -> float:
    """From the first publish() to the last result committed, in one process."""
    async with dispatcher(directory / f"e{time.time_ns()}.sqlite") as ours:
        await ours.add_endpoint(url, ["**"], concurrency=IN_FLIGHT)
        began = time.perf_counter()
        await publish_many(ours, count, IN_FLIGHT)
        await until_delivered(ours, count // IN_FLIGHT * IN_FLIGHT)
        return count / (time.perf_counter() - began)


async def backlog(directory: Path, url: str, count: int) -> float:
    """A backlog in the database, delivered by a process that starts: its start is part of the time."""
    outbox = directory / f"b{time.time_ns()}.sqlite"
    publisher = dispatcher(outbox)
    publisher.open()  # publishes and does not deliver
    await publisher.add_endpoint(url, ["**"], concurrency=IN_FLIGHT)
    await publish_many(publisher, count, 256)
    publisher.close()
    began = time.perf_counter()
    async with dispatcher(outbox) as ours:
        await until_delivered(ours, count // 256 * 256)
        return count / (time.perf_counter() - began)


async def accepting(directory: Path, count: int, callers: int, *, routed: bool) -> float:
    """publish() alone, each call durable when it returns; `routed` with a delivery row too."""
    ours = dispatcher(directory / f"p{time.time_ns()}.sqlite")
    ours.open()  # publishes and does not deliver
    if routed:
        await ours.add_endpoint("http://127.0.0.1:9/", ["**"])
    rate = await publish_many(ours, count, callers)
    ours.close()
    return rate


async def latency(directory: Path, port: int, *, hung: bool, healthy: int = 20) -> float:
    """p99 of publish-to-arrival in seconds over 20 healthy endpoints, with or without a hung one beside them."""
    import httpx

    async with (
        dispatcher(directory / f"l{time.time_ns()}.sqlite") as ours,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        for _ in range(healthy):
            await ours.add_endpoint(f"http://127.0.0.1:{port}/lat", ["**"])
        if hung:
            await ours.add_endpoint(f"http://127.0.0.1:{port}/hang", ["**"])
        await http.get(f"http://127.0.0.1:{port}/ages")
        events = 100
        for _ in range(events):
            await ours.publish("t", b"%.6f {}" % time.time(), content_type="text/plain")
            await asyncio.sleep(0.02)  # 1,000 deliveries a second: well below what it can do
        ages: list[float] = []
        deadline = time.monotonic() + 30
        while len(ages) < events * healthy and time.monotonic() < deadline:
            text = (await http.get(f"http://127.0.0.1:{port}/ages")).text
            ages += [float(age) for age in text.split()]
            await asyncio.sleep(0.05)
        assert len(ages) == events * healthy, f"{len(ages)} of {events * healthy} arrived"
        ours.deliverer.set_shards(())  # do not wait for the hung one
        await ours.deliverer.cancel()
        return sorted(ages)[int(len(ages) * 0.99)]


# ── many endpoints, a third of them bad ──────────────────────────────────────

# Ten events a second, each for a fiftieth of the endpoints: 1,300 deliveries a second to healthy ones.
TOPICS, EVENTS_PER_S = 50, 10
# In the first window every bad endpoint fails for the first times and the hung ones time out (after 15 s); the second
# shows how it goes on.
WINDOWS_S = (20.0, 10.0)


async def register_crowd(outbox: Path, urls: list[tuple[str, int]]) -> None:
    """An outbox with so many endpoints for each URL, spread over the topics; nothing is delivered meanwhile."""
    ours = dispatcher(outbox)
    ours.open()
    for url, count in urls:
        for start in range(0, count, 500):
            batch = range(start, min(start + 500, count))
            await asyncio.gather(*(ours.add_endpoint(f"{url}/{n}", [f"t{n % TOPICS}"]) for n in batch))
    ours.close()


async def crowd(outbox: str, port: int, healthy: int) -> None:
    """Deliver from an outbox with registered endpoints; print of each window the p99 of publish-to-arrival in seconds
    over the healthy ones, and then the CPU time of the last window and its attempts.
    """
    import httpx

    ages: list[float] = []

    async def arrived(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(ages) < count:
            assert time.monotonic() < deadline, f"{len(ages)} of {count} arrived"
            await asyncio.sleep(0.5)
            ages.extend(float(age) for age in (await http.get(f"http://127.0.0.1:{port}/ages")).text.split())

    topic = 0
    ours = dispatcher(outbox)
    ours.open()
    collect_seldom()  # as `brokerless webhooks serve` does
    async with ours, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for window_s in WINDOWS_S:
            began, cpu, attempts = time.monotonic(), time.process_time(), ours.counters.attempts
            events = int(window_s * EVENTS_PER_S)
            for number in range(events):
                await asyncio.sleep(began + number / EVENTS_PER_S - time.monotonic())
                await ours.publish(f"t{topic % TOPICS}", b"%.6f {}" % time.time(), content_type="text/plain")
                topic += 1
            spent, made = time.process_time() - cpu, ours.counters.attempts - attempts
            await arrived(events * healthy // TOPICS)
            print(sorted(ages)[int(len(ages) * 0.99)], end=" ")
            ages.clear()
        print(spent / window_s, made / window_s, flush=True)
        ours.deliverer.set_shards(())  # do not wait for the hung ones
        await ours.deliverer.cancel()


def measure_crowd(report: Report, directory: Path, scale: int) -> None:
    """With and without bad endpoints in turn, each time in a process of its own, from the same outboxes."""
    healthy, failing, hung = 6500 // scale, 2000 // scale, 1500 // scale
    with receiver() as port, receiver() as other:
        good, bad = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"
        cases = {
            "without": [(f"{good}/lat", healthy)],
            "beside": [(f"{good}/lat", healthy), (f"{bad}/fail", failing), (f"{bad}/hang", hung)],
        }
        for name, urls in cases.items():
            asyncio.run(register_crowd(directory / f"{name}.sqlite", urls))
        found: dict[str, list[list[float]]] = {name: [] for name in cases}
        for _ in range(3):
            for name, turns in found.items():
                outbox = directory / f"turn{time.time_ns()}.sqlite"
                shutil.copy(directory / f"{name}.sqlite", outbox)
                command = [sys.executable, __file__, "--crowd", str(outbox), str(port), str(healthy)]
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True
                )
                turns.append([float(word) for word in done.stdout.split()])
    median = {
        name: [statistics.median(column) for column in zip(*turns, strict=True)]
        for name, turns in found.items()
    }
    for window, when in enumerate(("as they break", "afterwards")):
        without, beside = median["without"][window] * 1000, median["beside"][window] * 1000
        ratio = beside / without
        report.add(f"p99 publish to arrival, {healthy} healthy endpoints, {when}, median of 3", without, "ms")
        report.add(
            f"the same beside {failing} failing and {hung} hung ones",
            beside,
            "ms",
            against="without them",
            ratio=ratio,
            goal="≤ 1.5×",
            met=ratio <= 1.5,
        )
        for name, turns in found.items():
            print(f"p99 {name}, {when}, ms:", *(f"{turn[window] * 1000:.1f}" for turn in turns))
    for name, (*_, cost, rate) in median.items():
        report.add(
            f"CPU of the dispatcher {name}, afterwards, {rate:.0f} attempts/s", cost * 100, "% of a core"
        )


# ── several processes on PostgreSQL ──────────────────────────────────────────


@contextlib.contextmanager
def postgres(directory: Path) -> Iterator[str | None]:
    """A fresh cluster with durable commits, on a Unix socket; None if PostgreSQL is not installed."""
    places = [shutil.which("pg_ctl"), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")))]
    found = [place for place in places if place]
    if not found:
        yield None
        return
    tools = Path(found[-1]).parent
    home = Path(tempfile.mkdtemp(prefix="bl-pg-"))
    options: dict[str, Any] = {"check": True, "capture_output": True, "cwd": "/"}
    if os.geteuid() == 0:
        # The server refuses to run as root.
        user = pwd.getpwnam("postgres")
        os.chown(home, user.pw_uid, user.pw_gid)
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data = str(home / "data")
    subprocess.run(  # noqa: PLW1510 (`options` has it)
        [str(tools / "initdb"), "-D", data, "-U", "bench", "-A", "trust"], **options
    )
    control = [str(tools / "pg_ctl"), "-D", data, "-w", "-l", str(home / "log")]
    subprocess.run(  # noqa: PLW1510 (`options` has it)
        [*control, "-o", f"-k {home} -c listen_addresses=''", "start"], **options
    )
    try:
        yield f"postgresql://bench@/postgres?host={home}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **options)  # noqa: PLW1510 (`options` has it)
        shutil.rmtree(home, ignore_errors=True)


async def work(outbox: str) -> None:
    """Deliver until stdin ends; then tell how many, and the CPU time that it cost in seconds."""
    async with dispatcher(outbox) as ours:
        known, began = -1, time.process_time()
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        while not ended.done():
            if len(ours.deliverer.shards) != known:
                known = len(ours.deliverer.shards)
                print("shards", known, flush=True)
            if not ours.counters.delivered:
                began = time.process_time()  # starting is not part of it
            await asyncio.wait([ended], timeout=0.05)
        print("delivered", ours.counters.delivered, time.process_time() - began, flush=True)


def others_s(outbox: str) -> dict[str, float]:
    """CPU seconds so far of all that takes part beside the dispatchers."""

    def spent(*processes: psutil.Process) -> float:
        total = 0.0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    server = psutil.Process(
        int(Path(outbox.rpartition("host=")[2], "data/postmaster.pid").read_text().split()[0])
    )
    receivers = [child for child in psutil.Process().children() if "--receiver" in child.cmdline()]
    return {
        "PostgreSQL": spent(server, *server.children()),
        "the publisher": spent(psutil.Process()),
        "the receiver": spent(*receivers),
    }


def shared(outbox: str, url: str, count: int, processes: int) -> tuple[float, float, dict[str, float]]:
    """Deliveries per second of so many processes together over 64 endpoints, µs of their CPU for each, and of others'.

    Another process publishes as fast as it can; the clock runs from its first event to the last result committed.
    """
    command = [sys.executable, __file__, "--worker", outbox]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]

    async def publish() -> float:
        publisher = dispatcher(outbox)
        publisher.open()  # publishes and does not deliver
        before = (await publisher.account()).delivered
        began = time.perf_counter()
        await publish_many(publisher, count, 256)
        deadline = time.monotonic() + PATIENCE_S
        while (await publisher.account()).delivered < before + count // 256 * 256:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not delivered within {PATIENCE_S} s")
            await asyncio.sleep(0.05)
        taken = time.perf_counter() - began
        publisher.close()
        return taken

    try:
        for worker in workers:
            assert worker.stdout is not None
            while worker.stdout.readline().split() != ["shards", str(32 // processes)]:
                pass
        before = others_s(outbox)
        taken = asyncio.run(publish())
        others = {name: spent - before[name] for name, spent in others_s(outbox).items()}
        cost = 0.0
        for worker in workers:
            output, _ = worker.communicate("", timeout=60)
            cost += float(output.split()[-1])
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    made = count // 256 * 256
    return made / taken, cost / made * 1e6, {name: spent / made * 1e6 for name, spent in others.items()}


def measure_postgres(report: Report, directory: Path, url: str, scale: int) -> None:
    with postgres(directory) as outbox:
        if outbox is None:
            print("PostgreSQL is not installed: its figures are left out", file=sys.stderr)
            return

        async def register() -> None:
            ours = dispatcher(outbox)
            ours.open()
            for n in range(64):
                await ours.add_endpoint(url, [f"bench.event{n}"], concurrency=IN_FLIGHT)
            ours.close()

        asyncio.run(register())
        found: dict[int, list[tuple[float, float, dict[str, float]]]] = {1: [], 2: []}
        for _ in range(3):
            for processes, turns in found.items():
                turns.append(shared(outbox, url, 12_800 // scale, processes))
    best = {processes: max(rate for rate, *_ in turns) for processes, turns in found.items()}
    for processes, turns in found.items():
        what = f"brokerless on PostgreSQL, {processes} process{'es' if processes > 1 else ''}"
        cost = min(cost for _, cost, _ in turns)
        report.add(what, cost, "µs CPU each", goal="≤ 250", met=cost <= 250)
        ratio = best[processes] / best[1]
        against: dict[str, Any] = {}
        if processes > 1:
            # Two dispatchers, the publisher, the receiver and the server itself need a core each.
            enough = (os.cpu_count() or 1) >= 6
            against = {"against": "one process", "ratio": ratio}
            if enough:
                against |= {"goal": "≥ 1.7×", "met": ratio >= 1.7}
        report.add(what, best[processes], "deliveries/s", **against)
        # Where the time goes: with all of it per delivery, so many cores are busy at that rate.
        all_us = cost
        for name in turns[0][2]:
            least = min(others[name] for *_, others in turns)
            all_us += least
            report.add(f"{what}: {name}", least, "µs CPU each")
        report.add(f"{what}: all together", best[processes] * all_us / 1e6, "cores busy")


# ── a million pending ────────────────────────────────────────────────────────


async def fill(outbox: Path, port: int, pending: int) -> None:
    """An outbox with so much pending for 1,000 endpoints that hang."""
    filler = dispatcher(outbox)
    filler.open()
    for start in range(0, 1000, 500):
        urls = [f"http://127.0.0.1:{port}/hang/{n}" for n in range(start, start + 500)]
        await asyncio.gather(*(filler.add_endpoint(url, [f"t{n}"]) for n, url in enumerate(urls, start)))
    ids = sorted(filler.outbox.routes.endpoints)
    filler.close()
    with sqlite3.connect(outbox) as db:
        now = time.time_ns() // 1000
        db.execute("CREATE TEMP TABLE names (k INTEGER PRIMARY KEY, id TEXT)")
        db.executemany("INSERT INTO names VALUES (?, ?)", list(enumerate(ids)))
        numbers = f"WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < {int(pending)}) "
        db.execute(
            "INSERT INTO outbox_events (n, id, tenant, topic, time, data, content_type, routed) "
            + numbers
            + "SELECT x, printf('msg_%032x', x), 'default', 't', ? + x, ?, 'application/json', 1 FROM c",
            (now, BODY),
        )
        db.execute(
            "INSERT INTO outbox_deliveries (event, endpoint, state, due, attempts, created, log) "
            + numbers
            + "SELECT x, names.id, 0, ?, 0, ?, '' FROM c JOIN names ON names.k = x % 1000",
            (now, now),
        )
    db.close()


async def start(outbox: str, pending: int) -> None:
    """Start with what is pending and make an attempt for each endpoint; print the seconds that the start took, and how
    far memory went up meanwhile, in bytes: the highest point, in a process that did nothing else.
    """
    import httpx_aiohttp  # noqa: F401 (what is imported is no part of it)

    ours = dispatcher(outbox)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    began = time.perf_counter()
    async with ours:
        taken = time.perf_counter() - began
        assert ours.outbox.backlog.total == pending
        deadline = time.monotonic() + 60
        while ours.deliverer.in_flight() < 1000:
            assert time.monotonic() < deadline, (
                f"{ours.deliverer.in_flight()} of 1000 endpoints have an attempt"
            )
            await asyncio.sleep(0.05)
        print(taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, flush=True)
        ours.deliverer.set_shards(())
        await ours.deliverer.cancel()


def start_with(directory: Path, port: int, pending: int) -> tuple[float, float]:
    """Seconds and MB of a start with so much pending."""
    outbox = directory / f"m{time.time_ns()}.sqlite"
    asyncio.run(fill(outbox, port, pending))
    command = [sys.executable, __file__, "--start", str(outbox), str(pending)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True)
    taken, grown = map(float, done.stdout.split())
    return taken, grown / 1e6


def measure_start(report: Report, directory: Path, port: int, few: int, many: int) -> None:
    found = {pending: start_with(directory, port, pending) for pending in (few, many)}
    for pending, (taken, grown) in found.items():
        what = f"start with {pending:,} pending for 1,000 hung endpoints"
        report.add(what, taken, "s", goal="< 5 s", met=taken < 5)
        against: dict[str, Any] = {}
        if pending == many:
            ratio = grown / found[few][1]
            against = {"against": f"{few:,} pending", "ratio": ratio, "goal": "≤ 1.25×", "met": ratio <= 1.25}
        report.add(f"{what}: memory goes up by", grown, "MB", **against)


# ── the peer that persists ───────────────────────────────────────────────────


def django_peer(directory: Path, url: str, count: int) -> float | None:
    """django-outbound-webhooks in a process of its own, if it is installed; None if it is not."""
    if importlib.util.find_spec("django_outbound_webhooks") is None:
        return None
    script = Path(__file__).with_name("webhooks_django.py")
    done = subprocess.run(
        [sys.executable, str(script), url, str(count), str(directory / "django.sqlite")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        print(
            f"django-outbound-webhooks did not run: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr
        )
        return None
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--receiver", action="store_true", help="be the receiver (used by the benchmark itself)"
    )
    parser.add_argument(
        "--worker", metavar="OUTBOX", help="deliver from an outbox (used by the benchmark itself)"
    )
    parser.add_argument(
        "--start", nargs=2, metavar=("OUTBOX", "PENDING"), help="start once (used by the benchmark itself)"
    )
    parser.add_argument(
        "--crowd", nargs=3, metavar=("OUTBOX", "PORT", "HEALTHY"), help="(used by the benchmark itself)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--only", choices=["one", "crowd", "postgres", "start"], help="one part of it")
    arguments = parser.parse_args()
    if arguments.receiver:
        asyncio.run(receive())
        return
    if arguments.start:
        asyncio.run(start(arguments.start[0], int(arguments.start[1])))
        return
    if arguments.worker:
        asyncio.run(work(arguments.worker))
        return
    if arguments.crowd:
        asyncio.run(crowd(arguments.crowd[0], int(arguments.crowd[1]), int(arguments.crowd[2])))
        return
    scale = 10 if arguments.quick else 1
    # On the disk of the repository, not in a memory file system: commits must cost what they cost.
    place = Path(__file__).resolve().parent.parent / "build"
    place.mkdir(exist_ok=True)
    report = Report("webhooks" if arguments.only is None else f"webhooks-{arguments.only}")
    with tempfile.TemporaryDirectory(dir=place) as name, receiver() as port:
        directory, url = Path(name), f"http://127.0.0.1:{port}/hook"
        parts: dict[str, Callable[[], None]] = {
            "one": lambda: measure(report, directory, port, scale),
            "crowd": lambda: measure_crowd(report, directory, scale),
            "postgres": lambda: measure_postgres(report, directory, url, scale),
            # As many that every lane holds as much as it ever does.
            "start": lambda: measure_start(
                report, directory, port, 100_000, 1_000_000 if scale == 1 else 300_000
            ),
        }
        for part, work_ in parts.items():
            if arguments.only in (None, part):
                work_()
    report.close()


def turn(rates: list[float], costs: list[float], work: Coroutine[Any, Any, float], count: int) -> None:
    """Run once; note the rate that it returns, and the CPU time of all threads of this process per item, in µs."""
    began = time.process_time()
    rates.append(asyncio.run(work))
    costs.append((time.process_time() - began) / count * 1e6)


def measure(report: Report, directory: Path, port: int, scale: int) -> None:
    """One process: rates and CPU beside the peers, publishing alone, and one hung endpoint."""
    url = f"http://127.0.0.1:{port}/hook"
    loops = {
        "plain httpx": (plain_httpx, 320),
        "httpx-aiohttp": (httpx_aiohttp, 1600),
        "bare aiohttp": (bare_aiohttp, 6400),
    }
    stored_loops = {"end to end": (end_to_end, 6400), "backlog": (backlog, 6400)}
    rates: dict[str, list[float]] = {name: [] for name in (*loops, *stored_loops)}
    costs: dict[str, list[float]] = {name: [] for name in (*loops, *stored_loops)}
    for _ in range(3):
        for name, (loop, count) in loops.items():
            turn(rates[name], costs[name], loop(url, count // scale + 64), count // scale + 64)
        for name, (work, count) in stored_loops.items():
            turn(rates[name], costs[name], work(directory, url, count // scale), count // scale)
    best = {name: max(found) for name, found in rates.items()}
    cheapest = {name: min(found) for name, found in costs.items()}
    for name in loops:
        what = f"{name} loop, nothing stored, nothing signed"
        report.add(what, best[name], "requests/s")
        report.add(what, cheapest[name], "µs CPU each")
    for name in stored_loops:
        rate, what = best[name], f"brokerless, durable and signed, {name}"
        ratio = rate / best["plain httpx"]
        report.add(
            what, rate, "deliveries/s", against="plain httpx", ratio=ratio, goal="≥ 4×", met=ratio >= 4
        )
        ratio = rate / best["bare aiohttp"]
        report.add(
            what, rate, "deliveries/s", against="bare aiohttp", ratio=ratio, goal="≥ 0.5×", met=ratio >= 0.5
        )
        # All threads, publishing included: the figure that a busy machine changes least.
        report.add(
            what,
            cheapest[name],
            "µs CPU each",
            against="bare aiohttp",
            ratio=cheapest["bare aiohttp"] / cheapest[name],
            goal="≤ 250",
            met=cheapest[name] <= 250,
        )
    stored = django_peer(directory, url, 200 // scale)
    if stored:
        rate = best["end to end"]
        report.add("django-outbound-webhooks, one worker", stored, "deliveries/s")
        report.add(
            "brokerless, durable and signed, end to end",
            rate,
            "deliveries/s",
            against="django-outbound-webhooks",
            ratio=rate / stored,
        )
    else:
        print("django-outbound-webhooks is not installed: pip install 'brokerless[bench]'", file=sys.stderr)
    for callers in (64, 256):
        for routed in (False, True):
            turns = [
                asyncio.run(accepting(directory, 20_480 // scale, callers, routed=routed)) for _ in range(3)
            ]
            what = f"publish(), {callers} callers, {'with' if routed else 'without'} a delivery"
            rate = max(turns)
            report.add(what, rate, "events/s", goal="≥ 10 k", met=rate >= 10_000)
    alone, beside = [], []
    for _ in range(7):
        alone.append(asyncio.run(latency(directory, port, hung=False)))
        beside.append(asyncio.run(latency(directory, port, hung=True)))
    # The median turn: the best of several p99s would hide the very tail that is asked for.
    without, with_hung = statistics.median(alone), statistics.median(beside)
    report.add("p99 publish to arrival, 20 healthy endpoints, median of 7", without * 1000, "ms")
    report.add(
        "the same beside a hung endpoint",
        with_hung * 1000,
        "ms",
        against="without it",
        ratio=with_hung / without,
        goal="≤ 1.5×",
        met=with_hung / without <= 1.5,
    )
    for name, turns in (("without", alone), ("beside", beside)):
        print(f"p99 of each turn, {name}, ms:", *(f"{turn * 1000:.1f}" for turn in turns))


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    os.environ.pop("http_proxy", None)
    socket.setdefaulttimeout(30)
    main()
