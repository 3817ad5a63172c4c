"""`brokerless metrics top`: any name is shown whole, and an address may be a URL."""

import pytest
from rich.console import Console

from brokerless.cli.metrics_top import render, top
from brokerless.core.errors import UsageError
from brokerless.metrics import MetricsServer
from tests.metrics.windows import NEVER_S


def test_names_with_markup_and_long_tags_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """`[/x]` is no markup here, and tags are not cut off."""
    with MetricsServer(tcp=["127.0.0.1:0"], http="127.0.0.1:0", flush_s=NEVER_S) as server:
        series = "a;url=[/x]" + "y" * 150
        server._receiver.collector.lines(f"a:1|c|#url:[/x]{'y' * 150}".encode(), 0.0)
        server.flush_now()
        state = server.state()
        assert series in state["counters"]
        console = Console(width=100)
        with console.capture() as captured:
            console.print(render(state, 10))
        assert captured.get().count("y") >= 150
        assert "[/x]" in captured.get()
        top(f"http://{server.addresses['http'][0]}/", count=1)
        assert "lines/s" in capsys.readouterr().out
        with pytest.raises(UsageError, match="neither"):
            top("ftp://127.0.0.1:1", count=1)
