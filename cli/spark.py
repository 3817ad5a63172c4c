"""`brokerless spark …`: land, loss, counts, metrics, query, compact, cluster."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

from brokerless import spark_collector as sc
from brokerless.cli.show import as_json, bar, table
from brokerless.core.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

app = cyclopts.App(name="spark", help="Spark jobs over spools, journals and publishers.")
cluster = cyclopts.App(name="cluster", help="A standalone Spark cluster on this machine, for trying it out.")
app.command(cluster)

Spools = Annotated[
    tuple[str, ...], Parameter(name="--spool", help="spool or journal directory, glob; repeatable")
]
Endpoints = Annotated[tuple[str, ...], Parameter(name="--endpoint", help="a publisher's address; repeatable")]
Master = Annotated[str, Parameter(help="Spark master: local[*], local[2], spark://host:7077")]
Follow = Annotated[
    bool, Parameter(help="go on with new events until Ctrl-C, instead of ending with those that are there")
]
Every = Annotated[float, Parameter(help="with --follow: seconds between batches (0: as soon as possible)")]
MaxEvents = Annotated[int | None, Parameter(help="largest batch, in events")]
DataLoss = Annotated[
    bool, Parameter(name="--fail-on-data-loss", help="stop if retention passed what is wanted")
]
Quarantine = Annotated[bool, Parameter(help="go on over damaged segments, with a row that says so")]
Json = Annotated[bool, Parameter(name="--json", help="one JSON object per line instead of a table")]
Ui = Annotated[bool, Parameter(help="Spark's own web pages at port 4040")]


@contextlib.contextmanager
def _session(name: str, master: str, ui: bool) -> Iterator["SparkSession"]:
    spark = sc.session(f"brokerless {name}", master=master, ui=ui)
    try:
        yield spark
    finally:
        sc.stop(spark)


def _input(
    spools: tuple[str, ...],
    endpoints: tuple[str, ...],
    max_events: int | None,
    strict: bool,
    quarantine: bool,
) -> sc.SparkInput:
    if not spools and not endpoints:
        raise UsageError("give --spool DIRECTORY or --endpoint ADDRESS")
    return sc.SparkInput(
        paths=spools,
        endpoints=endpoints,
        max_events_per_trigger=max_events,
        fail_on_data_loss=strict,
        quarantine_corrupt=quarantine,
    )


def _run(
    spark: "SparkSession", rows: sc.SparkInput, function: Any, checkpoint: str, every_s: float | None
) -> sc.Progress:
    """Run a streaming job with a progress bar; Ctrl-C and SIGTERM end it after the batch in hand."""
    stop = threading.Event()
    previous = {n: signal.signal(n, lambda *_: stop.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with bar() as tell:
            return sc.run_stream(
                rows.stream(spark),
                function,
                checkpoint=checkpoint,
                every_s=every_s,
                on_progress=tell,
                stopped=stop.is_set,
            )
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@app.command
def land(
    *,
    table_path: Annotated[Path, Parameter(name="--table", help="the table's directory")],
    spool: Spools = (),
    endpoint: Endpoints = (),
    format: Annotated[
        Literal["parquet", "delta"], Parameter(help="delta needs brokerless[delta]")
    ] = "parquet",
    json_schema: Annotated[
        str | None, Parameter(help='payload schema, as "a int, b string", or "infer"')
    ] = None,
    partition_by: Annotated[tuple[str, ...], Parameter(help="columns of the folder names")] = (
        "date",
        "topic",
    ),
    dedupe: Annotated[
        bool | None, Parameter(help="drop what was landed before; default: with several inputs")
    ] = None,
    compact: Annotated[bool, Parameter(help="put small files together afterwards")] = False,
    follow: Follow = False,
    every: Every = 10.0,
    max_events: MaxEvents = None,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    master: Master = "local[*]",
    ui: Ui = False,
) -> None:
    """Land events in a table by date and topic, exactly once."""
    rows = _input(spool, endpoint, max_events, fail_on_data_loss, quarantine)
    several = len(spool) + len(endpoint) > 1 or any("*" in s for s in spool)
    options = sc.LandOptions(
        partition_by=partition_by, dedupe=several if dedupe is None else dedupe, json_schema=json_schema
    )
    with _session("land", master, ui) as spark:
        if format == "delta":
            lander: Any = sc.DeltaLander(str(table_path), options)
        else:
            lander = sc.Lander(str(table_path), options)
        done = _run(spark, rows, lander, lander.checkpoint, every if follow else None)
        print(f"landed {done.rows:,} rows in {table_path}")
        if lander.quarantined:
            print(f"quarantined {lander.quarantined:,} rows in {lander.quarantine.path}")
        if compact and format == "parquet":
            print(f"{sc.compact(spark, lander.table)} files fewer after compaction")


@app.command
def loss(
    *,
    ledger: Annotated[Path, Parameter(help="the ledger's directory, made if it is not there")],
    spool: Spools = (),
    endpoint: Endpoints = (),
    window: Annotated[float, Parameter(help="seconds")] = 60.0,
    late_after: Annotated[
        float, Parameter(help="seconds after its window that an event counts as late")
    ] = 60.0,
    settle: Annotated[float, Parameter(help="seconds that a gap is pending before it is lost")] = 10.0,
    by: Annotated[
        Literal["window", "topic"], Parameter(help="one row per window, or sums per topic")
    ] = "window",
    follow: Follow = False,
    every: Every = 10.0,
    max_events: MaxEvents = None,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
    master: Master = "local[*]",
    ui: Ui = False,
) -> None:
    """Loss per source, topic and window: what was sent, received, lost, and what came late after all."""

    def show(spark: "SparkSession", made: sc.LedgerTable) -> "DataFrame":
        found = made.loss(spark, window_s=window, settle_s=settle)
        return sc.totals(found) if by == "topic" else found.orderBy("source", "epoch", "topic", "window")

    rows = _input(spool, endpoint, max_events, fail_on_data_loss, quarantine)
    _ledger_job("loss", ledger, rows, sc.Windows(window, late_after), show, follow, every, json, master, ui)


@app.command
def counts(
    *,
    ledger: Annotated[
        Path, Parameter(help="the ledger's directory, made if it is not there; may be that of `loss`")
    ],
    spool: Spools = (),
    endpoint: Endpoints = (),
    window: Annotated[float, Parameter(help="seconds")] = 60.0,
    follow: Follow = False,
    every: Every = 10.0,
    max_events: MaxEvents = None,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
    master: Master = "local[*]",
    ui: Ui = False,
) -> None:
    """Events per window, source and topic, each counted once."""
    rows = _input(spool, endpoint, max_events, fail_on_data_loss, quarantine)

    def show(spark: "SparkSession", made: sc.LedgerTable) -> "DataFrame":
        return made.counts(spark, window_s=window)

    _ledger_job("counts", ledger, rows, sc.Windows(window), show, follow, every, json, master, ui)


def _ledger_job(
    name: str,
    path: Path,
    rows: sc.SparkInput,
    windows: sc.Windows,
    show: "Callable[[SparkSession, sc.LedgerTable], DataFrame]",
    follow: bool,
    every: float,
    json: bool,
    master: str,
    ui: bool,
) -> None:
    with _session(name, master, ui) as spark:
        made = sc.LedgerTable(str(path), windows)
        _run(spark, rows, made, made.table.checkpoint, every if follow else None)
        if len(made.table.files()) > 32:  # a ledger of a hundred batches reads slowly, and merging is exact
            made.merge(spark)
        (as_json if json else table)(show(spark, made))


@app.command
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
    ui: Ui = False,
) -> None:
    """StatsD series over time: raw and corrected values with their bounds."""
    from pyspark.sql import functions as F

    with _session("metrics", master, ui) as spark:
        if table_path is not None:
            rows = sc.read_table(spark, str(table_path))
        else:
            rows = _input(spool, (), None, True, False).batch(spark)
        found = sc.metrics(rows, window_s=window)
        if name is not None:
            found = found.where(F.col("name").startswith(name))
        (as_json if json else table)(found)


@app.command
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
    ui: Ui = False,
) -> None:
    """Run SQL over the landed tables.

    Views `events`, `quarantine`, `loss`, `counts`, and `spool` for raw rows.
    """
    if table_path is None and ledger is None and not spool:
        raise UsageError("give --table, --ledger or --spool")
    with _session("query", master, ui) as spark:
        views = sc.make_views(
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
                raise UsageError(f"{str(error).splitlines()[0]} (views: {', '.join(views)})") from None
            raise


@app.command(name="compact")
def compact_table(
    *,
    table_path: Annotated[Path, Parameter(name="--table", help="the landed table")],
    min_files: Annotated[int, Parameter(help="folders with fewer small files are left alone")] = 4,
    master: Master = "local[*]",
) -> None:
    """Put the small files of a landed table together; may run while it is being written."""
    with _session("compact", master, False) as spark:
        landed = sc.Table(str(table_path))
        if not landed.exists():
            raise UsageError(f"{table_path} is not a landed table")
        print(f"{sc.compact(spark, landed, min_files=min_files)} files fewer")


@app.command
def jar(
    *, directory: Annotated[Path, Parameter(name="--out", help="the folder to put it into")] = Path()
) -> None:
    """Make the jar of the data source for `spark-submit --jars`, and print its path. Needs a JDK.

    Sessions that these commands start themselves make and use it without being asked.
    """
    try:
        print(sc.make_jar(sc.find_java().home, directory.absolute()))
    except OSError as error:
        raise UsageError(f"--out {directory}: {error.strerror}") from None


@cluster.command
def start(
    *,
    directory: Annotated[Path, Parameter(help="logs, work files and cluster.json")] = Path("spark-cluster"),
    workers: int = 2,
    cores: Annotated[int, Parameter(help="per worker")] = 1,
    memory: Annotated[str, Parameter(help="per worker: a number with m, g or t")] = "1g",
    port: Annotated[int, Parameter(help="the master's; 0: a free one")] = 0,
) -> None:
    """Start a master and workers on 127.0.0.1; they stay until `cluster stop`."""
    info = sc.start_cluster(directory, workers=workers, cores=cores, memory=memory, port=port)
    print(f"{info.url} with {workers} workers; pages at {info.web}; use it with --master {info.url}")


@cluster.command(name="stop")
def stop_(
    *, directory: Annotated[Path, Parameter(help="the directory given to start")] = Path("spark-cluster")
) -> None:
    """Stop what `cluster start` started in this directory."""
    count = sc.stop_cluster(directory)
    print(f"stopped {count} processes" if count else f"nothing is running in {directory}")


@cluster.command
def status(
    *, directory: Annotated[Path, Parameter(help="the directory given to start")] = Path("spark-cluster")
) -> None:
    """Show the cluster's address and how many workers are registered."""
    info = sc.read_cluster(directory)
    if info is None:
        raise UsageError(f"no cluster was started in {directory}")
    print(f"{info.url}: {len(sc.alive_workers(info))} workers; pages at {info.web}")
