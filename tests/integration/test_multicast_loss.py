"""Seeded loss on real sockets: everything is repaired, with few requests."""

import ctypes
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from brokerless.multicast import Publisher, Subscriber
from brokerless.multicast.acquire import Acquirer
from brokerless.multicast.sockets import parse_address, receiving_socket, sending_socket
from tests.multicast.groups import new_group


class Relay:
    """Forwards one group to another, and loses, repeats and reorders datagrams by a seed."""

    def __init__(
        self, seed: int, *, loss: float, burst: int = 1, repeat: float = 0.0, reorder: float = 0.0
    ) -> None:
        self.before, self.after = new_group(), new_group()
        self.dropped = self.forwarded = 0
        self._random = random.Random(seed)
        self._loss, self._burst, self._repeat, self._reorder = loss, burst, repeat, reorder
        self._in = receiving_socket(parse_address(self.before, "group", multicast=True), ["127.0.0.1"])
        self._out = sending_socket(parse_address(self.after, "group", multicast=True), "127.0.0.1", 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        acquirer = Acquirer(self._in, "plain")
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        losing = 0
        late: list[bytes] = []
        while not self._stop.is_set():
            poll.poll(20)
            while arrivals := acquirer.receive():
                packet = bytes(arrivals[0][0])
                if not losing and self._random.random() < self._loss / self._burst:
                    losing = self._burst
                if losing:
                    losing -= 1
                    self.dropped += 1
                    continue
                if self._random.random() < self._reorder:
                    late.append(packet)
                    continue
                for _ in range(2 if self._random.random() < self._repeat else 1):
                    self._out.send(packet)
                    self.forwarded += 1
                while late:
                    self._out.send(late.pop())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._in.close()
        self._out.close()


@pytest.fixture
def relays() -> Iterator[list[Relay]]:
    made: list[Relay] = []
    yield made
    for relay in made:
        relay.close()


def follow(sub: Subscriber, count: int, seconds: float = 60.0) -> list[int]:
    """The offsets of the next `count` events."""
    offsets: list[int] = []
    deadline = time.monotonic() + seconds
    for batch in sub.batches(5):
        offsets += range(batch.first_offset, batch.next_offset)
        if len(offsets) >= count or time.monotonic() > deadline:
            break
    return offsets


@pytest.mark.parametrize(
    ("loss", "burst", "repeat", "reorder"),
    [
        (0.01, 1, 0.0, 0.0),
        (0.05, 1, 0.0, 0.0),
        (0.20, 1, 0.0, 0.0),
        (0.05, 12, 0.0, 0.0),
        (0.05, 1, 0.05, 0.05),
        (0.00, 1, 0.10, 0.10),
    ],
)
def test_loss_is_repaired(
    relays: list[Relay], loss: float, burst: int, repeat: float, reorder: float
) -> None:
    """1, 5 and 20 %, bursts, repeats and reordering: nothing is lost, requests stay within twice the gaps."""
    relay = Relay(7, loss=loss, burst=burst, repeat=repeat, reorder=reorder)
    relays.append(relay)
    total = 30_000
    # Paced to what a relay of one thread can forward: only what it loses on purpose is lost.
    with (
        Publisher(relay.before, "LOSS", rate_bytes_s=12_000_000) as pub,
        Subscriber(
            relay.after, "LOSS", start=0, request_servers=[str(pub.request_address)], tcp=False
        ) as sub,
    ):
        assert sub.wait_joined(5)
        for start in range(0, total, 500):
            pub.publish_many("a", [b"%06d" % i + b"x" * 94 for i in range(start, start + 500)])
        assert follow(sub, total) == list(range(total))
        c = sub.counters
        assert not sub.losses
        assert c.lost == 0
        if loss:
            assert relay.dropped > 0
            assert c.gaps > 0
        assert c.requests <= 2 * c.gaps
        assert c.missing_kernel + c.missing_network == c.repaired + c.late + sub.pending_missing
        sub.commit()
        account = sub.ledger.account()
        assert account.balanced
        assert (account.delivered, account.pending, account.lost) == (total, 0, 0)


def attach_loss(sock: socket.socket, seed: int, share: float) -> object:
    """Let the kernel drop that share of the datagrams of one socket, chosen by a hash of their sequence."""
    program = [
        (0x20, 0, 0, 8 + 14),  # load the low word of the sequence number (after 8 bytes of UDP header)
        (0xA4, 0, 0, seed & 0xFFFFFFFF),  # xor
        (0x24, 0, 0, 2_654_435_761),  # multiply
        (0x35, 0, 1, int(share * 2**32)),  # jump if above or equal
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
        (0x06, 0, 0, 0),  # drop
    ]
    raw = b"".join(struct.pack("HBBI", *line) for line in program)
    keep = ctypes.create_string_buffer(raw)
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", len(program), ctypes.addressof(keep)))
    return keep


@pytest.mark.parametrize("share", [0.01, 0.05, 0.20])
@pytest.mark.parametrize("io", ["plain", "mmsg"])
def test_loss_in_the_kernel_is_repaired_and_attributed(share: float, io: str) -> None:
    """A classic BPF filter drops in the socket: repaired, and counted as the kernel's doing, not the network's."""
    group = new_group()
    total = 20_000
    with (
        Publisher(group, "LOSS", rate_bytes_s=20_000_000, io="mmsg") as pub,
        Subscriber(group, "LOSS", start=0, tcp=False, io=io) as sub,  # type: ignore[arg-type]
    ):
        assert sub.wait_joined(5)
        keep = attach_loss(sub._engine._lines[0], 99, share)
        for start in range(0, total, 500):
            pub.publish_many("a", [b"%06d" % i + b"x" * 94 for i in range(start, start + 500)])
        assert follow(sub, total) == list(range(total))
        c = sub.counters
        assert c.lost == 0
        assert c.gaps > 0
        assert c.requests <= 2 * c.gaps
        assert sub.count_drops() > 0
        assert c.missing_kernel > 0
        assert c.missing_kernel + c.missing_network == c.repaired + c.late + sub.pending_missing
        del keep


def test_two_lossy_lines_lose_what_both_lose(relays: list[Relay]) -> None:
    """A/B: each line loses a fifth; only what both lost is asked for."""
    first = Relay(1, loss=0.2)
    second = Relay(2, loss=0.2)
    relays += [first, second]
    total = 20_000
    with (
        Publisher([first.before, second.before], "AB", rate_bytes_s=8_000_000) as pub,
        Subscriber(
            [first.after, second.after], "AB", start=0, request_servers=[str(pub.request_address)], tcp=False
        ) as sub,
    ):
        assert sub.wait_joined(5)
        for _ in range(total // 500):
            pub.publish_many("a", [b"x" * 100] * 500)
        assert follow(sub, total) == list(range(total))
        c = sub.counters
        assert c.lost == 0
        # One line alone would miss a fifth; both together a twenty-fifth. Room for chance, and for a late line.
        assert c.missing_network + c.missing_kernel < total / 10
        assert c.requests <= 2 * c.gaps


def test_a_long_gap_goes_over_tcp(relays: list[Relay]) -> None:
    """A burst longer than the threshold is one TCP fetch, not hundreds of datagrams."""
    relay = Relay(3, loss=0.0)
    relays.append(relay)
    with (
        Publisher(relay.before, "LONG", rate_bytes_s=12_000_000) as pub,
        Subscriber(relay.after, "LONG", start=0, request_servers=[str(pub.request_address)]) as sub,
    ):
        assert sub.wait_joined(5)
        pub.publish_many("a", [b"x" * 100] * 1000)
        assert follow(sub, 1000) == list(range(1000))
        relay._loss = 1.0
        for _ in range(20):
            pub.publish_many("a", [b"x" * 100] * 500)
        deadline = time.monotonic() + 10
        while relay.dropped < 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        relay._loss = 0.0
        pub.publish_many("a", [b"x" * 100] * 1000)
        assert follow(sub, 11_000) == list(range(1000, 12_000))
        assert sub.counters.fetches >= 1
        assert sub.counters.requests < 20
        assert sub.counters.lost == 0
