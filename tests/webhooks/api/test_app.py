"""The registration endpoint over HTTP: resources, tenants, limits, problems, mounting."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from brokerless.core.errors import Closed, ConfigError
from brokerless.webhooks import Dispatcher, TenantLimits, registration_app, verify
from brokerless.webhooks.api.http import MAX_ASKING

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]
ACME, OTHER, ROOT = "acme-token-0123456789", "other-token-0123456789", "root-token-0123456789"
AUTH = {ACME: "acme", OTHER: "other", ROOT: "*"}


@asynccontextmanager
async def api(
    dispatcher: Dispatcher, token: str | None = ACME, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = registration_app(dispatcher, auth=options.pop("auth", AUTH), **options)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
        yield client


async def test_life_of_an_endpoint(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """Create, list, change, publish, look at deliveries, retry, replay, rotate, test, delete: all over HTTP."""
    target, dispatcher = await targets(), await dispatchers()
    async with api(dispatcher) as http:
        made = await http.post(
            "/endpoints", json={"url": target.url, "topics": ["order.*"], "headers": {"X-Key": "v"}}
        )
        assert made.status_code == 201, made.text
        endpoint = made.json()
        where = f"/endpoints/{endpoint['id']}"
        assert made.headers["location"] == where
        assert endpoint["secret"].startswith("whsec_")
        shown = (await http.get(where)).json()
        assert "secret" not in shown
        assert (shown["state"], shown["enabled"], shown["headers"]) == ("active", True, ["x-key"])
        assert [e["id"] for e in (await http.get("/endpoints")).json()["items"]] == [endpoint["id"]]

        changed = await http.patch(where, json={"description": "mine", "concurrency": 2, "topics": ["**"]})
        assert (changed.json()["description"], changed.json()["concurrency"]) == ("mine", 2)

        sent = await http.post("/events", json={"topic": "order.paid", "data": {"a": [1, None]}})
        assert (sent.status_code, sent.json()["deliveries"]) == (202, 1)
        await eventually(lambda: target.got)
        assert target.bodies == ['{"a":[1,null]}']
        verify(target.got[0].headers, target.got[0].body, endpoint["secret"])

        async def delivered() -> bool:
            listed = (await http.get(where + "/deliveries", params={"state": "delivered"})).json()
            return len(listed["items"]) == 1

        await eventually(delivered)
        (delivery,) = (await http.get(where + "/deliveries")).json()["items"]
        assert (delivery["log"][0]["status"], delivery["log"][0]["excerpt"]) == (200, "ok")
        event = (await http.get(f"/events/{sent.json()['id']}")).json()
        assert (event["data"], event["deliveries"][0]["id"]) == ({"a": [1, None]}, delivery["id"])

        assert (await http.post(f"/deliveries/{delivery['id']}/retry")).status_code == 202
        await eventually(lambda: len(target.got) == 2)
        await eventually(delivered)
        since = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        assert (await http.post(where + "/replay", json={"since": since})).json()["deliveries"] == 0
        assert (await http.post(where + "/replay", json={"since": since, "only": "all"})).json() == {
            "deliveries": 1,
            "complete": True,
        }
        await eventually(lambda: len(target.got) == 3)

        rotated = (await http.post(where + "/rotate-secret")).json()
        assert rotated["secret"] != endpoint["secret"]
        assert rotated["previous_valid_until"] > datetime.now(UTC).isoformat()
        tested = (await http.post(where + "/test")).json()
        assert (tested["delivered"], tested["status"]) == (True, 200)
        verify(target.got[-1].headers, target.got[-1].body, rotated["secret"])

        disabled = await http.patch(where, json={"enabled": False})
        assert (disabled.json()["state"], disabled.json()["enabled"]) == ("disabled", False)
        assert (await http.post(where + "/enable")).json()["state"] == "active"
        assert (await http.delete(where)).status_code == 204
        assert (await http.get(where)).status_code == 404


async def test_filters_and_paging(targets: Targets, dispatchers: Dispatchers, eventually: Eventually) -> None:
    """Deliveries are filtered by state, topic and time, and pages follow each other without gap or repetition."""
    target = await targets(lambda got, _n: 415 if got.body == b"7" else 200)
    dispatcher = await dispatchers()
    async with api(dispatcher) as http:
        made = (await http.post("/endpoints", json={"url": target.url, "topics": ["**"]})).json()
        where = f"/endpoints/{made['id']}/deliveries"
        for number in range(12):
            await http.post("/events", json={"topic": f"t{number % 3}", "data": number})
        await eventually(lambda: dispatcher.counters.delivered + dispatcher.counters.gave_up == 12)
        seen, after = [], None
        while True:
            page = (await http.get(where, params={"limit": 5} | ({"after": after} if after else {}))).json()
            seen += [delivery["id"] for delivery in page["items"]]
            after = page["next"]
            if after is None:
                break
        # An id begins with its milliseconds; what follows is random.
        times = [delivery.removeprefix("msg_")[:12] for delivery in seen]
        assert times == sorted(times, reverse=True)
        assert len(set(seen)) == 12
        dead = (await http.get(where, params={"state": "gave_up"})).json()["items"]
        assert [delivery["status"] for delivery in dead] == [415]
        assert len((await http.get(where, params={"topic": "t1"})).json()["items"]) == 4
        future = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        assert (await http.get(where, params={"since": future})).json()["items"] == []
        assert len((await http.get(where, params={"until": future})).json()["items"]) == 12
        assert len((await http.get("/endpoints", params={"limit": 1})).json()["items"]) == 1


async def test_endpoints_by_page_with_what_waits(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A page has as many endpoints of the tenant as asked for, each with how much waits and since when."""
    broken, fine, dispatcher = await targets(lambda _got, _n: 500), await targets(), await dispatchers()
    async with api(dispatcher) as http, api(dispatcher, OTHER) as other:
        waits = (await http.post("/endpoints", json={"url": broken.url, "topics": ["**"]})).json()["id"]
        idle = (await http.post("/endpoints", json={"url": fine.url, "topics": ["**"]})).json()["id"]
        await other.post("/endpoints", json={"url": fine.url, "topics": ["**"]})
        before = datetime.now(UTC)
        for _ in range(3):
            await http.post("/events", json={"topic": "t"})
        await eventually(lambda: dispatcher.counters.delivered == 3 and dispatcher.counters.failures >= 3)
        listed, after = {}, None
        for _ in range(2):
            params = {"limit": 1} | ({"after": after} if after else {})
            page = (await http.get("/endpoints", params=params)).json()
            assert len(page["items"]) == 1
            listed |= {item["id"]: item for item in page["items"]}
            after = page["next"]
        assert after is None
        assert (listed[idle]["backlog"], listed[idle]["waiting_since"]) == (0, None)
        assert listed[waits]["backlog"] == 3
        first = (await http.get("/deliveries", params={"endpoint": waits})).json()["items"][-1]
        assert listed[waits]["waiting_since"] == first["created"]
        assert before <= datetime.fromisoformat(listed[waits]["waiting_since"]) <= datetime.now(UTC)


async def test_tenants_see_only_their_own(targets: Targets, dispatchers: Dispatchers) -> None:
    """Another tenant's endpoint, deliveries and events are not found; the operator sees all and acts for any."""
    target, dispatcher = await targets(), await dispatchers()
    async with api(dispatcher) as acme, api(dispatcher, OTHER) as other, api(dispatcher, ROOT) as root:
        made = (await acme.post("/endpoints", json={"url": target.url, "topics": ["**"]})).json()
        sent = (await acme.post("/events", json={"topic": "t", "data": 1})).json()
        where = f"/endpoints/{made['id']}"
        for method, path in [
            ("GET", where),
            ("PATCH", where),
            ("DELETE", where),
            ("GET", where + "/deliveries"),
            ("POST", where + "/test"),
            ("POST", where + "/enable"),
            ("POST", where + "/verify"),
            ("POST", where + "/rotate-secret"),
            ("GET", f"/events/{sent['id']}"),
            ("POST", f"/deliveries/{sent['id']}.{made['id']}/retry"),
        ]:
            body = {"json": {}} if method == "PATCH" else {}
            answer = await other.request(method, path, **body)  # type: ignore[arg-type]
            assert answer.status_code == 404, (method, path, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
        replayed = await other.post(where + "/replay", json={"since": "2020-01-01T00:00:00Z"})
        assert replayed.status_code == 404
        assert (await other.get("/endpoints")).json()["items"] == []
        assert (await other.post("/events", json={"topic": "t", "data": 1})).json()["deliveries"] == 0
        assert (await other.post("/events?tenant=acme", json={"topic": "t"})).status_code == 403
        assert (await root.get(where)).status_code == 200
        assert len((await root.get("/endpoints")).json()["items"]) == 1
        assert (await root.get("/endpoints?tenant=other")).json()["items"] == []
        assert (await root.post("/events?tenant=acme", json={"topic": "t"})).json()["deliveries"] == 1


async def test_tokens(dispatchers: Dispatchers) -> None:
    """No token, a wrong one or another scheme: 401 with a challenge; health needs none. How much all tenants do is for
    the operator's eyes.
    """
    dispatcher = await dispatchers()
    async with api(dispatcher, None) as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Basic {ACME}"},
            {"Authorization": ACME},
        ):
            answer = await http.get("/endpoints", headers=headers)
            assert answer.status_code == 401
            assert "Bearer" in answer.headers["www-authenticate"]
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        # What it does not look at it does not tell.
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        assert (await http.get("/readyz")).json() == {"status": "ready", "delivering": True}
        assert (await http.get("/metrics")).status_code == 401
        answers = [
            await http.get("/metrics", headers={"Authorization": f"Bearer {token}"}) for token in (ACME, ROOT)
        ]
        assert [answer.status_code for answer in answers] == [403, 200]
        metrics = answers[1].text
        assert "brokerless_webhooks_dispatcher_published_total 0" in metrics
        assert "brokerless_webhooks_dispatcher_pending 0" in metrics

    async def ask(request: Any) -> str | None:
        return "acme" if request.headers.get("x-user") == "anna" else None

    async with api(dispatcher, None, auth=ask) as http:
        assert (await http.get("/endpoints")).status_code == 401
        assert (await http.get("/endpoints", headers={"X-User": "anna"})).status_code == 200
    for bad in ({}, {"short": "acme"}, {"x" * 30: "no spaces"}):
        with pytest.raises(ConfigError):
            registration_app(dispatcher, auth=bad)


async def test_limits(targets: Targets, dispatchers: Dispatchers) -> None:
    """Endpoints, pending deliveries and publishing rate are limited per tenant, and 429 comes with Retry-After."""
    target = await targets(lambda _got, _number: 500)
    dispatcher = await dispatchers()
    limits = {"acme": TenantLimits(max_endpoints=1, max_pending=3), "other": TenantLimits(publish_per_s=2)}
    async with api(dispatcher, limits=limits) as http:
        body = {"url": target.url, "topics": ["**"]}
        assert (await http.post("/endpoints", json=body)).status_code == 201
        assert (await http.post("/endpoints", json=body)).status_code == 409
        codes = [(await http.post("/events", json={"topic": "t"})).status_code for _ in range(5)]
        assert codes == [202, 202, 202, 429, 429]
        http.headers["Authorization"] = f"Bearer {OTHER}"
        answers = [await http.post("/events", json={"topic": "t"}) for _ in range(4)]
        assert [answer.status_code for answer in answers].count(429) >= 1
        assert answers[-1].headers["retry-after"] == "1"


async def test_replay_and_retry_keep_to_the_limit_of_a_tenant(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """What a tenant sends again counts as what it publishes: over all its endpoints no more waits than it may have, so
    that it cannot fill the outbox for others. The operator is not bound.
    """
    target, dispatcher = await targets(), await dispatchers()
    since = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    async with api(dispatcher, limits=TenantLimits(max_pending=10)) as http:
        body = {"url": target.url, "topics": ["**"]}
        made = [(await http.post("/endpoints", json=body)).json()["id"] for _ in range(3)]
        for number in range(8):
            await dispatcher.publish("t", b"%d" % number, tenant="acme")
        await eventually(lambda: dispatcher.counters.delivered == 24)
        dispatcher.deliverer.set_shards(())  # nothing is delivered for a moment
        again = {"since": since, "only": "all"}
        answers = [(await http.post(f"/endpoints/{name}/replay", json=again)).json() for name in made]
        assert answers == [
            {"deliveries": 8, "complete": True},
            {"deliveries": 2, "complete": False},
            {"deliveries": 0, "complete": False},
        ]
        page = await http.get("/deliveries", params={"state": "delivered"})
        ids = [delivery["id"] for delivery in page.json()["items"]]
        assert (await http.post(f"/deliveries/{ids[0]}/retry")).status_code == 429
        assert (await http.post("/retries", json={"deliveries": ids})).status_code == 429
        assert dispatcher.outbox.backlog.total == 10
        operator = {"Authorization": f"Bearer {ROOT}"}
        assert (await http.post(f"/deliveries/{ids[0]}/retry", headers=operator)).status_code == 202


async def test_tests_of_a_tenant_are_bounded(targets: Targets, dispatchers: Dispatchers) -> None:
    """However many tests of an endpoint that hangs a tenant asks for at once: few wait for its answer, the rest are
    refused, and another tenant's are not.
    """
    waiting = asyncio.Event()

    async def hang(_writer: asyncio.StreamWriter) -> None:
        await waiting.wait()

    hung, fine = await targets(lambda _got, _number: hang), await targets()
    dispatcher = await dispatchers(attempt_timeout_s=10.0)
    async with api(dispatcher) as http, api(dispatcher, OTHER) as other:
        made = await http.post("/endpoints", json={"url": hung.url, "topics": ["**"]})
        where = f"/endpoints/{made.json()['id']}/test"
        tests = [asyncio.create_task(http.post(where)) for _ in range(100)]
        made = await other.post("/endpoints", json={"url": fine.url, "topics": ["**"]})
        tested = await other.post(f"/endpoints/{made.json()['id']}/test")
        assert tested.json()["delivered"] is True
        answers = [answer.status_code for answer in await asyncio.gather(*tests)]
        assert (answers.count(200), answers.count(429)) == (MAX_ASKING, 100 - MAX_ASKING)
        waiting.set()
        assert (await http.post(where)).status_code == 200


async def test_lists_of_a_tenant_take_turns(tmp_path: Path, dispatchers: Dispatchers) -> None:
    """However many slow lists a tenant asks for at once: what another one asks for is read before most of them."""
    dispatcher = await dispatchers()
    numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 100000) "
    with closing(sqlite3.connect(tmp_path / "outbox.sqlite", timeout=30)) as own:
        own.execute(
            "INSERT INTO outbox_events (id, tenant, topic, time, data, content_type, routed) "
            + numbers
            + "SELECT printf('msg_%032x', x), 'acme', 't', x, 'x', 'text/plain', 2 FROM c"
        )
        own.commit()
    done: list[int] = []
    async with api(dispatcher) as http, api(dispatcher, OTHER) as other:

        async def look(path: str) -> None:
            answer = await http.get(path)
            done.append(answer.status_code)

        paths = ["/account", "/events?topic=none", "/deliveries?topic=none"] * 20
        lists = [asyncio.create_task(look(path)) for path in paths]
        while not done:
            await asyncio.sleep(0.001)
        assert (await other.get("/events")).status_code == 200
        assert len(done) < 30, "another tenant's list waited behind them"
        await asyncio.gather(*lists)
        assert set(done) == {200}


async def test_full_outbox_is_429(targets: Targets, dispatchers: Dispatchers) -> None:
    """on_full="reject" shows at POST /events as 429 with Retry-After."""
    target = await targets(lambda _got, _number: 500)
    dispatcher = await dispatchers(max_pending=2)
    async with api(dispatcher) as http:
        await http.post("/endpoints", json={"url": target.url, "topics": ["**"]})
        answers = [await http.post("/events", json={"topic": "t"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert int(answers[2].headers["retry-after"]) >= 1


async def test_idempotency_key(dispatchers: Dispatchers) -> None:
    """The same key again answers 200 with the first id; with another event 409."""
    dispatcher = await dispatchers()
    async with api(dispatcher) as http:
        first = await http.post("/events", json={"topic": "t", "data": 1}, headers={"Idempotency-Key": "k"})
        again = await http.post("/events", json={"topic": "t", "data": 1}, headers={"Idempotency-Key": "k"})
        other = await http.post("/events", json={"topic": "t", "data": 2}, headers={"Idempotency-Key": "k"})
        assert (first.status_code, again.status_code, other.status_code) == (202, 200, 409)
        assert first.json()["id"] == again.json()["id"]
        assert (
            await http.post("/events", json={"topic": "t"}, headers={"Idempotency-Key": ""})
        ).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, ""),
        ({"url": "https://example.com", "topics": []}, 400, "topics"),
        ({"url": "https://example.com", "topics": ["a b"]}, 400, "topics[0]"),
        ({"url": "https://example.com", "topics": ["**"], "concurrency": 0}, 400, "concurrency"),
        ({"url": "https://example.com", "topics": ["**"], "surprise": 1}, 400, ""),
        ({"url": "https://example.com", "topics": ["**"], "headers": {"Host": "x"}}, 400, "headers"),
        ([], 400, ""),
        ({"url": "https://example.com", "topics": "**"}, 400, "topics"),
        ({"url": "https://example.com", "topics": ["**"], "rate": -1}, 400, "rate"),
        ({"url": "https://example.com", "topics": ["**"], "concurrency": 1.5}, 400, "concurrency"),
        ({"url": "https://example.com", "topics": ["**"], "mode": "odd"}, 400, "mode"),
        ({"url": "h", "topics": ["**"]}, 400, "url"),
        ({"url": "ftp://example.com", "topics": ["**"]}, 400, "url"),
        ({"url": "http://10.0.0.1/", "topics": ["**"]}, 422, "url"),
        ({"url": "http://user@example.com/", "topics": ["**"]}, 400, "url"),
        ({"url": "http://example.com:99999/", "topics": ["**"]}, 422, "url"),
    ],
)
async def test_problems_name_the_field(dispatchers: Dispatchers, body: Any, status: int, field: str) -> None:
    """What is wrong with a registration is told as problem+json with the field's name."""
    dispatcher = await dispatchers()
    async with api(dispatcher) as http:
        answer = await http.post("/endpoints", json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert not any(word in answer.text for word in ("regex", "`", "xpected")), "a person reads this"
    if field:
        assert answer.json()["field"] == field


async def test_a_word_that_is_not_offered_is_refused_with_those_that_are(dispatchers: Dispatchers) -> None:
    """In a registration, a change, a query and the library, whether the field may be left out or not."""
    dispatcher = await dispatchers()
    good = {"url": "https://example.com", "topics": ["**"]}
    async with api(dispatcher) as http:
        for answer, field, words in (
            (await http.post("/endpoints", json=good | {"mode": "odd"}), "mode", "binary, structured, batch"),
            (
                await http.patch("/endpoints/ep_" + "a" * 16, json={"mode": "odd"}),
                "mode",
                "binary, structured, batch",
            ),
            (
                await http.post("/endpoints", json=good | {"verification": "odd"}),
                "verification",
                "handshake, challenge",
            ),
            (
                await http.get("/deliveries?state=odd"),
                "state",
                "pending, delivered, gave_up, evicted, withdrawn, skipped",
            ),
        ):
            assert answer.status_code == 400
            assert (answer.json()["field"], answer.json()["detail"]) == (
                field,
                f"must be one of {words}, not 'odd'",
            )
        odd = "odd - at `$.url`"
        found = (await http.post("/endpoints", json=good | {"mode": odd})).json()
        assert (found["field"], found["detail"]) == (
            "mode",
            f"must be one of binary, structured, batch, not '{odd}'",
        )
    with pytest.raises(ConfigError, match="mode: must be one of binary, structured, batch, not 'odd'"):
        await dispatcher.add_endpoint("https://example.com", ["**"], mode="odd")


async def test_wrong_requests(dispatchers: Dispatchers) -> None:
    """Wrong methods, paths, media types, queries and bodies get their own 4xx, never a 5xx."""
    dispatcher = await dispatchers(max_event_bytes=1000)
    async with api(dispatcher) as http:
        assert (await http.put("/endpoints")).status_code == 405
        assert (await http.get("/nowhere")).status_code == 404
        assert (
            await http.post("/endpoints", content=b"{", headers={"content-type": "application/json"})
        ).status_code == 400
        assert (
            await http.post("/endpoints", content=b"\xff", headers={"content-type": "application/json"})
        ).status_code == 400
        assert (await http.post("/endpoints", content=b"{}")).status_code == 415
        broken = b'{"topic":"t","data":"\xff\xfe"}'
        refused = await http.post("/events", content=broken, headers={"content-type": "application/json"})
        assert (refused.status_code, "UTF-8" in refused.json()["detail"]) == (400, True)
        assert (await http.get("/endpoints?limit=0")).status_code == 400
        assert (await http.get("/endpoints?limit=5&limit=6")).status_code == 400
        assert (await http.get("/endpoints/ep_x/deliveries?since=yesterday")).status_code == 400
        assert (await http.post("/deliveries/x/retry")).status_code == 404
        assert (await http.get("/events/%00")).status_code == 404
        assert (await http.post("/events", json={"topic": "t", "data": "x" * 10_000})).status_code == 413
        assert (await http.post("/events", json={"topic": "t", "data": "x" * 1100})).status_code == 422
        assert (await http.post("/events", json={"topic": "brokerless.x"})).status_code == 422
        both = {"topic": "t", "data": 1, "data_base64": "AAAA"}
        assert (await http.post("/events", json=both)).status_code == 422
        binary = {"topic": "t", "data_base64": "AAEC", "content_type": "image/png"}
        sent = (await http.post("/events", json=binary)).json()
        assert (await http.get(f"/events/{sent['id']}")).json()["data_base64"] == "AAEC"


async def test_mounted(tmp_path: Path, targets: Targets, make_config: Any, eventually: Eventually) -> None:
    """Mounted without a lifespan it says what is missing; with `dispatcher.lifespan` it works, docs included."""
    dispatcher = Dispatcher(tmp_path / "o.sqlite", config=make_config())
    app = registration_app(dispatcher, auth=AUTH)
    forgotten = Starlette(routes=[Mount("/hooks", app)])
    headers = {"Authorization": f"Bearer {ACME}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(forgotten), base_url="http://x", headers=headers
    ) as http:
        ready = await http.get("/hooks/readyz")
        assert (ready.status_code, "lifespan" in ready.json()["detail"]) == (503, True)
        sent = await http.post("/hooks/events", json={"topic": "t"})
        assert (sent.status_code, "lifespan" in sent.json()["detail"]) == (503, True)

    outer = Starlette(routes=[Mount("/hooks", app)], lifespan=dispatcher.lifespan)
    target = await targets()
    async with (
        outer.router.lifespan_context(outer),
        httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://x", headers=headers) as http,
    ):
        made = await http.post("/hooks/endpoints", json={"url": target.url, "topics": ["**"]})
        assert made.headers["location"].startswith("/hooks/endpoints/ep_")
        await http.post("/hooks/events", json={"topic": "t"})
        await eventually(lambda: target.got)
        assert (await http.get("/hooks/openapi.json")).json()["servers"] == [{"url": "/hooks"}]
    assert not dispatcher.running


async def test_broken_database_is_503(dispatchers: Dispatchers) -> None:
    """When the outbox cannot be written, readiness and publishing answer 503, and recover by themselves."""
    dispatcher = await dispatchers()

    def limit(pages: int) -> Callable[[Any], Any]:
        return lambda store: store.session.execute(f"PRAGMA max_page_count={pages}")

    async with api(dispatcher) as http:
        await dispatcher.outbox.call_async(limit(1))
        codes = set()
        for _ in range(30):
            answer = await http.post("/events", json={"topic": "t", "data": "x" * 5000})
            codes.add(answer.status_code)
            if answer.status_code == 503:
                break
        assert 503 in codes
        assert (await http.get("/readyz")).status_code == 503
        assert "sqlite" not in answer.text.lower()
        await dispatcher.outbox.call_async(limit(10**6))
        await asyncio.sleep(0)
        assert (await http.post("/events", json={"topic": "t"})).status_code == 202
        assert (await http.get("/readyz")).status_code == 200


async def test_lists_over_all_endpoints(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """GET /deliveries and GET /events over all endpoints of a tenant, by pages; several deliveries are retried at once;
    the account adds up.
    """
    target = await targets(lambda got, _n: 415 if got.path.endswith("bad") else 200)
    dispatcher = await dispatchers()
    async with api(dispatcher) as http, api(dispatcher, OTHER) as other:
        for path in ("good", "bad"):
            await http.post("/endpoints", json={"url": f"{target.url}/{path}", "topics": ["**"]})
        for number in range(7):
            await http.post("/events", json={"topic": "t", "data": number})
        await other.post("/events", json={"topic": "t", "data": "theirs"})
        await eventually(lambda: dispatcher.counters.delivered + dispatcher.counters.gave_up == 14)
        for path, count in (("/deliveries", 14), ("/events", 7)):
            seen, after = [], None
            while True:
                page = (
                    await http.get(path, params={"limit": 4} | ({"after": after} if after else {}))
                ).json()
                seen += [item["id"] for item in page["items"]]
                after = page["next"]
                if after is None:
                    break
            assert len(seen) == len(set(seen)) == count
        assert len((await other.get("/deliveries")).json()["items"]) == 0
        assert len((await other.get("/events")).json()["items"]) == 1
        assert (await other.get("/events?tenant=acme")).status_code == 403
        dead = [item["id"] for item in (await http.get("/deliveries?state=gave_up")).json()["items"]]
        assert len(dead) == 7
        theirs = await other.post("/retries", json={"deliveries": dead})
        assert (theirs.json()["retried"], len(theirs.json()["refused"])) == (0, 7)
        assert (await http.post("/retries", json={"deliveries": dead})).json() == {
            "retried": 7,
            "refused": {},
        }
        await eventually(lambda: dispatcher.counters.gave_up == 14)
        account = (await http.get("/account")).json()
        assert (account["events"], account["accepted"], account["lost"]) == (7, 14, {"gave_up": 7})
        one = await http.get(f"/deliveries/{dead[0]}")
        assert (one.status_code, (await other.get(f"/deliveries/{dead[0]}")).status_code) == (200, 404)


async def test_a_secret_of_your_own(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually
) -> None:
    """A secret that the caller brings signs, at registration and at rotation; svix names are sent when asked for."""
    target, dispatcher = await targets(), await dispatchers()
    first, second = "whsec_" + "A" * 32, "whsec_" + "B" * 32
    async with api(dispatcher) as http:
        body = {"url": target.url, "topics": ["**"], "secret": first, "header_style": "svix"}
        made = (await http.post("/endpoints", json=body)).json()
        assert made["secret"] == first
        rotated = await http.post(f"/endpoints/{made['id']}/rotate-secret", json={"secret": second})
        assert rotated.json()["secret"] == second
        await http.post("/events", json={"topic": "t"})
        await eventually(lambda: target.got)
        got = target.got[0]
        svix_only = {name: value for name, value in got.headers.items() if not name.startswith("webhook-")}
        for secret in (first, second):
            verify(got.headers, got.body, secret)
            verify(svix_only, got.body, secret)
        weak = {"url": target.url, "topics": ["**"], "secret": "whsec_QUJD"}
        assert (await http.post("/endpoints", json=weak)).status_code == 400


async def test_portal_links_and_frames(tmp_path: Path, dispatchers: Dispatchers) -> None:
    """A link's token is its tenant's and nobody else's; no link without an open outbox; only named origins embed."""
    with pytest.raises(Closed):
        Dispatcher(tmp_path / "other.sqlite").portal_link("acme")
    dispatcher = await dispatchers()
    with pytest.raises(ConfigError):
        dispatcher.portal_link("*")
    token = dispatcher.portal_link("acme", base="https://hooks.example.com/").partition("#token=")[2]
    async with api(dispatcher, token, embed_in=["https://app.example.com"]) as http:
        assert (await http.get("/endpoints")).status_code == 200
        assert (await http.get("/endpoints", params={"tenant": "other"})).status_code == 403
        policy = (await http.get("/")).headers["content-security-policy"]
        assert policy.endswith("frame-ancestors 'self' https://app.example.com")
    expired = dispatcher.portal_link("acme", valid_s=-1).partition("#token=")[2]
    async with api(dispatcher, expired) as http:
        assert (await http.get("/endpoints")).status_code == 401
        assert (await http.get("/")).headers["content-security-policy"].endswith("frame-ancestors 'self'")
    for wrong in ("app.example.com", "https://x; script-src *", "javascript:", "https://a b"):
        with pytest.raises(ConfigError):
            registration_app(dispatcher, auth=AUTH, embed_in=[wrong])
