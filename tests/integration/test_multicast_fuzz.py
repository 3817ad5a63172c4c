"""Hostile and broken datagrams on every port: nothing crashes, everything is counted, memory stays bounded."""

import itertools
import os
import random
import socket
import struct
import time
from collections.abc import Callable

from brokerless.multicast import Publisher, RepairPolicy, Subscriber
from brokerless.multicast.wire.moldudp64 import HEADER, request
from brokerless.multicast.wire.packing import encode_block
from tests.multicast.groups import new_group


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mutants(rng: random.Random, sample: bytes, count: int) -> list[bytes]:
    """Random bytes, and the sample with bits flipped, cut off, grown, and with hostile numbers put in."""
    made = []
    for _ in range(count):
        kind = rng.randrange(6)
        data = bytearray(sample)
        if kind == 0:
            data = bytearray(rng.randbytes(rng.randrange(0, 200)))
        elif kind == 1:
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[rng.randrange(len(data)) :]
        elif kind == 3:
            data += rng.randbytes(rng.randrange(1, 100))
        elif kind == 4 and len(data) >= 20:
            data[18:20] = rng.randbytes(2)
        elif len(data) >= 20:
            data[10:18] = rng.choice([rng.randbytes(8), b"\xff" * 8, bytes(8), struct.pack(">Q", 1 << 40)])
        made.append(bytes(data))
    return made


def sender() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    return sock


def test_noise_on_the_data_port_of_an_authenticated_stream() -> None:
    """20,000 hostile datagrams between real ones: with a key none of them has any effect but on a counter."""
    group = new_group()
    host, port = group.split(":")
    rng = random.Random(5)
    key = b"k" * 32
    with (
        Publisher(group, "FUZZ", auth_key=key) as pub,
        Subscriber(group, "FUZZ", start=0, auth_key=key) as sub,
        sender() as noise,
    ):
        assert sub.wait_joined(5)
        sample = HEADER.pack(pub.session.encode().ljust(10), 5, 2) + b"\0\3abc\0\1x"
        before = resident_bytes()
        offsets: list[int] = []
        for _ in range(100):
            for data in mutants(rng, sample, 200):
                noise.sendto(data, (host, int(port)))
            pub.publish_many("a", [b"x" * 50] * 20)
            offsets += [e.offset for e in sub.events(0.01)]
        deadline = time.monotonic() + 20
        while len(offsets) < 2000 and time.monotonic() < deadline:
            offsets += [e.offset for e in sub.events(0.1)]
        assert offsets == list(range(2000))
        assert not sub.losses
        c = sub.counters
        assert c.unauthentic + c.kernel_drops * 64 > 15_000
        assert resident_bytes() - before < 100_000_000


def test_noise_on_the_data_port_of_a_plain_stream() -> None:
    """Without a key, forged headers can cost events, but never order, balance, memory, or the process."""
    group = new_group()
    host, port = group.split(":")
    rng = random.Random(6)
    policy = RepairPolicy(give_up_s=0.5, max_held_bytes=1_000_000, max_gaps=500)
    with (
        Publisher(group, "FUZZ") as pub,
        Subscriber(group, "FUZZ", start=0, repair=policy) as sub,
        sender() as noise,
    ):
        assert sub.wait_joined(5)
        sample = HEADER.pack(pub.session.encode().ljust(10), 5, 2) + b"\0\3abc\0\1x"
        before = resident_bytes()
        last = -1
        for _ in range(60):
            for data in mutants(rng, sample, 200):
                noise.sendto(data, (host, int(port)))
            pub.publish_many("a", [b"x" * 50] * 20)
            for event in sub.events(0.01):
                if event.topic == "a":
                    last = max(last, event.offset)
        c = sub.counters
        assert c.malformed > 1000
        assert c.implausible + c.other_session > 100
        assert sub._engine.receiver.held_bytes <= 1_000_000 + 65_536
        assert len(sub.gaps) <= 510
        assert resident_bytes() - before < 100_000_000
        assert sub.ledger.account().balanced
        missing = c.missing_kernel + c.missing_network
        assert missing == c.repaired + c.late + c.lost + c.skipped + sub.pending_missing


def test_a_forger_with_many_names_cannot_fill_memory() -> None:
    """Without a key, messages claim 20,000 different sources; accounting and positions stay bounded, and balance."""
    group = new_group()
    host, port = group.split(":")
    session = b"FUZZ000001"
    with Subscriber(group, request_servers=[], start=0) as sub, sender() as noise:
        got = 0
        for first in range(1, 20_001, 20):
            blocks = b"".join(encode_block(f"s{first + i}", 1, "t", 0, 0, b"x") for i in range(20))
            noise.sendto(HEADER.pack(session, first, 20) + blocks, (host, int(port)))
            got += sum(1 for _ in itertools.islice(sub.events(5), 20))
        assert got == 20_000
        assert len(sub.positions) <= 1024
        account = sub.ledger.account()
        assert account.balanced
        assert account.delivered == 20_000
        assert len(sub.ledger.snapshot()) < 10_000_000


def test_noise_on_the_request_port() -> None:
    """Random and mutated requests, by UDP and TCP: counted by their fault, and honest clients are still served."""
    group = new_group()
    rng = random.Random(7)
    with Publisher(group, "FUZZ") as pub:
        pub.publish_many("a", [b"x" * 50] * 1000)
        server = pub.request_server
        assert server is not None
        session = pub.session.encode().ljust(10)
        before = resident_bytes()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            for data in mutants(rng, request(session, 5, 2), 20_000):
                sock.sendto(data, server.address)
                if rng.random() < 0.02:
                    time.sleep(0.0005)
        for data in mutants(rng, request(session, 5, 2), 200):
            with socket.create_connection(server.address, timeout=5) as connection:
                connection.sendall(
                    rng.choice([data, struct.pack(">I", len(data)) + data, b"\xff" * 4 + data])
                )
        c = server.counters
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (c.malformed <= 5000 or c.refused_session <= 100):
            time.sleep(0.01)
        assert c.malformed > 5000
        assert c.refused_session > 100
        refused = c.malformed + c.refused_session + c.refused_budget + c.repeats + c.ahead
        assert c.requests + 200 >= refused
        assert resident_bytes() - before < 100_000_000
        with Subscriber(group, "FUZZ", start="oldest") as sub:
            assert [e.offset for e in itertools.islice(sub.events(10), 1000)] == list(range(1000))


def test_a_flood_of_requests_is_held_to_the_budget(until: Callable[..., None]) -> None:
    """One client that asks a hundred thousand times gets its budget and no more; answers never exceed requests."""
    group = new_group()
    with Publisher(group, "FLOOD") as pub:
        pub.publish_many("a", [b"x" * 50] * 1000)
        server = pub.request_server
        assert server is not None
        session = pub.session.encode().ljust(10)
        begun = time.monotonic()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            for i in range(60_000):
                sock.sendto(request(session, 1 + i % 900, 1 + i // 900 % 50), server.address)
        c = server.counters

        def settled() -> bool:
            """Whether every request that arrived is accounted for, and no more arrive."""
            before = c.requests
            time.sleep(0.2)
            return before == c.requests == (c.answered + c.refused_budget + c.refused_unproven + c.repeats)

        until(settled, 60, "every request is answered, refused or a repeat")
        spent = time.monotonic() - begun
        assert c.answered <= 2_000 + 4_000 * spent + 1
        assert c.sent_bytes <= 65_536 * (2 + spent), "the address has not proven that it receives anything"
        assert c.answered <= c.requests
