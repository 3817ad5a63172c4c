"""The thread that inputs run in."""

import pytest

from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.collector.inputs.base import CollectorInterface, InputStatus, InputThread
from tests.conftest import Until


class Sink:
    """What the thread itself needs of a collector."""

    counters = CollectorCounters()


def test_an_input_survives_whatever_its_loop_raises(until: Until, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error is logged, counted and shown, and the loop runs again."""
    calls = []
    status = InputStatus("x", "direct")

    def loop(_: CollectorInterface) -> None:
        calls.append(len(calls))
        if len(calls) < 4:
            raise RuntimeError("dictionary changed size during iteration")
        thread.stopping.wait(60)

    thread = InputThread(status, loop)
    sink = Sink()
    thread.start(sink)  # type: ignore[arg-type]
    until(lambda: len(calls) == 4, 60, "three failures")
    assert status.error == "RuntimeError: dictionary changed size during iteration"
    thread.stop()
    assert sink.counters.restarts == 3
    assert "Traceback" in caplog.text
