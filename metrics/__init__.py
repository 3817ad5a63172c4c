"""StatsD client and daemon that know how wrong their counters are.

A client numbers its datagrams by an ordinary gauge line and tells its counters' totals now and then; the
daemon publishes every counter as what arrived, what was sent, a 95 % bound and a grade. See docs/metrics.md.
"""

from brokerless.metrics.aggregate.flush import ClientReport, CounterPoint, Flush
from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.sketch import Sketch
from brokerless.metrics.aggregate.timers import Bins
from brokerless.metrics.backends.graphite import GraphiteNames
from brokerless.metrics.client.client import StatsClient
from brokerless.metrics.counters import AggregateCounters, BackendCounters, ClientCounters, ReceiveCounters
from brokerless.metrics.parser import Passed, Refused, Sample, parse_line
from brokerless.metrics.server.config import MetricsConfig
from brokerless.metrics.server.server import MetricsServer

__all__ = [
    "AggregateCounters",
    "BackendCounters",
    "Bins",
    "ClientCounters",
    "ClientReport",
    "CounterPoint",
    "Flush",
    "Grade",
    "GraphiteNames",
    "MetricsConfig",
    "MetricsServer",
    "Passed",
    "ReceiveCounters",
    "Refused",
    "Sample",
    "Sketch",
    "StatsClient",
    "parse_line",
]
