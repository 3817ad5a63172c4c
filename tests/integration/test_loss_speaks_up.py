"""Without `on_loss` and without a question, every part that declares something lost says so in the log."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless import direct, multicast
from brokerless.core import Lost, MemoryJournal, Reason, Retention
from brokerless.losstest.harness.ports import Ports
from brokerless.metrics import MetricsServer
from brokerless.spark_collector import Collector, CollectorConfig, JournalIn, SpoolConfig
from brokerless.webhooks import AddressPolicy, BlockingDispatcher, DispatcherConfig, Schedule
from tests.multicast.groups import new_group

TINY = Retention(max_events=10)


def said(caplog: pytest.LogCaptureFixture, logger: str) -> list[logging.LogRecord]:
    """The warnings of one logger."""
    return [r for r in caplog.records if r.name == logger and r.levelno == logging.WARNING]


def publisher_with_evicted_events() -> direct.Publisher:
    publisher = direct.Publisher("tcp://127.0.0.1:*", source="s", journal=MemoryJournal(retention=TINY))
    for number in range(100):
        publisher.publish("t", b"%d" % number)
    publisher.flush()
    return publisher


def test_a_subscriber_logs_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Range, count and reason; with `on_loss` the application is told instead."""
    with publisher_with_evicted_events() as publisher:
        with direct.Subscriber(publisher.address, start=0) as subscriber:
            assert subscriber.receive(timeout=30) is not None
        (record,) = said(caplog, "brokerless.direct.subscriber")
        assert record.getMessage() == "lost 90 events of s (evicted, offsets 0 to 89)"
        told: list[Lost] = []
        with direct.Subscriber(publisher.address, start=0, on_loss=told.append) as subscriber:
            assert subscriber.receive(timeout=30) is not None
    assert len(told) == 1
    assert len(said(caplog, "brokerless.direct.subscriber")) == 1


def test_a_journal_logs_what_it_evicts_before_a_group_had_it(caplog: pytest.LogCaptureFixture) -> None:
    """The producer's side of the same loss; a worker that comes back logs it, too."""
    journal = MemoryJournal(retention=TINY)
    with direct.Publisher("tcp://127.0.0.1:*", source="s", journal=journal) as publisher:
        publisher.publish("t", b"first")
        with direct.Worker(publisher.address, group="g") as worker:
            delivery = worker.receive(timeout=30)
            assert delivery is not None
            delivery.ack()
        for number in range(100):
            publisher.publish("t", b"%d" % number)
        publisher.flush()
        records = said(caplog, "brokerless.core.journal")
        assert records
        assert vars(records[0])["reason"] == "evicted"
        with direct.Worker(publisher.address, group="g") as worker:
            assert worker.receive(timeout=30) is not None
    lost = sum(vars(r)["count"] for r in said(caplog, "brokerless.direct.worker"))
    assert lost == 90  # of 101, the first was acknowledged and ten are left
    evicted = journal.counters.evicted
    assert evicted >= lost  # the group's cursor moves a moment after the acknowledgement
    assert sum(vars(r)["count"] for r in said(caplog, "brokerless.core.journal")) == evicted


def test_a_multicast_subscriber_logs_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    """What the retransmit buffer no longer has."""
    group = new_group()
    with multicast.Publisher(group, "T", journal=MemoryJournal(retention=TINY)) as publisher:
        for number in range(100):
            publisher.publish("t", b"%d" % number)
        with multicast.Subscriber(group, "T", start=0) as subscriber:
            assert subscriber.receive(timeout=30) is not None
            lost = subscriber.ledger.account().lost
    assert lost > 0
    assert sum(vars(r)["count"] for r in said(caplog, "brokerless.multicast.subscriber")) == lost
    record = said(caplog, "brokerless.multicast.request_server")[0]
    assert record.getMessage().startswith("lost 90 events of T (evicted, offsets 0 to 89")


def test_a_collector_logs_what_its_inputs_declare(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Per source and reason, whatever the input."""
    source = JournalIn(path=str(tmp_path / "absent"))
    config = CollectorConfig(name="c", spool=SpoolConfig(path=str(tmp_path / "spool")), input=[source])
    with Collector(config) as collector:
        collector.lost("direct", Lost("s", 1, None, 3, 7, Reason.EVICTED))
    (record,) = said(caplog, "brokerless.collector")
    assert record.getMessage() == "lost 5 events of s (evicted, offsets 3 to 7)"


def test_the_metrics_daemon_logs_missing_datagrams(caplog: pytest.LogCaptureFixture) -> None:
    """A client's numbers show a gap: the daemon says how many."""
    with MetricsServer(udp=["127.0.0.1:0"]) as server:
        host, _, port = server.addresses["udp"][0].rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for number in (1, 2, 6):
                sock.sendto(b"_bl.aaaaaaaa:%d|g\nx:1|c" % number, (host, int(port)))
        for _ in range(100):
            server.flush_now()
            if said(caplog, "brokerless.metrics.server"):
                break
    records = said(caplog, "brokerless.metrics.server")
    assert sum(vars(r)["count"] for r in records) == 3
    assert vars(records[0])["reason"] == "in_flight"


def test_a_mirror_logs_the_holes_of_its_copy(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, ports: Ports, until: Callable[..., None]
) -> None:
    """What the publisher had evicted while the mirror was away."""
    home, own = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    journal = MemoryJournal(retention=TINY)
    with direct.Publisher(home, source="s", journal=journal) as publisher:
        with direct.Mirror(home, journal=tmp_path / "copy", serve=own) as mirror:
            publisher.publish("t", b"first")
            publisher.flush()
            until(lambda: mirror.journal.next == 1)
        for number in range(100):
            publisher.publish("t", b"%d" % number)
        publisher.flush()
        with direct.Mirror(home, journal=tmp_path / "copy", serve=own) as mirror:
            until(lambda: mirror.journal.next == 101)
            assert mirror.counters.lost == 90
    (record,) = said(caplog, "brokerless.direct.mirror")
    assert record.getMessage() == "lost 90 events of s (evicted, offsets 1 to 90)"


def test_a_dispatcher_logs_what_it_gave_up(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, until: Callable[..., None]
) -> None:
    """How many deliveries, of which outbox, and why; there is no range, they are to many endpoints."""
    config = DispatcherConfig(
        policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
        verification="none",
        schedule=Schedule(delays_s=()),
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with BlockingDispatcher(tmp_path / "outbox.sqlite", source="shop", config=config) as dispatcher:
            dispatcher.add_endpoint(f"http://127.0.0.1:{nobody.getsockname()[1]}/", ["**"])
            dispatcher.publish("t", b"1")
            until(lambda: dispatcher.counters.gave_up == 1)
    (record,) = said(caplog, "brokerless.webhooks.dispatcher")
    assert "lost 1 deliveries of" in record.getMessage()
    assert "outbox.sqlite" in vars(record)["source"]
    assert (vars(record)["reason"], vars(record)["count"]) == ("gave_up", 1)
