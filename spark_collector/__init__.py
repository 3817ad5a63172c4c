"""Every transport lands in Spark, exactly once, with loss as a table.

The collector needs no Spark; what needs Spark imports it when it is called. Functions on DataFrames are in
`brokerless.spark_collector.jobs`, what needs no Spark at all in `brokerless.spark_collector.local`.
"""

from brokerless.spark_collector.collector.collector import Collector
from brokerless.spark_collector.collector.config import (
    CollectorConfig,
    DirectIn,
    JournalIn,
    MulticastIn,
    SpoolConfig,
    StatusConfig,
    WebhooksIn,
)
from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.jobs.land import Lander, LandOptions
from brokerless.spark_collector.jobs.ledger import Windows
from brokerless.spark_collector.jobs.report import LedgerTable
from brokerless.spark_collector.jobs.stream import JobFailed, SparkInput, run_stream
from brokerless.spark_collector.session.cluster import start_cluster, stop_cluster
from brokerless.spark_collector.session.session import spark_session, start_session, stop_session
from brokerless.spark_collector.sink.event_sink import EventSink
from brokerless.spark_collector.source.locations import DataLoss
from brokerless.spark_collector.source.registration import register

__all__ = [
    "Collector",
    "CollectorConfig",
    "CollectorCounters",
    "DataLoss",
    "DirectIn",
    "EventSink",
    "JobFailed",
    "JournalIn",
    "LandOptions",
    "Lander",
    "LedgerTable",
    "MulticastIn",
    "SparkInput",
    "SpoolConfig",
    "StatusConfig",
    "WebhooksIn",
    "Windows",
    "register",
    "run_stream",
    "spark_session",
    "start_cluster",
    "start_session",
    "stop_cluster",
    "stop_session",
]
