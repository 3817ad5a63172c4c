"""Seeded loss on real sockets: everything is repaired, with few requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from brokerless.multicast import AnswerPolicy, Publisher, RepairPolicy, Subscriber
from brokerless.multicast.wire.packing import MAX_SEGMENTS
from tests.multicast.groups import new_group
from tests.multicast.lossy import Relay, attach_loss, follow


@pytest.fixture
def relays() -> Iterator[list[Relay]]:
    made: list[Relay] = []
    yield made
    for relay in made:
        relay.close()


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


@pytest.mark.parametrize("share", [0.01, 0.05, 0.20])
@pytest.mark.parametrize("io", ["plain", "mmsg", "gso"])
def test_loss_in_the_kernel_is_repaired_and_attributed(share: float, io: str) -> None:
    """A classic BPF filter drops in the socket: repaired, and counted as the kernel's doing, all of it."""
    total = 10_000
    group = new_group()
    with (
        Publisher(group, "LOSS", rate_bytes_s=20_000_000, io="gso" if io == "gso" else "mmsg") as pub,
        Subscriber(group, "LOSS", start=0, tcp=False, io=io) as sub,  # type: ignore[arg-type]
    ):
        assert sub.wait_joined(5)
        keep = attach_loss(sub._engine._lines[0].sock, 99, share)
        for start in range(
            0, total, 100
        ):  # one event in a datagram, so that drops can be compared with events
            pub.publish_many("a", [b"%06d" % i + b"x" * 994 for i in range(start, start + 100)])
        assert follow(sub, total) == list(range(total))
        drops = sub.count_drops()
        c = sub.counters
        assert c.lost == 0
        assert c.gaps > 0
        assert c.requests <= 2 * c.gaps
        assert c.missing_network == 0, "nothing was lost elsewhere"
        assert c.missing_kernel == c.repaired + c.late + sub.pending_missing
        if io == "gso":  # the kernel counts a GSO batch as one
            assert drops <= c.missing_kernel <= drops * MAX_SEGMENTS
        else:
            assert c.missing_kernel == drops
        del keep


@pytest.mark.parametrize(("repeat", "reorder"), [(0.0, 0.0), (0.1, 0.0), (0.05, 0.1)])
def test_every_message_is_accounted_for(
    relays: list[Relay], until: Callable[..., None], repeat: float, reorder: float
) -> None:
    """Lost by the network, repaired, late, repeated, delivered: the counters of both ends and of the relay agree."""
    relay = Relay(11, loss=0.05, burst=3, repeat=repeat, reorder=reorder)
    relays.append(relay)
    total = 20_000
    with (
        Publisher(relay.before, "BOOKS", rate_bytes_s=12_000_000) as pub,
        Subscriber(
            relay.after, "BOOKS", start=0, request_servers=[str(pub.request_address)], tcp=False
        ) as sub,
    ):
        assert sub.wait_joined(5)
        for start in range(0, total, 500):
            pub.publish_many("a", [b"%06d" % i + b"x" * 94 for i in range(start, start + 500)])
        assert follow(sub, total) == list(range(total))
        server, c = pub.request_server, sub.counters
        assert server is not None

        def rests() -> bool:
            """Whether the last repeats and the last requests have come, too."""
            came = (
                relay.forwarded_messages + server.counters.messages == c.delivered + c.duplicates + c.not_held
            )
            return came and c.requests + c.statuses == server.counters.requests

        until(lambda: sub.receive(0.3) is None and rests(), 60, "nothing is on its way any more")
        assert sub.count_drops() == c.missing_kernel == c.lost == c.skipped == 0
        assert c.missing_network == c.repaired + c.late
        if not reorder:
            assert c.missing_network == len(relay.dropped_sequences) > 0, "what was missing is what was lost"
        received = relay.forwarded_messages + server.counters.messages
        assert received == c.delivered + c.duplicates + c.not_held, "what came is what was used or not needed"
        assert c.delivered == total
        s = server.counters
        assert c.requests + c.statuses == s.requests == s.answered + s.statuses + s.repeats


def test_two_lossy_lines_lose_what_both_lose(relays: list[Relay]) -> None:
    """A/B: each line loses a fifth; exactly what both lost is missing, and asked for."""
    first = Relay(1, loss=0.2)
    second = Relay(2, loss=0.2)
    relays += [first, second]
    total = 20_000
    with (
        Publisher([first.before, second.before], "AB", rate_bytes_s=8_000_000) as pub,
        Subscriber(
            [first.after, second.after],
            "AB",
            start=0,
            request_servers=[str(pub.request_address)],
            tcp=False,
            repair=RepairPolicy(line_wait_s=2.0),  # longer than one relay can be behind the other
        ) as sub,
    ):
        assert sub.wait_joined(5)
        for _ in range(total // 500):
            pub.publish_many("a", [b"x" * 100] * 500)
        assert follow(sub, total) == list(range(total))
        c = sub.counters
        both = first.dropped_sequences & second.dropped_sequences
        assert 0 < len(both) == c.missing_network == c.repaired
        assert c.lost == c.late == c.missing_kernel == 0
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


@pytest.mark.parametrize("key", [None, b"k" * 16])
@pytest.mark.parametrize("share", [True, False])
def test_what_several_lost_is_repaired_for_all(
    share: bool, key: bytes | None, until: Callable[..., None]
) -> None:
    """Six subscribers lose the same packets: repairs go to the group, unless that is switched off; all get all."""
    group, total = new_group(), 400
    with (
        Publisher(group, "LOSS", answers=AnswerPolicy(share_repairs=share), auth_key=key, io="plain") as pub,
        ExitStack() as stack,
    ):
        subs = [stack.enter_context(Subscriber(group, "LOSS", start=0, auth_key=key)) for _ in range(6)]
        server = pub.request_server
        assert server is not None
        until(
            lambda: all(sub.wait_joined(1) for sub in subs) and len(server.positions) == 6,
            30,
            "the publisher knows all",
        )
        port = pub._lines[0]._sock.getsockname()[1]
        keep = [attach_loss(sub._engine._lines[0].sock, 5, 0.15, source_port=port) for sub in subs]
        for i in range(total):
            pub.publish_many("a", [b"%90d" % i])
            time.sleep(0.001)  # so that losses are spread over many requests
        for sub in subs:
            assert follow(sub, total) == list(range(total))
            assert sub.counters.lost == 0
        lost = subs[0].counters.missing_kernel + subs[0].counters.missing_network
        assert lost >= total // 20
        assert (server.counters.shared > 0) is share
        if share:
            assert any(sub.counters.repaired > sub.counters.requests for sub in subs), "somebody else asked"
        del keep
