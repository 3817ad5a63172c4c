"""An outbox with 100,000 undelivered events and 1,000 endpoints: memory stays bounded, starting stays quick."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EVENTS, ENDPOINTS = 100_000, 1_000
CHILD = """
import asyncio, json, resource, sqlite3, sys, time
from brokerless.webhooks import AddressPolicy, Dispatcher, DispatcherConfig, publish_in
import aiohttp, httpx, httpx_aiohttp

events, endpoints, port, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = DispatcherConfig(
    policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)), verification="none", attempt_timeout_s=30
)

def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

async def fill() -> None:
    async with Dispatcher(path, config=config) as dispatcher:
        await asyncio.gather(*(
            dispatcher.add_endpoint(f"http://127.0.0.1:{port}/{n}", [f"t.n{n}.*"]) for n in range(endpoints)
        ))
    own = sqlite3.connect(path)
    for n in range(events):
        publish_in(own, f"t.n{n % endpoints}.x", b"x" * 500)
    own.commit()
    own.close()
    async with Dispatcher(path, config=config) as dispatcher:
        deadline = time.monotonic() + 200
        while (await dispatcher.account()).unrouted:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

async def measure() -> dict:
    before, cpu, clock = rss(), time.process_time(), time.monotonic()
    async with Dispatcher(path, config=config) as dispatcher:
        found = {"start_s": time.monotonic() - clock, "start_cpu_s": time.process_time() - cpu}
        deadline = time.monotonic() + 60
        while dispatcher.deliverer.in_flight() < 400 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        deliverer = dispatcher.deliverer
        found |= {
            "grown": rss() - before, "bodies": deliverer.memory, "in_flight": deliverer.in_flight(),
            "pending": dispatcher.outbox.backlog.total, "lanes": len(deliverer._lanes),
        }
        deliverer.set_shards(())
        await deliverer.cancel()
    return found

if sys.argv[5] == "fill":
    asyncio.run(fill())
else:
    print(json.dumps(asyncio.run(measure())))
"""


@pytest.mark.timeout(290)
def test_hundred_thousand_events_thousand_endpoints(tmp_path: Path) -> None:
    """Starting takes under five seconds of CPU, and memory grows by the windows of the lanes, not by the backlog."""
    with socket.socket() as hung:
        # Connections are taken by the kernel, and nobody ever answers.
        hung.bind(("127.0.0.1", 0))
        hung.listen(4096)
        arguments = [str(EVENTS), str(ENDPOINTS), str(hung.getsockname()[1]), str(tmp_path / "o.sqlite")]
        for step in ("fill", "measure"):
            run = subprocess.run(
                [sys.executable, "-c", CHILD, *arguments, step],
                capture_output=True,
                text=True,
                timeout=280,
                check=False,
            )
            assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    print(found)
    assert found["pending"] == EVENTS
    assert found["lanes"] == ENDPOINTS
    assert found["in_flight"] >= 400
    assert found["start_cpu_s"] < 5
    assert found["bodies"] <= 64 * 1024 * 1024
    # 100,000 bodies alone would be 50 MB; the rows around them several times that.
    assert found["grown"] < 200 * 1024 * 1024
