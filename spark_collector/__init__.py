"""Every transport lands in Spark, exactly once, with loss as a table.

The collector needs no Spark; what needs Spark imports it when it is called.
"""

from brokerless.spark_collector.cluster import (
    ClusterError,
    ClusterInfo,
    alive_workers,
    read_cluster,
    start_cluster,
    stop_cluster,
)
from brokerless.spark_collector.collector import Collector, CollectorInput, InputStatus
from brokerless.spark_collector.config import (
    CollectorConfig,
    DirectIn,
    JournalIn,
    MulticastIn,
    SpoolConfig,
    StatusConfig,
    WebhooksIn,
)
from brokerless.spark_collector.counters import CollectorCounters
from brokerless.spark_collector.jar import JarFailed, make_jar
from brokerless.spark_collector.java import Java, JavaUnusable, find_java
from brokerless.spark_collector.jobs.compact import compact, merge_ledger
from brokerless.spark_collector.jobs.delta import DeltaLander
from brokerless.spark_collector.jobs.land import Lander, LandOptions, read_table
from brokerless.spark_collector.jobs.ledger import LedgerNote, Windows, ledger_rows
from brokerless.spark_collector.jobs.loss import loss, totals
from brokerless.spark_collector.jobs.metrics import metrics
from brokerless.spark_collector.jobs.parse import infer_json, parse_json, split_parsed
from brokerless.spark_collector.jobs.report import LedgerTable
from brokerless.spark_collector.jobs.stream import JobFailed, Progress, SparkInput, run_stream
from brokerless.spark_collector.jobs.views import make_views
from brokerless.spark_collector.places import DataLoss
from brokerless.spark_collector.registration import register
from brokerless.spark_collector.session import session, spark_session, stop
from brokerless.spark_collector.spool import Corrupt
from brokerless.spark_collector.status import AppServer, Status, progress_line, status, status_app
from brokerless.spark_collector.table import Table, TableError

__all__ = [
    "AppServer",
    "ClusterError",
    "ClusterInfo",
    "Collector",
    "CollectorConfig",
    "CollectorCounters",
    "CollectorInput",
    "Corrupt",
    "DataLoss",
    "DeltaLander",
    "DirectIn",
    "InputStatus",
    "JarFailed",
    "Java",
    "JavaUnusable",
    "JobFailed",
    "JournalIn",
    "LandOptions",
    "Lander",
    "LedgerNote",
    "LedgerTable",
    "MulticastIn",
    "Progress",
    "SparkInput",
    "SpoolConfig",
    "Status",
    "StatusConfig",
    "Table",
    "TableError",
    "WebhooksIn",
    "Windows",
    "alive_workers",
    "compact",
    "find_java",
    "infer_json",
    "ledger_rows",
    "loss",
    "make_jar",
    "make_views",
    "merge_ledger",
    "metrics",
    "parse_json",
    "progress_line",
    "read_cluster",
    "read_table",
    "register",
    "run_stream",
    "session",
    "spark_session",
    "split_parsed",
    "start_cluster",
    "status",
    "status_app",
    "stop",
    "stop_cluster",
    "totals",
]
