"""Connections to a broker that are made again."""

from typing import ClassVar

import pytest

from brokerless.losstest.adapters.brokers.reconnect import Reconnecting, Unreachable


class Line:
    """Fails as often as it is told."""

    made: ClassVar[list["Line"]] = []
    failures = 0

    def __init__(self) -> None:
        Line.made.append(self)
        self.closed = False

    def work(self) -> str:
        if Line.failures:
            Line.failures -= 1
            raise OSError("broken")
        return "done"

    def close(self) -> None:
        self.closed = True
        raise OSError("already gone")


@pytest.fixture(autouse=True)
def fresh() -> None:
    Line.made, Line.failures = [], 0


def test_it_connects_when_it_is_used_and_again_when_that_broke() -> None:
    """One connection as long as it works; a broken one is closed, and the work is done on a new one."""
    client = Reconnecting(Line, Line.close, (OSError,), 0.3)
    assert Line.made == []
    assert [client.until_done(Line.work) for _ in range(3)] == ["done"] * 3
    assert len(Line.made) == 1
    Line.failures = 2
    assert client.until_done(Line.work) == "done"
    assert [line.closed for line in Line.made] == [True, True, False]


def test_once_tells_and_patience_ends() -> None:
    """`once` does not repeat; `until_done` gives up after its time, with the last fault as the cause."""
    client = Reconnecting(Line, Line.close, (OSError,), 0.3)
    Line.failures = 1
    with pytest.raises(Unreachable, match="broken"):
        client.once(Line.work)
    assert client.once(Line.work) == "done"
    Line.failures = 1000
    with pytest.raises(Unreachable, match="broken"):
        client.until_done(Line.work)


def test_other_errors_are_not_its_business() -> None:
    """An answer that is an error leaves the connection alone."""
    client = Reconnecting(Line, Line.close, (OSError,), 0.3)

    def refuse(line: Line) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        client.until_done(refuse)
    assert not Line.made[0].closed
