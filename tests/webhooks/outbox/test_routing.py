"""Where events go, by topics and filters, and what a tenant's patterns may cost the others."""

import time

import pytest

from brokerless.core.errors import ConfigError
from brokerless.webhooks.admin.endpoints import check_endpoint
from brokerless.webhooks.delivery.ssrf import AddressGuard, AddressPolicy
from brokerless.webhooks.models import Endpoint, PayloadFilter
from brokerless.webhooks.outbox import routing
from brokerless.webhooks.outbox.routing import Routes
from brokerless.webhooks.rules import MAX_GLOBS, MAX_PATTERNS

JSON = "application/json"


def endpoint(number: int, topics: list[str], *, tenant: str = "acme", **fields: object) -> Endpoint:
    return Endpoint(
        id=f"ep_{number}", tenant=tenant, url="https://example.com/", topics=topics, state="active", **fields
    )


@pytest.mark.parametrize(
    ("pattern", "topic"),
    [
        (".".join(["**"] * 84), ".".join(["a"] * 128)),
        (".".join(["**", "*"] * 40), ".".join(["a"] * 128)),
        (".".join(["**", "a"] * 40), ".".join(["a"] * 128)),
    ],
)
def test_patterns_made_to_be_slow(pattern: str, topic: str) -> None:
    """A tenant with as many endpoints and patterns as it may have, each as laborious as can be: the writer finds the
    targets of an event in a moment. One by one they took minutes.
    """
    routes = Routes(
        endpoint(number, [f"{pattern}.{number}.{other}"[-255:] for other in range(MAX_PATTERNS)])
        for number in range(100)
    )
    began = time.process_time()
    assert routes.route("acme", topic, b"{}", JSON).active == ()
    assert time.process_time() - began < 5


def test_words_with_text_around_a_star_are_bounded() -> None:
    """They are the only ones that are compared one by one."""
    guard = AddressGuard(AddressPolicy())
    topics = [f"a{number}*" for number in range(MAX_GLOBS)]
    check_endpoint(endpoint(1, [*topics, "a.*.**", topics[0]]), guard)
    with pytest.raises(ConfigError, match="topics"):
        check_endpoint(endpoint(1, [*topics, "b*"]), guard)


def test_a_change_concerns_its_own_tenant() -> None:
    """What is known about other tenants' topics stays known."""
    routes = Routes([endpoint(1, ["t"]), endpoint(2, ["t"], tenant="other")])
    before = {name: routes.route(name, "t", b"", JSON) for name in ("acme", "other")}
    routes.put(endpoint(3, ["**"]))
    assert routes.route("other", "t", b"", JSON) is before["other"]
    assert [found.id for found in routes.route("acme", "t", b"", JSON).active] == ["ep_1", "ep_3"]
    routes.remove("ep_3")
    assert routes.route("acme", "t", b"", JSON) == before["acme"]
    assert routes.route("nobody", "t", b"", JSON).active == ()


def test_filters_follow_their_endpoint() -> None:
    """Changed filters are the ones that count, and 1 is not true."""
    routes = Routes([endpoint(1, ["t"], filters=[PayloadFilter(path="$.a", equals=1)])])
    assert routes.route("acme", "t", b'{"a": 1}', JSON).active
    assert not routes.route("acme", "t", b'{"a": true}', JSON).active
    routes.put(endpoint(1, ["t"], filters=[PayloadFilter(path="$.a", equals=True)]))
    assert not routes.route("acme", "t", b'{"a": 1}', JSON).active
    assert routes.route("acme", "t", b'{"a": true}', JSON).active
    routes.put(endpoint(1, ["t"]))
    assert routes.route("acme", "t", b"no JSON", JSON).active


def test_topics_with_ids_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of answers that are kept is bounded over all tenants."""
    monkeypatch.setattr(routing, "MAX_CACHED", 10)
    routes = Routes(endpoint(number, ["**"], tenant=f"t{number}") for number in range(5))
    for number in range(100):
        assert len(routes.route(f"t{number % 5}", f"order.n{number}", b"", JSON).active) == 1
        assert sum(map(len, routes._cache.values())) == routes._cached <= 10
        if number % 7 == 0:
            routes.remove("ep_0")
            routes.put(endpoint(0, ["**"], tenant="t0"))
