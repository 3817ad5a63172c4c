"""`--spark`: the loss that Spark computes from the consumers' spools must agree with the witnesses.

The two come from different places: the witnesses from records that the verdict compares, Spark's table from
sequence numbers in collector spools. A difference is an error of one of them.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from brokerless.losstest.analysis.observations import received_events, sent_events
from brokerless.losstest.evidence.event_log import read_event_log
from brokerless.losstest.evidence.evidence import Evidence, load
from brokerless.losstest.evidence.spool import Spool, source_name
from brokerless.losstest.harness.run_directory import Run, read_run

WORDS = "words"  # the spool in which the check itself says what was sent


class Stream(msgspec.Struct, frozen=True):
    """What the witnesses say of one subscription: bounds, because spool and witness are two writes."""

    source: str
    sent: int
    least: int  # committed
    most: int  # delivered or committed


def streams(evidence: Evidence) -> Iterator[Stream]:
    """The subscriptions of a run."""
    sent = sent_events(evidence.producers, evidence.cell.events)
    end = int(sent.accepted_numbers.max(initial=-1)) + 1
    for received in received_events(evidence, sent):
        committed = received.committed[:end] > 0
        either = committed | (received.delivered[:end] > 0)
        source = source_name(evidence.cell, received.name)
        del received  # before the next one is read
        yield Stream(source, end, int(committed.sum()), int(either.sum()))


def check_with_spark(directory: Path, say: Callable[[str], None]) -> list[str]:
    """Compare every run of the directory; returns the differences in words."""
    run = read_run(directory)
    expected: list[Stream] = []
    paths: list[str] = []
    for key in run.planned:
        cell_directory = directory / "cells" / key
        if not (cell_directory / "supervisor.jsonl").exists():
            continue
        if not any(note["what"] == "end" for note in read_event_log(cell_directory / "supervisor.jsonl")):
            continue
        found = list(streams(load(cell_directory)))
        _say_what_was_sent(cell_directory, found)
        expected += found
        paths += [str(path) for path in sorted((cell_directory / "spools").glob("*")) if found]
    say(f"Spark reads {len(paths)} spools of {len(expected)} subscriptions …")
    table = spark_totals(paths)
    return [text for stream in expected for text in _compare(stream, table.get(stream.source))]


def _say_what_was_sent(directory: Path, found: list[Stream]) -> None:
    for stream in found:
        path = directory / "spools" / f"{WORDS}-{stream.source}"
        if path.exists():  # from an earlier check of the same directory
            shutil.rmtree(path)
        spool = Spool(path, f"{WORDS}-{stream.source}", stream.source)
        spool.add(0, b"")
        spool.sent(stream.sent + 1)
        spool.close()


def spark_totals(paths: list[str]) -> dict[str, dict[str, int]]:
    """Spark's loss table, summed per source: sent, received, lost, pending."""
    from brokerless.spark_collector import LedgerTable, SparkInput, Windows, spark_session
    from brokerless.spark_collector.jobs.loss import totals

    with tempfile.TemporaryDirectory() as directory, spark_session() as spark:
        ledger = LedgerTable(directory, Windows())
        ledger(SparkInput(paths=tuple(paths)).batch(spark), 0, "losstest")
        now = time.time_ns() // 1000 + 3_600_000_000  # an hour on, so that every gap counts as settled
        table = totals(ledger.loss(spark, now_us=now, settle_s=0.0))
        return {
            row["source"]: {name: int(row[name]) for name in ("sent", "received", "lost", "pending")}
            for row in table.collect()
        }


def _compare(stream: Stream, found: dict[str, int] | None) -> Iterator[str]:
    if found is None:
        yield f"{stream.source}: not in Spark's table"
        return
    # One more than the witnesses say: the extra event at offset 0.
    received, sent = found["received"] - 1, found["sent"] - 1
    if sent != stream.sent:
        yield f"{stream.source}: Spark says {sent} were sent, the witnesses {stream.sent}"
    if not stream.least <= received <= stream.most:
        yield f"{stream.source}: Spark received {received}, the witnesses {stream.least} to {stream.most}"
    missing = found["lost"] + found["pending"]
    if missing != sent - received:
        yield f"{stream.source}: Spark's own sum is off: {sent} sent, {received} received, {missing} missing"


__all__ = ["Run", "check_with_spark", "spark_totals"]
