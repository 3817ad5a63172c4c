"""A request server in a process of its own."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core.errors import ConfigError, Fault
from brokerless.multicast import FlowControl, Publisher, Subscriber
from brokerless.multicast.request_process import RequestServerProcess
from tests.multicast.lossy import attach_loss, follow


def process_of(pub: Publisher) -> RequestServerProcess:
    assert isinstance(pub.request_server, RequestServerProcess)
    return pub.request_server


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_losses_are_repaired_from_another_process(
    group: str, tmp_path: Path, until: Callable[..., None]
) -> None:
    """Also after it was killed: another one is started at the same address. It ends with the publisher."""
    with Publisher(
        group, "T", journal=tmp_path / "j", request_process=True, auth_key=b"k" * 16, io="plain"
    ) as pub:
        server = process_of(pub)
        first, address = server.pid, pub.request_address
        with Subscriber(group, "T", start=0, auth_key=b"k" * 16) as sub:
            assert sub.wait_joined(30)
            port = pub._lines[0]._sock.getsockname()[1]
            keep = attach_loss(sub._engine._lines[0].sock, 7, 0.2, source_port=port)
            pub.publish_many("a", [b"%90d" % i for i in range(3000)])
            assert follow(sub, 3000) == list(range(3000))
            until(lambda: server.counters.answered > 0, 30, "it reported")
            answered = server.counters.answered
            os.kill(first, signal.SIGKILL)
            until(lambda: server.counters.restarts == 1, 60, "started again")
            assert pub.request_address == address
            assert server.pid != first
            pub.publish_many("a", [b"%90d" % i for i in range(3000)])
            assert follow(sub, 3000) == list(range(3000, 6000))
            until(lambda: server.counters.answered > answered, 30, "counts go on")
            assert sub.counters.lost == 0
            del keep
        last = server.pid
    assert not is_alive(last)


def test_positions_come_back(group: str, tmp_path: Path, until: Callable[..., None]) -> None:
    """Flow control works across the processes: the publisher waits for an application that takes nothing."""
    flow = FlowControl(window_events=100, timeout_s=60)
    with Publisher(group, "T", journal=tmp_path / "j", request_process=True, flow_control=flow) as pub:
        with Subscriber(group, "T", start=0) as sub:
            assert sub.wait_joined(30)
            until(lambda: len(process_of(pub).positions) == 1, 30, "the subscriber is known")
            for _ in range(10):
                pub.publish_many("a", [b"x"] * 50)
                list(itertools.islice(sub.events(30), 50))
            assert sub.counters.delivered == 500
        until(lambda: len(process_of(pub).positions) == 0, 30, "it said that it leaves")


def test_a_publisher_that_is_killed_leaves_no_process(
    group: str, tmp_path: Path, until: Callable[..., None]
) -> None:
    """Its child notices that the pipe has ended."""
    code = (
        "import sys, time; from brokerless.multicast import Publisher\n"
        "p = Publisher(sys.argv[1], 'T', journal=sys.argv[2], request_process=True)\n"
        "print(p.request_server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, group, str(tmp_path / "j")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        until(lambda: not is_alive(child), 30, "the child has ended")


def test_what_cannot_begin_says_why(group: str, tmp_path: Path) -> None:
    """A journal in memory, and an address that is taken."""
    with pytest.raises(ConfigError, match="DiskJournal"):
        Publisher(group, "T", request_process=True)
    with (
        Publisher(group, "T", requests="127.0.0.1:0") as pub,
        pytest.raises(Fault, match="cannot bind"),
    ):
        Publisher(group, "T", journal=tmp_path / "j", request_process=True, requests=str(pub.request_address))
