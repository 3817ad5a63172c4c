"""The catalogue of event types: schemas that are kept by choice, known to every process, and never fetched."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import httpx
import pytest

from brokerless.core.errors import ConfigError, InvalidEvent
from brokerless.webhooks import Dispatcher, NotFound, publish_in, registration_app
from brokerless.webhooks.catalogue import MAX_SCHEMA_BYTES, compiled

pytestmark = pytest.mark.anyio
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]
SCHEMA = {
    "type": "object",
    "required": ["total"],
    "properties": {
        "total": {"type": "number", "minimum": 1},
        "items": {"type": "array", "items": {"type": "string"}},
    },
}


async def test_data_must_fit_only_by_choice(dispatchers: Dispatchers) -> None:
    """A schema alone describes; with `validate` data that does not fit is refused, and the error says where."""
    dispatcher = await dispatchers()
    await dispatcher.set_event_type("order.paid", description="An order was paid", schema=SCHEMA)
    await dispatcher.publish("order.paid", b"[]")
    await dispatcher.set_event_type("order.paid", schema=SCHEMA, validate=True, example={"total": 2})
    await dispatcher.publish("order.paid", b'{"total": 5, "items": ["a"]}')
    await dispatcher.publish("order.sent", b"[]")
    for data, content_type, field, text in (
        (b'{"total": 0}', "application/json", "data", "$.total: "),
        (b'{"total": 1, "items": ["a", 2]}', "application/json", "data", "$.items[1]: "),
        (b"{}", "application/json", "data", "total"),
        (b"{", "application/json", "data", "must be JSON"),
        (b"\xff", "application/json", "data", "must be JSON"),
        (b"x", "text/plain", "content_type", "must be JSON"),
    ):
        with pytest.raises(InvalidEvent) as caught:
            await dispatcher.publish("order.paid", data, content_type=content_type)
        assert caught.value.field == field
        assert text in caught.value.problem
    assert (await dispatcher.account()).events == 3
    await dispatcher.remove_event_type("order.paid")
    await dispatcher.publish("order.paid", b"[]")
    with pytest.raises(NotFound):
        await dispatcher.event_type("order.paid")


async def test_other_processes_and_restarts_know_it(dispatchers: Dispatchers, eventually: Eventually) -> None:
    """What one dispatcher of an outbox sets, the other keeps within a moment, and a third one from its start."""
    one, two = await dispatchers(), await dispatchers()
    await one.set_event_type("t", schema={"type": "string"}, validate=True)

    async def refused(dispatcher: Dispatcher) -> bool:
        try:
            await dispatcher.publish("t", b"1")
        except InvalidEvent:
            return True
        return False

    await eventually(lambda: refused(two))
    assert await refused(await dispatchers())
    await two.remove_event_type("t")

    async def accepted() -> bool:
        return not await refused(one)

    await eventually(accepted)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"pattern": "("},
        {"enum": ["x" * MAX_SCHEMA_BYTES]},
    ],
)
def test_what_is_no_schema_is_refused(schema: dict[str, Any]) -> None:
    """Nonsense, references to other places and documents that are too long: ConfigError of the field."""
    with pytest.raises(ConfigError) as caught:
        compiled(schema)
    assert caught.value.field == "schema"


def test_patterns_take_linear_time() -> None:
    """A pattern that makes a backtracking matcher run for years is answered at once."""
    assert not compiled({"pattern": "^(a+)+$"}).is_valid("a" * 100_000 + "!")


async def test_over_http_the_operator_writes_and_tenants_read(dispatchers: Dispatchers) -> None:
    """PUT and DELETE are the operator's; a tenant's event that does not fit is 422 with the field."""
    dispatcher = await dispatchers()
    app = registration_app(dispatcher, auth={"t" * 20: "acme", "o" * 20: "*"})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        tenant, operator = ({"Authorization": "Bearer " + letter * 20} for letter in "to")
        body = {"description": "Paid", "schema": SCHEMA, "validate": True, "example": {"total": 3}}
        assert (await http.put("/event-types/order.paid", json=body, headers=tenant)).status_code == 403
        made = await http.put("/event-types/order.paid", json=body, headers=operator)
        assert (made.status_code, made.json()["schema"]) == (200, SCHEMA)
        wrong = await http.put("/event-types/x", json={**body, "example": 5}, headers=operator)
        assert (wrong.status_code, wrong.json()["field"]) == (422, "example")
        wrong = await http.put("/event-types/x", json={"validate": True}, headers=operator)
        assert (wrong.status_code, wrong.json()["field"]) == (422, "validate")
        listed = (await http.get("/event-types", headers=tenant)).json()["items"]
        assert [(found["topic"], found["example"]) for found in listed] == [("order.paid", {"total": 3})]
        event = {"topic": "order.paid", "data": {"total": "much"}}
        refused = await http.post("/events", json=event, headers=tenant)
        assert (refused.status_code, refused.json()["field"]) == (422, "data")
        assert refused.json()["detail"].startswith("$.total: ")
        assert (await http.delete("/event-types/order.paid", headers=tenant)).status_code == 403
        assert (await http.delete("/event-types/order.paid", headers=operator)).status_code == 204
        assert (await http.get("/event-types/order.paid", headers=tenant)).status_code == 404
        assert (await http.post("/events", json=event, headers=tenant)).status_code == 202


async def test_a_row_in_the_callers_transaction_must_fit_too(dispatchers: Dispatchers) -> None:
    """`publish_in` refuses what `publish` refuses, follows changes of the schema, and writes nothing then."""
    dispatcher = await dispatchers()
    with closing(sqlite3.connect(dispatcher.outbox.target)) as app:
        publish_in(app, "order.paid", b"[]")
        app.commit()
        await dispatcher.set_event_type("order.paid", schema=SCHEMA, validate=True)
        for data, content_type in ((b'{"total": 0}', "application/json"), (b"x", "text/plain")):
            with pytest.raises(InvalidEvent):
                publish_in(app, "order.paid", data, content_type=content_type)
        publish_in(app, "order.paid", b'{"total": 5}')
        publish_in(app, "order.sent", b"[]")
        app.commit()
        await dispatcher.set_event_type("order.paid", schema={"type": "array"}, validate=True)
        with pytest.raises(InvalidEvent):
            publish_in(app, "order.paid", b'{"total": 5}')
        await dispatcher.remove_event_type("order.paid")
        publish_in(app, "order.paid", b"{}")
        app.commit()
        assert app.execute("SELECT count(*) FROM outbox_events").fetchone() == (4,)
