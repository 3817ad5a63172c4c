"""The stream of changes that pages follow: whose it is, what it tells, how many there may be."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from brokerless.core.runtime.http_host import HttpHost, listen
from brokerless.webhooks import Dispatcher, DispatcherConfig, EndpointChanges, registration_app
from brokerless.webhooks.api import app as app_module

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
AUTH = {"acme-token-0123456789": "acme", "other-token-0123456789": "other"}


async def test_a_tenant_hears_of_its_own_changes(targets: Targets, dispatchers: Dispatchers) -> None:
    """Every kind of change wakes those who watch its tenant and those who watch all, and nobody else."""
    target, dispatcher = await targets(lambda _got, _number: 500), await dispatchers()
    changes = dispatcher.outbox.changes
    with changes.watch("acme") as mine, changes.watch(None) as all_of_them, changes.watch("other") as others:

        async def heard() -> None:
            async with asyncio.timeout(20):
                await mine.wait()
                await all_of_them.wait()
            mine.clear()
            all_of_them.clear()

        async def no_more_attempts() -> None:
            while dispatcher.outbox.backlog.total:
                await heard()

        await dispatcher.publish("nobody.wants.it", b"{}", tenant="acme")
        await heard()
        endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"], tenant="acme")
        await heard()
        await dispatcher.update_endpoint(endpoint.id, EndpointChanges(description="mine"))
        await heard()
        await dispatcher.publish("t", b"{}", tenant="acme")
        await heard()
        target.answer = lambda _got, _number: 410  # a retry finds it gone, which disables the endpoint
        await no_more_attempts()
        while (await dispatcher.endpoint(endpoint.id)).active:
            await heard()
        mine.clear()
        all_of_them.clear()
        await dispatcher.publish("t", b"{}", tenant="acme")
        await heard()
        target.answer = lambda _got, _number: 200
        await dispatcher.enable_endpoint(endpoint.id)
        await heard()
        assert (await dispatcher.replay(endpoint.id, 0)).deliveries
        await heard()
        await no_more_attempts()
        mine.clear()
        all_of_them.clear()
        await dispatcher.remove_endpoint(endpoint.id)
        await heard()
        assert not others.is_set()
    assert len(changes) == 0


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[HttpHost, Dispatcher]]:
    dispatcher = Dispatcher(tmp_path / "o.sqlite", config=DispatcherConfig(verification="none"))
    host = await asyncio.to_thread(
        HttpHost, registration_app(dispatcher, auth=AUTH), listen("127.0.0.1", 0), linger_s=60
    )
    yield host, dispatcher
    async with asyncio.timeout(30):
        await asyncio.to_thread(host.close)


def client(host: HttpHost, token: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=host.address, headers=headers, trust_env=False, timeout=30)


async def test_the_stream_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message at once, another after a change; too many streams of one tenant are refused, of another are not; a
    server that stops waits for none of them.
    """
    monkeypatch.setattr(app_module, "MAX_STREAMS_PER_TENANT", 2)
    monkeypatch.setattr(app_module, "REMIND_S", 3600.0)
    async with (
        served(tmp_path) as (host, dispatcher),
        client(host, "acme-token-0123456789") as acme,
        client(host, "other-token-0123456789") as other,
        client(host, "nobody-token-0123456789") as nobody,
    ):
        assert (await nobody.get("/changes")).status_code == 401
        assert (await acme.get("/changes", params={"tenant": "other"})).status_code == 403
        assert (await acme.head("/changes")).headers["content-type"].startswith("text/event-stream")
        async with acme.stream("GET", "/changes") as first, acme.stream("GET", "/changes") as second:
            lines, others = first.aiter_lines(), second.aiter_lines()
            assert [await anext(lines), await anext(others)] == ["data: connected"] * 2
            refused = await acme.get("/changes")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
            await asyncio.to_thread(dispatcher.publish_sync, "t", b"{}", tenant="acme")
            assert [await anext(lines), await anext(lines)] == ["", "data: changed"]
            async with other.stream("GET", "/changes") as third:
                assert await anext(third.aiter_lines()) == "data: connected"
                async with asyncio.timeout(30):
                    await asyncio.to_thread(host.close)


async def test_a_stream_ends_and_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that has expired meanwhile is refused then."""
    monkeypatch.setattr(app_module, "STREAM_S", 0.2)
    monkeypatch.setattr(app_module, "REMIND_S", 0.1)
    async with served(tmp_path) as (host, dispatcher), client(host, "acme-token-0123456789") as acme:
        found = await acme.get("/changes")
        assert found.text.startswith("data: connected\n\ndata: changed\n\n")
        assert len(dispatcher.outbox.changes) == 0
