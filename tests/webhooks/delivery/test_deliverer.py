"""Fairness between endpoints, and faults of our own, from a real outbox to real sockets."""

import asyncio
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from brokerless.webhooks import DeliveryQuery, Dispatcher, EndpointChanges, Schedule
from brokerless.webhooks.admin import managers
from brokerless.webhooks.admin.maintenance import Maintenance

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


async def test_many_hung_endpoints_do_not_starve_a_healthy_one(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Two hundred endpoints that hang, 32 slots, and a healthy endpoint that is as new as they are: it gets its event
    long before the first of them times out.
    """
    healthy = await targets()
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen(512)  # the kernel accepts, and nobody answers
        url = f"http://127.0.0.1:{hung.getsockname()[1]}/"
        dispatcher = await dispatchers(max_in_flight=32, attempt_timeout_s=60.0)
        for number in range(200):
            await dispatcher.add_endpoint(f"{url}{number}", ["**"])
        await dispatcher.add_endpoint(healthy.url, ["**"])
        began = time.monotonic()
        await dispatcher.publish("t", b"x")
        await eventually(lambda: healthy.got)
        assert time.monotonic() - began < 15
        # Now that it has proved itself, it does not wait behind them at all.
        await eventually(lambda: dispatcher.counters.delivered == 1)
        for _ in range(20):
            await dispatcher.publish("t", b"y")
        await eventually(lambda: len(healthy.got) == 21)
        assert dispatcher.deliverer.budget.active <= 32
        await dispatcher.deliverer.cancel()


async def test_hung_endpoints_with_a_backlog_cost_nothing(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Endpoints that hang and have more to come do not stand in line for slots that they may not have: otherwise every
    attempt of a healthy one would look at each of them.
    """

    async def hang(_writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    hung, healthy = await targets(lambda _got, _number: hang), await targets()
    dispatcher = await dispatchers(attempt_timeout_s=30.0)
    for _ in range(20):
        await dispatcher.add_endpoint(hung.url, ["**"])
    await dispatcher.add_endpoint(healthy.url, ["**"])
    for _ in range(5):
        await dispatcher.publish("t", b"x")
    deliverer = dispatcher.deliverer
    await eventually(lambda: deliverer.budget.parked == 20 and len(healthy.got) == 5)
    await dispatcher.publish("t", b"x")
    await eventually(lambda: len(healthy.got) == 6)
    assert [len(lanes) for lanes in deliverer._waiting.values()] == [0, 0, 0]
    await deliverer.cancel()


async def test_a_failing_endpoint_with_a_backlog_shares_with_the_others_that_fail(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """One slot for all that fail: an endpoint does not keep it until its whole backlog has been tried."""
    busy, other = await targets(lambda _got, _n: 500), await targets(lambda _got, _n: 500)
    dispatcher = await dispatchers(max_in_flight=8, schedule=Schedule(delays_s=(1000.0,)))
    for target, topic in ((busy, "busy"), (other, "other")):
        await dispatcher.add_endpoint(target.url, [topic])
        await dispatcher.publish(topic, b"x")
    await eventually(lambda: dispatcher.counters.failures == 2)
    await asyncio.gather(*(dispatcher.publish(topic, b"y") for topic in ["busy"] * 500 + ["other"]))
    await eventually(lambda: len(other.got) == 2)
    assert len(busy.got) < 400


async def test_new_endpoints_at_a_host_that_hangs_come_after_the_others(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of endpoints that have not answered yet, in one burst: only the order changes, and all are attempted."""

    async def hang(_writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    hung, healthy = await targets(lambda _got, _number: hang), await targets()
    dispatcher = await dispatchers(attempt_timeout_s=30.0)
    deliverer = dispatcher.deliverer
    await dispatcher.add_endpoint(hung.url, ["first"])
    await dispatcher.publish("first", b"x")
    await eventually(lambda: deliverer.budget.parked == 1)
    for number in range(20):
        await dispatcher.add_endpoint(f"{(hung, healthy)[number % 2].url}/{number}", ["then"])
    begun: list[str] = []
    post = deliverer.client.post

    async def noted(url: str, headers: Any, body: bytes) -> Any:
        begun.append(url)
        return await post(url, headers, body)

    monkeypatch.setattr(deliverer.client, "post", noted)
    await dispatcher.publish("then", b"y")
    await eventually(lambda: len(begun) == 20)
    assert [url.startswith(healthy.url) for url in begun] == [True] * 10 + [False] * 10
    await deliverer.cancel()


async def test_the_first_event_of_an_endpoint_is_not_read_back(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing older waits for it, so the database is not asked; where something does, both arrive."""
    told: list[str] = []
    listen = Maintenance._told
    monkeypatch.setattr(Maintenance, "_told", lambda self, text: (told.append(text), listen(self, text)))
    target, dispatcher = await targets(), await dispatchers()
    # When it begins to listen to other processes it reads whatever waits.
    await eventually(lambda: "*" in told)
    loads = []
    read_then = dispatcher.outbox.read_then
    dispatcher.outbox.read_then = lambda *rest: (loads.append(1), read_then(*rest))  # type: ignore[method-assign]
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"1")
    await eventually(lambda: dispatcher.counters.delivered == 1)
    assert not loads
    target.answer = lambda _got, _number: 503
    await dispatcher.publish("t", b"2")
    await eventually(lambda: dispatcher.counters.failures)
    await dispatcher.disable_endpoint(endpoint.id)
    target.answer = lambda _got, _number: 200
    await dispatcher.enable_endpoint(endpoint.id)
    await dispatcher.publish("t", b"3")
    await eventually(lambda: dispatcher.counters.delivered == 3)
    assert loads


async def test_rate_is_kept_while_an_endpoint_flaps(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Failures, successes, changes, disabling and enabling in turn never lead to more requests than the rate allows."""
    target = await targets(lambda _got, number: 500 if number % 2 else 200)
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"], rate=20, concurrency=50)
    began = time.monotonic()
    await asyncio.gather(*(dispatcher.publish("t", b"%d" % n) for n in range(200)))
    while time.monotonic() - began < 2:
        await dispatcher.update_endpoint(endpoint.id, EndpointChanges(description=str(time.monotonic())))
        await dispatcher.disable_endpoint(endpoint.id)
        await dispatcher.enable_endpoint(endpoint.id)
        await asyncio.sleep(0.05)
    passed = time.monotonic() - began
    assert 3 <= len(target.got) <= 1 + 20 * passed + 1


async def test_first_failures_cost_the_same_each(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Since when endpoints fail is recorded for many at once, and touches neither settings nor routes."""
    target = await targets(lambda _got, _n: 500)
    dispatcher = await dispatchers(schedule=Schedule(delays_s=(1000.0,)))
    await asyncio.gather(*(dispatcher.add_endpoint(f"{target.url}/{n}", ["**"]) for n in range(200)))
    await dispatcher.publish("t", b"x")
    await eventually(lambda: dispatcher.counters.failures == 200)

    async def recorded() -> bool:
        return all(endpoint.failing_since for endpoint in await dispatcher.endpoints())

    generation = dispatcher.outbox._generation
    before = dispatcher.counters.commits
    await eventually(recorded)
    assert dispatcher.outbox._generation == generation
    assert dispatcher.counters.commits - before < 50


SERVER = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): ...

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)  # HTTP/1.0: a new connection for every request
print(server.server_port, flush=True)
server.serve_forever()
"""


async def test_lack_of_descriptors_costs_no_attempt(dispatchers: Dispatchers, eventually: Eventually) -> None:
    """While this process has no descriptor left nothing is sent and no retry is used up; then it is delivered."""
    dispatcher = await dispatchers(schedule=Schedule(delays_s=()))
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/"
            endpoint, _ = await dispatcher.add_endpoint(url, ["**"])
            await dispatcher.publish("t", b"warm")
            await eventually(lambda: dispatcher.counters.delivered == 1)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            # The lowest free one is the limit: every new socket fails, what is open stays open.
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                await dispatcher.publish("t", b"later")
                await eventually(lambda: dispatcher.counters.local_failures >= 1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await eventually(lambda: dispatcher.counters.delivered == 2)
        finally:
            server.kill()
    (delivery, _) = await dispatcher.deliveries(DeliveryQuery(endpoint=endpoint.id))
    assert (delivery.attempts, dispatcher.counters.gave_up) == (1, 0)


NAMESPACE = """
import asyncio, contextlib, json, pathlib, socket, statistics, subprocess, sys, time
from brokerless.webhooks import AddressPolicy, Dispatcher, DispatcherConfig, Schedule

# No IPv6 here, as in most containers, and ten ports to connect from.
net = pathlib.Path("/proc/sys/net")
(net / "ipv6/conf/all/disable_ipv6").write_text("1")
(net / "ipv4/ip_local_port_range").write_text("40000 40009")
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

async def answer(reader, writer):
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 8001)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 8002))
        full.listen()
        taken = [socket.create_connection(full.getsockname()) for _ in range(10)]
        config = DispatcherConfig(
            policy=AddressPolicy(allow=("127.0.0.0/8", "2001:db8::/32"), schemes=("http",)),
            verification="none", schedule=Schedule(delays_s=(1000.0,)),
        )
        async with Dispatcher(sys.argv[1], config=config) as dispatcher:
            bad = {"six": "http://[2001:db8::1]/", "full": "http://127.0.0.1:8002/"}[sys.argv[2]]
            for url in ("http://127.0.0.1:8001/", bad):
                await dispatcher.add_endpoint(url, ["**"])
            counters = dispatcher.counters
            await dispatcher.publish("t", b"first")
            while not counters.delivered or counters.failures + counters.local_failures == 0:
                await asyncio.sleep(0.01)
            taken_s = []
            for number in range(20):
                began, before = time.monotonic(), counters.delivered
                await dispatcher.publish("t", b"x")
                while counters.delivered == before:
                    await asyncio.sleep(0.005)
                taken_s.append(time.monotonic() - began)
                await asyncio.sleep(0.1)
            found = {"median": statistics.median(taken_s), "failed": counters.failures}
            print(json.dumps(found | {"local": counters.local_failures}))
            for connection in taken:
                connection.close()

asyncio.run(asyncio.wait_for(main(), 50))
"""


@pytest.mark.parametrize("kind", ["six", "full"])
def test_what_one_address_lacks_is_its_own_matter(tmp_path: Path, kind: str) -> None:
    """An endpoint with an IPv6 address on a machine without IPv6 fails like any other that cannot be reached, and one
    to whose address no port is left waits without using up attempts. Neither holds up deliveries to others.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, for a network of its own")
    command = ["unshare", "-n", sys.executable, "-c", NAMESPACE, str(tmp_path / "o.sqlite"), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # A pause of all deliveries is a second long.
    assert found["median"] < 0.8, found
    assert (found["failed"] > 0, found["local"] > 0) == ((True, False) if kind == "six" else (False, True)), (
        found
    )


async def test_a_dripped_body_is_not_delivered(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A 200 whose announced body does not come in time, or breaks off, is a failed attempt."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def break_off(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        await writer.drain()

    dispatcher = await dispatchers(attempt_timeout_s=1.5, schedule=Schedule(delays_s=()))
    for answer in (drip, break_off):
        target = await targets(lambda _got, _n, answer=answer: answer)
        await dispatcher.add_endpoint(target.url, ["**"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: dispatcher.counters.gave_up == 2)
    found = await dispatcher.deliveries(DeliveryQuery())
    assert {delivery.status for delivery in found} == {None}
    assert "timeout" in {delivery.log[0].error for delivery in found}


async def test_replay_is_bounded(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """A replay makes no more pending than an endpoint may have, says that it is not complete, and goes on later."""
    answers = {"status": 415}
    target = await targets(lambda _got, _n: answers["status"])
    dispatcher = await dispatchers(max_pending_per_endpoint=30)
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    for _ in range(4):
        await asyncio.gather(*(dispatcher.publish("t", b"x") for _ in range(25)))
        await eventually(lambda: dispatcher.outbox.backlog.total == 0)
    dispatcher.deliverer.set_shards(())  # nothing is delivered for a moment
    first = await dispatcher.replay(endpoint.id, 0)
    assert (first.deliveries, first.complete) == (30, False)
    again = await dispatcher.replay(endpoint.id, 0)
    assert (again.deliveries, again.complete) == (0, False)
    assert (await dispatcher.replay(endpoint.id, 0, dry_run=True)).deliveries == 70
    account = await dispatcher.account()
    assert (account.pending, account.lost, account.balanced) == (30, {"gave_up": 70}, True)


async def test_replay_goes_in_bounded_steps(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much a replay brings back, no transaction reopens more than some; others publish in between."""
    monkeypatch.setattr(managers, "REPLAY_AT_ONCE", 10)
    target = await targets()
    dispatcher = await dispatchers()
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["t"])
    await asyncio.gather(*(dispatcher.publish("t", b"x") for _ in range(95)))
    await eventually(lambda: dispatcher.counters.delivered == 95)
    dispatcher.deliverer.set_shards(())  # nothing is delivered meanwhile
    pending: list[int] = []
    replaying = asyncio.create_task(dispatcher.replay(endpoint.id, 0, only="all"))
    while not replaying.done():
        await dispatcher.publish("other", b"y")
        pending.append(dispatcher.outbox.backlog.total)
    assert replaying.result().deliveries == 95
    steps = [after - before for before, after in itertools.pairwise(pending)]
    assert len([step for step in steps if step]) >= 3
