"""What announcements and a console cost a busy publisher: CPU of the thread that announces, and CPU per event with
and without. `--quick` takes a few seconds.

The share of CPU is exact whatever else the machine does. The ratio is as good as the machine is quiet.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import Report

from brokerless.core import DiskJournal, Retention
from brokerless.direct import Publisher, Subscriber

SIZE = 100
BATCH = 100


def presence_cpu() -> float:
    """CPU seconds of the thread that announces; 0 if there is none."""
    for thread in threading.enumerate():
        if thread.name == "presence" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def publish_for(publisher: Publisher, seconds: float) -> float:
    """Events a second, as fast as it goes."""
    data = [b"x" * SIZE] * BATCH
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        publisher.publish_many("orders.eu", data)
        count += BATCH
    return count / (time.perf_counter() - began)


def measure(directory: Path, *, announce: bool, seconds: float) -> tuple[float, float, float]:
    """CPU seconds per event, the announcing thread's share of a core, and its share of what the process used."""
    journal = DiskJournal(directory, retention=Retention(max_bytes=1 << 26), fsync="never")
    stop = threading.Event()
    with (
        Publisher("tcp://127.0.0.1:*", source="busy", journal=journal, announce=announce) as publisher,
        Subscriber(publisher.address, topics=["nothing."], announce=False) as subscriber,
    ):
        reader = threading.Thread(
            target=lambda: [subscriber.receive(timeout=0.2) for _ in iter(stop.is_set, True)]
        )
        reader.start()
        time.sleep(0.2)
        thread, process, wall = presence_cpu(), time.process_time(), time.perf_counter()
        rate = publish_for(publisher, seconds)
        thread, process = presence_cpu() - thread, time.process_time() - process
        wall = time.perf_counter() - wall
        stop.set()
        reader.join()
    return process / (rate * wall), thread / wall, thread / process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, seconds = (5, 1.5) if quick else (7, 10.0)
    report = Report("presence")
    on: list[tuple[float, float, float]] = []
    off: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["BROKERLESS_PRESENCE"] = f"{temporary}/presence"
        console = subprocess.Popen(
            [sys.executable, "-m", "brokerless.cli", "console", "--port", "0"], stdout=subprocess.DEVNULL
        )
        try:
            for number in range(rounds):
                on.append(measure(Path(temporary, f"on-{number}"), announce=True, seconds=seconds))
                off.append(measure(Path(temporary, f"off-{number}"), announce=False, seconds=seconds)[0])
        finally:
            console.terminate()
            console.wait(30)
    core, process = (100 * statistics.median(each[i] for each in on) for i in (1, 2))
    report.add("the announcing thread, of one core", core, "%", goal="< 1 %", met=core < 1)
    report.add("the announcing thread, of the publisher's CPU", process, "%", goal="< 1 %", met=process < 1)
    cost, without = 1e9 * statistics.median(each[0] for each in on), 1e9 * statistics.median(off)
    report.add(
        "CPU per event, announced and looked at", cost, "ns", against="not announced", ratio=cost / without
    )
    report.close()


if __name__ == "__main__":
    main()
