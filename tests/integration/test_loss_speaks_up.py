"""Without `on_loss` and without a question, every part that declares something lost says so in the log."""

import logging
from pathlib import Path

import pytest

from brokerless import direct, multicast
from brokerless.core import Lost, MemoryJournal, Reason, Retention
from brokerless.metrics import MetricsServer
from brokerless.spark_collector import Collector, CollectorConfig, JournalIn, SpoolConfig
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
    import socket

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
