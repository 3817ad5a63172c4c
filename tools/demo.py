"""What `make demo` runs: all transports send, the collector is killed and returns, Spark lands it and shows the loss.

Everything stays on 127.0.0.1 and below build/demo. Ends with 0 if producers, spool and Spark agree on every number.
Spark starts while the producers send: a JVM takes as long as the outage that people look at.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from brokerless import direct, multicast
from brokerless.cli.show import table
from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.core.runtime.process import end_with_parent
from brokerless.metrics import MetricsServer, StatsClient
from brokerless.spark_collector import (
    Lander,
    LedgerTable,
    SparkInput,
    Windows,
    local,
    run_stream,
    start_session,
    stop_session,
)
from brokerless.spark_collector.jobs.loss import totals
from brokerless.spark_collector.jobs.metric_series import metric_series
from brokerless.spark_collector.jobs.views import read_table
from brokerless.spark_collector.session.session import QUICK
from brokerless.webhooks import AddressPolicy, BlockingDispatcher, DispatcherConfig, Schedule

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "demo"
SECONDS = 9.0
# The collector is away from the first to the second of these.
AWAY = (3.0, 6.0)
RATE = 400  # events a second and transport; webhooks a tenth of it
TINY = 300  # what the forgetful publisher remembers: less than it sends while the collector is away


NEXT = """
What to try next:
  .venv/bin/brokerless console                                   the live page; start something as this user
  .venv/bin/brokerless pub tcp://127.0.0.1:5555 orders.eu hello --journal build/demo/orders --keep
  .venv/bin/brokerless sub tcp://127.0.0.1:5555 --from oldest    in another terminal; stop and start it as you like
  .venv/bin/brokerless losstest run --quick                      what each transport loses, measured
  docs/start.md, docs/guides/shop.md                             five minutes, and a shop from an empty folder"""


def say(text: str) -> None:
    """One step of the demo."""
    print(f"[{time.monotonic() - BEGAN:5.1f} s] {text}", flush=True)


BEGAN = time.monotonic()


def free_port() -> int:
    """A port that was free a moment ago, and the one after it."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with contextlib.suppress(OSError):
                two.bind(("127.0.0.1", port + 1))
                return port


class Producers:
    """One producer per transport, and a forgetful one."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        keep = Retention(max_bytes=1 << 28)
        journal = DiskJournal(WORK / "shop-journal", retention=keep, fsync="never")
        self.shop = stack.enter_context(direct.Publisher("tcp://127.0.0.1:0", source="shop", journal=journal))
        tiny = MemoryJournal(retention=Retention(max_events=TINY))
        self.forgetful = stack.enter_context(
            direct.Publisher("tcp://127.0.0.1:0", source="forgetful", journal=tiny)
        )
        port = free_port()
        self.group = f"239.255.42.{port % 250}:{port}"
        self.ticks = stack.enter_context(multicast.Publisher(self.group, "TICKS", source="ticks"))
        self.listen = f"127.0.0.1:{free_port()}"
        config = DispatcherConfig(
            policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
            verification="none",
            schedule=Schedule(delays_s=(0.5,) * 200),
            synchronous="normal",
        )
        self.hooks = stack.enter_context(BlockingDispatcher(WORK / "outbox.sqlite", config=config))
        _, self.secret = self.hooks.add_endpoint(f"http://{self.listen}/", ["**"])
        self.statsd = MetricsServer(
            udp=["127.0.0.1:0"], backends=[f"journal:{WORK / 'metrics-journal'}"], flush_s=1.0
        )
        self.statsd.start()
        stack.callback(self.statsd.stop)
        host, _, statsd_port = self.statsd.addresses["udp"][0].rpartition(":")
        self.client = stack.enter_context(StatsClient(host, int(statsd_port), flush_s=0.1, heartbeat_s=0.5))
        self.sent: Counter[str] = Counter()

    def send(self, until: float) -> None:
        """Send on all transports at a steady rate."""
        n, began = 0, time.monotonic()
        while time.monotonic() < until:
            for _ in range(RATE // 100):
                topic = ("orders", "payments")[n % 2]
                self.shop.publish(topic, b'{"order": %d}' % n, content_type="application/json")
                self.forgetful.publish("readings", b"%d" % n)
                self.ticks.publish("ticks", b"%d" % n)
                self.client.incr("requests")
                self.sent.update(("shop", "forgetful", "ticks", "requests"))
                if n % 10 == 0:
                    self.hooks.publish("order.paid", b'{"order": %d}' % n)
                    self.sent["collector.webhooks"] += 1
                n += 1
            time.sleep(max(0.0, began + n / RATE - time.monotonic()))


def collector_file(producers: Producers, status_port: int) -> Path:
    """The collector's configuration."""
    file = WORK / "collector.toml"
    addresses = f'["{producers.shop.address}", "{producers.forgetful.address}"]'
    file.write_text(
        f"""name = "collector"
[spool]
path = "{WORK / "spool"}"
[status]
port = {status_port}
[[input]]
type = "direct"
addresses = {addresses}
sent_counts_every_s = 1.0
[[input]]
type = "multicast"
groups = ["{producers.group}"]
session = "TICKS"
[[input]]
type = "webhooks"
listen = "{producers.listen}"
secrets = ["{producers.secret}"]
[[input]]
type = "journal"
path = "{WORK / "metrics-journal"}"
transport = "metrics"
"""
    )
    return file


def brokerless(*arguments: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """The command line as its users run it; ended with the demo, whatever ends that."""
    command = [sys.executable, "-m", "brokerless.cli", *arguments]
    # Nothing here holds a lock that the call in the child would need.
    return subprocess.Popen(command, stdout=output, text=True, preexec_fn=end_with_parent)  # noqa: PLW1509


def start_collector(file: Path) -> subprocess.Popen[str]:
    """A collector in a process of its own."""
    return brokerless("collect", "--config", str(file), "--quiet")


def start_console(stack: contextlib.ExitStack) -> str:
    """The live page in a process of its own; returns its address."""
    process = brokerless("console", "--port", "0", "--json", output=subprocess.PIPE)
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("demo: the console did not start")
    return str(msgspec.json.decode(line)["address"])


def ask_status(port: int) -> Any:
    """The collector's status page, or None while it is not there."""
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer,
    ):
        return msgspec.json.decode(answer.read())
    return None


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Until the condition holds. The machine may be busy: only a time that nothing needs is a failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"demo: {what}: not within {seconds:.0f} s")
        time.sleep(0.1)


def complete(port: int, sent: Counter[str]) -> bool:
    """Whether the spool has received or declared lost all that was sent, and the collector is behind with nothing."""
    status = ask_status(port)
    if status is None or any(i["behind"] > 0 for i in status["inputs"]):
        return False
    known: Counter[str] = Counter()
    for row in local.loss({"path": str(WORK / "spool")}, settle_s=0.0, by="topic").to_pylist():
        known[row["source"]] += row["received"] + row["lost"]
    return all(known[source] >= count for source, count in sent.items() if source != "requests")


def counted(server: MetricsServer, name: str) -> float:
    """A counter's total as the daemon knows it now."""
    return sum(point.total for point in server.flush_now().counters if point.series == name)


def collect(stack: contextlib.ExitStack, producers: Producers) -> "subprocess.Popen[str]":
    """Send, kill the collector, bring it back, and wait until it has everything that can be had.

    Returns the collector: it runs on, as collectors do, while Spark reads its spool.
    """
    port = free_port()
    file = collector_file(producers, port)
    running = [start_collector(file)]
    stack.callback(lambda: running[0].poll() is None and running[0].kill())
    wait_for("the collector answers", lambda: ask_status(port) is not None)
    until = time.monotonic() + SECONDS
    sender = threading.Thread(target=producers.send, args=(until,), name="producers")
    sender.start()
    say(f"ZeroMQ, multicast, webhooks and StatsD send for {SECONDS:.0f} s; the collector spools")
    time.sleep(AWAY[0])
    running[0].send_signal(signal.SIGKILL)
    running[0].wait()
    say("the collector was killed (SIGKILL); the producers go on, and its lag grows")
    time.sleep(AWAY[1] - AWAY[0])
    running[0] = start_collector(file)
    say("the collector is back; it goes on where its spool ends")
    sender.join()
    producers.client.close()
    sent = producers.sent
    total = sent["requests"]
    wait_for("the daemon has counted everything", lambda: counted(producers.statsd, "requests") >= total)
    producers.statsd.stop()
    wait_for("the collector has everything", lambda: complete(port, sent))
    say("all sent, and the collector has what can be had")
    return running[0]


def start_spark(stack: contextlib.ExitStack) -> "Future[Any]":
    """An embedded Spark that starts while other things go on; it is stopped with the stack."""
    pool = ThreadPoolExecutor(1, "spark")
    stack.callback(pool.shutdown)
    starting = pool.submit(
        start_session, "brokerless demo", master="local[2]", shuffle_partitions=1, config=QUICK
    )
    stack.callback(lambda: starting.exception() or stop_session(starting.result()))
    return starting


def analyse(spark: Any, sent: Counter[str]) -> bool:
    """Land, compute loss and series in Spark, show them, and compare with what the producers know."""
    sums, total_counted = land_and_show(spark)
    good = True
    for source, count in sorted(sent.items()):
        if source == "requests":
            seen, lost, total = round(total_counted), 0, round(total_counted)
        else:
            total, seen, lost = sums.get(source, (0, 0, 0))
        agrees = total == count and seen + lost == count
        good = good and agrees
        print(
            f"  {source:20} sent {count:6,}  in Spark {seen:6,}  lost {lost:5,}  {'agrees' if agrees else 'DIFFERS'}"
        )
    return good


def land_and_show(spark: Any) -> tuple[dict[str, tuple[int, int, int]], float]:
    """Land the spool, print the tables; returns sent, received and lost by source, and the counter's total."""
    say("Spark is up (embedded, two cores)")
    rows = SparkInput(paths=(str(WORK / "spool"),))
    lander = Lander(str(WORK / "events"))
    done = run_stream(rows.stream(spark), lander, checkpoint=lander.checkpoint, paths=rows.paths)
    say(f"landed {lander.landed:,} events of {done.rows:,} rows in {WORK.relative_to(ROOT) / 'events'}")
    ledger = LedgerTable(str(WORK / "ledger"), Windows(2.0, 2.0))
    run_stream(rows.stream(spark), ledger, checkpoint=ledger.table.checkpoint, paths=rows.paths)
    found = ledger.loss(spark, settle_s=0).persist()
    say(
        "loss of the forgetful publisher, by window: it remembers too little for how long the collector was away"
    )
    table(found.where("source = 'forgetful'").orderBy("window").drop("epoch", "topic"))
    say("loss in all, by source and topic (the metrics daemon's journal counts as a source)")
    table(totals(found).drop("epoch"))
    series = (
        metric_series(read_table(spark, str(WORK / "events")), window_s=60)
        .where("name = 'requests'")
        .persist()
    )
    say("the StatsD counter over UDP, corrected, with its bounds")
    table(series.drop("tags"))
    sums = {
        row[0]: (row[1], row[2], row[3])
        for row in found.groupBy("source").sum("sent", "received", "lost").collect()
    }
    return sums, sum(row.corrected for row in series.collect())


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # The page shows this demo, and not what an earlier one killed or what else runs here.
    os.environ.setdefault("BROKERLESS_PRESENCE", str(WORK / "presence"))
    with contextlib.ExitStack() as watching:
        say(f"open {start_console(watching)} to watch")
        with contextlib.ExitStack() as stack:
            producers = Producers(stack)
            spark = start_spark(stack)
            collector = collect(watching, producers)
            good = analyse(spark.result(), producers.sent)
        collector.send_signal(signal.SIGTERM)
        collector.wait(120)
    say("producers, spool and Spark agree" if good else "the numbers DIFFER")
    print(NEXT)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
