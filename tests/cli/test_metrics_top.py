"""`brokerless metrics top`: any name is shown whole, and an address may be a URL; and what both live tables refuse."""

import pytest
from rich.console import Console

from brokerless.cli.metrics_top import render, top
from brokerless.core.errors import UsageError
from brokerless.metrics import MetricsServer
from tests.command import run_here
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


@pytest.mark.parametrize("interval", ["inf", "0", "-1", "1e9"])
@pytest.mark.parametrize("table", [("metrics", "top", "127.0.0.1:1"), ("top", "tcp://127.0.0.1:1")])
def test_an_interval_that_is_none_is_refused_before_anybody_is_asked(
    table: tuple[str, ...], interval: str
) -> None:
    """Infinity, nothing and years: an error that says what is allowed, and no traceback from `sleep`."""
    done = run_here(*table, f"--interval={interval}")
    assert (done.returncode, "more than 0 and at most 86400" in done.stderr) == (2, True), done.stderr


def test_before_the_first_window_it_says_so() -> None:
    """A daemon that has just begun shows the same keys as later, and `top` no rates."""
    with MetricsServer(tcp=["127.0.0.1:0"], flush_s=NEVER_S) as server:
        before = server.state()
        console = Console(width=100)
        with console.capture() as captured:
            console.print(render(before, 10))
        assert "no window has ended yet" in captured.get()
        server.flush_now()
        after = server.state()
        assert {key: sorted(before[key]) for key in before if isinstance(before[key], dict)} == {
            key: sorted(after[key]) for key in after if isinstance(after[key], dict)
        }
        assert before.keys() == after.keys()
