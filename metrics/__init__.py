"""StatsD client and daemon that know how wrong their counters are.

A client numbers its datagrams by an ordinary gauge line and tells its counters' totals now and then; the
daemon publishes every counter as what arrived, what was sent, a 95 % bound and a grade. See docs/metrics.md.
"""

from brokerless.metrics.client import StatsClient
from brokerless.metrics.config import GraphiteNames, MetricsConfig
from brokerless.metrics.counters import BackendCounters, BooksCounters, ClientCounters, IngestCounters
from brokerless.metrics.flush import ClientReport, CounterPoint, Flush, Grade
from brokerless.metrics.parser import Passed, Refused, Sample, parse_line
from brokerless.metrics.server import MetricsServer
from brokerless.metrics.sketch import Sketch
from brokerless.metrics.timers import Bins

__all__ = [
    "BackendCounters",
    "Bins",
    "BooksCounters",
    "ClientCounters",
    "ClientReport",
    "CounterPoint",
    "Flush",
    "Grade",
    "GraphiteNames",
    "IngestCounters",
    "MetricsConfig",
    "MetricsServer",
    "Passed",
    "Refused",
    "Sample",
    "Sketch",
    "StatsClient",
    "parse_line",
]
