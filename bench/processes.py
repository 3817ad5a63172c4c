"""Pairs of processes that measure something together, and none of which is left behind."""

import contextlib
import multiprocessing
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

processes = multiprocessing.get_context("spawn")
Result = dict[str, float]


@contextlib.contextmanager
def running(*children: Any) -> Any:
    """Start processes; whatever happens, none is left."""
    for child in children:
        child.start()
    try:
        yield
        for child in children:
            child.join(10)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()


def expect(pipe: Connection, timeout: float = 120.0) -> Any:
    if not pipe.poll(timeout):
        raise RuntimeError("a benchmark process does not answer")
    return pipe.recv()


def median_of(rounds: int, cases: dict[str, Callable[[], Result]]) -> dict[str, Result]:
    """All cases in turn, several rounds; the median of each number."""
    found: dict[str, list[Result]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            found[name].append(case())
    return {
        name: {key: statistics.median(r[key] for r in results) for key in results[0]}
        for name, results in found.items()
    }
