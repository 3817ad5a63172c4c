"""Groups and ports that no other test uses. Nothing here leaves the machine."""

import itertools
import os
import socket

_numbers = itertools.count()


def free_port() -> int:
    """A port that is free, as is the one after it: each worker process has a range of its own.

    All of them are below those that loss tests lease (20,000 and up), which are below those that the kernel takes by
    itself (32,768 and up).
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw") or 0) % 8
    while True:
        port = 10_000 + worker * 1_000 + next(_numbers) * 2 % 1_000
        if _free(port):
            return port


def new_group() -> str:
    """A group and port of one test alone."""
    port = free_port()
    return f"239.255.{os.getpid() % 250}.{port % 250}:{port}"


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
