"""A SparkSession that fits a small machine, is quiet, and can read `format("brokerless")`."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from brokerless.core.errors import Fault, MissingDependency
from brokerless.spark_collector.session.cache import own_directories
from brokerless.spark_collector.session.jar import FILE_SYSTEM, find_jar
from brokerless.spark_collector.session.java import find_java, java_home
from brokerless.spark_collector.session.spark_home import launching

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Two of the four are what a laptop or an edge box can spare; a batch of 1 M events of 100 bytes fits.
DRIVER_MEMORY = "2g"

# For jobs of some thousand rows, where compiling plans takes far longer than running them: the slowest test of
# this package went from 46 s to 16 s on a busy machine. Not for jobs of millions of rows.
QUICK = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.memory": "1g",
}

# Arrow's Java library checks every single access to a vector by default. The vectors come from our own Python
# processes, and Spark reads them in order: without the checks a row costs the JVM a sixth less.
ARROW_OPTIONS = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"

_CHECKPOINT_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_LOG4J = """status = error
rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{{1}}: %m%n%ex{{short}}
# Otherwise the Python gateway announces that it changes the level, and changes it.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = {level}
# Said on every stop of a stream and on every kill, and never of use to anyone.
logger.writer.name = org.apache.spark.sql.execution.datasources.v2.WriteToDataSourceV2Exec
logger.writer.level = off
logger.runner.name = org.apache.spark.sql.execution.python.streaming
logger.runner.level = off
"""


def require_pyspark() -> None:
    """Raise MissingDependency unless pyspark and what it needs are installed."""
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401
    except ImportError as error:
        raise MissingDependency(error.name or "pyspark", "spark", "Spark") from None


class SparkNotStarted(Fault):
    """There is no session: a master that cannot be one or does not answer, or a setting that Spark refuses."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Spark cannot be started: {problem}")
        self.problem = problem


def settings(
    *, master: str = "local[*]", ui: bool = False, shuffle_partitions: int | None = None
) -> dict[str, str]:
    """The Spark settings that `start_session()` uses, each with its reason; pure."""
    local = master.startswith("local")
    cores = os.cpu_count() or 2
    chosen = {
        # A streaming micro-batch of a few hundred thousand rows needs no 200 shuffle tasks; two per core
        # keep both cores busy when one partition is larger.
        "spark.sql.shuffle.partitions": str(shuffle_partitions or max(2, cores)),
        "spark.ui.enabled": str(ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        # Times are UTC everywhere; a table must not depend on the time zone of whoever wrote it.
        "spark.sql.session.timeZone": "UTC",
        # 10,000 rows of the default are 100 Python–JVM hand-overs per million events.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        # An idle stream looks for new events so often; five times less often than by default, and still soon.
        "spark.sql.streaming.pollingDelay": "50ms",
        # The default one asks for a file's status by starting a program, some forty times in each batch.
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_MANAGER,
        # Without it Spark sorts every batch by partition before it writes; a batch has few of them.
        "spark.sql.maxConcurrentOutputFileWriters": "32",
        "spark.sql.parquet.compression.codec": "zstd",
        # The default INT96 is deprecated, and Delta does not know it.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # A topic named 007 is text, not the number 7, also when it is the name of a folder.
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        # Stopping by Ctrl-C must not wait for a batch that takes minutes.
        "spark.sql.streaming.stopTimeout": "30s",
        # transformWithState needs it, and it keeps state out of the JVM's heap.
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    if local:
        chosen |= {
            "spark.driver.memory": DRIVER_MEMORY,
            # Nobody outside needs to reach an embedded Spark.
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
    return chosen


def start_session(
    app: str = "brokerless",
    *,
    master: str = "local[*]",
    ui: bool = False,
    log_level: str = "error",
    shuffle_partitions: int | None = None,
    config: dict[str, str] | None = None,
) -> "SparkSession":
    """A SparkSession with `format("brokerless")` registered; the running one if there is one.

    `config` overrides any of our settings. Raises MissingDependency without pyspark or Java, and SparkNotStarted for a
    master or a setting that Spark refuses. The caller stops it with `stop_session(spark)`, or uses `with
    spark_session(…) as spark`.
    """
    require_pyspark()
    from pyspark.sql import SparkSession

    from brokerless.spark_collector.source.registration import register

    running = SparkSession.getActiveSession()
    chosen = settings(master=master, ui=ui, shuffle_partitions=shuffle_partitions)
    chosen |= config or {}
    jar = None
    if running is None:
        java = find_java()
        os.environ["JAVA_HOME"] = str(java_home(java))
        jar = find_jar(java.home)
        if jar is not None and not _has_jar(str(jar)):
            jar = None
        if jar is not None:
            chosen |= _with_jar(chosen, str(jar), master)
        # Workers must be the interpreter that has this package, not whatever `python3` is on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        # The JVM starts the package's planner with it.
        chosen.setdefault("spark.brokerless.python", os.environ["PYSPARK_PYTHON"])
        if master.startswith(("local", "spark://127.", "spark://localhost")):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    java_options = chosen.get("spark.driver.extraJavaOptions", "")
    chosen["spark.driver.extraJavaOptions"] = (
        f"{_log_option(log_level)} {ARROW_OPTIONS} {java_options}".strip()
    )
    java_options = chosen.get("spark.executor.extraJavaOptions", "")
    chosen["spark.executor.extraJavaOptions"] = f"{ARROW_OPTIONS} {java_options}".strip()
    builder = SparkSession.builder.appName(app).master(master)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    with launching(), _own_interrupt():
        try:
            spark = builder.getOrCreate()
        except Exception as error:  # of PySpark, of py4j, of Java
            # Read while the JVM is there: such an error asks it for its own text.
            raise SparkNotStarted(_reason(error)) from None
    if jar is None:  # with it the JVM knows the format, and asking starts a Python process
        register(spark)
    return spark


@contextlib.contextmanager
def _own_interrupt() -> Iterator[None]:
    """Keep the caller's handler of Ctrl-C: PySpark's cancels all jobs and raises wherever the program is.

    Where there was only Python's own, PySpark's stays.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        main = threading.current_thread() is threading.main_thread()
        if main and before is not None and before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _reason(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage())
    return text.partition("\n")[0]


def _has_jar(jar: str) -> bool:
    """Whether the JVM will have the jar: one that an earlier session of this process started keeps its class path."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    return gateway is None or jar in gateway.jvm.java.lang.System.getProperty("java.class.path").split(":")


def _with_jar(chosen: dict[str, str], jar: str, master: str) -> dict[str, str]:
    """The settings that put the jar on the class path, beside what the caller has there."""

    def joined(key: str, separator: str) -> str:
        return separator.join(filter(None, [chosen.get(key, ""), jar]))

    if master.startswith("local"):
        return {
            "spark.driver.extraClassPath": joined("spark.driver.extraClassPath", ":"),
            "spark.hadoop.fs.file.impl": chosen.get("spark.hadoop.fs.file.impl", FILE_SYSTEM),
        }
    return {"spark.jars": joined("spark.jars", ",")}  # Spark carries it to the executors


def _log_option(level: str) -> str:
    """What makes the JVM log at this level, by a file that our processes share; empty if there is no folder for it."""
    text = _LOG4J.format(level=level)
    directory = next(own_directories(), None)
    if directory is None:
        return ""
    path = directory / f"log4j2-{level}.properties"
    if not path.is_file() or path.read_text("utf-8") != text:
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(text, "utf-8")
        os.replace(aside, path)
    return f"-Dlog4j2.configurationFile={path}"


def stop_session(spark: "SparkSession", timeout_s: float = 30.0) -> None:
    """Stop all streams after their running batch, then the session.

    A stream is stopped between two batches: Spark prints pages of stack trace if a Python batch function is
    interrupted. One that is still busy after `timeout_s` is interrupted all the same; its batch is repeated
    at the next start.
    """
    for query in list(spark.streams.active):
        stop_query(query, timeout_s)
    spark.stop()


def stop_query(query: object, timeout_s: float = 30.0) -> None:
    """Stop one stream between two batches, or after `timeout_s` in the middle of one."""
    import time

    deadline = time.monotonic() + timeout_s
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.02)
    query.stop()  # type: ignore[attr-defined]


@contextlib.contextmanager
def spark_session(
    app: str = "brokerless", *, master: str = "local[*]", ui: bool = False
) -> Iterator["SparkSession"]:
    """`start_session()` that is stopped at the end of the block."""
    spark = start_session(app, master=master, ui=ui)
    try:
        yield spark
    finally:
        stop_session(spark)
