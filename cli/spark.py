"""`brokerless spark …`: land, loss, counts, metrics, query, compact, cluster."""

import contextlib
import logging
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter

from brokerless.cli.options import By, DataLoss, Endpoints, Json, LateAfter, Quarantine, Settle, Window
from brokerless.cli.output import result
from brokerless.cli.show import as_json, progress, table
from brokerless.core.errors import UsageError
from brokerless.spark_collector import (
    Lander,
    LandOptions,
    LedgerTable,
    SparkInput,
    Windows,
    start_cluster,
    start_session,
    stop_cluster,
    stop_session,
)
from brokerless.spark_collector.jobs.delta import BatchTable
from brokerless.spark_collector.jobs.land import open_table, prepare
from brokerless.spark_collector.jobs.loss import totals
from brokerless.spark_collector.jobs.metric_series import metric_series
from brokerless.spark_collector.jobs.stream import (
    AlreadyRunning,
    Progress,
    root_cause,
    run_parquet_sink,
    run_stream,
)
from brokerless.spark_collector.jobs.views import make_views, read_table
from brokerless.spark_collector.session.cluster import alive_workers, read_cluster
from brokerless.spark_collector.session.jar import make_jar, shipped_jar
from brokerless.spark_collector.session.java import find_java
from brokerless.spark_collector.source.locations import LocationMissing
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Planner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

app = cyclopts.App(
    name="spark",
    help="Spark jobs over spools, journals and publishers.",
    help_epilogue="Example: brokerless spark land --spool var/spool --table var/events",
)
cluster = cyclopts.App(
    name="cluster",
    help="A standalone Spark cluster on this machine, for trying it out.",
    help_epilogue="Example: brokerless spark cluster start --workers 2",
)
app.command(cluster)

Spools = Annotated[
    tuple[str, ...], Parameter(name="--spool", help="spool or journal directory, glob; repeatable")
]
Master = Annotated[str, Parameter(help="Spark master: local[*], local[2], spark://host:7077")]
Follow = Annotated[
    bool, Parameter(help="go on with new events until Ctrl-C, instead of ending with those that are there")
]
Every = Annotated[float, Parameter(help="with --follow: seconds between batches (0: as soon as possible)")]
MaxEvents = Annotated[int | None, Parameter(help="largest batch, in events")]
Checkpoint = Annotated[
    Path | None,
    Parameter(help="the query's checkpoint; default: inside the table, if that is a directory"),
]
Ui = Annotated[bool, Parameter(help="Spark's own web pages at port 4040")]


def _check_conf(_: object, conf: tuple[str, ...]) -> None:
    for setting in conf:
        if not re.fullmatch(r"spark\.[^=\s]+=.*", setting):
            raise ValueError(f"must be spark.…=value, not {setting!r}")


Conf = Annotated[
    tuple[str, ...],
    Parameter(name="--conf", help="a setting of Spark, as key=value; repeatable", validator=_check_conf),
]


@contextlib.contextmanager
def _session(name: str, master: str, ui: bool, conf: tuple[str, ...] = ()) -> Iterator["SparkSession"]:
    # PySpark logs each error of a query as a page of JSON, before it raises it.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL + 1)
    spark = start_session(
        f"brokerless {name}", master=master, ui=ui, config=dict(c.split("=", 1) for c in conf)
    )
    try:
        yield spark
    finally:
        stop_session(spark)


def _check(rows: SparkInput, checkpoint: str = "") -> None:
    """Report a place that is not there at once, not after the many seconds that Spark needs to start.

    Not if the query has been there before: then a spool that is away is behind, and does not hold up the others.
    """
    if "://" in checkpoint or (checkpoint and any(Path(checkpoint, "offsets").glob("[0-9]*"))):
        return
    try:
        Planner(parse_options(rows.options())).initial()
    except LocationMissing as error:
        option = "--endpoint" if error.location in rows.endpoints else "--spool"
        raise UsageError(f"{option}: {error}") from None


def _check_landed(path: Path) -> None:
    """As `_check`, for a table that is read."""
    if not BatchTable(str(path)).exists():
        raise UsageError(f"--table: {path} is not a landed table")


def _input(
    spools: tuple[str, ...],
    endpoints: tuple[str, ...],
    max_events: int | None,
    strict: bool,
    quarantine: bool,
) -> SparkInput:
    if not spools and not endpoints:
        raise UsageError("give --spool DIRECTORY or --endpoint ADDRESS")
    rows = SparkInput(
        paths=spools,
        endpoints=endpoints,
        max_events_per_trigger=max_events,
        fail_on_data_loss=strict,
        quarantine_corrupt=quarantine,
    )
    rows.options()  # raises for wrong ones, before Spark is started
    return rows


@contextlib.contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets: the job ends after the batch that it is working on."""
    stop = threading.Event()
    previous = {n: signal.signal(n, lambda *_: stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@app.command(help_epilogue="Example: brokerless spark land --spool var/spool --table var/events")
def land(
    *,
    table_path: Annotated[
        str,
        Parameter(
            name="--table",
            help="the table's directory, or URL (s3://, gs://, abfs://); with --format iceberg namespace.name",
        ),
    ],
    spool: Spools = (),
    endpoint: Endpoints = (),
    format: Annotated[
        Literal["delta", "iceberg", "parquet"],
        Parameter(
            help="iceberg: in the default catalogue of pyiceberg's configuration; parquet: Spark's own sink, without "
            "our guarantees"
        ),
    ] = "delta",
    json_schema: Annotated[
        str | None, Parameter(help='payload schema, as "a int, b string", or "infer"')
    ] = None,
    partition_by: Annotated[tuple[str, ...], Parameter(help="columns of the table's partitions")] = ("date",),
    dedupe: Annotated[
        bool | None, Parameter(help="drop what was landed before; default: with several inputs")
    ] = None,
    checkpoint: Checkpoint = None,
    compact: Annotated[bool, Parameter(help="put small files together afterwards")] = False,
    follow: Follow = False,
    every: Every = 10.0,
    max_events: MaxEvents = None,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = (),
    ui: Ui = False,
) -> None:
    """Land events in a Delta or Iceberg table by date, exactly once."""
    rows = _input(spool, endpoint, max_events, fail_on_data_loss, quarantine)
    several = len(spool) + len(endpoint) > 1 or any("*" in s for s in spool)
    wanted = several if dedupe is None else dedupe
    every_s = every if follow else None
    options = LandOptions(
        partition_by=partition_by,
        dedupe=wanted,
        json_schema=json_schema,
        format="iceberg" if format == "iceberg" else "delta",
    )
    if format != "delta" and compact:
        raise UsageError("--compact is for Delta tables")
    if format == "parquet":
        if dedupe or json_schema:
            raise UsageError("--format parquet has no --dedupe and --json-schema; land in a Delta table")
        where = str(checkpoint or Path(table_path).absolute() / "_brokerless" / "checkpoint")
        _check(rows, where)
        with _until_signal() as stop, progress() as show, _session("land", master, ui, conf) as spark:
            count = run_parquet_sink(
                prepare(rows.stream(spark)),
                table_path,
                partition_by=partition_by,
                checkpoint=where,
                every_s=every_s,
                on_progress=show,
                stopped=stop.is_set,
                paths=rows.paths,
            )
        fields: dict[str, object] = {"events": count, "table": table_path}
        result(fields, f"landed {count:,} events in {table_path}", as_json=json)
        return
    place = open_table(table_path, options)  # before Spark is started
    place.check()
    where = str(checkpoint or place.checkpoint)
    _check(rows, where)
    with _until_signal() as stop, progress() as show, _session("land", master, ui, conf) as spark:
        lander = Lander(table_path, options)
        run_stream(
            lander.stream(rows, spark),
            lander,
            checkpoint=where,
            every_s=every_s,
            on_progress=show,
            stopped=stop.is_set,
            paths=rows.paths,
            counted=lambda: lander.landed + lander.quarantined,
        )
    fields = {"events": lander.landed, "table": table_path, "quarantined": lander.quarantined}
    lines = [f"landed {lander.landed:,} events in {table_path}"]
    if lander.quarantined:
        lines.append(f"quarantined {lander.quarantined:,} events in {lander.quarantine.path}")
    if compact:
        fields["files_removed"] = BatchTable(table_path).optimize()
        lines.append(f"{fields['files_removed']} files fewer after compaction")
    result(fields, "\n".join(lines), as_json=json)


@app.command(help_epilogue="Example: brokerless spark loss --spool var/spool --ledger var/ledger --by topic")
def loss(
    *,
    ledger: Annotated[str, Parameter(help="the ledger's directory or URL, made if it is not there")],
    spool: Spools = (),
    endpoint: Endpoints = (),
    window: Window = 60.0,
    late_after: LateAfter = 60.0,
    settle: Settle = 10.0,
    by: By = "window",
    checkpoint: Checkpoint = None,
    follow: Follow = False,
    every: Every = 10.0,
    max_events: MaxEvents = None,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = (),
    ui: Ui = False,
) -> None:
    """Loss per source, topic and window: what was sent, received, lost, and what came late after all."""

    def show(spark: "SparkSession", made: LedgerTable) -> "DataFrame":
        found = made.loss(spark, window_s=window, settle_s=settle)
        return totals(found) if by == "topic" else found.orderBy("source", "epoch", "topic", "window")

    rows = _input(spool, endpoint, max_events, fail_on_data_loss, quarantine)
    _ledger_job(
        "loss",
        ledger,
        rows,
        Windows(window, late_after),
        show,
        checkpoint,
        follow,
        every,
        json,
        master,
        conf,
        ui,
    )


@app.command(help_epilogue="Example: brokerless spark counts --spool var/spool --ledger var/ledger")
def counts(
    *,
    ledger: Annotated[
        str, Parameter(help="the ledger's directory or URL, made if it is not there; may be that of `loss`")
    ],
    spool: Spools = (),
    endpoint: Endpoints = (),
    window: Window = 60.0,
    checkpoint: Checkpoint = None,
    follow: Follow = False,
    every: Every = 10.0,
    max_events: MaxEvents = None,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = (),
    ui: Ui = False,
) -> None:
    """Events per window, source and topic, each counted once."""
    rows = _input(spool, endpoint, max_events, fail_on_data_loss, quarantine)

    def show(spark: "SparkSession", made: LedgerTable) -> "DataFrame":
        return made.counts(spark, window_s=window)

    _ledger_job(
        "counts", ledger, rows, Windows(window), show, checkpoint, follow, every, json, master, conf, ui
    )


def _ledger_job(
    name: str,
    path: str,
    rows: SparkInput,
    windows: Windows,
    show: "Callable[[SparkSession, LedgerTable], DataFrame]",
    checkpoint: Path | None,
    follow: bool,
    every: float,
    json: bool,
    master: str,
    conf: tuple[str, ...],
    ui: bool,
) -> None:
    output = as_json if json else table
    made = LedgerTable(path, windows)
    where = str(checkpoint or made.checkpoint)
    _check(rows, where)
    with _until_signal() as stop, progress() as show_progress, _session(name, master, ui, conf) as spark:

        def update(now: Progress) -> None:
            show_progress(now)
            if follow:
                output(show(spark, made))

        try:
            run_stream(
                rows.stream(spark),
                made,
                checkpoint=where,
                every_s=every if follow else None,
                on_progress=update,
                stopped=stop.is_set,
                paths=rows.paths,
            )
            made.merge()
        except AlreadyRunning as running:
            if follow:
                raise
            # The job that writes this ledger brings it up to date; two would spoil it for both.
            print(f"brokerless: {running}; this is what its ledger has", file=sys.stderr)
        output(show(spark, made))


@app.command(help_epilogue="Example: brokerless spark metrics --spool var/spool --name orders")
def metrics(
    *,
    spool: Spools = (),
    table_path: Annotated[
        Path | None, Parameter(name="--table", help="a landed table instead of a spool")
    ] = None,
    name: Annotated[str | None, Parameter(help="only series whose name begins so")] = None,
    window: Annotated[float | None, Parameter(help="seconds; default: the daemon's flush interval")] = None,
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = (),
    ui: Ui = False,
) -> None:
    """StatsD series over time: raw and corrected values with their bounds."""
    from pyspark.sql import functions as F

    chosen = None if table_path is not None else _input(spool, (), None, True, False)
    if chosen is not None:
        _check(chosen)
    if table_path is not None:
        _check_landed(table_path)
    with progress(), _session("metrics", master, ui, conf) as spark:
        rows = read_table(spark, str(table_path)) if chosen is None else chosen.batch(spark)
        found = metric_series(rows, window_s=window)
        if name is not None:
            found = found.where(F.col("name").startswith(name))
        (as_json if json else table)(found)


@app.command(help_epilogue="Example: brokerless spark query 'SELECT count(*) FROM events' --table var/events")
def query(
    sql: Annotated[str, Parameter(help='e.g. "SELECT topic, count(*) FROM events GROUP BY topic"')],
    /,
    *,
    table_path: Annotated[
        Path | None, Parameter(name="--table", help="a landed table: views events, quarantine")
    ] = None,
    ledger: Annotated[Path | None, Parameter(help="a ledger: views loss, counts")] = None,
    spool: Spools = (),
    json: Json = False,
    master: Master = "local[*]",
    conf: Conf = (),
    ui: Ui = False,
) -> None:
    """Run SQL over the landed tables.

    Views `events`, `quarantine`, `loss`, `counts`, and `spool` for raw rows.
    """
    if table_path is None and ledger is None and not spool:
        raise UsageError("give --table, --ledger or --spool")
    if spool:
        _check(_input(spool, (), None, True, False))
    if table_path is not None:
        _check_landed(table_path)
    with progress(), _session("query", master, ui, conf) as spark:
        views = make_views(
            spark,
            table=str(table_path) if table_path else None,
            ledger=str(ledger) if ledger else None,
            spools=spool,
        )
        try:
            found = spark.sql(sql)
            (as_json if json else table)(found)
        except Exception as error:
            if type(error).__module__.startswith("pyspark"):
                raise UsageError(f"{root_cause(str(error))} (views: {', '.join(views)})") from None
            raise


@app.command(name="compact", help_epilogue="Example: brokerless spark compact --table var/events")
def compact_table(
    *,
    table_path: Annotated[str, Parameter(name="--table", help="the landed table")],
    vacuum: Annotated[
        int | None, Parameter(help="also delete files that no version of the last HOURS needs (at least 168)")
    ] = None,
    json: Json = False,
) -> None:
    """Put the small files of a landed table together; may run while it is being written. Needs no Spark."""
    landed = BatchTable(table_path)
    fewer = landed.optimize()
    fields: dict[str, object] = {"table": table_path, "files_removed": fewer}
    text = f"{fewer} files fewer"
    if vacuum is not None:
        fields["files_deleted"] = landed.vacuum(keep_hours=vacuum)
        text += f", {fields['files_deleted']} files deleted"
    result(fields, text, as_json=json)


@app.command(help_epilogue="Example: brokerless spark jar --out build")
def jar(
    *,
    directory: Annotated[Path, Parameter(name="--out", help="the folder to put it into")] = Path(),
    json: Json = False,
) -> None:
    """Put the jar of the data source for `spark-submit --jars` into a folder, and print its path.

    It is a copy of the one in this installation; if that was built without a JDK, it is compiled here, which needs one.
    Sessions that these commands start themselves use it without being asked.
    """
    shipped = shipped_jar()
    try:
        if shipped is None:
            made = make_jar(find_java().home, directory.absolute())
        else:
            directory.mkdir(parents=True, exist_ok=True)
            made = Path(shutil.copy(shipped, directory.absolute()))
    except OSError as error:
        raise UsageError(f"--out {directory}: {error.strerror}") from None
    result({"jar": str(made)}, str(made), as_json=json)


@cluster.command(help_epilogue="Example: brokerless spark cluster start --workers 2")
def start(
    *,
    directory: Annotated[Path, Parameter(help="logs, work files and cluster.json")] = Path("spark-cluster"),
    workers: Annotated[int, Parameter(help="worker processes")] = 2,
    cores: Annotated[int, Parameter(help="per worker")] = 1,
    memory: Annotated[str, Parameter(help="per worker: a number with m, g or t")] = "1g",
    port: Annotated[int, Parameter(help="the master's; 0: a free one")] = 0,
    json: Json = False,
) -> None:
    """Start a master and workers on 127.0.0.1; they stay until `cluster stop`."""
    info = start_cluster(directory, workers=workers, cores=cores, memory=memory, port=port)
    fields: dict[str, object] = {"url": info.url, "workers": workers, "web": info.web}
    text = f"{info.url} with {workers} workers; pages at {info.web}; use it with --master {info.url}"
    result(fields, text, as_json=json)


@cluster.command(name="stop", help_epilogue="Example: brokerless spark cluster stop")
def stop_(
    *,
    directory: Annotated[Path, Parameter(help="the directory given to start")] = Path("spark-cluster"),
    json: Json = False,
) -> None:
    """Stop what `cluster start` started in this directory."""
    count = stop_cluster(directory)
    text = f"stopped {count} processes" if count else f"nothing is running in {directory}"
    result({"stopped": count}, text, as_json=json)


@cluster.command(help_epilogue="Example: brokerless spark cluster status")
def status(
    *,
    directory: Annotated[Path, Parameter(help="the directory given to start")] = Path("spark-cluster"),
    json: Json = False,
) -> None:
    """Show the cluster's address and how many workers are registered."""
    info = read_cluster(directory)
    if info is None:
        raise UsageError(f"no cluster was started in {directory}")
    alive = len(alive_workers(info))
    fields: dict[str, object] = {"url": info.url, "workers": alive, "web": info.web}
    result(fields, f"{info.url}: {alive} workers; pages at {info.web}", as_json=json)
