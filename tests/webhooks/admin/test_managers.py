"""What deliveries say about their endpoints is recorded, also if the database is away for a while."""

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from brokerless.webhooks import Dispatcher, Schedule
from brokerless.webhooks.admin import managers
from brokerless.webhooks.outbox import database

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


async def test_failures_during_an_outage_of_the_database_are_recorded_after_it(
    targets: Targets,
    dispatchers: Dispatchers,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Since when an endpoint fails, and its dead letters: both are tried again until the database takes them."""
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    monkeypatch.setattr(managers, "REPORT_S", 0.2)
    locked = asyncio.Event()

    async def refuse(writer: asyncio.StreamWriter) -> None:
        await locked.wait()
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")

    broken, told = await targets(lambda _got, _number: refuse), await targets()
    dispatcher = await dispatchers(schedule=Schedule(delays_s=()), attempt_timeout_s=30.0, lease_s=600.0)
    endpoint, _ = await dispatcher.add_endpoint(broken.url, ["t"])
    await dispatcher.add_endpoint(told.url, ["brokerless.delivery.*"])
    await dispatcher.publish("t", b"x")
    await eventually(lambda: broken.got)
    other = sqlite3.connect(dispatcher.outbox.target, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # nobody else can write now
    locked.set()
    await eventually(lambda: caplog.text.count("could not be recorded") >= 3)
    assert (await dispatcher.endpoint(endpoint.id)).failing_since is None
    other.execute("ROLLBACK")
    other.close()

    async def recorded() -> bool:
        return (await dispatcher.endpoint(endpoint.id)).failing_since is not None

    await eventually(recorded)
    await eventually(lambda: told.got)
    (body,) = told.bodies
    assert (json.loads(body)["endpoint"], json.loads(body)["count"]) == (endpoint.id, 1)
