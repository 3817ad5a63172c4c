"""What the loss test itself costs: judging a long run, and a transport that does nothing at a high rate.

python bench/losstest.py judge --events 18000000     # an hour at 5,000 events/s
python bench/losstest.py noop --rate 100000          # on a machine with other work: chrt -r 5 python …
"""

import argparse
import asyncio
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from brokerless.losstest import (
    Cell,
    Consumer,
    Message,
    Producer,
    Promise,
    Setup,
    Traits,
    Transport,
    judge,
    load,
)
from brokerless.losstest.evidence.event_log import EventLog
from brokerless.losstest.evidence.reader import RECORD_TYPE, checksums
from brokerless.losstest.evidence.witness import MAGIC, NO_POSITION, Kind
from brokerless.losstest.harness.engine import CellRun
from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.harness.processes import Workers
from brokerless.losstest.model import Row, to_json

START = 1_000_000_000_000
BLOCK = 1 << 18


def cell(events: int, rate: float, **changes: object) -> Cell:
    """A run of `events` events."""
    seconds = events / rate
    fields: dict[str, object] = {
        "transport": f"{Path(__file__).resolve()}:noop",
        "scenario": "none",
        "seed": 1,
        "run": 5,
        "rate": rate,
        "size": 200,
        "lead_s": seconds / 3,
        "offline_s": seconds / 3,
        "tail_s": seconds / 3,
        "drain_s": 30.0,
        "buffer_events": 10_000,
        "retention_events": 10**9,
        "traits": Traits(family="bench", quiet_s=1.0),
        "promise": Promise("may"),
    }
    return Cell(**(fields | changes))  # type: ignore[arg-type]


def write_witness(
    path: Path, kinds: tuple[Kind, ...], numbers: np.ndarray, interval: int, after: int
) -> None:
    """A witness file with one record of each kind per event, as a process would have written it."""
    with open(path, "wb") as file:
        file.write(MAGIC + (len(numbers) * len(kinds) + 2).to_bytes(8, "little"))
        first = Kind.START if Kind.OFFERED in kinds else Kind.READY
        last = Kind.DONE if Kind.OFFERED in kinds else Kind.IDLE
        end = START + len(numbers) * interval
        file.write(_records([first], np.array([len(numbers)]), np.array([START]), interval))
        for at in range(0, len(numbers), BLOCK):
            part = numbers[at : at + BLOCK]
            times = START + part * interval + after
            file.write(
                _records(list(kinds) * len(part), np.repeat(part, len(kinds)), np.repeat(times, len(kinds)))
            )
        file.write(_records([last], np.array([0]), np.array([end]), interval))


def _records(kinds: list[Kind], numbers: np.ndarray, times: np.ndarray, position: int = NO_POSITION) -> bytes:
    records = np.zeros(len(numbers), RECORD_TYPE)
    records["kind"], records["count"], records["n"], records["t"] = kinds, 1, numbers, times
    records["position"] = position
    records["crc"] = checksums(records)
    return records.tobytes()


def make_long_run(directory: Path, events: int, rate: float) -> None:
    """Make the witnesses of a run in which one in a hundred events is lost."""
    interval = int(1e9 / rate)
    (directory / "cell.json").write_bytes(to_json(cell(events, rate)))
    numbers = np.arange(events)
    write_witness(directory / "producer-0.1.wit", (Kind.OFFERED, Kind.ACCEPTED), numbers, interval, 0)
    kept = numbers[numbers % 100 != 7]
    kinds = (Kind.DELIVERED, Kind.COMMITTED, Kind.ACKED)
    write_witness(directory / "consumer-0.1.wit", kinds, kept, interval, 500_000)
    log = EventLog(directory / "supervisor.jsonl")
    log.close()
    end = START + events * interval + 10**10
    (directory / "supervisor.jsonl").write_text(
        f'{{"t":{START - 1},"what":"begin"}}\n{{"t":{end},"what":"quiescent"}}\n{{"t":{end + 1},"what":"end"}}\n'
    )


def judge_long_run(events: int, rate: float) -> None:
    """Judge a long run. Another process makes it, so that the memory for that does not count."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        maker = multiprocessing.get_context("spawn").Process(
            target=make_long_run, args=(directory, events, rate)
        )
        maker.start()
        maker.join()
        assert not maker.exitcode, maker.exitcode
        size = sum(path.stat().st_size for path in directory.iterdir())
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.monotonic()
        row = judge(load(directory))
        took = time.monotonic() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (row.lost, row.accepted) == ((events - 8) // 100 + 1, events), (row.lost, row.accepted)
    print(
        f"judged {events:,} events ({size / 1e9:.2f} GB of witnesses) in {took:.1f} s; "
        f"peak memory {peak / 1024:.0f} MB (before: {base / 1024:.0f} MB); lost {row.lost:,} {row.lost_by_reason}"
    )


class PipeProducer(Producer):
    """Passes events through a pipe in the file system: the cheapest transport that there is between two processes."""

    def __init__(self, setup: Setup) -> None:
        from brokerless.losstest.adapters.pipe import PipeProducer as Plain

        self._plain = Plain(setup)
        self.send = self._plain.send  # type: ignore[method-assign]

    def send(self, data: bytes) -> None: ...


class PipeConsumer(Consumer):
    """Reads large portions."""

    def __init__(self, setup: Setup) -> None:
        from brokerless.losstest.adapters.pipe import PipeConsumer as Plain

        self._plain = Plain(setup)

    def receive(self, timeout_s: float) -> "list[Message]":
        return list(self._plain.receive(timeout_s))


noop = Transport("noop", PipeProducer, PipeConsumer, Traits(family="bench", quiet_s=1.0))


def run_noop(rate: float, seconds: float) -> None:
    """One run at a high rate: are all events offered on time, and counted?"""
    one = cell(int(rate * seconds), rate)

    async def go(directory: Path) -> Row:
        async with Workers() as workers:
            await CellRun(one, directory, workers, Ports()).run()
        return judge(load(directory))

    with tempfile.TemporaryDirectory() as name:
        before_s = time.process_time()
        row = asyncio.run(go(Path(name)))
        supervisor_s = time.process_time() - before_s  # following both, and the verdict
    assert row.latency_ms is not None, row.problems
    assert row.price is not None, row.problems
    latency, price = row.latency_ms, row.price
    print(
        f"{rate:,.0f} events/s for {seconds:g} s, load average {os.getloadavg()[0]:.0f}: {row.verdict}; offered "
        f"{row.offered:,}, committed {row.committed:,}, lost {row.lost}, withheld {row.withheld}; from when each was "
        f"due to its delivery p50 {latency.p50:g}, p99 {latency.p99:g}, at most {latency.max:g} ms; CPU per million "
        f"events: producer {price.producer_cpu_s:.1f} s, consumer {price.consumer_cpu_s:.1f} s, "
        f"supervisor {supervisor_s / row.offered * 1e6:.1f} s {row.problems or ''}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("judge", "noop"))
    parser.add_argument("--events", type=int, default=1_800_000)
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--seconds", type=float, default=6)
    given = parser.parse_args()
    if given.what == "judge":
        judge_long_run(given.events, given.rate or 5000.0)
    else:
        run_noop(given.rate or 100_000.0, given.seconds)
