"""`with` and `async with`: closed once at the end, and never in the thread of the loop."""

import asyncio
import threading

import pytest

from brokerless import direct, multicast
from brokerless.core.runtime.closing import Closing


class Part(Closing):
    """Remembers who closed it."""

    def __init__(self) -> None:
        self.closed_by: list[int] = []

    def close(self) -> None:
        self.closed_by.append(threading.get_ident())


def test_with_closes_here() -> None:
    """Also when the block raises."""
    with pytest.raises(KeyError), Part() as part:
        raise KeyError
    assert part.closed_by == [threading.get_ident()]


def test_async_with_closes_in_another_thread() -> None:
    """Closing waits for sockets and disks, and the loop must not."""

    async def run() -> Part:
        async with Part() as part:
            pass
        return part

    (closer,) = asyncio.run(run()).closed_by
    assert closer != threading.get_ident()


@pytest.mark.parametrize("cls", [direct.Publisher, direct.Worker, multicast.Publisher])
def test_who_uses_it(cls: type) -> None:
    """What is closed by several threads, and by asyncio, is closed in the one way."""
    assert issubclass(cls, Closing)
