"""Tables fit the terminal they are printed in."""

import pytest
from rich.console import Console

from brokerless.cli.output import as_table, make_table
from brokerless.cli.ps import COLUMNS, SPARE

NAME = "ж" * 70
ROW = {
    "kind": "multicast.request_server",
    "name": NAME,
    "pid": 4194304,
    "up": "123:14:54",
    "rate": 1234567.8,
    "lag": 12345678,
    "lost": 403,
    "balanced": True,
    "state": "dead",
    "address": "tcp://192.168.100.200:40685",
}


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_only_long_text_is_folded(width: int) -> None:
    """A number, a duration and a state are whole or not there at all; what is folded is there to the last letter."""
    console = Console(width=width)
    table = make_table(*as_table([ROW], COLUMNS), width=width, spare=SPARE)
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    shown = [str(column.header) for column in table.columns]
    assert [name for name in COLUMNS if name in shown] == shown
    whole = {"pid": "4194304", "up": "123:14:54", "rate": "1,234,567.8", "lag": "12,345,678", "lost": "403"}
    for name, value in {**whole, "state": "dead", "balanced": "true"}.items():
        assert (name in words and value in words) == (name in shown)
    assert {"kind", "name", "rate", "lag", "lost", "state"} <= set(shown)
    assert (len(shown) == len(COLUMNS)) == (width == 300)
    assert text.count("ж") == 70
