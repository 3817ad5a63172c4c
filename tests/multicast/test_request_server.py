"""The request server by itself: TCP, refusals, and journals that fail."""

import shutil
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, MemoryJournal
from brokerless.core.errors import ConfigError, JournalError
from brokerless.multicast import AnswerPolicy, RequestServer, SocketFault
from brokerless.multicast.wire.moldudp64 import HEADER, request, wire_session
from brokerless.multicast.wire.status import Requester, extended_request, parse_status


def filled(count: int = 1000) -> MemoryJournal:
    journal = MemoryJournal(source="src")
    journal.append_many("a", [b"%d" % i for i in range(count)])
    return journal


def fetch(server: RequestServer, session: bytes, first: int, count: int) -> list[tuple[int, int]]:
    """Ask over TCP; (sequence, count) of the packets that come, up to the heartbeat that ends them."""
    seen: list[tuple[int, int]] = []
    with (
        suppress(ConnectionError),
        socket.create_connection(server.address, timeout=5) as sock,
        sock.makefile("rb") as stream,
    ):
        packet = request(session, first, count)
        sock.sendall(struct.pack(">I", len(packet)) + packet)
        while head := stream.read(4):
            packet = stream.read(struct.unpack(">I", head)[0])
            _, sequence, messages = HEADER.unpack_from(packet)
            seen.append((sequence, messages))
            if not messages:
                break
    return seen


def test_a_range_comes_over_tcp_and_ends_with_a_heartbeat() -> None:
    """All of what was asked for, as far as there is any; then where it ended."""
    journal = filled()
    session = wire_session("T", journal.epoch)
    with RequestServer(journal, "T") as server:
        seen = fetch(server, session, 101, 5000)
        assert sum(n for _, n in seen) == 900
        assert seen[0][0] == 101
        assert seen[-1] == (1001, 0)
        assert fetch(server, session, 5000, 10) == [(5000, 0)], "nothing there yet"
        assert fetch(server, b"OTHER00001", 1, 10) == [], "another session: the connection is closed"
        assert server.counters.refused_session == 1


def test_strangers_and_crowds_are_refused_over_tcp(until: Callable[..., None]) -> None:
    """Not on the list, or too many at one time: closed at once, and counted."""
    journal = filled()
    session = wire_session("T", journal.epoch)
    with RequestServer(journal, "T", allow=["10.0.0.0/8"]) as server:
        assert fetch(server, session, 1, 10) == []
        assert server.counters.fetches_refused == 1
    for policy in (AnswerPolicy(max_fetches=2), AnswerPolicy(client_fetches=2)):
        refuses_a_third(journal, policy, until)


def refuses_a_third(journal: MemoryJournal, policy: AnswerPolicy, until: Callable[..., None]) -> None:
    with RequestServer(journal, "T", answers=policy) as server:
        idle = [socket.create_connection(server.address, timeout=5) for _ in range(2)]
        until(lambda: len(server._fetches) == 2, 5, "both are being served")
        with socket.create_connection(server.address, timeout=5) as third, suppress(ConnectionError):
            assert third.recv(1) == b"", "no room"
        assert server.counters.fetches_refused == 1
        for sock in idle:
            sock.close()


def test_an_idle_connection_is_closed() -> None:
    """Whoever connects and says nothing is not waited for."""
    with (
        RequestServer(filled(), "T", answers=AnswerPolicy(fetch_idle_s=0.2)) as server,
        socket.create_connection(server.address, timeout=5) as sock,
    ):
        assert sock.recv(1) == b""


def test_a_journal_that_fails_does_not_end_the_server(tmp_path: Path, until: Callable[..., None]) -> None:
    """The journal's files vanish: requests are not answered, counted, and the server goes on."""
    with DiskJournal(tmp_path / "j", source="src") as journal:
        journal.append_many("a", [b"x"] * 100)
        session = wire_session("T", journal.epoch)
    with RequestServer(tmp_path / "j", "T") as server:
        shutil.rmtree(tmp_path / "j")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            deadline = time.monotonic() + 5
            while server.counters.requests < 5 and time.monotonic() < deadline:
                sock.sendto(request(session, 1 + server.counters.requests, 1), server.address)
                time.sleep(0.02)
        assert server.counters.requests >= 5
        assert server._thread.is_alive()


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    """No journal, a port in use, wrong numbers."""
    with pytest.raises(JournalError):
        RequestServer(tmp_path / "nothing", "T")
    with RequestServer(filled(), "T") as server, pytest.raises(SocketFault):
        RequestServer(filled(), "T", str(server.address))
    with pytest.raises(ConfigError):
        RequestServer(filled(), "T", answer_bytes=10)
    with pytest.raises(ConfigError):
        RequestServer(filled(), "TOOLONG")
    with pytest.raises(ConfigError):
        AnswerPolicy(max_clients=0)


def test_a_position_in_an_earlier_session_does_not_count() -> None:
    """A subscriber that still follows the publisher's last run is neither waited for nor taken to have everything."""
    journal = filled(10)
    session = wire_session("T", journal.epoch)
    earlier = wire_session("T", journal.epoch - 1)
    with (
        RequestServer(journal, "T") as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(10)

        def told_cookie(wire: bytes, cookie: int) -> int:
            sock.sendto(extended_request(wire, 5000, 0, Requester(cookie, 7, 5000, 0)), server.address)
            status = parse_status(sock.recv(65_536))
            assert status is not None
            return status.cookie

        cookie = told_cookie(earlier, 0)
        time.sleep(0.01)  # longer than what counts as a repeat of the same request
        told_cookie(earlier, cookie)
        assert len(server.positions) == 0
        time.sleep(0.01)
        told_cookie(session, cookie)
        assert len(server.positions) == 1
