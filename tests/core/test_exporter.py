"""`/metrics` of a process, by one argument of its components."""

import os
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from brokerless import direct, multicast
from brokerless.core import MemoryJournal
from brokerless.core.errors import ConfigError
from brokerless.core.exporter import Exporter
from brokerless.losstest.harness.ports import Ports
from tests.multicast.groups import new_group


def scrape(address: str) -> dict[tuple[str, str], float]:
    """Every sample by its name and the component's kind."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(answer.read().decode())
    return {(s.name, s.labels["kind"]): s.value for f in families for s in f.samples}


def test_direct_components_share_a_page(ports: Ports, until: Callable[..., None]) -> None:
    """Publisher, subscriber and worker of one process at one address; figures equal the ledger; closed ones leave."""
    where = f"127.0.0.1:{ports.take()}"
    with direct.Publisher(
        "tcp://127.0.0.1:*", source="p", journal=MemoryJournal(), metrics=where
    ) as publisher:
        assert publisher.metrics_address == f"http://{where}/metrics"
        with (
            direct.Subscriber(publisher.address, start="oldest", metrics=where) as subscriber,
            direct.Worker(publisher.address, group="g", metrics=where) as worker,
        ):
            for number in range(7):
                publisher.publish("t", b"%d" % number)
            for _ in range(7):
                assert subscriber.receive(timeout=30) is not None
            assert subscriber.receive(timeout=0.1) is None  # the last one is processed
            delivery = worker.receive(timeout=30)
            assert delivery is not None
            delivery.ack()
            found = scrape(worker.metrics_address)
            assert found["brokerless_direct_publisher_accepted_total", "direct.publisher"] == 7
            assert found["brokerless_direct_subscriber_events_total", "direct.subscriber"] == 7
            assert found["brokerless_lag", "direct.subscriber"] == 0
            assert found["brokerless_lost", "direct.subscriber"] == subscriber.ledger.account().lost
            assert found["brokerless_up", "direct.worker"] == 1
        assert {kind for _, kind in scrape(publisher.metrics_address)} == {"direct.publisher"}
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{where}/metrics", timeout=5)
    assert Exporter._open == {}


def test_multicast_components(until: Callable[..., None]) -> None:
    """Publisher, subscriber and request server, each with a port of its own choice."""
    group = new_group()
    with (
        multicast.Publisher(group, "T", metrics="127.0.0.1:0") as publisher,
        multicast.Subscriber(group, "T", start="oldest", metrics="127.0.0.1:0") as subscriber,
        multicast.RequestServer(
            publisher.journal, "T", "127.0.0.1:0", announce=False, metrics="127.0.0.1:0"
        ) as server,
    ):
        publisher.publish("t", b"x")
        assert subscriber.receive(timeout=30) is not None
        addresses = {publisher.metrics_address, subscriber.metrics_address, server.metrics_address}
        assert len(addresses) == 3
        kinds = {kind for address in addresses for _, kind in scrape(address)}
        assert kinds == {"multicast.publisher", "multicast.subscriber", "multicast.request_server"}


@pytest.mark.parametrize("where", ["9464", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:²", ":9464"])
def test_bad_addresses_are_refused(where: str) -> None:
    """And the component that could not be made leaves nothing behind."""
    with pytest.raises(ConfigError, match=r"metrics: .*(host:port|names no host)"):
        direct.Publisher("tcp://127.0.0.1:*", source="p", metrics=where)


def test_a_port_in_use_is_named(ports: Ports) -> None:
    """And the publisher can be made again with another: its address and journal are free."""
    import socket

    address = f"tcp://127.0.0.1:{ports.take()}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"metrics: 127\.0\.0\.1:\d+ cannot be used"):
            direct.Publisher(address, source="p", metrics=where)
    with direct.Publisher(address, source="p", metrics="127.0.0.1:0") as publisher:
        assert scrape(publisher.metrics_address)


def test_a_forked_child_does_not_serve_for_its_parent() -> None:
    """It starts without exporters, and ends without closing the parent's."""
    with direct.Publisher("tcp://127.0.0.1:*", source="p", metrics="127.0.0.1:0") as publisher:
        child = os.fork()
        if child == 0:
            os._exit(0 if Exporter._open == {} else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert scrape(publisher.metrics_address)
