"""Spark: our data source against the built-in Parquet and JSON streams, on the same events in the same run.

Also: planning over many segments, latency from publish to row, and how fast a collector spools from `direct`.
Call it with a number of events to have it larger or smaller than the default.
"""

import contextlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Report
from brokerless.core import DiskJournal, MemoryJournal, Retention, encode_frame
from brokerless.direct import Publisher
from brokerless.spark_collector import (
    Collector,
    CollectorConfig,
    DirectIn,
    Lander,
    SpoolConfig,
    session,
    stop,
)
from brokerless.spark_collector.options import parse_options
from brokerless.spark_collector.planning import Planner
from brokerless.spark_collector.session import stop_query
from brokerless.spark_collector.spool import NESTED

PER_FRAME = 500
BIG = Retention(max_bytes=1 << 34)
REPEAT = 3


def payloads(count: int) -> list[bytes]:
    """JSON of about 100 bytes that does not compress to nothing."""
    rng = random.Random(1)
    return [
        b'{"order": %d, "price": %d, "customer": "%x", "note": "%s"}'
        % (n, rng.randrange(10**6), rng.getrandbits(64), rng.randbytes(14).hex().encode())
        for n in range(count)
    ]


def make_spool(path: Path, datas: list[bytes], segment_bytes: int = 0) -> None:
    """The events as a collector would have spooled them."""
    now = time.time_ns() // 1000
    with DiskJournal(path, source="c", retention=BIG, fsync="never", segment_bytes=segment_bytes) as spool:
        for at in range(0, len(datas), PER_FRAME):
            part = datas[at : at + PER_FRAME]
            times = list(range(now + at, now + at + len(part)))
            frame = encode_frame(
                "p", 1, at, topics=[("orders", at)], topic_index=None, times=times, datas=part
            )
            spool.append("direct/event", frame.raw, NESTED)


def drain(stream: Any, sink: Callable[[Any], Any], checkpoint: Path) -> float:
    """Seconds that one availableNow run takes."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    began = time.perf_counter()
    query = sink(
        stream.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    ).start()
    query.awaitTermination()
    return time.perf_counter() - began


def compare(report: Report, spark: Any, work: Path, datas: list[bytes], endpoint: str) -> None:
    """Noop and Parquet, four sources, each the best of some rounds taken in turns."""
    count = len(datas)
    ours = {"path": str(work / "spool"), "maxEventsPerTrigger": "0"}
    rows = spark.read.format("brokerless").options(**ours).load()
    rows.repartition(8).write.parquet(str(work / "parquet"))
    rows.withColumn("data", rows["data"].cast("string")).repartition(8).write.json(str(work / "json"))
    text = rows.withColumn("data", rows["data"].cast("string")).schema
    sources: dict[str, Callable[[], Any]] = {
        "built-in Parquet": lambda: spark.readStream.schema(rows.schema).parquet(str(work / "parquet")),
        "built-in JSON": lambda: spark.readStream.schema(text).json(str(work / "json")),
        "ours, spool": lambda: spark.readStream.format("brokerless").options(**ours).load(),
        "ours, endpoint": lambda: (
            spark.readStream.format("brokerless").options(endpoint=endpoint, maxEventsPerTrigger="0").load()
        ),
    }
    best: dict[tuple[str, str], float] = {}

    def note(name: str, sink: str, seconds: float) -> None:
        best[(name, sink)] = max(best.get((name, sink), 0.0), count / seconds)

    for _ in range(REPEAT):
        for name, source in sources.items():
            note(name, "noop", drain(source(), lambda w: w.format("noop"), work / "cp"))
            if name == "built-in JSON":
                continue
            out = work / "out"
            shutil.rmtree(out, ignore_errors=True)
            note(
                name,
                "Parquet",
                drain(source(), lambda w, o=out: w.format("parquet").option("path", str(o)), work / "cp"),
            )
        shutil.rmtree(work / "landed", ignore_errors=True)
        lander = Lander(str(work / "landed"))
        each = lambda w, la=lander: w.foreachBatch(lambda df, batch: la(df, batch, "bench"))  # noqa: E731
        note("ours, spool, spark land", "Parquet", drain(sources["ours, spool"](), each, work / "cp"))
    peer = {sink: best[("built-in Parquet", sink)] for sink in ("noop", "Parquet")}
    goals = {("ours, spool", "noop"): 1.5, ("ours, spool", "Parquet"): 0.9}
    for (name, sink), rate in best.items():
        goal = goals.get((name, sink))
        ratio = rate / peer[sink]
        report.add(
            f"{name} into {sink}", rate, "events/s", against="built-in Parquet", ratio=ratio,
            goal=f"≥ {goal}×" if goal else "", met=ratio >= goal if goal else None,
        )  # fmt: skip
    ratio = best[("ours, spool", "noop")] / best[("built-in JSON", "noop")]
    report.add("ours, spool into noop", best[("ours, spool", "noop")], "events/s", against="built-in JSON",
               ratio=ratio, goal="≥ 3×", met=ratio >= 3)  # fmt: skip


def planning(report: Report, work: Path) -> None:
    """One planning step (how far, which tasks) at the end of a spool of few and of many segments."""
    taken = {}
    for segments in (100, 20_000):
        path = work / f"segments-{segments}"
        with DiskJournal(path, source="c", retention=BIG, fsync="never", segment_bytes=1) as spool:
            for at in range(segments):
                frame = encode_frame(
                    "p", 1, at, topics=[("t", at)], topic_index=None, times=[at], datas=[b"x"]
                )
                spool.append("direct/event", frame.raw, NESTED)
            end = spool.next
        planner = Planner(parse_options({"path": str(path)}))
        marks = {key: extent.mark(end - 20) for key, extent in planner.extents({}).items()}
        rounds = []
        for _ in range(20):
            began = time.perf_counter()
            planner.pieces(marks, planner.latest(marks, 1_000_000))
            rounds.append(time.perf_counter() - began)
        taken[segments] = statistics.median(rounds)
        shutil.rmtree(path)
    report.add("planning, 100 segments", taken[100] * 1000, "ms")
    ratio = taken[20_000] / taken[100]
    report.add("planning, 20,000 segments", taken[20_000] * 1000, "ms", against="100 segments", ratio=ratio,
               goal="flat (≤ 2×)", met=ratio <= 2)  # fmt: skip


@contextlib.contextmanager
def collecting(work: Path, address: str) -> Iterator[Collector]:
    """A collector of one publisher."""
    spool = SpoolConfig(path=str(work), fsync="never")
    config = CollectorConfig(name="c", spool=spool, input=[DirectIn(addresses=[address])], status=None)
    with Collector(config) as collector:
        yield collector
    shutil.rmtree(work)


def latency(report: Report, spark: Any, work: Path) -> None:
    """From `publish` to the row in a batch function, with a continuous trigger and 100 events a second."""
    taken: list[float] = []
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(
            Publisher("tcp://127.0.0.1:0", source="p", journal=MemoryJournal(retention=BIG))
        )
        with collecting(work / "latency", publisher.address):
            publisher.publish("t", b"first")
            while not (work / "latency" / "meta.json").exists():
                time.sleep(0.01)
            stream = spark.readStream.format("brokerless").load(str(work / "latency")).where("kind = 'event'")

            def look(rows: Any, _: int) -> None:
                found = rows.select("time").collect()
                now = time.time()
                taken.extend(now - r.time.timestamp() for r in found)

            writer = stream.writeStream.foreachBatch(look).option(
                "checkpointLocation", str(work / "latency-cp")
            )
            query = writer.trigger(processingTime="0 seconds").start()
            ends = time.monotonic() + 15
            while time.monotonic() < ends:
                publisher.publish("t", b"x" * 100)
                time.sleep(0.01)
            stop_query(query)
    steady = sorted(taken[len(taken) // 4 :])
    p50, p99 = steady[len(steady) // 2], steady[len(steady) * 99 // 100]
    report.add("publish to row, p50", p50 * 1000, "ms", goal="≤ 600 ms", met=p50 <= 0.6)
    report.add("publish to row, p99", p99 * 1000, "ms")


_PRODUCER = """
import sys
from brokerless.core import DiskJournal, Retention
from brokerless.direct import Publisher
path, data, count = sys.argv[1], b"x" * 100, int(sys.argv[2])
journal = DiskJournal(path, retention=Retention(max_bytes=1 << 34), fsync="never")
with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as publisher:
    print(publisher.address, flush=True)
    sys.stdin.readline()
    for _ in range(count // 200):
        publisher.publish_many("t", [data] * 200)
    sys.stdin.readline()
"""


def collecting_rate(report: Report, work: Path, count: int) -> None:
    """A publisher in another process publishes 200 at a time as fast as it can; the collector spools all of it."""
    command = [sys.executable, "-c", _PRODUCER, str(work / "source"), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        assert producer.stdin is not None
        assert producer.stdout is not None
        address = producer.stdout.readline().strip()
        with collecting(work / "rate", address) as collector:
            while not collector.inputs[0].status.connected:
                time.sleep(0.01)
            began, cpu = time.perf_counter(), time.process_time()
            producer.stdin.write("\n")
            producer.stdin.flush()
            deadline = time.monotonic() + 120
            while collector.counters.events < count and time.monotonic() < deadline:
                time.sleep(0.005)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            done = collector.counters.events
        producer.stdin.close()
    assert done == count, f"{done} of {count} events arrived"
    rate = count / seconds
    report.add("collector from direct", rate, "events/s", goal="≥ 300 k", met=rate >= 300_000)
    report.add("collector from direct, per second of its CPU", count / cpu, "events/s")


def main(count: int) -> None:
    report = Report("spark")
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as name:
        work = Path(name)
        collecting_rate(report, work, min(count, 1_000_000))
        planning(report, work)
        datas = payloads(count)
        make_spool(work / "spool", datas)
        journal = DiskJournal(work / "journal", retention=BIG, fsync="never")
        spark = session("bench", master="local[2]")
        with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as publisher:
            for at in range(0, count, PER_FRAME):
                publisher.publish_many("orders", datas[at : at + PER_FRAME])
            compare(report, spark, work, datas, publisher.address)
        latency(report, spark, work)
        stop(spark)
    report.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000)
