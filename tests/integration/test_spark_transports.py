"""All four transports end to end: real sockets, one collector that goes away and returns, a real SparkSession."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brokerless import direct, multicast
from brokerless.core import MemoryJournal, Retention
from brokerless.losstest.evidence import reader, witness
from brokerless.metrics import MetricsServer, StatsClient
from brokerless.spark_collector import (
    Collector,
    CollectorConfig,
    DirectIn,
    JournalIn,
    Lander,
    LedgerTable,
    MulticastIn,
    SparkInput,
    SpoolConfig,
    WebhooksIn,
    Windows,
    run_stream,
)
from brokerless.spark_collector.jobs.loss import totals
from brokerless.spark_collector.jobs.metric_series import metric_series
from brokerless.spark_collector.jobs.views import read_table
from brokerless.webhooks import AddressPolicy, BlockingDispatcher, DispatcherConfig, Schedule
from tests.conftest import Until
from tests.integration.spark_processes import free_port
from tests.multicast.conftest import free_port as free_group_port
from tests.spark_collector.spools import spooled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(240)]
PER_ROUND = 200
ROUNDS = 3


class Senders:
    """One producer per transport."""

    def __init__(self, stack: contextlib.ExitStack, tmp_path: Path) -> None:
        keep = Retention(max_bytes=1 << 26)
        self.direct = stack.enter_context(
            direct.Publisher("tcp://127.0.0.1:0", source="direct", journal=MemoryJournal(retention=keep))
        )
        port = free_group_port()
        self.group = f"239.255.77.{port % 250}:{port}"
        self.multicast = stack.enter_context(
            multicast.Publisher(self.group, "MCAST", source="mcast", journal=MemoryJournal(retention=keep))
        )
        self.listen = f"127.0.0.1:{free_port()}"
        config = DispatcherConfig(
            policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
            verification="none",
            # The collector is away for a moment: try again soon, for a while.
            schedule=Schedule(delays_s=(0.2,) * 300),
            synchronous="normal",
        )
        self.webhooks = stack.enter_context(BlockingDispatcher(tmp_path / "outbox.sqlite", config=config))
        _, self.secret = self.webhooks.add_endpoint(f"http://{self.listen}/", ["**"])
        self.journal = tmp_path / "metrics-journal"
        self.statsd = MetricsServer(udp=["127.0.0.1:0"], backends=[f"journal:{self.journal}"], flush_s=0.5)
        self.statsd.start()
        stack.callback(self.statsd.stop)
        host, _, statsd_port = self.statsd.addresses["udp"][0].rpartition(":")
        self.client = stack.enter_context(StatsClient(host, int(statsd_port), flush_s=0.05, heartbeat_s=0.2))
        self.sent: Counter[str] = Counter()
        # What the producers' side says in files of its own, for the comparison at the end.
        self.files = {
            name: tmp_path / f"{name}.witness" for name in ("direct", "multicast", "webhooks", "hits")
        }
        self._witnesses = {name: witness.Witness(path) for name, path in self.files.items()}
        for one in self._witnesses.values():
            stack.callback(one.close)

    def send(self, count: int) -> None:
        """So many events on every transport."""
        for i in range(count):
            self._accepted("direct", lambda n: self.direct.publish("ab"[n % 2], b'{"n": %d}' % n))
            self._accepted("multicast", lambda n: self.multicast.publish("ab"[n % 2], b'{"n": %d}' % n))
            self._accepted("hits", lambda n: self.client.incr("hits"))
            if i % 10 == 0:
                self._accepted("webhooks", lambda n: self.webhooks.publish("order.paid", b'{"n": %d}' % n))

    def _accepted(self, name: str, publish: Callable[[int], object]) -> None:
        number = self.sent[name]
        publish(number)
        self._witnesses[name].write(witness.Kind.ACCEPTED, number)
        self.sent[name] += 1

    def witnessed(self, name: str) -> Counter[int]:
        """The numbers of the events that were accepted, read back from the file."""
        return Counter(r.n for r in reader.read(self.files[name]).records if r.kind == witness.Kind.ACCEPTED)


class Bystander:
    """An ordinary consumer, which knows nothing of the collector: its ledger, and what it wrote down itself."""

    def __init__(self, subscriber: direct.Subscriber | multicast.Subscriber) -> None:
        self.subscriber = subscriber
        self.seen: Counter[tuple[str, int, str, int]] = Counter()

    def has(self, count: int) -> bool:
        """Whether it has seen so many, after taking what has come."""
        self.seen.update((e.source, e.offset, e.topic, e.seq) for e in self.subscriber.events(timeout=0.05))
        return sum(self.seen.values()) >= count


def config(tmp_path: Path, senders: Senders) -> CollectorConfig:
    return CollectorConfig(
        name="c",
        spool=SpoolConfig(path=str(tmp_path / "spool"), sync_interval_s=0.05),
        input=[
            DirectIn(addresses=[senders.direct.address], sent_counts_every_s=0.3),
            MulticastIn(groups=[senders.group], session="MCAST"),
            WebhooksIn(listen=senders.listen, secrets=[senders.secret]),
            JournalIn(path=str(senders.journal), transport="metrics"),
        ],
        status=None,
    )


def test_four_transports_land_in_spark(spark: "SparkSession", tmp_path: Path, until: Until) -> None:
    """The collector goes away and returns while all send; Spark, the ledgers and the producers agree on all."""
    spool = tmp_path / "spool"
    with contextlib.ExitStack() as stack:
        senders = Senders(stack, tmp_path)
        bystanders = {
            "direct": Bystander(
                stack.enter_context(direct.Subscriber(senders.direct.address, start="oldest")),
            ),
            "multicast": Bystander(
                stack.enter_context(multicast.Subscriber([senders.group], "MCAST", start="oldest"))
            ),
        }
        for _ in range(ROUNDS):
            senders.send(PER_ROUND // 2)
            with Collector(config(tmp_path, senders)) as collector:
                senders.send(PER_ROUND // 2)

                def has(source: str, count: int, c: Collector = collector) -> bool:
                    found = c.positions().get(source)
                    return found is not None and found.offset >= count

                until(lambda: has("direct", senders.sent["direct"]), 60, "direct")
                until(lambda: has("mcast", senders.sent["multicast"]), 60, "multicast")
                until(lambda: has("c.webhooks", senders.sent["webhooks"]), 60, "webhooks")
                count = senders.sent["direct"]
                until(
                    lambda n=count, c=collector: any(
                        source == "direct" and offset >= n for source, offset in spooled(Path(c.path), "sent")
                    ),
                    120,
                    "sent counts after the last event",
                )
                accounts = collector.ledger.account()
                assert (accounts.lost, accounts.pending) == (0, 0)
        for name, bystander in bystanders.items():
            until(lambda n=name, b=bystander: b.has(senders.sent[n]), 60, f"the bystander of {name}")
            account = bystander.subscriber.ledger.account()
            assert (account.delivered, account.lost, account.pending) == (senders.sent[name], 0, 0)
        # The last flush of the daemon has the rest of the counter.
        senders.client.close()
        said = senders.client.counters.datagrams
        until(lambda: senders.statsd.receive_counters()["datagrams"] >= said, 30, "all datagrams")
        senders.statsd.stop()
        with Collector(config(tmp_path, senders)) as collector:
            until(lambda: collector.inputs[3].status.behind == 0, 30, "the daemon's last window")
    rows = SparkInput(paths=(str(spool),))
    lander = Lander(str(tmp_path / "events"))
    run_stream(rows.stream(spark), lander, checkpoint=lander.checkpoint)
    ledger = LedgerTable(str(tmp_path / "ledger"), Windows(10.0, 60.0))
    run_stream(rows.stream(spark), ledger, checkpoint=ledger.table.checkpoint)

    landed = (
        read_table(spark, str(tmp_path / "events"))
        .where("kind = 'event'")
        .select("transport", "source", "offset", "topic", "seq", "data")
        .collect()
    )
    assert len(landed) == len({(r.source, r.offset) for r in landed}), "no row twice"
    counts = Counter(r.transport for r in landed)
    for transport in ("direct", "multicast", "webhooks"):
        assert counts[transport] == senders.sent[transport], transport
        numbers = Counter(json.loads(r.data)["n"] for r in landed if r.transport == transport)
        assert numbers == senders.witnessed(transport), f"Spark and the witness file of {transport} agree"
    for name, bystander in bystanders.items():
        found = Counter((r.source, r.offset, r.topic, r.seq) for r in landed if r.transport == name)
        assert found == bystander.seen, f"Spark and the bystander of {name} agree on every event"
    table = {(r.source, r.topic): r for r in totals(ledger.loss(spark, settle_s=0)).collect()}
    half = senders.sent["direct"] // 2
    for source in ("direct", "mcast"):
        for topic in "ab":
            row = table[(source, topic)]
            assert (row.sent, row.received, row.lost, row.duplicates) == (half, half, 0, 0)
    assert all(r.lost == 0 and r.uncertain == 0 for r in table.values())
    series = (
        metric_series(read_table(spark, str(tmp_path / "events")), window_s=86400)
        .where("name = 'hits'")
        .collect()
    )
    assert sum(r.corrected for r in series) == senders.witnessed("hits").total() == senders.sent["hits"]
