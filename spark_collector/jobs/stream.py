"""Running a streaming job: where it reads, how often, how it is stopped, and what it reports meanwhile."""

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core.errors import Fault, UsageError
from brokerless.core.presence import announce
from brokerless.core.runtime.files import FileLocked, lock_file
from brokerless.spark_collector.session.session import stop_query
from brokerless.spark_collector.source.options import parse_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)
# Spark gives its Python process ten seconds to start. It needs half of one, but a machine that reads pyspark from
# a cold disk, or has a load of ten, does not always manage: nearly two minutes of trying.
START_ATTEMPTS = 10
# The name under which the rows of a sink are counted.
_OBSERVED = "brokerless_rows"
# How long a job that has ended is announced with its last figures: the console looks once a second.
_LINGER_S = 3.0
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
    storage_options: dict[str, str] = {}

    def options(self) -> dict[str, str]:
        """As the data source wants them. Raises ConfigError, before Spark is asked, if one is wrong."""
        chosen = {
            "path": ",".join(p if "://" in p else os.path.abspath(p) for p in self.paths),
            "endpoint": ",".join(self.endpoints),
            "failOnDataLoss": str(self.fail_on_data_loss).lower(),
            "onCorrupt": "quarantine" if self.quarantine_corrupt else "fail",
            "startingOffsets": self.starting,
        }
        if self.max_events_per_trigger is not None:
            chosen["maxEventsPerTrigger"] = str(self.max_events_per_trigger)
        if self.storage_options:
            chosen["storageOptions"] = json.dumps(self.storage_options)
        if self.partitions is not None:
            chosen["numPartitions"] = str(self.partitions)
        chosen = {k: v for k, v in chosen.items() if v}
        parse_options(chosen)
        return chosen

    def stream(self, spark: "SparkSession", *, ranges: bool = False) -> "DataFrame":
        """The rows as a stream; with `ranges` what its tasks would read, for a job whose own tasks read it."""
        chosen = self.options() | ({"ranges": "true"} if ranges else {})
        return spark.readStream.format("brokerless").options(**chosen).load()

    def batch(self, spark: "SparkSession") -> "DataFrame":
        """The rows that are there now."""
        return spark.read.format("brokerless").options(**self.options()).load()


class Progress(msgspec.Struct, frozen=True):
    """What a running job has done: `behind` counts frames or events that are there and not read yet."""

    batch: int
    rows: int
    rows_per_s: float
    behind: int


class AlreadyRunning(UsageError):
    """Another job uses this checkpoint; `checkpoint` names it, `pid` is the process on this machine."""

    def __init__(self, checkpoint: str, pid: str) -> None:
        super().__init__(
            f"another job (process {pid or 'unknown'}) is running with the checkpoint {checkpoint}: "
            "one table has one writer at a time"
        )
        self.checkpoint = checkpoint
        self.pid = pid


@contextlib.contextmanager
def checkpoint_lock(checkpoint: str) -> Iterator[None]:
    """Hold a checkpoint for one job. Raises AlreadyRunning.

    A checkpoint on a file system that cannot be locked from here (a URL) is not held; then the table refuses a second
    writer of the same query at its commit.
    """
    path = checkpoint.removeprefix("file://").removeprefix("file:")
    if "://" in path:
        yield
        return
    os.makedirs(path, exist_ok=True)
    try:
        fd = lock_file(f"{path.rstrip('/')}.lock", holder=str(os.getpid()))
    except FileLocked as error:
        raise AlreadyRunning(checkpoint, error.holder) from None
    try:
        yield
    finally:
        os.close(fd)


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
    paths: Sequence[str] = (),
    counted: Callable[[], int] | None = None,
) -> Progress:
    """Run `function(rows, batch id, query id)` for each micro-batch; returns when done or stopped.

    With `every_s` it goes on until `stopped()`; without, it ends when everything that is there now is done. A batch
    that was interrupted comes again with the same id and the same rows. `paths` are the journals that the stream
    reads: the console's map shows the job behind them at once, and without them after its first batch. `counted` tells
    how many rows there were so far, where Spark does not see them (`Lander.stream`).
    Raises JobFailed, and AlreadyRunning if another job holds the checkpoint.
    """
    identity: list[str] = []

    def on_batch(rows: "DataFrame", batch: int) -> None:
        if not identity:
            identity.append(query_id(checkpoint))
        function(rows, batch, identity[0])

    writer = stream.writeStream.foreachBatch(on_batch)
    return _run(writer, checkpoint, every_s, _Watch(on_progress, paths, counted), stopped)


def run_parquet_sink(
    stream: "DataFrame",
    path: str,
    *,
    partition_by: tuple[str, ...],
    checkpoint: str,
    every_s: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    paths: Sequence[str] = (),
) -> int:
    """Run Spark's own Parquet sink; returns how many rows it wrote.

    Each row is there once for readers that know Spark's `_spark_metadata`; other readers may see files of batches
    that failed. Raises what `run_stream` raises.
    """
    from pyspark.sql import functions as F

    counted = stream.observe(_OBSERVED, F.count(F.lit(1)).alias("rows"))
    writer = counted.writeStream.format("parquet").option("path", path).partitionBy(*partition_by)
    watch = _Watch(on_progress, paths)
    _run(writer, checkpoint, every_s, watch, stopped)
    return watch.observed


def _run(
    writer: Any, checkpoint: str, every_s: float | None, watch: "_Watch", stopped: Callable[[], bool]
) -> Progress:
    writer = writer.option("checkpointLocation", checkpoint)
    if every_s is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{max(0, round(every_s * 1000))} milliseconds")
    with checkpoint_lock(checkpoint), watch.announced(checkpoint):
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

    def __init__(
        self,
        on_progress: Callable[[Progress], None] | None,
        paths: Sequence[str],
        counted: Callable[[], int] | None = None,
    ) -> None:
        self.total = Progress(-1, 0, 0.0, 0)
        self.observed = 0
        self._on_progress = on_progress
        self._counted = counted
        self._began = time.monotonic()
        self._paths = [os.path.abspath(path) for path in paths if "://" not in path]
        self._positions: dict[str, int] = {}

    @contextlib.contextmanager
    def announced(self, checkpoint: str) -> Iterator[None]:
        """Announce the job: in the map of the console it stands behind the spools that it reads."""
        presence = announce("spark.job", checkpoint_name(checkpoint), [], self._state)
        try:
            yield
        finally:
            # A job that ends with its only batch would never be seen with its figures.
            presence.close(linger_s=_LINGER_S)

    def _state(self) -> dict[str, Any]:
        """What the job announces about itself (see `core.presence`); `behind` only once Spark has reported."""
        state: dict[str, Any] = {
            "counters": {"rows": self.total.rows, "batches": self.total.batch + 1},
            "paths": sorted({*self._paths, *self._positions}),
            "read_to": self._positions,
        }
        if self._positions:
            state["behind"] = self.total.behind
        return state

    def look(self, query: Any) -> None:
        for report in query.recentProgress:
            self._positions = {
                path: mark["next"]
                for source in report["sources"]
                for path, mark in _offsets(source["endOffset"]).items()
            }
            if report["batchId"] <= self.total.batch or not report["numInputRows"]:
                continue
            rows = self._counted() if self._counted else self.total.rows + report["numInputRows"]
            speed = rows / max(0.001, time.monotonic() - self._began)
            self.total = Progress(report["batchId"], rows, speed, behind(report))
            observed = report["observedMetrics"].get(_OBSERVED)
            self.observed += observed["rows"] if observed else 0
            if self._on_progress is not None:
                self._on_progress(self.total)


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


def checkpoint_name(checkpoint: str) -> str:
    """What people call the job: its table, or else the folder of its checkpoint."""
    path = checkpoint.rstrip("/").removesuffix("/_brokerless/checkpoint")
    return path.rpartition("/")[2]


def query_id(checkpoint: str) -> str:
    """The id that Spark gave the query when its checkpoint was made; a new checkpoint has a new one."""
    found: dict[str, str] = json.loads(Path(checkpoint, "metadata").read_text("utf-8"))
    return found["id"]


def _readable(error: Any) -> JobFailed:
    """Spark's exception, with the cause alone as its message."""
    return JobFailed(f"the Spark job failed: {root_cause(str(error))}", str(error))


def root_cause(text: str) -> str:
    """The one line of Spark's error text that names the cause; pure.

    The last error of Python, without the name of its class if it is ours; else the innermost of Java; else what
    PySpark says in a Python traceback; else the first line.
    """
    lines = [re.sub(r" SQLSTATE: \w+;?", "", line.strip()) for line in text.splitlines() if line.strip()]
    errors = [m for line in lines if (m := _PYTHON_ERROR.match(line))]
    python = [m for m in errors if not m[1].startswith(_FOREIGN)]
    ours = [m for m in python if m[1].startswith("brokerless.")]
    if ours:
        return ours[-1][2]
    if python:
        return python[-1][0]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    causes = causes or [m[2] for m in errors if m[1].startswith("pyspark.")]
    shown = causes[-1] if causes else (lines[0] if lines else "unknown")
    shown = re.sub(r"^\[STREAM_FAILED\] Query \[.*?\] terminated with exception: ", "", shown)
    return re.sub(r"^(java|org|scala|py4j)\.[\w.$]+(Exception|Error): ", "", shown)


# `module.Class: message`, or a class of Python itself; Spark's and Java's own are wrapped around the cause.
_PYTHON_ERROR = re.compile(r"^((?:[a-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception)): (.+)$")
_FOREIGN = ("java.", "org.", "scala.", "py4j.", "pyspark.")
