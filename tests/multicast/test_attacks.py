"""The attacker's table of docs/multicast.md: who can send what, and what that causes. One test per line."""

import itertools
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from brokerless.core import MemoryJournal
from brokerless.multicast import AnswerPolicy, FlowControl, Publisher, RepairPolicy, RequestServer, Subscriber
from brokerless.multicast.sockets import parse_address, receiving_socket, sending_socket
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.moldudp64 import heartbeat, request, wire_session
from brokerless.multicast.wire.status import Requester, extended_request, parse_status, receivers_known
from tests.multicast.lossy import attach_loss

KEY = b"k" * 32
QUICK = RepairPolicy(stale_after_s=0.5, session_switch_s=0.05, session_silence_s=0.2)


@contextmanager
def recording(group: str) -> Iterator[list[bytes]]:
    """What a stranger who has joined the group writes down."""
    packets: list[bytes] = []
    sock = receiving_socket(parse_address(group, "group", multicast=True), "127.0.0.1")
    try:
        yield packets
        while True:
            try:
                packets.append(sock.recv(65_536))
            except BlockingIOError:
                break
    finally:
        sock.close()


def send_all(group: str, packets: list[bytes]) -> None:
    with sending_socket(parse_address(group, "group", multicast=True), "127.0.0.1", 0) as sock:
        for packet in packets:
            sock.send(packet)


def asker() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.settimeout(0.5)
    return sock


def answers(sock: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(sock.recv(65_536))
        except TimeoutError:
            return found


def test_a_recorded_run_does_not_take_over_a_subscriber(group: str, until: Callable[..., None]) -> None:
    """With `auth_key`: packets of an earlier run, sent again to an idle subscriber, are counted and not followed."""
    with recording(group) as recorded:
        with Publisher(group, "T", auth_key=KEY) as old:
            old.publish_many("a", [b"old"] * 10)
        earlier = old.session
    with (
        Subscriber(group, "T", auth_key=KEY, repair=QUICK) as sub,
        Publisher(group, "T", auth_key=KEY) as pub,
    ):
        assert sub.wait_joined(10)
        pub.publish("a", b"new")
        assert sub.receive(10).data == b"new"  # type: ignore[union-attr]
        time.sleep(0.3)  # longer than a session must be silent before another one is believed
        for _ in range(5):
            send_all(group, recorded)
        until(
            lambda: sub.receive(0.01) is None and sub.counters.replayed > 0, 10, "the recorded packets came"
        )
        assert sub.session == pub.session != earlier
        assert sub.counters.sessions == 1


def test_without_a_key_a_recorded_run_is_followed(group: str, until: Callable[..., None]) -> None:
    """Without `auth_key`: packets of an earlier run take over a subscriber whose session is silent."""
    with recording(group) as recorded, Publisher(group, "T") as old:
        old.publish_many("a", [b"old"] * 10)
    with Subscriber(group, "T", repair=QUICK, request_servers=[]) as sub:
        with Publisher(group, "T", linger_s=0):
            assert sub.wait_joined(10)

        def taken_over() -> bool:
            send_all(group, recorded)
            sub.receive(0.1)
            return sub.session == old.session

        until(taken_over, 10, "the earlier session is followed")


def test_recorded_heartbeats_do_not_hide_silence(group: str, until: Callable[..., None]) -> None:
    """With `auth_key`: a stranger who repeats heartbeats does not keep a subscriber from being stale."""
    with Subscriber(group, "T", auth_key=KEY, repair=QUICK) as sub:
        with recording(group) as recorded, Publisher(group, "T", auth_key=KEY, linger_s=0) as pub:
            assert sub.wait_joined(10)
            pub.close(end=False)

        def stale() -> bool:
            send_all(group, recorded)
            sub.receive(0.05)
            return sub.stale

        until(stale, 10, "stale in spite of what is repeated")


def test_what_goes_by_unicast_does_not_pass_for_the_publisher(group: str, until: Callable[..., None]) -> None:
    """With `auth_key`: questions and answers, sent to the group by a stranger, new and signed, do not hide silence."""
    journal = MemoryJournal(source="T")
    with RequestServer(journal, "T", auth_key=KEY) as server, asker() as between:
        between.setblocking(False)
        where = f"127.0.0.1:{between.getsockname()[1]}"
        with Subscriber(group, "T", auth_key=KEY, request_servers=[where], repair=QUICK) as sub:
            with Publisher(group, "T", journal=MemoryJournal(source="T"), auth_key=KEY, linger_s=0) as pub:
                journal._stage.epoch = pub.epoch  # so that the server answers for this session
                assert sub.wait_joined(10)
                pub.close(end=False)
            reflected = {"questions": 0, "answers": 0}
            subscriber: tuple[str, int] | None = None

            def all_reflected() -> bool:
                """Between the subscriber and its server: everything goes on its way, and to the group."""
                nonlocal subscriber
                sub.receive(0.02)
                with suppress(BlockingIOError):
                    while True:
                        packet, sender = between.recvfrom(65_536)
                        from_server = sender[1] == server.address.port
                        subscriber = subscriber if from_server else sender
                        assert subscriber is not None
                        between.sendto(packet, subscriber if from_server else server.address)
                        if sub.stale:
                            reflected["answers" if from_server else "questions"] += 1
                            send_all(group, [packet])
                return min(reflected.values()) >= 2

            until(all_reflected, 30, "questions and answers went to the group")
            until(lambda: sub.receive(0.02) is None and sub.counters.unauthentic >= 4, 10, "and were seen")
            assert sub.stale
            assert sub.counters.stale == 1


def test_without_a_key_recorded_heartbeats_hide_silence(group: str) -> None:
    """Without `auth_key`: whoever repeats heartbeats makes a dead publisher look alive."""
    # Longer than what counts of a machine that stood still (a second), so that only silence makes it stale.
    with Subscriber(group, "T", repair=RepairPolicy(stale_after_s=1.5), request_servers=[]) as sub:
        with recording(group) as recorded, Publisher(group, "T", linger_s=0) as pub:
            assert sub.wait_joined(10)
            pub.close(end=False)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            send_all(group, recorded)
            sub.receive(0.05)
        assert sub.counters.stale == 0


@pytest.mark.parametrize("key", [KEY, None])
def test_recorded_data_of_this_run(group: str, key: bytes | None, until: Callable[..., None]) -> None:
    """Duplicates. Without a key, if the publisher is silent, they pass for a sender that went back: that is said."""
    told = []
    repair = RepairPolicy(rewind_after_s=0.3)
    with Subscriber(group, "T", repair=repair, request_servers=[], auth_key=key, on_stale=told.append) as sub:
        with recording(group) as recorded, Publisher(group, "T", linger_s=0, auth_key=key) as pub:
            assert sub.wait_joined(10)
            pub.publish_many("a", [b"x"] * 3)
            pub.publish_many("a", [b"y"] * 3)
            assert len(list(itertools.islice(sub.events(10), 6))) == 6
            pub.close(end=False)
        data = [packet for packet in recorded if int.from_bytes(packet[18:20], "big")][:1]
        again: list[object] = []
        begun = time.monotonic()

        def repeated() -> bool:
            send_all(group, data)
            while (event := sub.receive(0.02)) is not None:
                again.append(event)
            enough = sub.counters.duplicates > 30 and time.monotonic() > begun + 1.0
            return enough if key is not None else sub.counters.rewinds > 0

        until(repeated, 20, "seen often enough")
        if key is not None:
            assert (again, sub.counters.rewinds) == ([], 0)
        else:
            assert sub.counters.rewinds == 1
            assert [notice.reason for notice in told] == ["rewound"]


def test_an_unsigned_request_is_not_answered(group: str, until: Callable[..., None]) -> None:
    """With `auth_key`: neither requests nor questions nor positions of somebody without the key have any effect."""
    journal = MemoryJournal(source="T")
    journal.append_many("a", [b"x"] * 10)
    session = wire_session("T", journal.epoch)
    with RequestServer(journal, "T", auth_key=KEY) as server, asker() as sock:
        sock.sendto(request(session, 1, 5), server.address)
        sock.sendto(extended_request(session, 1, 0, Requester(0, 5, 1, 0)), server.address)
        until(lambda: server.counters.unauthentic == 2, 10, "both were seen")
        assert not answers(sock)
        assert len(server.positions) == 0


def test_false_positions_hold_up_closing_for_the_linger(group: str) -> None:
    """Without `auth_key`: whoever receives our answers can say that it lacks something; closing ends all the same."""
    pub = Publisher(group, "T", linger_s=0.5)
    with pub, asker() as sock:
        pub.publish("a", b"x")
        assert pub.request_server is not None
        session, cookie = pub._sender.session, 0
        for _ in range(2):  # the first time only to have a cookie
            sock.sendto(
                extended_request(session, 1, 0, Requester(cookie, 5, 1, 0)), pub.request_server.address
            )
            status = parse_status(answers(sock)[0])
            assert status is not None
            cookie = status.cookie
        assert len(pub.request_server.positions) == 1
        begun = time.monotonic()
        pub.close()
        assert time.monotonic() - begun < 20
    assert pub.counters.lingered == 1


@pytest.mark.parametrize("key", [KEY, None])
def test_false_positions_hold_back_a_publisher_with_flow_control(group: str, key: bytes | None) -> None:
    """Without `auth_key`: who receives our answers can pretend to be slow; then no more than the floor is published."""
    policy = FlowControl(window_events=10, timeout_s=60, floor_events_s=100)
    with Publisher(group, "T", flow_control=policy, auth_key=key, linger_s=0) as pub, asker() as sock:
        assert pub.request_server is not None
        session, cookie = pub._sender.session, 0
        for _ in range(2):  # the first time only to have a cookie
            question = extended_request(session, 1, 0, Requester(cookie, 5, 1, 0))
            sock.sendto(question, pub.request_server.address)
            for packet in answers(sock)[:1]:
                status = parse_status(packet)
                assert status is not None
                cookie = status.cookie
        begun = time.monotonic()
        for _ in range(100):
            pub.publish("a", b"x")
        if key is None:
            assert time.monotonic() - begun > 0.5, "80 beyond the window and the burst, at 100 a second"
            assert pub.counters.held_back > 0
        else:
            assert pub.counters.held_back == 0


@pytest.mark.parametrize("key", [KEY, None])
def test_somebody_who_pretends_to_be_many(group: str, key: bytes | None) -> None:
    """Without `auth_key`: repairs that nobody needs go to the group, up to the cap, and never for a forged address."""
    policy = AnswerPolicy(shared_bytes_s=10_000)
    with Publisher(group, "T", answers=policy, auth_key=key) as pub, asker() as sock:
        pub.publish_many("a", [b"x" * 1000] * 400)
        server = pub.request_server
        assert server is not None
        session, cookies = pub._sender.session, [0, 0]
        for who in (0, 1, 0, 1):  # the first time only to have a cookie
            sock.sendto(extended_request(session, 1, 0, Requester(cookies[who], who, 1, 0)), server.address)
            for packet in answers(sock)[:1]:
                status = parse_status(packet)
                assert status is not None
                cookies[who] = status.cookie
        begun = time.monotonic()
        for first in range(1, 400):
            for who in (0, 1):
                packet = extended_request(session, first, 1, Requester(cookies[who], who, 1, 0))
                sock.sendto(packet, server.address)
        answers(sock)
        if key is not None:
            assert server.counters.shared == 0
            return
        assert server.counters.shared > 0
        assert server.counters.shared_bytes <= 65_536 + 10_000 * (time.monotonic() - begun + 1)


def test_a_false_number_of_receivers_delays_repair_a_little(group: str) -> None:
    """Without `auth_key`: a heartbeat says that there are 65,535 others; a gap waits for `share_wait_s` at most."""
    with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(10)
        session = pub._sender.session
        port = pub._lines[0]._sock.getsockname()[1]
        keep = attach_loss(sub._engine._lines[0].sock, 1, 1.0, source_port=port)  # all data of the publisher
        send_all(group, [heartbeat(session, 1) + receivers_known(65_535)])
        pub.publish_many("a", [b"x"] * 5)
        assert len(list(itertools.islice(sub.events(20), 5))) == 5
        assert sub.counters.lost == 0
        assert sub.counters.repaired == 5
        del keep


def test_a_request_server_without_the_key_is_not_believed(group: str, until: Callable[..., None]) -> None:
    """With `auth_key`: what an impostor answers is `unauthentic`; the next server is asked."""
    false = MemoryJournal(source="T")
    with Publisher(group, "T", auth_key=KEY) as pub:
        pub.publish_many("a", [b"true"] * 50)
        false._stage.epoch = pub.epoch
        false.append_many("a", [b"false"] * 50)
        with RequestServer(false, "T") as liar, asker() as sock:
            # It does not understand signed requests, so it is asked beforehand for what it would answer.
            sock.sendto(request(pub._sender.session, 1, 50), liar.address)
            lie = answers(sock)[0]
            false_server = ("127.0.0.1", sock.getsockname()[1])
            servers = [f"{false_server[0]}:{false_server[1]}", str(pub.request_address)]
            sock.settimeout(0.02)
            with Subscriber(
                group, "T", start="oldest", request_servers=servers, auth_key=KEY, tcp=False
            ) as sub:
                got: list[bytes] = []

                def everything() -> bool:
                    with suppress(TimeoutError):
                        _, asking = sock.recvfrom(65_536)
                        sock.sendto(lie, asking)
                    for event in itertools.islice(sub.events(0.02), 50):
                        got.append(event.data)
                    return len(got) >= 50 and sub.counters.unauthentic > 0

                until(everything, 30, "everything, and a lie")
                assert got == [b"true"] * 50


def test_without_a_key_a_request_server_is_believed(group: str) -> None:
    """Without `auth_key`: what a request server that lies answers passes for the publisher's."""
    false = MemoryJournal(source="T")
    with Publisher(group, "T", requests=None) as pub:
        pub.publish_many("a", [b"true"] * 50)
        false._stage.epoch = pub.epoch
        false.append_many("a", [b"false"] * 50)
        with (
            RequestServer(false, "T") as liar,
            Subscriber(group, "T", start="oldest", request_servers=[str(liar.address)]) as sub,
        ):
            assert [event.data for event in itertools.islice(sub.events(20), 50)] == [b"false"] * 50


def test_whoever_has_the_key_is_believed(group: str) -> None:
    """With `auth_key`: the key is all that there is. Everybody who has it can be the publisher."""
    with (
        Publisher(group, "T", auth_key=KEY, requests=None) as pub,
        Subscriber(group, "T", auth_key=KEY, request_servers=[]) as sub,
    ):
        assert sub.wait_joined(10)
        forged = Publisher(group, "T", auth_key=KEY, requests=None)
        forged._sender.session = pub._sender.session
        with forged:
            forged.publish_many("a", [b"forged"] * 3)
            assert [event.data for event in itertools.islice(sub.events(5), 2)] == [b"forged"] * 2


def test_every_line_of_the_table_names_its_tests() -> None:
    """The attacker's table in docs/multicast.md: each line names tests, and they exist."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "multicast.md").read_text().split("### Who can cause what")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(lines) >= 12
    sources = [
        *(root / "tests" / "multicast").rglob("test_*.py"),
        *(root / "tests").glob("integration/test_multicast_*"),
    ]
    tests = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in sources), re.MULTILINE))
    for line in lines:
        named = re.findall(r"test_\w+", line.split("|")[-2])
        assert named, line
        assert set(named) <= tests, line


def test_a_recorded_request_is_answered_once(group: str) -> None:
    """With `auth_key`: 300 repeats of one signed request get the one answer that it had."""
    journal = MemoryJournal(source="T")
    journal.append_many("a", [b"x" * 100] * 100)
    session = wire_session("T", journal.epoch)
    with RequestServer(journal, "T", auth_key=KEY) as server, asker() as sock:
        packet = request(session, 1, 5)
        packet += Signer(KEY, "request")(packet)
        for _ in range(300):
            sock.sendto(packet, server.address)
        assert len(answers(sock)) == 1
        assert server.counters.replayed == 299


def test_a_request_from_another_day_is_not_answered(group: str) -> None:
    """With `auth_key`: a request that was recorded longer ago than clocks may differ."""
    journal = MemoryJournal(source="T")
    journal.append_many("a", [b"x"] * 10)
    with RequestServer(journal, "T", auth_key=KEY) as server, asker() as sock:
        packet = request(wire_session("T", journal.epoch), 1, 5)
        packet += Signer(KEY, "request", lambda: time.time_ns() // 1000 - 3_600_000_000)(packet)
        sock.sendto(packet, server.address)
        assert not answers(sock)
        assert server.counters.replayed == 1


def test_recorded_requests_prove_no_address(group: str) -> None:
    """With `auth_key`: at a server that has not seen them (another one, or restarted), no more than from anybody."""
    journal = MemoryJournal(source="T")
    journal.append_many("a", [secrets.token_bytes(57_000) for _ in range(50)])
    session, sign = wire_session("T", journal.epoch), Signer(KEY, "request")
    with RequestServer(journal, "T", auth_key=KEY) as server, asker() as sock:
        begun = time.monotonic()
        for first in range(1, 51):
            packet = extended_request(session, first, 1, Requester(5, 5, 1, 0))
            sock.sendto(packet + sign(packet), server.address)
        got = sum(map(len, answers(sock)))
        assert 0 < got <= 65_536 * (2 + time.monotonic() - begun)
        assert server.counters.refused_unproven > 0


def test_what_goes_to_an_unproven_address_is_bounded(group: str) -> None:
    """Anybody: 20 bytes in and 57 kB out, as often as one likes, is 64 kB and then 64 kB/s to that address."""
    journal = MemoryJournal(source="T")
    journal.append_many("a", [secrets.token_bytes(57_000) for _ in range(50)])
    session = wire_session("T", journal.epoch)
    with RequestServer(journal, "T") as server, asker() as sock:
        begun = time.monotonic()
        for i in range(400):
            sock.sendto(request(session, 1 + i % 50, 1), server.address)
        got = sum(map(len, answers(sock)))
        took = time.monotonic() - begun
        assert 0 < got <= 65_536 * (2 + took)
        assert server.counters.refused_unproven + server.counters.repeats > 300


def test_a_cookie_proves_the_address(group: str) -> None:
    """Whoever sends back what it was given has the whole budget; a cookie of another address is worth nothing."""
    journal = MemoryJournal(source="T")
    journal.append_many("a", [secrets.token_bytes(57_000) for _ in range(50)])
    session = wire_session("T", journal.epoch)
    with RequestServer(journal, "T") as server, asker() as sock, asker() as other:
        sock.sendto(extended_request(session, 1, 0, Requester(0, 5, 1, 0)), server.address)
        status = parse_status(answers(sock)[0])
        assert status is not None
        assert (status.next, status.requester) == (51, 5)
        who = Requester(status.cookie, 5, 1, 0)
        for i in range(50):
            sock.sendto(extended_request(session, 1 + i, 1, who), server.address)
            assert len(sock.recv(65_536)) > 57_000
        for i in range(50):
            other.sendto(extended_request(session, 1 + i, 1, who), server.address)
        assert len(answers(other)) <= 2
        other.sendto(extended_request(session, 1, 0, who), server.address)
        assert parse_status(answers(other)[0]) is not None
        assert len(server.positions) == 0, "a position is believed only of an address that is proven"
        sock.sendto(extended_request(session, 1, 0, who), server.address)
        assert answers(sock)
        assert len(server.positions) == 1


def test_forged_packets_without_a_key_are_believed(group: str) -> None:
    """Without `auth_key`: whoever can send to the group can make events up. That is what the key is for."""
    with Subscriber(group, "T", request_servers=[]) as sub, Publisher(group, "T") as pub:
        assert sub.wait_joined(10)
        pub.publish("a", b"x")
        assert sub.receive(10) is not None
        forged = Publisher(group, "T", requests=None)
        forged._sender.session = pub._sender.session
        with forged:
            forged.publish_many("a", [b"forged"] * 3)
            assert [event.data for event in itertools.islice(sub.events(5), 2)] == [b"forged"] * 2


def test_forged_packets_with_a_key_are_counted_and_nothing_else(
    group: str, until: Callable[..., None]
) -> None:
    """With `auth_key`: unsigned packets and those of another key are ignored."""
    with Publisher(group, "T", auth_key=KEY) as pub, Subscriber(group, "T", auth_key=KEY) as sub:
        assert sub.wait_joined(10)
        beat = heartbeat(pub._sender.session, 1000)
        send_all(group, [beat, beat + Signer(b"z" * 32, "group")(beat)])
        until(lambda: sub.receive(0.01) is None and sub.counters.unauthentic >= 2, 10, "both were seen")
        assert not sub.gaps


@pytest.mark.parametrize("key", [KEY, None])
def test_a_flood_of_requests_leaves_the_publisher_its_time(group: str, key: bytes | None) -> None:
    """Anybody: requests beyond the budget are not read; the kernel drops them, and publishing goes on."""
    answers = AnswerPolicy(total_requests_s=500, total_burst=100)
    with Publisher(group, "T", answers=answers, auth_key=key) as pub, asker() as sock:
        pub.publish_many("a", [b"x" * 1000] * 100)
        assert pub.request_server is not None
        packet = request(pub._sender.session, 1, 1)
        begun = time.monotonic()
        while time.monotonic() < begun + 1.0:
            for _ in range(100):
                sock.sendto(packet, pub.request_server.address)
        read, took = pub.request_server.counters.requests, time.monotonic() - begun
        assert read <= 200 + 1000 * took + 200, "twice the budget"
        assert pub.publish("a", b"y").offset == 100


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\0\0\x14", b"\0\0\0\x14ORDERS"])
def test_a_client_that_drips_holds_no_connection(sent: bytes, key: bytes | None) -> None:
    """Anybody: a request over TCP that is not there as a whole in time ends the connection."""
    with (
        RequestServer(
            MemoryJournal(source="T"), "T", answers=AnswerPolicy(fetch_idle_s=0.5), auth_key=key
        ) as server,
        socket.create_connection(server.address, timeout=10) as sock,
    ):
        sock.sendall(sent)
        begun = time.monotonic()
        sock.settimeout(0.1)
        while time.monotonic() < begun + 10:
            try:
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                try:
                    sock.sendall(b"\0" if len(sent) > 4 else b"")
                except OSError:
                    break
            except OSError:
                break
        assert time.monotonic() - begun < 8


def test_a_server_that_drips_does_not_hold_the_subscriber(group: str, until: Callable[..., None]) -> None:
    """A request server that sends a byte now and then: the fetch ends, and another server is asked."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    held: list[socket.socket] = []
    repair = RepairPolicy(tcp_threshold=10, tcp_idle_s=0.3, give_up_s=60)
    journal = MemoryJournal(source="T")
    better = f"127.0.0.1:{int(group.rpartition(':')[2]) + 1}"
    servers = [better, f"127.0.0.1:{port}"]  # a gap from sequence 1 on is asked of the second one first
    with Publisher(group, "T", journal=journal, requests=None) as pub, ExitStack() as later:
        pub.publish_many("a", [b"x"] * 5000)
        with Subscriber(group, "T", start="oldest", request_servers=servers, repair=repair) as sub:
            got: list[int] = []

            def read() -> None:
                with_drip(listener, held)
                for batch in itertools.islice(sub.batches(0.05), 100):
                    got.extend(range(batch.first_offset, batch.next_offset))

            def dripping() -> bool:
                read()
                return bool(held)

            until(dripping, 30, "the server that drips was asked")
            later.enter_context(RequestServer(journal, "T", better))

            def everything() -> bool:
                read()
                return len(got) >= 5000

            until(everything, 30, "all events")
            assert got == list(range(5000))
    for sock in held:
        sock.close()
    listener.close()


def with_drip(listener: socket.socket, held: list[socket.socket]) -> None:
    with suppress(BlockingIOError):
        held.append(listener.accept()[0])
        held[-1].sendall(
            (40_000).to_bytes(4, "big")
        )  # the length of an answer that is never there as a whole
    for sock in held:
        with suppress(OSError):
            sock.send(b"\0")


def test_a_request_server_alone_serves_a_late_joiner(group: str, tmp_path: Path) -> None:
    """No publisher lives: with `start="oldest"` everything comes from the journal that it left."""
    from brokerless.core import DiskJournal

    with Publisher(group, "T", journal=DiskJournal(tmp_path / "j")) as pub:
        pub.publish_many("a", [b"%d" % i for i in range(3000)])
    with (
        RequestServer(tmp_path / "j", "T") as server,
        Subscriber(group, "T", start="oldest", request_servers=[str(server.address)]) as sub,
    ):
        got = [event.data for event in itertools.islice(sub.events(20), 3000)]
        assert got == [b"%d" % i for i in range(3000)]


def test_silence_is_reported(
    group: str, caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    """Nothing comes any more: a state, a counter, a callback, a log line; and the group is joined again."""
    told = []
    with (
        Subscriber(group, "T", repair=QUICK, on_stale=told.append) as sub,
        caplog.at_level(logging.INFO),
        Publisher(group, "T", linger_s=0) as pub,
    ):
        assert sub.wait_joined(10)
        pub.publish("a", b"x")
        assert sub.receive(10) is not None
        assert not sub.stale
        for line in pub._lines:
            line.close()  # its packets reach nobody any more
        until(lambda: sub.receive(0.05) is None and sub.stale, 10, "stale")
        until(lambda: sub.receive(0.05) is None and sub.counters.rejoins > 0, 10, "joined again")
        pub.publish("a", b"y")
        event = sub.receive(20)
        assert event is not None, "the request server tells that there is more, and has it"
        assert event.data == b"y"
    assert [notice.reason for notice in told] == ["silent"]
    assert told[0].next_offset == 1
    assert sub.counters.stale == 1
    assert "nothing was heard of" in caplog.text


def test_sessions_that_are_not_wanted_are_named(group: str, until: Callable[..., None]) -> None:
    """A wrong session name: the subscriber can say which ones it heard instead."""
    with Publisher(group, "RIGHT") as pub, Subscriber(group, "WRONG") as sub:
        until(lambda: sub.receive(0.05) is None and sub.sessions_heard == [pub.session], 10, "heard")
