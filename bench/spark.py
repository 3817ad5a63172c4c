"""Spark: our data source against the built-in Parquet and JSON streams, on the same events in the same run.

Into noop and into Parquet; all in the same number of micro-batches, after a warm-up round, in turns. Also:
planning over many segments, a spool against its remote tier (an S3 server in Python on loopback, whose own CPU is
shown), latency from publish to row by the spool's directory and by the collector's address, and how fast a collector
spools from `direct`.

    bench/spark.py [EVENTS] [--only noop|parquet|tier|planning|latency|collector]
"""

import argparse
import contextlib
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Report
from brokerless.core import DiskJournal, MemoryJournal, Retention, encode_frame
from brokerless.direct import Publisher
from brokerless.spark_collector import (
    Collector,
    CollectorConfig,
    DirectIn,
    Lander,
    SparkInput,
    SpoolConfig,
    start_session,
    stop_session,
)
from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.collector.spool import NESTED
from brokerless.spark_collector.session.session import stop_query
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Planner
from brokerless.spark_collector.source.schema import ROW_SCHEMA
from brokerless.spark_collector.tier.object_store import open_store
from brokerless.spark_collector.tier.uploader import TierUploader

PER_FRAME = 500
BIG = Retention(max_bytes=1 << 34)
# One to warm up, which is not counted; of the others the best counts: the one that was disturbed least.
ROUNDS = 4
BATCHES = 4
FILES = 8
# The first batches of a session start Python processes and compile plans: events of so long are not counted.
WARM_S = 20
PARTS = ("collector", "planning", "noop", "parquet", "tier", "latency")


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


class Run:
    """One source into one sink: the best of some rounds, with and without the start of the query."""

    def __init__(self) -> None:
        self.whole = self.batches = float("inf")
        self.cpu = self.server_cpu = float("inf")

    def note(self, whole: float, batches: float) -> None:
        """Seconds of the whole query, and of its batches alone."""
        self.whole, self.batches = min(self.whole, whole), min(self.batches, batches)

    def note_cpu(self, spark: float, server: float) -> None:
        """Seconds of CPU of Spark with its Python processes, and of the object store's server."""
        self.cpu, self.server_cpu = min(self.cpu, spark), min(self.server_cpu, server)


def drain(
    stream: Any, sink: Callable[[Any], Any], checkpoint: Path, *, parts: bool = False
) -> tuple[float, float]:
    """Seconds of one availableNow run: from `start` to the end, and of its batches by Spark's own report.

    `parts`: batches end where objects end, so that there may be one more or less.
    """
    shutil.rmtree(checkpoint, ignore_errors=True)
    began = time.perf_counter()
    query = sink(
        stream.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    ).start()
    query.awaitTermination()
    whole = time.perf_counter() - began
    reports = [r for r in query.recentProgress if r["numInputRows"]]
    assert len(reports) == BATCHES or parts, f"{len(reports)} batches"
    return whole, sum(r["durationMs"]["triggerExecution"] for r in reports) / 1000


def ceiling_source(batch_file: str, rounds: int) -> Any:
    """The least that a data source in Python can do: yield one prepared batch again and again."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow

    class Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
        def initialOffset(self) -> dict[str, int]:
            return {"n": 0}

        def getDefaultReadLimit(self) -> Any:
            return ReadAllAvailable()

        def prepareForTriggerAvailableNow(self) -> None:
            pass

        def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
            return {"n": min(BATCHES, start["n"] + 1)}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
            return [InputPartition(0), InputPartition(1)] if end["n"] > start["n"] else []

        def read(self, partition: Any) -> Iterator[Any]:
            import pyarrow as pa

            if partition.value is not None:
                with open(batch_file, "rb") as file:
                    batch = pa.ipc.open_stream(file).read_next_batch()
                for _ in range(rounds):
                    yield batch

    class Ceiling(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ceiling"

        def schema(self) -> str:
            return ROW_SCHEMA

        def streamReader(self, schema: Any) -> Any:
            return Reader()

    return Ceiling


class Streams:
    """The same events as files for the built-in sources, as a spool, at a publisher, and as one Arrow batch."""

    def __init__(self, spark: Any, work: Path, datas: list[bytes], endpoint: str) -> None:
        self.spark, self.work, self.count = spark, work, len(datas)
        self._own = psutil.Process()
        each = str(-(-self.count // BATCHES))
        spool = {"path": str(work / "spool")}
        rows = spark.read.format("brokerless").options(**spool, numPartitions=FILES).load()
        rows.write.parquet(str(work / "parquet"))
        text = rows.withColumn("data", rows["data"].cast("string"))
        text.write.json(str(work / "json"))
        per_trigger = {"maxFilesPerTrigger": str(FILES // BATCHES)}
        batch_rows = self._ceiling(spool)
        self.ceiling_count = batch_rows * 2 * BATCHES * max(1, self.count // (batch_rows * 2 * BATCHES))

        def ours(**options: str) -> Callable[[], Any]:
            made = spark.readStream.format("brokerless").options(maxEventsPerTrigger=each, **options)
            load: Callable[[], Any] = made.load
            return load

        self.spool = SparkInput(paths=(spool["path"],), max_events_per_trigger=int(each))
        read = spark.readStream.options(**per_trigger)
        self.sources: dict[str, Callable[[], Any]] = {
            "built-in Parquet": lambda: read.schema(rows.schema).parquet(str(work / "parquet")),
            "built-in JSON": lambda: read.schema(text.schema).json(str(work / "json")),
            "ours, spool": ours(**spool),
            "ours, endpoint": ours(endpoint=endpoint),
            "ceiling of a Python source": lambda: spark.readStream.format("ceiling").load(),
        }

    def _ceiling(self, spool: dict[str, str]) -> int:
        """Register the source that yields the first batch of the spool again and again; its rows per batch."""
        import pyarrow as pa

        from brokerless.spark_collector.source.locations import JournalLocation
        from brokerless.spark_collector.source.planning import Partition, read_partition

        location = JournalLocation(spool["path"])
        extent = location.extent()
        assert extent is not None
        partition = Partition(location.key, extent.oldest, extent.next, extent.source, extent.epoch)
        batch: Any = next(iter(read_partition(location, partition, parse_options(spool))))
        file = self.work / "ceiling.arrow"
        with pa.ipc.new_stream(str(file), batch.schema) as writer:
            writer.write_batch(batch)
        rounds = max(1, self.count // (batch.num_rows * 2 * BATCHES))
        self.spark.dataSource.register(ceiling_source(str(file), rounds))
        return int(batch.num_rows)

    def measure(self, sink: str, names: list[str]) -> dict[str, Run]:
        """All the named sources into a sink, in turns."""
        runs = {name: Run() for name in names}
        for turn in range(ROUNDS):
            for name, run in runs.items():
                if name == LAND:
                    source, into = landing(self.spark, self.spool, self.work / "out")
                else:
                    source, into = self.sources[name](), self._sink(sink)
                before = cpu_s(self._own)
                seconds = drain(source, into, self.work / "cp")
                if turn:
                    run.note(*seconds)
                    run.note_cpu(cpu_s(self._own) - before, 0.0)
        return runs

    def _sink(self, name: str) -> Callable[[Any], Any]:
        if name == "noop":
            return lambda w: w.format("noop")
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        return lambda w: w.format("parquet").option("path", str(out))

    def rows_of(self, name: str) -> int:
        """How many rows a source yields."""
        return self.ceiling_count if name.startswith("ceiling") else self.count


def landing(spark: Any, source: SparkInput, table: Path) -> tuple[Any, Callable[[Any], Any]]:
    """The stream and the sink of `spark land` into a new table."""
    shutil.rmtree(table, ignore_errors=True)
    lander = Lander(str(table))
    stream = lander.stream(source, spark)
    return stream, lambda w: w.foreachBatch(lambda df, batch: lander(df, batch, "bench"))


LAND = "ours, spool, spark land"
PEER = "built-in Parquet"


def noop(report: Report, streams: Streams) -> None:
    """How fast rows get into Spark."""
    runs = streams.measure("noop", list(streams.sources))
    rates = {n: (streams.rows_of(n) / r.whole, streams.rows_of(n) / r.batches) for n, r in runs.items()}
    ours = "ours, spool"
    for name, (rate, _) in rates.items():
        goal = 1.5 if name == ours else 0
        _add(report, f"{name} into noop", rate, PEER, rates[PEER][0], goal)
    _add(report, f"{ours} into noop", rates[ours][0], "built-in JSON", rates["built-in JSON"][0], 3)
    _add(report, f"{ours} into noop", rates[ours][0], "ceiling", rates["ceiling of a Python source"][0])
    for name, (_, rate) in rates.items():
        _add(report, f"{name} into noop, without the query's start", rate, PEER, rates[PEER][1])
    for name in (PEER, ours):
        report.add(f"{name}: start of a query", (runs[name].whole - runs[name].batches) * 1000, "ms")


def parquet(report: Report, streams: Streams) -> None:
    """How fast rows get through Spark into files."""
    runs = streams.measure("Parquet", [PEER, "ours, spool", "ours, endpoint", LAND])
    rates = {n: (streams.count / r.whole, streams.count / r.batches) for n, r in runs.items()}
    for name, (rate, _) in rates.items():
        _add(
            report,
            f"{name} into Parquet",
            rate,
            PEER,
            rates[PEER][0],
            0.9 if name in ("ours, spool", LAND) else 0,
        )
    for name, run in runs.items():
        ratio = run.cpu / runs[PEER].cpu
        spent = run.cpu / streams.count * 1e6
        report.add(f"{name} into Parquet: CPU per million", spent, "s", against=PEER, ratio=ratio)
    for name, (_, rate) in rates.items():
        _add(report, f"{name} into Parquet, without the query's start", rate, PEER, rates[PEER][1])


def _add(report: Report, what: str, rate: float, against: str, peer: float, goal: float = 0) -> None:
    report.add(
        what, rate, "events/s", against=against, ratio=rate / peer,
        goal=f"≥ {goal}×" if goal else "", met=rate / peer >= goal if goal else None,
    )  # fmt: skip


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
        offsets = {key: extent.at(end - 20) for key, extent in planner.extents({}).items()}
        rounds = []
        for _ in range(20):
            began = time.perf_counter()
            planner.partitions(offsets, planner.latest(offsets, 1_000_000))
            rounds.append(time.perf_counter() - began)
        taken[segments] = statistics.median(rounds)
        shutil.rmtree(path)
    report.add("planning, 100 segments", taken[100] * 1000, "ms")
    ratio = taken[20_000] / taken[100]
    report.add("planning, 20,000 segments", taken[20_000] * 1000, "ms", against="100 segments", ratio=ratio,
               goal="flat (≤ 2×)", met=ratio <= 2)  # fmt: skip


def cpu_s(*processes: psutil.Process) -> float:
    """Seconds of CPU of processes and all that they started."""
    spent = 0.0
    for process in processes:
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                spent += sum(each.cpu_times()[:4])  # with children that have ended
    return spent


@contextlib.contextmanager
def object_store() -> Iterator[tuple[dict[str, str], psutil.Process]]:
    """The options of an S3 server on loopback with a bucket, and its process."""
    import boto3

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    try:
        client = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **keys)
        for _ in range(300):
            with contextlib.suppress(Exception):
                client.create_bucket(Bucket="bucket")
                break
            time.sleep(0.1)
        options = {"aws_region": "us-east-1", "aws_endpoint": address, "aws_allow_http": "true"}
        yield keys | options, psutil.Process(server.pid)
    finally:
        server.kill()
        server.wait()


def fetch_bare(url: str, s3: dict[str, str]) -> float:
    """Seconds to get the objects of a tier with obstore by two threads, as two tasks would."""
    import obstore

    store = open_store(url, s3)
    keys = [entry["path"] for page in obstore.list(store, prefix="parts") for entry in page]
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda key: len(obstore.get(store, key).bytes()), keys))
        best = min(best, time.perf_counter() - began)
    return best


def _noop(writer: Any) -> Any:
    return writer.format("noop")


def tier(report: Report, spark: Any, work: Path, count: int) -> None:
    """The same spool from the disk and from an object store, into noop and into a table."""
    each = str(-(-count // BATCHES))
    with object_store() as (s3, server):
        url = "s3://bucket/spool"
        directory = f"file://{work}/tier"  # without the server's share of the cores
        for at in (url, directory):
            uploader = TierUploader(str(work / "spool"), at, counters=CollectorCounters(), storage_options=s3)
            began = time.perf_counter()
            uploader.start()
            uploader.stop()
            report.add(f"uploading a spool to {at[:4]}", count / (time.perf_counter() - began), "events/s")
        places = {"spool": {"path": str(work / "spool")}, "tier in a directory": {"path": directory}}
        report.add("the tier's objects with obstore alone", count / fetch_bare(url, s3), "events/s")
        places["tier"] = {"path": url}
        jvm = [each for each in psutil.Process().children() if each.pid != server.pid]
        for target in ("noop", "a table"):
            runs = {name: Run() for name in places}
            for turn in range(ROUNDS):
                for name, options in places.items():
                    source = SparkInput(
                        paths=(options["path"],), storage_options=s3, max_events_per_trigger=int(each)
                    )
                    if target == "noop":
                        rows, into = source.stream(spark), _noop
                    else:
                        rows, into = landing(spark, source, work / "out")
                    before, served = cpu_s(*jvm), cpu_s(server)
                    seconds = drain(rows, into, work / "cp", parts=True)
                    if turn:
                        runs[name].note(*seconds)
                        runs[name].note_cpu(cpu_s(*jvm) - before, cpu_s(server) - served)
            rates = {name: count / run.batches for name, run in runs.items()}
            for name, rate in rates.items():
                goal = 0.7 if name.startswith("tier") else 0
                _add(report, f"from the {name} into {target}", rate, "spool", rates["spool"], goal)
            for name, run in runs.items():
                report.add(
                    f"from the {name} into {target}: CPU of Spark per million",
                    run.cpu / count * 1e6, "s", against="spool", ratio=run.cpu / runs["spool"].cpu,
                )  # fmt: skip
            share = runs["tier"].server_cpu / count * 1e6
            report.add(f"from the tier into {target}: CPU of the S3 server per million", share, "s")


@contextlib.contextmanager
def collecting(work: Path, address: str) -> Iterator[Collector]:
    """A collector of one publisher, whose spool can also be read over the network."""
    spool = SpoolConfig(path=str(work), fsync="never", serve="tcp://127.0.0.1:0")
    config = CollectorConfig(name="c", spool=spool, input=[DirectIn(addresses=[address])], status=None)
    with Collector(config) as collector:
        yield collector
    shutil.rmtree(work)


def latency(report: Report, spark: Any, work: Path) -> None:
    """From `publish` to the row in a batch function, with a continuous trigger and 100 events a second."""
    for served in (True, False):
        steady = sorted(_latencies(spark, work / f"latency-{served}", served))
        p50, p99 = steady[len(steady) // 2], steady[len(steady) * 99 // 100]
        how = "by the collector's address" if served else "by the spool's directory"
        report.add(f"publish to row, {how}, p50", p50 * 1000, "ms", goal="≤ 300 ms", met=p50 <= 0.3)
        report.add(f"publish to row, {how}, p99", p99 * 1000, "ms")


def _latencies(spark: Any, work: Path, served: bool) -> list[float]:
    """Seconds of each event, once the query has warmed up."""
    taken: list[float] = []
    counted = [time.time() + WARM_S]
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(
            Publisher("tcp://127.0.0.1:0", source="p", journal=MemoryJournal(retention=BIG))
        )
        with collecting(work / "spool", publisher.address) as collector:
            publisher.publish("t", b"first")
            while not collector.counters.events:
                time.sleep(0.01)
            where = {"endpoint": collector.address} if served else {"path": str(work / "spool")}
            stream = spark.readStream.format("brokerless").options(**where).load().where("kind = 'event'")

            def look(rows: Any, _: int) -> None:
                found = rows.select("time").collect()
                now = time.time()
                taken.extend(now - at for r in found if (at := r.time.timestamp()) >= counted[0])

            writer = stream.writeStream.foreachBatch(look).option("checkpointLocation", str(work / "cp"))
            query = writer.trigger(processingTime="0 seconds").start()
            counted[0] = time.time() + WARM_S
            ends = time.monotonic() + WARM_S + 15
            while time.monotonic() < ends:
                publisher.publish("t", b"x" * 100)
                time.sleep(0.01)
            stop_query(query)
    return taken


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


_SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from bench.spark import BIG, PER_FRAME, DiskJournal, Publisher, payloads
journal = DiskJournal(sys.argv[2], retention=BIG, fsync="never")
datas = payloads(int(sys.argv[3]))
with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as publisher:
    for at in range(0, len(datas), PER_FRAME):
        publisher.publish_many("orders", datas[at : at + PER_FRAME])
    del datas
    print(publisher.address, flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def serving(work: Path, count: int) -> Iterator[Callable[[], str]]:
    """A publisher in a process of its own that has published all events; call it for its address."""
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", _SERVE, root, str(work / "journal"), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        assert producer.stdin is not None
        assert producer.stdout is not None
        out = producer.stdout
        try:
            yield lambda: out.readline().strip()
        finally:
            producer.stdin.close()


def main(count: int, only: str | None) -> None:
    wanted = (only,) if only else PARTS
    count -= count % (PER_FRAME * BATCHES)
    report = Report(f"spark-{only}" if only else "spark")
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as name:
        work = Path(name)
        if "collector" in wanted:
            collecting_rate(report, work, min(count, 1_000_000))
        if "planning" in wanted:
            planning(report, work)
        if {"noop", "parquet"} & set(wanted):
            with serving(work, count) as address:
                datas = payloads(count)
                make_spool(work / "spool", datas)
                spark = start_session("bench", master="local[2]")
                streams = Streams(spark, work, datas, address())
                del datas
                for part in (noop, parquet):
                    if part.__name__ in wanted:
                        part(report, streams)
                stop_session(spark)
        if "tier" in wanted:
            if not (work / "spool").exists():
                make_spool(work / "spool", payloads(count))
            spark = start_session("bench", master="local[2]")
            tier(report, spark, work, count)
            stop_session(spark)
        if "latency" in wanted:
            spark = start_session("bench", master="local[2]")
            latency(report, spark, work)
            stop_session(spark)
    report.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events", nargs="?", type=int, default=4_000_000)
    parser.add_argument("--only", choices=PARTS)
    chosen = parser.parse_args()
    main(chosen.events, chosen.only)
