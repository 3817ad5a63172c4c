"""Large spools: planning over many sources and topics, the driver's memory, loss of many streams, cost per million.

Data are two bytes each, so that a hundred million events fit on a small disk: what grows with their size is
in bench/spark.py.

    bench/scale.py [EVENTS] [--quick]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from bench import spark as bench_spark
from bench.common import Report
from brokerless.core import DiskJournal, Retention, encode_frame
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
from brokerless.spark_collector.collector.spool import NESTED

SOURCES, TOPICS, PER_FRAME = 1000, 100, 5000
DAY_STREAMS, DAY_US = 10_000, 86_400_000_000
BIG = Retention(max_bytes=1 << 36)
# A process of its own, so that its largest memory is that of planning alone.
_PLAN = """
import json, resource, sys, time
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Planner
planner = Planner(parse_options({"path": sys.argv[1], "numPartitions": "8"}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
start = planner.initial()
end = planner.latest(start, 0)
tasks = len(planner.partitions(start, end))
whole = time.perf_counter() - began
began = time.perf_counter()
planner.partitions(start, planner.latest(start, 2_000_000))
limited = time.perf_counter() - began
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"whole": whole, "limited": limited, "tasks": tasks, "grown": (after - before) / 1024}))
"""


def make_spool(path: Path, events: int) -> float:
    """`events` of 1,000 sources with 100 topics each; returns seconds of CPU for a million."""
    index = [n % TOPICS for n in range(PER_FRAME)]
    names = [f"topic-{n}" for n in range(TOPICS)]
    datas = [b"xy"] * PER_FRAME
    now = time.time_ns() // 1000
    times = list(range(now, now + PER_FRAME))
    began = time.process_time()
    with DiskJournal(path, source="c", retention=BIG, fsync="never") as spool:
        for n in range(events // PER_FRAME):
            part, source = divmod(n, SOURCES)
            seq = part * PER_FRAME // TOPICS
            frame = encode_frame(
                f"source-{source}",
                1,
                part * PER_FRAME,
                topics=[(name, seq) for name in names],
                topic_index=index,
                times=times,
                datas=datas,
            )
            spool.append("direct/event", frame.raw, NESTED)
    return (time.process_time() - began) / (events / 1e6)


def make_day(path: Path) -> int:
    """A day of 10,000 streams: an event per stream in each of 100 moments of the day, one in fifty missing."""
    count = 0
    day = time.time_ns() // 1000 // DAY_US * DAY_US - DAY_US
    with DiskJournal(path, source="c", retention=BIG, fsync="never") as spool:
        for source in range(DAY_STREAMS // TOPICS):
            for moment in range(100):
                if (moment + source) % 50 == 7 and 0 < moment < 99:
                    continue
                frame = encode_frame(
                    f"source-{source}",
                    1,
                    moment * TOPICS,
                    topics=[(f"topic-{n}", moment) for n in range(TOPICS)],
                    topic_index=list(range(TOPICS)),
                    times=[day + moment * DAY_US // 100] * TOPICS,
                    datas=[b"xy"] * TOPICS,
                )
                spool.append("direct/event", frame.raw, NESTED)
                count += TOPICS
    return count


def cpu_of_all() -> float:
    """CPU seconds of this process and of those that it started."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def jobs(report: Report, work: Path, spool: Path, what: str, events: int) -> int:
    """Land a spool and make its loss table, in a new session: CPU per million events; returns how many were lost."""
    spark = start_session("costs", master="local[2]")
    ledger = LedgerTable(str(work / "ledger"), Windows())
    for name, job in (("land", Lander(str(work / "table"))), ("loss", ledger)):
        before = cpu_of_all()
        source = SparkInput(paths=(str(spool),), max_events_per_trigger=500_000)
        stream = job.stream(source, spark) if isinstance(job, Lander) else source.stream(spark)
        run_stream(stream, job, checkpoint=job.checkpoint)
        report.add(f"spark {name} of {what}, CPU per million", (cpu_of_all() - before) / events * 1e6, "s")
    before, began = cpu_of_all(), time.perf_counter()
    lost = int(ledger.loss(spark, settle_s=0).selectExpr("sum(lost)").collect()[0][0] or 0)
    report.add(f"the loss table of {what} from its ledger", time.perf_counter() - began, "s")
    report.add(f"the loss table of {what} from its ledger, CPU", cpu_of_all() - before, "s")
    stop_session(spark)
    return lost


def costs(report: Report, work: Path, events: int) -> None:
    """What a million ordinary events cost: bytes of a spool and of a table, CPU of landing and of loss tables."""
    spool, table = work / "ordinary", work / "table"
    bench_spark.make_spool(spool, bench_spark.payloads(events))
    jobs(report, work, spool, f"{events:,} events", events)
    for what, folder, kind in (("spool", spool, "*.seg"), ("Delta table", table, "*.parquet")):
        report.add(f"{what}, per event", sum(f.stat().st_size for f in folder.rglob(kind)) / events, "bytes")
    options = {"path": str(spool)}
    jobs_here: dict[str, Callable[[], object]] = {
        "loss": lambda: local.loss(options),
        "counts": lambda: local.counts(options),
    } | {
        f"export as {kind}": lambda kind=kind: local.export(options, work / f"out.{kind}")
        for kind in ("parquet", "arrow", "csv")
    }
    for name, job in jobs_here.items():
        began, cpu = time.perf_counter(), time.process_time()
        job()
        taken = (time.perf_counter() - began) / events * 1e6
        report.add(f"{name} without Spark, per million", taken, "s", goal="< 1 s", met=taken < 1)
        report.add(f"{name} without Spark, CPU per million", (time.process_time() - cpu) / events * 1e6, "s")


def main(events: int) -> None:
    """Measure everything."""
    report = Report("scale")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cost = make_spool(work / "spool", events)
        report.add(f"appending {events:,} events, CPU per million", cost, "s")
        found = json.loads(
            subprocess.run(
                [sys.executable, "-c", _PLAN, str(work / "spool")], capture_output=True, text=True, check=True
            ).stdout
        )
        report.add(
            f"planning all {events:,} events", found["whole"], "s", goal="< 2 s", met=found["whole"] < 2
        )
        report.add(
            "planning the next 2 M of them", found["limited"], "s", goal="< 2 s", met=found["limited"] < 2
        )
        report.add(
            "memory that planning added", found["grown"], "MB", goal="≤ 50 MB", met=found["grown"] <= 50
        )
        began, cpu = time.perf_counter(), time.process_time()
        table = local.loss({"path": str(work / "spool")}, settle_s=0, by="topic")
        taken, used = time.perf_counter() - began, time.process_time() - cpu
        assert table.num_rows == SOURCES * TOPICS
        report.add("loss table of 100,000 streams, without Spark", taken, "s")
        report.add("the same, CPU per million events", used / (events / 1e6), "s")
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report.add("largest memory of this process", memory, "MB")
        count = make_day(work / "day")
        began = time.perf_counter()
        table = local.loss({"path": str(work / "day")}, settle_s=0)
        report.add(
            f"loss by minute of a day of 10,000 streams ({count:,} events)", time.perf_counter() - began, "s"
        )
        lost = sum(table["lost"].to_pylist())
        assert lost == DAY_STREAMS * 100 - count, (lost, count)
        (work / "jobs").mkdir()
        of_day = jobs(report, work / "jobs", work / "day", "the day of 10,000 streams", count)
        assert of_day == lost, (of_day, lost)
        costs(report, work, min(events, 2_000_000))
    report.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events", nargs="?", type=int, default=100_000_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    given = parser.parse_args()
    main(given.events // 10 if given.quick else given.events)
