"""What the tests of direct share: every transport, both kinds of journal, waiting with a deadline."""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, Journal, MemoryJournal, Retention
from brokerless.direct import Publisher

TRANSPORTS = ["tcp", "ipc", "inproc", "nng+tcp", "nng+ipc"]
_numbers = itertools.count()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport in turn."""
    return str(request.param)


@pytest.fixture
def new_address() -> Iterator[Callable[[str], str]]:
    """A fresh address of a transport; ipc paths are short, because sockets allow 107 bytes."""
    directory = tempfile.mkdtemp(prefix="bl")

    def make(transport: str) -> str:
        number = next(_numbers)
        if transport.endswith("tcp"):
            return f"{transport}://127.0.0.1:{'0' if transport.startswith('nng') else '*'}"
        if transport.endswith("ipc"):
            return f"{transport}://{directory}/{number}"
        return f"{transport}://test-{os.getpid()}-{number}"

    yield make
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def address(transport: str, new_address: Callable[[str], str]) -> str:
    """A fresh address of the transport under test."""
    return new_address(transport)


@pytest.fixture(params=["memory", "disk"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    """A roomy journal of either kind."""
    if request.param == "disk":
        return DiskJournal(tmp_path / "journal")
    return MemoryJournal(retention=Retention(max_bytes=64 * 1024 * 1024))


def have_room(pub: Publisher, n: int) -> bool:
    """Whether so many workers have said how much they can take; having joined, they have yet to say so."""
    groups = pub._coordinator.groups
    return pub._server.ask(lambda: sum(m.room > 0 for g in groups.values() for m in g.members.values())) >= n


def eventually(condition: Callable[[], object], timeout: float = 20.0) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.005)
