"""The outbox in a real PostgreSQL server; skipped where none is installed."""

import asyncio
import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokerless.webhooks import (
    AddressPolicy,
    Conflict,
    DeliveryQuery,
    Dispatcher,
    DispatcherConfig,
    OutboxError,
    OutboxFull,
    Schedule,
)

pytestmark = pytest.mark.anyio


def find(name: str) -> str | None:
    """A program of PostgreSQL: Debian keeps the server's beside the version, not on PATH."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(places[-1]) if places else found


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A fresh cluster on a Unix socket; its address."""
    initdb, pg_ctl = find("initdb"), find("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    directory = Path(tempfile.mkdtemp(prefix="bl-pg-"))
    options: dict[str, Any] = {"check": True, "capture_output": True, "cwd": "/"}
    if os.geteuid() == 0:
        # The server refuses to run as root.
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL cannot run as root, and there is no user postgres")
        os.chown(directory, user.pw_uid, user.pw_gid)
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data = directory / "data"
    subprocess.run([initdb, "-D", str(data), "-U", "test", "-A", "trust", "--no-sync"], **options)
    settings = f"-k {directory} -c listen_addresses='' -c fsync=off"
    log = str(directory / "log")
    subprocess.run([pg_ctl, "-D", str(data), "-w", "-o", settings, "-l", log, "start"], **options)
    yield f"postgresql://test@/postgres?host={directory}"
    subprocess.run([pg_ctl, "-D", str(data), "-m", "immediate", "stop"], **options)
    shutil.rmtree(directory, ignore_errors=True)


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

        app = Starlette(routes=[Route("/", take, methods=["POST"])])
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
    async with asyncio.timeout(30):
        while True:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return
            await asyncio.sleep(0.02)


async def test_delivers_retries_and_replays(outbox: str) -> None:
    """The same life as in SQLite: publish, fail, retry, list, replay, and the books balance."""
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
        assert await dispatcher.replay(endpoint.id, 0, only="all") == 300
        await eventually(lambda: len(target.bodies) == 300)
        await eventually(done)
        await dispatcher.remove_endpoint(endpoint.id)


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


async def test_standby_and_lost_connection(outbox: str) -> None:
    """A standby takes over; a connection that the server closes is opened again, and nothing accepted is lost."""
    target = Target()
    async with target.serve() as url, Dispatcher(outbox, config=config()) as second_owner:
        await second_owner.add_endpoint(url, ["**"])
        async with Dispatcher(outbox, config=config()) as standby:
            assert (second_owner.delivering, standby.delivering) == (True, False)
            await standby.publish("t", b"0")
            await eventually(lambda: target.bodies == ["0"])
            with psycopg.connect(outbox, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            accepted: list[str] = []

            async def accepts() -> bool:
                n = 1 + len(accepted)
                with contextlib.suppress(OutboxError):
                    await standby.publish("t", b"%d" % n)
                    accepted.append(str(n))
                return len(accepted) == 15

            await eventually(accepts)
            await eventually(lambda: set(accepted) <= set(target.bodies))
            await second_owner.stop()
            await eventually(lambda: standby.delivering)
            await standby.publish("t", b"after")
            await eventually(lambda: "after" in target.bodies)


async def test_wrong_address_is_one_clear_error(server: str) -> None:
    """A server that is not there, or a password: OutboxError, and the password is not in its text."""
    with pytest.raises(OutboxError) as caught:
        await Dispatcher("postgresql://user:topsecret@127.0.0.1:1/none").start()
    assert "topsecret" not in str(caught.value)


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
