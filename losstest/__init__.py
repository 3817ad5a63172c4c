"""Measures what a transport loses when consumers go offline: real processes, witnesses, a pure verdict."""

from brokerless.losstest.adapters.base import (
    Command,
    Consumer,
    Loss,
    Message,
    Position,
    Producer,
    Rejected,
    Setup,
    Transport,
)
from brokerless.losstest.evidence import Evidence, load
from brokerless.losstest.expect import Expectation
from brokerless.losstest.matrix import Options, Progress, Result, run_matrix
from brokerless.losstest.model import Cell, Promise, Row, Traits
from brokerless.losstest.registry import names as transport_names
from brokerless.losstest.registry import resolve
from brokerless.losstest.rundir import Run, read_run
from brokerless.losstest.verdict import judge

__all__ = [
    "Cell",
    "Command",
    "Consumer",
    "Evidence",
    "Expectation",
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
