"""A group of its own for every test: nothing here leaves the machine, and no two tests hear each other."""

import itertools
import os
import socket
from collections.abc import Callable

import pytest

_numbers = itertools.count()


def _free(port: int) -> bool:
    """Whether the group's port and the one after it (for requests) are free."""
    for kind, number in (
        (socket.SOCK_DGRAM, port),
        (socket.SOCK_DGRAM, port + 1),
        (socket.SOCK_STREAM, port + 1),
    ):
        sock = socket.socket(socket.AF_INET, kind)
        try:
            sock.bind(("127.0.0.1", number))
        except OSError:
            return False
        finally:
            sock.close()
    return True


def free_port() -> int:
    """A port that no other test uses: each worker process has a range of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw") or 0) % 8
    while True:
        port = 20_000 + worker * 1_500 + next(_numbers) * 2 % 1_500
        if _free(port):
            return port


@pytest.fixture
def port() -> int:
    """A free port for a group; the one after it is free, too."""
    return free_port()


@pytest.fixture
def group(port: int) -> str:
    """A group address of this test alone."""
    return f"239.255.{os.getpid() % 250}.{port % 250}:{port}"


@pytest.fixture
def another_group() -> Callable[[], str]:
    """A function that makes more of them."""

    def make() -> str:
        port = free_port()
        return f"239.255.{os.getpid() % 250}.{port % 250}:{port}"

    return make
