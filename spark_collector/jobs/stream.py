"""Running a streaming job: where it reads, how often, how it is stopped, and what it says meanwhile."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core.errors import Fault
from brokerless.spark_collector.session import stop_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)
# Spark gives its Python process ten seconds to start. It needs half of one, but a machine that reads pyspark from
# a cold disk, or has a load of ten, does not always manage: nearly two minutes of trying.
START_ATTEMPTS = 10
_NOT_STARTED = "Python worker failed to connect back"
BatchFunction = Callable[["DataFrame", int, str], None]


class SparkInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a job reads: options of the data source, in Python's spelling."""

    paths: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    max_events_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    quarantine_corrupt: bool = False
    partitions: int | None = None
    starting: str = "earliest"

    def options(self) -> dict[str, str]:
        """As the data source wants them."""
        chosen = {
            "path": ",".join(os.path.abspath(p) for p in self.paths),
            "endpoint": ",".join(self.endpoints),
            "failOnDataLoss": str(self.fail_on_data_loss).lower(),
            "onCorrupt": "quarantine" if self.quarantine_corrupt else "fail",
            "startingOffsets": self.starting,
        }
        if self.max_events_per_trigger is not None:
            chosen["maxEventsPerTrigger"] = str(self.max_events_per_trigger)
        if self.partitions is not None:
            chosen["numPartitions"] = str(self.partitions)
        return {k: v for k, v in chosen.items() if v}

    def stream(self, spark: "SparkSession") -> "DataFrame":
        """The rows as a stream."""
        return spark.readStream.format("brokerless").options(**self.options()).load()

    def batch(self, spark: "SparkSession") -> "DataFrame":
        """The rows that are there now."""
        return spark.read.format("brokerless").options(**self.options()).load()


class Progress(msgspec.Struct, frozen=True):
    """What a running job has done: `behind` counts frames or events that are there and not read yet."""

    batch: int
    rows: int
    rows_per_s: float
    behind: int


class JobFailed(Fault):
    """A Spark job ended with an error; `detail` is Spark's own text."""

    def __init__(self, problem: str, detail: str) -> None:
        super().__init__(problem)
        self.detail = detail


def run_stream(
    stream: "DataFrame",
    function: BatchFunction,
    *,
    checkpoint: str,
    every_s: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Progress:
    """Run `function(rows, batch id, query id)` for each micro-batch; returns when done or stopped.

    With `every_s` it goes on until `stopped()`; without, it ends when everything that is there now is done.
    A batch that was interrupted comes again with the same id and the same rows. Raises JobFailed.
    """
    identity: list[str] = []

    def on_batch(rows: "DataFrame", batch: int) -> None:
        if not identity:
            identity.append(query_id(checkpoint))
        function(rows, batch, identity[0])

    writer = stream.writeStream.foreachBatch(on_batch).option("checkpointLocation", checkpoint)
    if every_s is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{max(0, round(every_s * 1000))} milliseconds")
    watch = _Watch(on_progress)
    for attempt in range(START_ATTEMPTS):
        try:
            _run_once(writer.start(), watch, stopped)
            break
        except JobFailed as error:
            if _NOT_STARTED not in error.detail or attempt + 1 == START_ATTEMPTS or stopped():
                raise
            # Nothing is lost by starting again: the checkpoint says where.
            log.warning("Spark's Python process did not start in time (a busy machine?); trying again")
    return watch.total


def _run_once(query: Any, watch: "_Watch", stopped: Callable[[], bool]) -> None:
    try:
        while query.isActive and not stopped():
            query.awaitTermination(1)
            watch.look(query)
    except BaseException as error:
        if query.isActive:
            stop_query(query)
        if isinstance(error, Exception):
            raise _readable(error) from error
        raise
    if query.isActive:
        stop_query(query)
    watch.look(query)
    if query.exception() is not None:
        raise _readable(query.exception())


class _Watch:
    """Adds up a query's progress reports; Spark keeps the last hundred, each is counted once."""

    def __init__(self, tell: Callable[[Progress], None] | None) -> None:
        self.total = Progress(-1, 0, 0.0, 0)
        self._tell = tell
        self._began = time.monotonic()

    def look(self, query: Any) -> None:
        for report in query.recentProgress:
            if report["batchId"] <= self.total.batch or not report["numInputRows"]:
                continue
            rows = self.total.rows + report["numInputRows"]
            speed = rows / max(0.001, time.monotonic() - self._began)
            self.total = Progress(report["batchId"], rows, speed, behind(report))
            if self._tell is not None:
                self._tell(self.total)


def behind(report: Any) -> int:
    """Offsets between where the query is and what there is, from its progress report."""
    total = 0
    for source in report["sources"]:
        ends, latest = _offsets(source["endOffset"]), _offsets(source["latestOffset"])
        total += sum(
            max(0, mark["next"] - ends.get(key, {"next": 0})["next"]) for key, mark in latest.items()
        )
    return total


def _offsets(found: Any) -> dict[str, Any]:
    parsed = json.loads(found) if isinstance(found, str) else found
    return parsed if isinstance(parsed, dict) else {}


def query_id(checkpoint: str) -> str:
    """The id that Spark gave the query when its checkpoint was made; a new checkpoint has a new one."""
    found: dict[str, str] = json.loads(Path(checkpoint, "metadata").read_text("utf-8"))
    return found["id"]


def _readable(error: Any) -> JobFailed:
    """Spark's exception, with the line that matters first."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines()]
    ours = [line for line in lines if line.startswith("brokerless.")]
    shown = ours[-1].split(": ", 1)[-1] if ours else next((line for line in lines if line), "unknown")
    return JobFailed(f"the Spark job failed: {shown}", text)
