"""The outbox in a real PostgreSQL server; skipped where none is installed."""

import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokerless.losstest.harness.ports import Ports
from brokerless.webhooks import (
    AddressPolicy,
    Conflict,
    DeliveryQuery,
    Dispatcher,
    DispatcherConfig,
    Endpoint,
    OutboxError,
    OutboxFull,
    Schedule,
    TenantLimits,
    publish_in,
    registration_app,
)
from brokerless.webhooks.admin import maintenance
from brokerless.webhooks.outbox import notices
from brokerless.webhooks.outbox.schema import SHARDS
from brokerless.webhooks.outbox.store import SHARD_LOCK, Store
from tests.postgres import frozen, restart

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("postgres")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def outbox(server: str) -> str:
    """A database of its own for each test."""
    name = f"t{os.getpid()}_{os.urandom(4).hex()}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    return server.replace("/postgres?", f"/{name}?")


class Target:
    """A receiver on a real socket."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.status = 200

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        import uvicorn

        async def take(request: Request) -> Response:
            self.bodies.append((await request.body()).decode())
            return Response(status_code=self.status)

        async def agree(request: Request) -> Response:
            """The owner of any path agrees but of those with a no."""
            return Response(headers={} if "no" in request.url.path else {"WebHook-Allowed-Origin": "*"})

        routes = [
            Route("/{path:path}", take, methods=["POST"]),
            Route("/{path:path}", agree, methods=["OPTIONS"]),
        ]
        app = Starlette(routes=routes)
        running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        task = asyncio.create_task(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/"
        running.should_exit = True
        await task


def config(**changes: Any) -> DispatcherConfig:
    fields: dict[str, Any] = {
        "policy": AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
        "verification": "none",
        "schedule": Schedule(delays_s=(0.05,) * 100),
        "poll_s": 0.05,
    }
    return DispatcherConfig(**(fields | changes))


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while True:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return
            await asyncio.sleep(0.02)


async def test_delivers_retries_and_replays(outbox: str) -> None:
    """The same life as in SQLite: publish, fail, retry, list, replay, and the accounting balance."""
    target = Target()
    async with target.serve() as url, Dispatcher(outbox, config=config()) as dispatcher:
        target.status = 500
        endpoint, _ = await dispatcher.add_endpoint(url, ["**"])
        results = await asyncio.gather(*(dispatcher.publish("t", b"%d" % n) for n in range(300)))
        assert len({result.n for result in results}) == 300
        await eventually(lambda: target.bodies)
        target.status = 200

        async def done() -> bool:
            return (await dispatcher.account()).delivered == 300

        await eventually(done)
        account = await dispatcher.account()
        assert (account.balanced, account.pending, account.lost) == (True, 0, {})
        assert set(target.bodies) == {str(n) for n in range(300)}
        page = await dispatcher.deliveries(DeliveryQuery(endpoint=endpoint.id, state="delivered", limit=500))
        assert len(page) == 300
        assert all(delivery.log[-1].status == 200 for delivery in page)
        target.bodies.clear()
        assert (await dispatcher.replay(endpoint.id, 0, only="all")).deliveries == 300
        await eventually(lambda: len(target.bodies) == 300)
        await eventually(done)
        await dispatcher.remove_endpoint(endpoint.id)


async def test_a_clock_that_was_ahead(outbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose clock is an hour ahead leaves retries and first attempts, and leases that lie ahead: the next one
    does not wait for that hour.
    """
    target, real, real_ns = Target(), time.time, time.time_ns
    target.status = 503
    async with target.serve() as url:
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: real() + 3600)
            ahead.setattr(time, "time_ns", lambda: real_ns() + 3600 * 10**9)
            async with Dispatcher(outbox, config=config()) as first:
                await first.add_endpoint(url, ["**"], concurrency=1)
                await asyncio.gather(*(first.publish("t", b"%d" % n) for n in range(50)))
                await eventually(lambda: first.counters.failures)
        target.status = 200
        with psycopg.connect(outbox) as admin:
            later = real_ns() // 1000 + 3600 * 10**6
            admin.execute("UPDATE outbox_shards SET owner = 'elsewhere', until = %s", (later,))
        async with Dispatcher(outbox, config=config(lease_s=0.3)) as second:
            await eventually(lambda: second.counters.delivered == 50)


async def test_callers_transactions(outbox: str) -> None:
    """Sync and async psycopg connections: rows commit and roll back with the caller's own."""
    target = Target()
    async with target.serve() as url, Dispatcher(outbox, config=config()) as dispatcher:
        await dispatcher.add_endpoint(url, ["**"])
        with psycopg.connect(outbox) as own:
            own.execute("CREATE TABLE orders (n INT)")
            dispatcher.publish_sync("t", b"sync", connection=own)
            own.commit()
            dispatcher.publish_sync("t", b"gone", connection=own)
            own.rollback()
            assert own.execute("SELECT count(*) FROM orders").fetchone() == (0,)
        async with await psycopg.AsyncConnection.connect(outbox) as aown:
            await dispatcher.publish("t", b"async", connection=aown)
            await aown.commit()
            await dispatcher.publish("t", b"gone too", connection=aown)
            await aown.rollback()
        await eventually(lambda: len(target.bodies) == 2)
        assert sorted(target.bodies) == ["async", "sync"]


async def test_late_commit_is_not_skipped(outbox: str) -> None:
    """A transaction that got its number first and commits last is delivered: numbers are not commit order."""
    target = Target()
    async with target.serve() as url, Dispatcher(outbox, config=config()) as dispatcher:
        await dispatcher.add_endpoint(url, ["**"])
        with psycopg.connect(outbox) as slow:
            early = dispatcher.publish_sync("t", b"early number, late commit", connection=slow)
            later = await dispatcher.publish("t", b"later")
            assert later.n > early.n
            await eventually(lambda: target.bodies == ["later"])
            slow.commit()
        await eventually(lambda: len(target.bodies) == 2)


async def test_bounds_and_keys(outbox: str) -> None:
    """Evicting, idempotency keys and the bound inside callers' transactions work as in SQLite."""
    target = Target()
    target.status = 500
    async with (
        target.serve() as url,
        Dispatcher(outbox, config=config(max_pending=10, on_full="evict")) as dispatcher,
    ):
        await dispatcher.add_endpoint(url, ["**"])
        for n in range(30):
            await dispatcher.publish("t", b"%d" % n)
        account = await dispatcher.account()
        assert (account.balanced, account.pending, account.lost) == (True, 10, {"evicted": 20})
        first = await dispatcher.publish("u", b"x", idempotency_key="k", tenant="other")
        again = await dispatcher.publish("u", b"x", idempotency_key="k", tenant="other")
        assert (again.id, again.duplicate) == (first.id, True)
        with pytest.raises(Conflict):
            await dispatcher.publish("u", b"y", idempotency_key="k", tenant="other")
    async with Dispatcher(outbox, config=config(max_pending=10)) as dispatcher:
        with pytest.raises(OutboxFull):
            await dispatcher.publish("t", b"no")
        with psycopg.connect(outbox) as own, pytest.raises(OutboxFull):
            dispatcher.publish_sync("t", b"no", connection=own)


async def test_sharing_and_lost_connections(outbox: str) -> None:
    """Two processes share the endpoints; connections that the server closes are opened again, and nothing accepted is
    lost; when one stops, the other takes over.
    """
    target = Target()
    async with target.serve() as url, Dispatcher(outbox, config=config()) as one:
        for n in range(8):
            await one.add_endpoint(url, [f"t{n}"])
        async with Dispatcher(outbox, config=config()) as two:
            await eventually(
                lambda: one.delivering and len(one.deliverer.shards) == len(two.deliverer.shards)
            )
            for n in range(8):
                await two.publish(f"t{n}", b"first %d" % n)
            await eventually(lambda: len(target.bodies) == 8)
            with psycopg.connect(outbox, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            accepted: list[str] = []

            async def accepts() -> bool:
                n = 1 + len(accepted)
                with contextlib.suppress(OutboxError):
                    await two.publish(f"t{n % 8}", b"%d" % n)
                    accepted.append(str(n))
                return len(accepted) == 16

            await eventually(accepts)
            await eventually(lambda: set(accepted) <= set(target.bodies))
            await one.stop()
            await eventually(lambda: len(two.deliverer.shards) == SHARDS)
            for n in range(8):
                await two.publish(f"t{n}", b"after %d" % n)
            await eventually(lambda: {f"after {n}" for n in range(8)} <= set(target.bodies))


async def test_wrong_address_is_one_clear_error(server: str) -> None:
    """A server that is not there, or a password: OutboxError, and the password is not in its text."""
    with pytest.raises(OutboxError) as caught:
        await Dispatcher("postgresql://user:topsecret@127.0.0.1:1/none").start()
    assert "topsecret" not in str(caught.value)


async def test_a_process_that_stands_still_in_a_transaction_holds_up_nobody(outbox: str) -> None:
    """It has the lock that every process needs to renew its leases: the server ends its transaction, and the others
    take its endpoints over.
    """
    options = config(lease_s=1.5, database_timeout_s=1.0)
    async with Dispatcher(outbox, config=options) as still, Dispatcher(outbox, config=options) as other:
        await eventually(lambda: len(still.deliverer.shards) == len(other.deliverer.shards))
        release = threading.Event()

        def stand_still(store: Store) -> None:
            store.lock(SHARD_LOCK)
            release.wait(60)

        waiting = still.outbox.call_async(stand_still)
        try:
            await eventually(lambda: len(other.deliverer.shards) == SHARDS)
        finally:
            release.set()
        with pytest.raises(OutboxError):
            await waiting
        await eventually(lambda: len(still.deliverer.shards) == len(other.deliverer.shards))


async def test_processes_are_told_and_do_not_look(outbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process publishes, also in a transaction of its own, is delivered at once although nobody looks
    into the database for it: PostgreSQL tells.
    """
    for module, name in ((notices, "LOOK_S"), (maintenance, "COUNT_S")):
        monkeypatch.setattr(module, name, 3600.0)
    target = Target()
    async with (
        target.serve() as url,
        Dispatcher(outbox, config=config()) as one,
        Dispatcher(outbox, config=config()) as two,
    ):
        await eventually(lambda: len(one.deliverer.shards) == len(two.deliverer.shards))
        for number in range(8):
            await one.add_endpoint(url, [f"t{number}"])
        for number in range(8):
            for dispatcher in (one, two):
                await dispatcher.publish(f"t{number}", b"x")
        await eventually(lambda: len(target.bodies) == 16)
        with psycopg.connect(outbox) as own:
            for number in range(8):
                publish_in(own, f"t{number}", b"y")
        await eventually(lambda: len(target.bodies) == 24)


async def test_one_key_in_two_processes_is_one_event(outbox: str) -> None:
    """Two dispatchers that get the same new key at the same moment: one event, and no caller sees an error."""
    async with Dispatcher(outbox, config=config()) as one, Dispatcher(outbox, config=config()) as two:
        for round_ in range(30):
            keys = [f"{round_}-{n}" for n in range(20)]
            calls = [
                dispatcher.publish("t", b"same", idempotency_key=key)
                for key in keys
                for dispatcher in (one, two)
            ]
            results = await asyncio.gather(*calls)
            for first, second in zip(results[::2], results[1::2], strict=True):
                assert first.id == second.id
                assert sorted([first.duplicate, second.duplicate]) == [False, True]


class Apis:
    """Three processes with a dispatcher and its API on one outbox; every call goes to one of them at random."""

    def __init__(self, senders: "Senders", ports: Ports, chance: random.Random) -> None:
        self.urls = []
        self._chance = chance
        self._http = httpx.AsyncClient(
            headers={"Authorization": "Bearer " + "t" * 20}, timeout=60, trust_env=False
        )
        for _ in range(3):
            port = ports.take()
            senders.order("api", outbox=senders.outbox, port=port, token="t" * 20)
            self.urls.append(f"http://127.0.0.1:{port}")

    async def ready(self) -> None:
        """Wait until every process answers and has a share of the endpoints."""

        async def answers(url: str) -> bool:
            with contextlib.suppress(httpx.TransportError):
                found = await self._http.get(f"{url}/readyz")
                return found.status_code == 200 and bool(found.json()["delivering"])
            return False

        for url in self.urls:
            await eventually(lambda url=url: answers(url))

    async def __call__(self, method: str, path: str, *fine: int, **options: Any) -> Any:
        """The answer's JSON; any status that is not expected is a failure, above all a 503."""
        response = await self._http.request(method, self._chance.choice(self.urls) + path, **options)
        assert response.status_code in (fine or (200,)), f"{method} {path}: {response.text}"
        return response.json() if response.content else None

    async def close(self) -> None:
        await self._http.aclose()


class Register:
    """What was written to one setting and read from it, by several at once: each with its value and when it took place.

    Linearizable means that there is one order of them that fits all those times. Values are written once.
    """

    def __init__(self, value: Any) -> None:
        self.writes: dict[Any, tuple[float, float]] = {value: (-math.inf, -math.inf)}
        self.reads: list[tuple[Any, float, float]] = []

    async def write(self, value: Any, call: Awaitable[Any]) -> Any:
        """The call writes the value; with `value` None its result is what was written."""
        began = time.monotonic()
        result = await call
        self.writes[result if value is None else value] = (began, time.monotonic())
        return result

    async def read(self, call: Awaitable[Any]) -> Any:
        """The call's result was read."""
        began = time.monotonic()
        value = await call
        self.reads.append((value, began, time.monotonic()))
        return value

    def problems(self) -> list[str]:
        """Reads of what was never written, not yet written, or overwritten before; and reads that go back."""
        found, writes = [], self.writes
        for value, began, ended in self.reads:
            if value not in writes:
                found.append(f"{value!r} was never written")
                continue
            wrote, written = writes[value]
            if wrote > ended:
                found.append(f"{value!r} was read before it was written")
            over = [v for v, (start, end) in writes.items() if start > written and end < began]
            found += [f"{value!r} was read after {over[0]!r} had overwritten it"] if over else []
        for value, _, ended in self.reads:
            for later, began, _ in self.reads:
                if ended < began and value in writes and later in writes:
                    back = writes[later][1] < writes[value][0]
                    found += [f"{later!r} was read after {value!r}, which came later"] if back else []
        return found


@pytest.mark.parametrize(
    ("writes", "reads", "fine"),
    [
        ({"a": (1, 2), "b": (3, 4)}, [("a", 5, 6)], False),
        ({"a": (1, 2), "b": (3, 4)}, [("b", 5, 6), ("b", 7, 8)], True),
        ({"a": (1, 4), "b": (3, 6)}, [("b", 7, 8), ("b", 9, 9)], True),
        ({"a": (1, 4), "b": (3, 6)}, [("a", 7, 8)], True),
        ({"a": (1, 2)}, [("", 3, 4)], False),
        ({"a": (1, 2)}, [("a", 0, 0.5)], False),
        ({"a": (1, 2)}, [("x", 3, 4)], False),
        ({"a": (1, 2), "b": (3, 9)}, [("b", 4, 5), ("a", 6, 7)], False),
        ({"a": (1, 2), "b": (3, 9)}, [("a", 4, 5), ("b", 6, 7)], True),
    ],
)
async def test_the_register_sees_what_is_not_linearizable(
    writes: dict[str, tuple[float, float]], reads: list[tuple[str, float, float]], fine: bool
) -> None:
    """The judge itself: lost, early, invented and backward reads are found, and nothing else."""
    register = Register("")
    register.writes |= writes
    register.reads += reads
    assert (not register.problems()) == fine


async def change_at_random(
    api: Apis, look: Callable[[str], Awaitable[Endpoint]], url: str, seed: int, for_s: float
) -> None:
    """Change the same endpoints by PATCH, rotate, enable, disable, delete and replay over all processes at once, while
    their deliveries fail and their owners are asked: whoever asks any process finds what was acknowledged.
    """
    chance = random.Random(seed)

    async def register(**settings: Any) -> dict[str, Any]:
        body = {"url": f"{url}yes", "topics": ["**"]} | settings
        made: dict[str, Any] = await api("POST", "/endpoints", 201, json=body)
        while made["state"] != "active":
            made = await api("POST", f"/endpoints/{made['id']}/verify")
        return made

    async def field(endpoint: str, name: str) -> Any:
        return (await api("GET", f"/endpoints/{endpoint}"))[name]

    endpoints = [(await register())["id"] for _ in range(3)]
    moving = [(await register(topics=["nothing"]))["id"] for _ in range(2)]
    settings = {
        **{
            (endpoint, name): Register(start)
            for endpoint in endpoints
            for name, start in (("description", ""), ("rate", 0))
        },
        **{(endpoint, "secret"): Register((await look(endpoint)).secrets[0].key) for endpoint in endpoints},
        **{(endpoint, "url"): Register(f"{url}yes") for endpoint in moving},
    }
    until = time.monotonic() + for_s
    done: dict[str, int] = {}

    async def describe(endpoint: str) -> None:
        text = str(chance.random())
        call = api("PATCH", f"/endpoints/{endpoint}", json={"description": text})
        await settings[endpoint, "description"].write(text, call)
        await settings[endpoint, "description"].read(field(endpoint, "description"))

    async def limit(endpoint: str) -> None:
        rate = 100 + 9000 * chance.random()
        await settings[endpoint, "rate"].write(
            rate, api("PATCH", f"/endpoints/{endpoint}", json={"rate": rate})
        )
        await settings[endpoint, "rate"].read(field(endpoint, "rate"))

    async def rotate(endpoint: str) -> None:
        async def fresh() -> Any:
            return (await api("POST", f"/endpoints/{endpoint}/rotate-secret"))["secret"]

        async def newest() -> Any:
            return (await look(endpoint)).secrets[0].key

        await settings[endpoint, "secret"].write(None, fresh())
        await settings[endpoint, "secret"].read(newest())

    async def move(endpoint: str) -> None:
        # Its owner agrees at once, or refuses.
        target = f"{url}{chance.choice(['yes', 'no'])}{chance.random()}"
        await settings[endpoint, "url"].write(
            target, api("PATCH", f"/endpoints/{endpoint}", json={"url": target})
        )

    async def verify(endpoint: str) -> None:
        await api("POST", f"/endpoints/{endpoint}/verify")
        began = time.monotonic()
        found = await api("GET", f"/endpoints/{endpoint}")
        settings[endpoint, "url"].reads.append((found["url"], began, time.monotonic()))
        assert found["state"] in {"active", "pending"}
        assert found["state"] == "pending" or "yes" in found["url"], "active, and its owner never agreed"

    async def switch(endpoint: str) -> None:
        for action, state in (("disable", "disabled"), ("enable", "active")):
            await api("POST", f"/endpoints/{endpoint}/{action}")
            assert await field(endpoint, "state") == state

    async def replay(endpoint: str) -> None:
        # 409: it is disabled at the moment.
        body = {"since": "2020-01-01T00:00:00Z", "only": "all"}
        await api("POST", f"/endpoints/{endpoint}/replay", 202, 409, json=body)

    async def come_and_go(_endpoint: str) -> None:
        added = (await register())["id"]
        await api("POST", "/events", 202, json={"topic": "t"})
        await api("DELETE", f"/endpoints/{added}", 204)
        await api("GET", f"/endpoints/{added}", 404)

    async def publish(_endpoint: str) -> None:
        await api("POST", "/events", 202, json={"topic": "t"})

    async def repeat(work: Callable[[str], Awaitable[None]], endpoint: str) -> None:
        while time.monotonic() < until or work.__name__ not in done:
            await work(endpoint)
            done[work.__name__] = done.get(work.__name__, 0) + 1

    # Two at a time change the same setting of the same endpoint.
    works = (describe, describe, limit, limit, rotate, rotate, switch, replay, come_and_go, publish)
    await asyncio.gather(
        *(repeat(work, endpoint) for work in works for endpoint in endpoints),
        *(repeat(work, endpoint) for work in (move, move, verify, verify) for endpoint in moving),
    )
    print("changes", done)
    for (endpoint, name), setting in settings.items():
        assert setting.problems() == [], (endpoint, name)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("for_s", [6.0, pytest.param(60.0, marks=pytest.mark.slow)])
async def test_every_acknowledged_change_is_there(
    outbox: str, tmp_path: Path, ports: Ports, for_s: float
) -> None:
    """Three processes change the same endpoints at random while their deliveries fail and are replayed: every change
    that was acknowledged is there when another process is asked, and no deadlock reaches a caller.
    """
    seed = random.randrange(2**32)
    print("seed", seed)
    target = Target()
    target.status = 500
    senders = Senders(outbox, tmp_path)
    # Looks into the database, and delivers nothing.
    observer = Dispatcher(outbox, config=config())
    observer.open()
    api = Apis(senders, ports, random.Random(seed))
    try:
        async with target.serve() as url:
            await api.ready()
            await change_at_random(api, observer.endpoint, url, seed, for_s)
            repeated = []
            for address in api.urls:
                text = (await api._http.get(f"{address}/metrics")).text
                repeated += re.findall(r"repeated_transactions\S* (\d+)", text)
            print("repeated transactions", repeated)
            target.status = 200

            async def settled() -> bool:
                return (await observer.account()).pending == 0

            await eventually(settled)
            assert (await observer.account()).balanced
    finally:
        await api.close()
        observer.close()
        senders.close()


@pytest.mark.timeout(120)
async def test_a_server_that_hangs_is_noticed(server: str, outbox: str) -> None:
    """While PostgreSQL hangs, readiness says so within seconds and publish fails instead of waiting; afterwards
    everything goes on by itself, and nothing accepted is lost.
    """
    target = Target()
    async with target.serve() as url, Dispatcher(outbox, config=config(database_timeout_s=3.0)) as dispatcher:
        await dispatcher.add_endpoint(url, ["**"])
        app = registration_app(dispatcher, auth={"x" * 20: "*"})
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            await dispatcher.publish("t", b"before")
            await eventually(lambda: target.bodies == ["before"])
            with frozen(server):
                began = time.monotonic()
                waiting = asyncio.create_task(dispatcher.publish("t", b"during"))
                async with asyncio.timeout(20):
                    while (await http.get("/readyz")).status_code == 200:
                        await asyncio.sleep(0.05)
                noticed = time.monotonic() - began
                async with asyncio.timeout(20):
                    listed = await http.get("/endpoints", headers={"Authorization": "Bearer " + "x" * 20})
                assert listed.status_code == 503
                with pytest.raises(OutboxError):
                    await waiting
                failed = time.monotonic() - began
                with pytest.raises(OutboxError):
                    await dispatcher.publish("t", b"during")
            print(f"not ready after {noticed:.1f} s, publish failed after {failed:.1f} s")
            assert noticed < 8
            assert failed < 15

            async def accepts() -> bool:
                with contextlib.suppress(OutboxError):
                    await dispatcher.publish("t", b"after")
                    return True
                return False

            await eventually(accepts)
            await eventually(lambda: "after" in target.bodies)

            async def ready() -> bool:
                return (await http.get("/readyz")).status_code == 200

            await eventually(ready)


async def test_limits_of_a_tenant_hold_in_every_process(outbox: str) -> None:
    """A tenant's bounds on endpoints and pending deliveries hold in a process that delivers nothing of it."""
    target = Target()
    target.status = 500
    limits = TenantLimits(max_endpoints=2, max_pending=20)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(target.serve())
        made = [await stack.enter_async_context(Dispatcher(outbox, config=config())) for _ in range(2)]
        clients = []
        for dispatcher in made:
            app = registration_app(dispatcher, auth={"t" * 20: "acme"}, limits=limits)
            headers = {"Authorization": "Bearer " + "t" * 20}
            client = httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://api", headers=headers
            )
            clients.append(await stack.enter_async_context(client))
        body = {"url": url, "topics": ["**"]}
        answers = await asyncio.gather(*(client.post("/endpoints", json=body) for client in clients * 4))
        assert sorted(answer.status_code for answer in answers) == [201] * 2 + [409] * 6
        codes = []
        for number in range(40):
            codes.append((await clients[number % 2].post("/events", json={"topic": "t"})).status_code)
        accepted = codes.count(202)
        # Each process knows its own exactly, and the other's within about a second.
        assert 10 <= accepted <= 20
        await asyncio.sleep(2)
        for client in clients:
            assert (await client.post("/events", json={"topic": "t"})).status_code == 429


class Senders:
    """Dispatcher processes that publish numbered events and deliver, forked from one prepared parent."""

    def __init__(self, outbox: str, directory: Path) -> None:
        self.outbox = outbox
        self.directory = directory
        self.witness = directory / "witness"
        self.running: list[int] = []
        script = Path(__file__).with_name("webhook_roles.py")
        self._parent = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._started = 0

    def order(self, role: str, **options: Any) -> int:
        """Start a process; returns its pid."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        order = {"role": role, "stderr": str(self.directory / "stderr"), **options}
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def start(self, count: int) -> None:
        self._started += 1
        self.running.append(
            self.order(
                "sender",
                outbox=self.outbox,
                witness=str(self.witness),
                first=0,
                count=count,
                pause_s=0.03,
                prefix=f"p{self._started}-",
                own_source=True,
            )
        )

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.running.remove(pid)

    def stop(self, pid: int) -> None:
        """It stands still, and its connections stay."""
        os.kill(pid, signal.SIGSTOP)
        self.running.remove(pid)

    def go_on(self, pid: int) -> None:
        self.running.append(pid)
        os.kill(pid, signal.SIGCONT)

    def accepted(self) -> set[str]:
        text = self.witness.read_text() if self.witness.exists() else ""
        lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return {words[1] for words in lines if words[0] == "accepted"}

    def close(self) -> None:
        self._parent.kill()  # its children die with it
        self._parent.communicate()


class OrderedTarget:
    """Endpoints by path; remembers what arrived in which order, and notes when two processes that both live send to one
    endpoint at the same time.
    """

    def __init__(self, lives: Callable[[int], bool]) -> None:
        self.bodies: dict[str, list[str]] = {}
        self.now: dict[str, list[int]] = {}
        self.senders: dict[str, list[int]] = {}
        self.requests: dict[str, list[int]] = {}
        self.shared: list[tuple[str, int, int]] = []
        self._lives = lives

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        import uvicorn

        async def take(request: Request) -> Response:
            name, pid = request.url.path, int(request.headers["ce-source"].rpartition(":")[2])
            now, senders = self.now.setdefault(name, []), self.senders.setdefault(name, [])
            self.shared += [(name, pid, other) for other in now if other != pid and self._lives(other)]
            if senders[-1:] != [pid]:
                senders.append(pid)
            self.requests.setdefault(name, []).append(pid)
            now.append(pid)
            try:
                self.bodies.setdefault(name, []).append((await request.body()).decode())
                await asyncio.sleep(0.01)
            finally:
                now.remove(pid)
            return Response()

        app = Starlette(routes=[Route("/{path}", take, methods=["POST"])])
        running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        task = asyncio.create_task(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/"
        running.should_exit = True
        await task


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [6, pytest.param(24, marks=pytest.mark.slow)])
async def test_three_dispatchers_killed_and_a_server_restarted_and_frozen(
    server: str, outbox: str, tmp_path: Path, rounds: int
) -> None:
    """Dispatchers die by SIGKILL or stand still again and again, also while PostgreSQL is restarted or frozen: nothing
    accepted is lost, FIFO endpoints see the order of each publisher, and all endpoints are attempted by a process that
    lives within ten seconds.
    """
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    senders = Senders(outbox, tmp_path)
    target = OrderedTarget(lambda pid: pid in senders.running)
    try:
        async with target.serve() as url:
            names = [f"fifo{n}" for n in range(3)] + [f"plain{n}" for n in range(5)]
            async with Dispatcher(outbox, config=config()) as setup:
                for name in names:
                    await setup.add_endpoint(url + name, ["**"], fifo=name.startswith("fifo"))
            for _ in range(3):
                senders.start(100_000)
            await eventually(lambda: len(senders.accepted()) > 30)
            took: dict[str, list[float]] = {}
            kinds = ["killed", "stopped", "killed, server restarted", "killed, server frozen"]
            for round_ in range(rounds):
                await asyncio.sleep(chance.random())
                kind, living = kinds[round_ % len(kinds)], set(senders.running)
                # One that has endpoints.
                victim = chance.choice([pids[-1] for pids in target.requests.values() if pids[-1] in living])
                (senders.stop if kind == "stopped" else senders.kill)(victim)
                if kind.endswith("restarted"):
                    await asyncio.to_thread(restart, server)
                if kind.endswith("frozen"):
                    with frozen(server):
                        await asyncio.sleep(8)
                # By deliveries, and not by what the table says.
                began, before = (
                    time.monotonic(),
                    {"/" + n: len(target.requests.get("/" + n, ())) for n in names},
                )
                await eventually(
                    lambda before=before: all(
                        set(target.requests.get(n, [])[count:]) & set(senders.running)
                        for n, count in before.items()
                    )
                )
                took.setdefault(kind, []).append(time.monotonic() - began)
                if kind == "stopped":
                    senders.go_on(victim)
                else:
                    senders.start(100_000)
                known = len(senders.accepted())
                await eventually(lambda known=known: len(senders.accepted()) > known + 30)
            slowest = max(seconds for each in took.values() for seconds in each)
            for kind, each in took.items():
                print(
                    f"{len(each)} {kind}: hand-over {sorted(each)[len(each) // 2]:.1f} s, slowest {max(each):.1f} s"
                )
            print(f"slowest hand-over {slowest:.1f} s, {len(senders.accepted())} accepted")
            assert slowest < 10
            for pid in list(senders.running):
                senders.kill(pid)
            accepted = senders.accepted()
            async with Dispatcher(outbox, source="pid:0", config=config()) as last:
                # A FIFO endpoint takes one at a time: what publishers were ahead of it takes as long as it takes.
                lowest, until = math.inf, time.monotonic() + 60
                while left := (await last.account()).pending + (await last.account()).unrouted:
                    if left < lowest:
                        lowest, until = left, time.monotonic() + 60
                    assert time.monotonic() < until, f"{left} deliveries are attempted by nobody"
                    await asyncio.sleep(0.1)
                account = await last.account()
                assert (account.balanced, account.lost, account.withdrawn) == (True, {}, 0)
        # One owner at a time: what a process had in flight when it was killed does not count.
        assert target.shared == []
        assert max(len(senders) for senders in target.senders.values()) > 1, "no endpoint changed its owner"
        for name in names:
            arrived = target.bodies["/" + name]
            assert accepted <= set(arrived), f"{len(accepted - set(arrived))} lost for {name}"
            if name.startswith("fifo"):
                by_publisher: dict[str, list[int]] = {}
                for body in dict.fromkeys(arrived):
                    publisher, _, number = body.partition("-")
                    by_publisher.setdefault(publisher, []).append(int(number))
                assert all(numbers == sorted(numbers) for numbers in by_publisher.values())
                print(name, len(arrived), "arrived,", len(arrived) - len(set(arrived)), "of them again")
    finally:
        senders.close()
