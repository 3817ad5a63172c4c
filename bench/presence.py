"""What announcements and a console cost a busy publisher: CPU of the thread that announces, and CPU per event and
events a second with and without. `--quick` takes a few seconds.

The share of CPU is exact whatever else the machine does. The ratios are medians of pairs that were measured one after
the other, in turns with and without first; they are as good as the machine is quiet.
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
from typing import NamedTuple

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


class Measured(NamedTuple):
    """What one publisher cost."""

    rate: float  # events a second
    cpu: float  # CPU seconds per event
    core: float  # the announcing thread's share of a core
    share: float  # its share of what the process used


def measure(directory: Path, *, announce: bool, seconds: float) -> Measured:
    """Publish as fast as it goes, with a subscriber that wants none of it."""
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
    return Measured(rate, process / (rate * wall), thread / wall, thread / process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, seconds = (5, 1.5) if quick else (7, 10.0)
    report = Report("presence")
    pairs: list[tuple[Measured, Measured]] = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["BROKERLESS_PRESENCE"] = f"{temporary}/presence"
        console = subprocess.Popen(
            [sys.executable, "-m", "brokerless.cli", "console", "--port", "0", "--json"],
            stdout=subprocess.PIPE,
        )
        assert console.stdout is not None
        console.stdout.readline()  # it serves
        try:
            measure(Path(temporary, "warm-up"), announce=True, seconds=1.0)
            for number in range(rounds):
                found = {
                    announce: measure(
                        Path(temporary, f"{number}-{announce}"), announce=announce, seconds=seconds
                    )
                    for announce in (number % 2 == 0, number % 2 == 1)
                }
                pairs.append((found[True], found[False]))
        finally:
            console.terminate()
            console.wait(30)
            console.stdout.close()
    core = 100 * statistics.median(on.core for on, _ in pairs)
    share = 100 * statistics.median(on.share for on, _ in pairs)
    report.add("the announcing thread, of one core", core, "%", goal="< 1 %", met=core < 1)
    report.add("the announcing thread, of the publisher's CPU", share, "%", goal="< 1 %", met=share < 1)
    for name, values, unit, scale in (
        ("CPU per event, announced and looked at", [(on.cpu, off.cpu) for on, off in pairs], "ns", 1e9),
        ("published, announced and looked at", [(on.rate, off.rate) for on, off in pairs], "events/s", 1.0),
    ):
        ratios = sorted(on / off for on, off in values)
        report.add(
            name,
            scale * statistics.median(on for on, _ in values),
            unit,
            against=f"not announced ({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} pairs)",
            ratio=statistics.median(ratios),
        )
    report.close()


if __name__ == "__main__":
    main()
