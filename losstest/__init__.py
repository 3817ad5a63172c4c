"""Measures what a transport loses when consumers go offline: real processes, witnesses, a pure verdict."""

from brokerless.losstest.adapters.base import (
    Command,
    Consumer,
    Indeterminate,
    Loss,
    Message,
    Position,
    Producer,
    Rejected,
    Setup,
    Transport,
)
from brokerless.losstest.analysis.expect import Expectation
from brokerless.losstest.analysis.verdict import judge
from brokerless.losstest.evidence.evidence import Evidence, load
from brokerless.losstest.harness.matrix import Options, Progress, Result, run_matrix
from brokerless.losstest.harness.run_directory import Run, read_run
from brokerless.losstest.model import Cell, Promise, Row, Traits
from brokerless.losstest.registry import names as transport_names
from brokerless.losstest.registry import resolve

__all__ = [
    "Cell",
    "Command",
    "Consumer",
    "Evidence",
    "Expectation",
    "Indeterminate",
    "Loss",
    "Message",
    "Options",
    "Position",
    "Producer",
    "Progress",
    "Promise",
    "Rejected",
    "Result",
    "Row",
    "Run",
    "Setup",
    "Traits",
    "Transport",
    "judge",
    "load",
    "read_run",
    "resolve",
    "run_matrix",
    "transport_names",
]
