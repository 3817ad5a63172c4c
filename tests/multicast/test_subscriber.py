"""Publisher and Subscriber on real sockets."""

import asyncio
import itertools
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, Event, Lost, MemoryJournal, Reason, Retention
from brokerless.core.errors import ConfigError
from brokerless.multicast import Batch, Publisher, RepairPolicy, RequestServer, Subscriber
from brokerless.multicast.receive.batch import LoneBatch
from brokerless.multicast.sockets import parse_address, sending_socket
from brokerless.multicast.wire.moldudp64 import heartbeat, wire_session


def drain(sub: Subscriber, count: int, timeout: float = 20.0) -> list[Event]:
    """`count` events, or what came until the deadline."""
    events: list[Event] = []
    deadline = time.monotonic() + timeout
    while len(events) < count and time.monotonic() < deadline:
        event = sub.receive(0.2)
        if event is not None:
            events.append(event)
    return events


def test_an_event_arrives_with_everything(group: str) -> None:
    """Topic, seq, time, content type, key and data arrive as they were published."""
    with Publisher(group, "T", source="orders-1") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        receipt = pub.publish("orders.eu", b"hello", content_type="text/plain", key="k1", time_us=1_234_567)
        event = sub.receive(5)
        assert event == Event(
            "orders-1",
            receipt.epoch,
            0,
            "orders.eu",
            0,
            1_234_567,
            b"hello",
            content_type="text/plain",
            key="k1",
        )


@pytest.mark.parametrize("io", ["auto", "gso", "mmsg", "plain"])
def test_every_way_of_moving_packets_delivers_the_same(group: str, io: str) -> None:
    """Forced offload, forced sendmmsg/recvmmsg and plain sockets all deliver all events in order."""
    with Publisher(group, "T", io=io) as pub, Subscriber(group, "T", io=io) as sub:  # type: ignore[arg-type]
        assert sub.wait_joined(5)
        pub.publish_many("a", [b"%05d" % i + b"x" * 95 for i in range(3000)])
        for i in range(200):
            pub.publish("bb" if i % 3 else "ccc", b"y" * (i % 90))
        events = drain(sub, 3200)
        assert [e.offset for e in events] == list(range(3200))
        assert [e.data[:5] for e in events[:3000]] == [b"%05d" % i for i in range(3000)]
        assert [len(e.data) for e in events[3000:]] == [i % 90 for i in range(200)]
        assert sub.ledger.account().delivered == 3200
        assert sub.ledger.account().balanced


def test_a_mix_of_ways_is_understood(group: str) -> None:
    """A sender with offload is read by receivers without it, and the other way round."""
    with (
        Publisher(group, "T", io="auto") as pub,
        Subscriber(group, "T", io="plain") as plain,
        Subscriber(group, "T", io="mmsg") as mmsg,
        Subscriber(group, "T", io="gso") as gro,
    ):
        subs = [plain, mmsg, gro]
        assert all(sub.wait_joined(5) for sub in subs)
        pub.publish_many("a", [b"z" * 100] * 2000)
        for sub in subs:
            assert [e.offset for e in drain(sub, 2000)] == list(range(2000))


def test_batches_and_events_and_items_are_the_same_stream(group: str) -> None:
    """Whoever changes between ways of receiving misses nothing and gets nothing twice."""
    with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        pub.publish_many("a", [b"%d" % i for i in range(1000)])
        seen = [sub.receive(5).offset for _ in range(10)]  # type: ignore[union-attr]
        for event in sub.events(5):
            seen.append(event.offset)
            if len(seen) >= 15:
                break
        batches = sub.batches(0.5)
        seen += [event.offset for event in next(batches).events]
        assert len(seen) > 15
        seen += [event.offset for batch in batches for event in batch.events]
        assert seen == list(range(1000))
        pub.publish_many("a", [b"x"] * 10)
        batch = next(sub.batches(5))
        assert batch.first_offset == 1000
        assert batch.datas[0] == b"x"
        assert sub.ledger.account().delivered == 1010, "the accounting have what was handed out"
        assert sub.positions["T"].offset == 1000, "a batch handed out is not yet processed"


def test_topics_filter_by_prefix_and_the_accounting_still_balances(group: str) -> None:
    """Events of other topics are not handed out, and count as delivered to this subscriber's accounting."""
    with Publisher(group, "T") as pub, Subscriber(group, "T", topics=["orders."]) as sub:
        assert sub.wait_joined(5)
        for i in range(50):
            pub.publish("orders.eu" if i % 5 == 0 else "other", b"%d" % i)
        pub.publish_many("other", [b"n"] * 100)
        pub.publish("orders.us", b"last")
        events = drain(sub, 11)
        assert [e.data for e in events] == [b"%d" % i for i in range(0, 50, 5)] + [b"last"]
        assert sub.receive(0.1) is None
        account = sub.ledger.account()
        assert account.delivered == 151
        assert account.balanced


def test_a_late_joiner_starts_where_it_wants(group: str) -> None:
    """Live, oldest, and an offset, all against a publisher that has published before."""
    with Publisher(group, "T") as pub:
        pub.publish_many("a", [b"%d" % i for i in range(500)])
        with (
            Subscriber(group, "T") as live,
            Subscriber(group, "T", start="oldest") as oldest,
            Subscriber(group, "T", start=100) as at,
        ):
            assert all(s.wait_joined(5) for s in (live, oldest, at))
            pub.publish("a", b"end")
            assert [e.offset for e in drain(live, 1)] == [500]
            assert [e.offset for e in drain(oldest, 501)] == list(range(501))
            assert [e.offset for e in drain(at, 401)] == list(range(100, 501))
            assert not oldest.losses
            assert not at.losses


def test_oldest_skips_what_was_evicted_and_an_offset_reports_it(group: str) -> None:
    """Who wants the oldest there is has lost nothing; who wanted offset 0 is told what is gone, once."""
    journal = MemoryJournal(retention=Retention(max_events=200))
    with Publisher(group, "T", journal=journal) as pub:
        for _ in range(10):
            pub.publish_many("a", [b"x"] * 50)
        kept = journal.oldest
        assert kept > 0
        told: list[Lost] = []
        with (
            Subscriber(group, "T", start="oldest") as oldest,
            Subscriber(group, "T", start=0, on_loss=told.append) as zero,
        ):
            assert [e.offset for e in drain(oldest, 500 - kept)] == list(range(kept, 500))
            assert not oldest.losses
            items = []
            for item in zero.items(5):
                items.append(item)
                if isinstance(item, Batch) and item.next_offset == 500:
                    break
            assert isinstance(items[0], Lost), "the loss comes in its place, before what follows it"
            assert told == [Lost("T", pub.epoch, None, 0, kept - 1, Reason.EVICTED)] == list(zero.losses)
            assert all(isinstance(item, Batch) for item in items[1:])
            zero.commit()
            account = zero.ledger.account()
            assert (account.delivered, account.lost, account.pending) == (500 - kept, kept, 0)
            assert account.lost_by_reason == {"evicted": kept}


def test_without_request_servers_a_hole_is_reported_and_the_stream_goes_on(
    group: str, until: Callable[..., None]
) -> None:
    """No repair: the loss is told in place, as in_flight, and the accounting balance."""
    with (
        Publisher(group, "T", requests=None) as pub,
        Subscriber(group, "T", request_servers=[], start=0) as sub,
    ):
        assert sub.wait_joined(5)
        assert not sub.losses
        pub.publish("a", b"one")
        assert sub.receive(5).data == b"one"  # type: ignore[union-attr]
    with Publisher(group, "T", requests=None) as pub:
        pub.publish_many("a", [b"x"] * 10)
        with Subscriber(group, "T", request_servers=[], start=0) as sub:
            assert sub.wait_joined(5)
            until(lambda: sub.receive(0.05) is None and sub.losses)
            assert [(lost.first, lost.last, lost.reason) for lost in sub.losses] == [(0, 9, Reason.IN_FLIGHT)]
            pub.publish("a", b"after")
            assert sub.receive(5).offset == 10  # type: ignore[union-attr]


def test_a_cursor_survives_and_nothing_is_lost_or_repeated(group: str, tmp_path: Path) -> None:
    """A subscriber that is closed and opened again goes on where it was, its ledger with it."""
    path = tmp_path / "sub.cursor"
    with Publisher(group, "T") as pub:
        with Subscriber(group, "T", cursor=path) as sub:
            assert sub.wait_joined(5)
            pub.publish_many("a", [b"%d" % i for i in range(100)])
            assert [e.offset for e in drain(sub, 60)] == list(range(60))
        pub.publish_many("a", [b"%d" % i for i in range(100, 300)])
        with Subscriber(group, "T", cursor=path) as sub:
            assert [e.offset for e in drain(sub, 240)] == list(range(60, 300))
            account = sub.ledger.account()
            assert (account.delivered, account.duplicates, account.lost) == (300, 0, 0)


def test_a_new_session_is_followed_from_its_beginning(group: str, tmp_path: Path) -> None:
    """A publisher that restarts without its journal: nothing of the new session is missed or taken for old."""
    with Subscriber(group, "T") as sub:
        for round_ in range(2):
            with Publisher(group, "T") as pub:
                if round_ == 0:
                    assert sub.wait_joined(5)
                pub.publish_many("a", [b"%d" % round_] * 100)
                events = drain(sub, 100)
                assert [(e.epoch, e.offset) for e in events] == [(pub.epoch, i) for i in range(100)]
        assert sub.counters.sessions == 2


@pytest.mark.parametrize("again", [False, True])
def test_a_restored_journal_repeats_nothing(group: str, tmp_path: Path, again: bool) -> None:
    """The new session of a restored copy has events of the epoch before: who had them does not get them again.

    `again`: the subscriber was restarted with its cursor meanwhile.
    """
    got: list[bytes] = []

    def publish(first: int, count: int) -> None:
        with Publisher(group, "T", journal=DiskJournal(tmp_path / "j"), linger_s=20) as pub:
            pub.publish_many("a", [b"%d" % i for i in range(first, first + count)])
            got.extend(event.data for event in drain(sub, count))

    def subscriber() -> Subscriber:
        return Subscriber(group, "T", start="cursor", cursor=tmp_path / "c")

    sub = subscriber()
    publish(0, 50)
    shutil.copytree(tmp_path / "j", tmp_path / "copy")
    publish(50, 80)
    if again:
        sub.close()
        sub = subscriber()
    shutil.rmtree(tmp_path / "j")
    shutil.move(tmp_path / "copy", tmp_path / "j")
    with sub:
        publish(1000, 80)
        assert got == [b"%d" % i for i in (*range(130), *range(1000, 1080))]
        assert (sub.counters.seen_before, sub.counters.lost) == (50, 0)
        account = sub.ledger.account()
        assert (account.delivered, account.duplicates, account.lost) == (210, 0, 0)


def test_a_restart_on_a_disk_journal_goes_on_with_the_session(group: str, tmp_path: Path) -> None:
    """Same session, next sequence, and what was sent before the restart can still be requested."""
    with Publisher(group, "T", journal=DiskJournal(tmp_path / "j")) as pub:
        session = pub.session
        pub.publish_many("a", [b"%d" % i for i in range(100)])
    with (
        Publisher(group, "T", journal=DiskJournal(tmp_path / "j")) as pub,
        Subscriber(group, "T", start="oldest") as sub,
    ):
        assert pub.session == session
        assert pub.publish("a", b"100").offset == 100
        assert [e.data for e in drain(sub, 101)] == [b"%d" % i for i in range(101)]


def test_the_end_of_a_session_ends_the_iteration_if_wanted(group: str) -> None:
    """`stop_at_end`: the loop ends by itself, with everything delivered."""
    with Subscriber(group, "T", stop_at_end=True) as sub:
        pub = Publisher(group, "T")
        assert sub.wait_joined(5)
        pub.publish_many("a", [b"x"] * 500)
        ender = threading.Timer(0.2, pub.close)
        ender.start()
        assert sum(1 for _ in sub) == 500
        ender.join()


def test_two_lines_are_arbitrated(group: str, another_group: Callable[[], str]) -> None:
    """With the same stream on two groups every event arrives once, and nothing counts as missing."""
    groups = [group, another_group()]
    with Publisher(groups, "T") as pub, Subscriber(groups, "T") as sub:
        assert sub.wait_joined(5)
        pub.publish_many("a", [b"x" * 100] * 3000)
        assert [e.offset for e in drain(sub, 3000)] == list(range(3000))
        deadline = time.monotonic() + 5
        while sub.counters.duplicates < 3000 and time.monotonic() < deadline:
            sub.receive(0.05)
        assert sub.counters.duplicates == 3000
        assert sub.counters.gaps == 0


IPV6_PROGRAM = """
from brokerless.multicast import Publisher, Subscriber

group = "[ff15::7]:30001"
with Publisher(group, "T") as pub:
    pub.publish_many("a", [b"x" * 100] * 1000)
    offsets = []
    with Subscriber(group, "T", start="oldest") as sub:
        assert sub.wait_joined(5)
        pub.publish_many("a", [b"x" * 100] * 4000)
        for event in sub.events(10):
            offsets.append(event.offset)
            if len(offsets) == 5000:
                break
    assert offsets == list(range(5000)), len(offsets)
    assert pub.request_address == "[::1]:30002", pub.request_address
    assert sub.counters.fetches + sub.counters.requests > 0, "repair over IPv6"
with Publisher(group, "T") as pub, Subscriber(group, "T", sender="::1") as sub:
    assert sub.wait_joined(5), "a source-specific join"
    pub.publish("a", b"y")
    assert sub.receive(5).data == b"y"
print("fine")
"""


def test_a_line_that_is_silent_is_told(
    group: str, another_group: Callable[[], str], caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    """Only line A carries the stream: that is said and counted, nothing is stale, and B is noticed when it comes."""
    second = another_group()
    caplog.set_level("INFO", "brokerless.multicast")
    address = parse_address(second, "group")
    repair = RepairPolicy(stale_after_s=1.5)
    with (
        Publisher(group, "T") as pub,
        Subscriber([group, second], "T", repair=repair) as sub,
        sending_socket(address, "127.0.0.1", 0) as line_b,
    ):
        assert sub.wait_joined(5)
        until(lambda: sub.receive(0.1) is None and sub.silent_lines == 1, 30, "line B is missed")
        assert not sub.stale
        assert f"nothing comes by {second}" in caplog.text
        assert sub.counters.rejoins >= 1

        def heard_again() -> bool:
            line_b.send(heartbeat(wire_session("T", pub.epoch), 1))
            return sub.receive(0.1) is None and not sub.silent_lines

        until(heard_again, 30, "line B is heard again")
        assert f"{second} on 127.0.0.1 is heard again" in caplog.text


def test_ipv6_groups_work() -> None:
    """The same over IPv6, with requests and a source-specific join, in a network namespace of its own."""
    prepare = "ip link set lo up && ip -6 route add local ff00::/8 dev lo"
    probe = subprocess.run(["unshare", "-n", "sh", "-c", prepare], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"cannot make a network namespace here: {probe.stderr.decode().strip()}")
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{prepare} && exec "$0" -c "$1"', sys.executable, IPV6_PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_a_source_specific_join_hears_that_sender_only(group: str) -> None:
    """Joined for 127.0.0.1 it hears the publisher; joined for another source it hears nothing."""
    with (
        Publisher(group, "T") as pub,
        Subscriber(group, "T", sender="127.0.0.1") as right,
        Subscriber(group, "T", sender="127.0.0.9") as wrong,
    ):
        assert right.wait_joined(5)
        pub.publish("a", b"x")
        assert right.receive(5).data == b"x"  # type: ignore[union-attr]
        assert wrong.receive(0.3) is None
        assert wrong.counters.packets == 0


def test_authentication_accepts_ours_and_refuses_others(group: str) -> None:
    """With a key everything works, repair and TCP included; packets without the key are counted, not taken."""
    key = b"k" * 32
    journal = MemoryJournal()
    with Publisher(group, "T", journal=journal, auth_key=key) as pub:
        pub.publish_many("a", [b"%d" % i for i in range(5000)])
        with (
            Subscriber(group, "T", auth_key=key, start="oldest") as sub,
            Subscriber(group, "T", start="live") as plain,
            Subscriber(group, "T", auth_key=b"w" * 32, start="live") as wrong,
        ):
            assert sub.wait_joined(5)
            assert plain.wait_joined(5)
            pub.publish_many("b", [b"x" * 100] * 100)
            events = drain(sub, 5100)
            assert [e.offset for e in events] == list(range(5100))
            assert sub.counters.fetches == 1, "more than the threshold is fetched over TCP"
            assert [e.offset for e in drain(plain, 100)] == list(range(5000, 5100)), (
                "plain receivers still work"
            )
            assert wrong.receive(0.2) is None
            assert wrong.counters.unauthentic > 0


def test_a_foreign_stream_is_opaque_data(group: str) -> None:
    """Somebody else's MoldUDP64 sender: every message is an event whose data is the message."""
    host, port = group.split(":")
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    try:
        with Subscriber(group, request_servers=[], start=0) as sub:
            messages = [b"S\0\0", b"A" + b"q" * 35, b"", b"\xb1"]
            packet = struct.pack(">10sQH", b"ITCH000001", 1, 4)
            packet += b"".join(struct.pack(">H", len(m)) + m for m in messages)
            sock.sendto(packet, (host, int(port)))
            events = drain(sub, 4)
            assert [e.data for e in events] == messages
            assert {(e.source, e.epoch, e.topic) for e in events} == {("ITCH000001", 0, "ITCH000001")}
            assert [(e.offset, e.seq) for e in events] == [(i, i) for i in range(4)]
    finally:
        sock.close()


@pytest.mark.parametrize("session", ["FOREIGN001", "OTHER"])
def test_a_loss_before_the_first_message_is_one_of_the_same_source(group: str, session: str) -> None:
    """Of a session nothing is known but that its beginning is missing: the loss and what follows have one source."""
    header, address = session.ljust(10).encode(), parse_address(group, "group")
    with (
        sending_socket(address, "127.0.0.1", 0) as sender,
        Subscriber(group, start=0, request_servers=[]) as sub,
    ):
        sender.send(header + struct.pack(">QH", 3, 1) + struct.pack(">H", 3) + b"abc")
        lost, batch = itertools.islice(sub.items(10), 2)
        assert isinstance(lost, Lost)
        assert (lost.source, lost.first, lost.last) == (session, 0, 1)
        assert not isinstance(batch, Lost)
        assert (batch.source, batch.datas) == (session, [b"abc"])
        assert {source for source, _, _ in sub.ledger.streams()} == {session}


def test_long_gaps_are_repaired_where_tcp_is_refused(group: str) -> None:
    """The request server answers by datagram alone: a late joiner has everything soon all the same."""
    journal = MemoryJournal(source="T")
    journal.append_many("a", [b"x" * 1000] * 20_000)
    with RequestServer(journal, "T", tcp=False) as server:
        servers = [str(server.address)]
        with Subscriber(group, "T", start="oldest", request_servers=servers) as sub:
            begun = time.monotonic()
            assert [event.offset for event in drain(sub, 20_000, 60)] == list(range(20_000))
            assert time.monotonic() - begun < 60
            assert sub.counters.lost == 0
            assert sub.counters.fetches <= 2 + (time.monotonic() - begun) / 5


def test_asyncio_receives_and_a_cancelled_wait_loses_nothing(group: str) -> None:
    """`async for`, `abatches`, `areceive` with time-outs: the same events, in order, each once."""

    async def main() -> list[int]:
        seen: list[int] = []
        async with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
            assert await asyncio.to_thread(sub.wait_joined, 5)
            for _ in range(5):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(sub.areceive(), 0.02)
            pub.publish_many("a", [b"x" * 50] * 2000)
            event = await sub.areceive(5)
            assert event is not None
            seen.append(event.offset)
            async for event in sub:
                seen.append(event.offset)
                if len(seen) == 700:
                    break
            async for batch in sub.abatches(2):
                seen += [e.offset for e in batch.events]
                if seen[-1] == 1999:
                    break
            assert await sub.areceive(0.05) is None
        return seen

    seen = asyncio.run(main())
    assert seen[:700] == list(range(700))
    assert seen[-1] == 1999
    assert sorted(set(seen)) == seen


def test_busy_polling_receives_the_same_and_ends(group: str) -> None:
    """A wait that spins gives every event, then sleeps, and ends by its time-out and by `stop`."""
    with Publisher(group, "T") as pub, Subscriber(group, "T", busy_poll_s=0.002) as sub:
        assert sub.wait_joined(5)
        for i in range(20):
            time.sleep(0.001)
            pub.publish("a", b"%d" % i)
            event = sub.receive(5)
            assert event is not None
            assert event.data == b"%d" % i
        begun = time.monotonic()
        assert sub.receive(0.05) is None
        assert 0.04 < time.monotonic() - begun < 4
        threading.Timer(0.05, sub.stop).start()
        assert sub.receive(20) is None
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize("topics", [(), ("a",), ("b",)])
def test_an_event_that_came_alone_is_a_batch_like_others(group: str, topics: tuple[str, ...]) -> None:
    """By the short way: positions, data, the part behind it, and nothing in it if its topic is not wanted."""
    with Publisher(group, "T") as pub, Subscriber(group, "T", topics=topics, request_servers=[]) as sub:
        assert sub.wait_joined(5)
        for data in (b"0", b"1"):  # they show what messages begin with
            pub.publish("a", data)
            for _ in sub.batches(0.2):
                pass
        time.sleep(0.001)
        pub.publish("a", b"2")
        found = sub._engine.wait_next(5)
        while found is None or found[2][3] is None:  # a heartbeat
            with sub._engine.lock:
                assert found is None or sub._engine.take(found) is None
            found = sub._engine.wait_next(5)
        wanted = topics != ("b",)
        assert sub._section.run(sub._take_found, found, False) == wanted
        if wanted:
            batch = next(sub.batches(0))
            assert isinstance(batch, LoneBatch)
            assert (batch.source, batch.epoch) == ("T", pub.epoch)
            assert (batch.first_offset, batch.next_offset, len(batch), batch.datas) == (2, 3, 1, [b"2"])
            assert [(e.offset, e.topic, e.seq, e.data) for e in batch] == [(2, "a", 2, b"2")]
            assert batch.after(2) is batch
            rest = batch.after(3)
            assert (rest.first_offset, rest.next_offset, list(rest), rest.datas) == (3, 3, [], [])
        assert sub.receive(0) is None
        assert sub.positions["T"].offset == 3
        assert (sub.counters.delivered, sub.counters.events) == (3, 3 * wanted)
        account = sub.ledger.account()
        assert (account.delivered, account.lost, account.pending) == (3, 0, 0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_was_read_before_another_thread_went_on_keeps_its_place(group: str, ahead: int) -> None:
    """A waiting thread reads an event; before it takes it in, the helper reads the next: both come once, in order."""
    with Publisher(group, "T") as pub, Subscriber(group, "T", request_servers=[]) as sub:
        assert sub.wait_joined(5)
        for data in (b"0", b"1"):  # the first ones show what messages begin with
            pub.publish("a", data)
            assert sub.receive(5).data == data  # type: ignore[union-attr]
        engine = sub._engine
        time.sleep(0.001)
        pub.publish("a", b"2")
        while (found := engine.wait_next(5)) is None or found[2][3] is None:
            with engine.lock:  # a heartbeat
                assert found is None or engine.take(found) is None
        if ahead:
            pub.publish_many("a", [b"3"])
            with engine.lock:
                while not engine.step():
                    engine.wait(5)
        assert sub._section.run(sub._take_found, found, False)
        got = [event.data for event in itertools.islice(sub.events(5), 1 + ahead)]
        assert got == [b"2", b"3"][: 1 + ahead]
        assert (sub.counters.lost, sub.counters.duplicates) == (0, 0)


def test_closing_from_another_thread_ends_the_iteration(group: str) -> None:
    """A loop that waits for ever ends when somebody closes the subscriber."""
    sub = Subscriber(group, "T")
    done = threading.Event()

    def loop() -> None:
        for _ in sub:
            pass
        done.set()

    thread = threading.Thread(target=loop)
    thread.start()
    sub.close()
    assert done.wait(5)
    thread.join()
    sub.close()


def test_a_slow_application_loses_nothing(group: str) -> None:
    """An application that computes for a while: the helper thread reads on, and nothing is lost."""
    with Publisher(group, "T") as pub, Subscriber(group, "T", receive_buffer_bytes=300_000) as sub:
        assert sub.wait_joined(5)
        publisher = threading.Thread(
            target=lambda: [pub.publish_many("a", [b"x" * 100] * 500) for _ in range(20)]
        )
        publisher.start()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            sum(range(1000))
        publisher.join()
        assert [e.offset for e in drain(sub, 10_000)] == list(range(10_000))
        assert not sub.losses


def test_a_full_queue_stops_reading_and_nothing_is_lost(group: str) -> None:
    """Beyond `max_queue_bytes` the kernel drops; that is counted, attributed, and repaired afterwards."""
    with (
        Publisher(group, "T", datagram_bytes=1400) as pub,
        Subscriber(group, "T", max_queue_bytes=50_000, receive_buffer_bytes=100_000) as sub,
    ):
        assert sub.wait_joined(5)
        for _ in range(100):
            pub.publish_many("a", [b"x" * 100] * 300)
        time.sleep(0.05)
        events = drain(sub, 30_000, 40)
        assert [e.offset for e in events] == list(range(30_000))
        c = sub.counters
        assert sub.count_drops() > 0
        assert c.missing_kernel > 0
        assert c.missing_kernel + c.missing_network == c.repaired + c.late + sub.pending_missing
        assert c.lost == 0


def test_a_pause_longer_than_the_deadline_loses_nothing(group: str) -> None:
    """An application that takes nothing for longer than `give_up_s`: the receiver's time stands still meanwhile."""
    policy = RepairPolicy(give_up_s=3.0)  # more than a busy machine needs for an answer
    with (
        Publisher(group, "T") as pub,
        Subscriber(
            group, "T", start=0, max_queue_bytes=30_000, receive_buffer_bytes=60_000, repair=policy
        ) as sub,
    ):
        assert sub.wait_joined(5)
        for _ in range(20):
            pub.publish_many("a", [b"x" * 100] * 500)
        spent = time.process_time()
        time.sleep(4.0)
        assert time.process_time() - spent < 2.0, "the helper thread does not spin while the queue is full"
        assert [e.offset for e in drain(sub, 10_000, 40)] == list(range(10_000))
        assert not sub.losses
        assert sub.counters.kernel_drops > 0


def test_a_second_request_server_is_asked_when_the_first_is_silent(
    group: str, tmp_path: Path, until: Callable[..., None]
) -> None:
    """Rotation: one address where nobody answers, and one stand-alone server on the journal's files."""
    with Publisher(group, "T", journal=DiskJournal(tmp_path / "j"), requests=None) as pub:
        pub.publish_many("a", [b"%d" % i for i in range(1000)])
        with (
            RequestServer(tmp_path / "j", "T") as server,
            Subscriber(
                group, "T", start="oldest", request_servers=["127.0.0.1:9", str(server.address)], tcp=False
            ) as sub,
        ):
            assert [e.data for e in drain(sub, 1000)] == [b"%d" % i for i in range(1000)]
            until(lambda: server.counters.answered > 0, 5, "the server counts its answer")


def test_giving_up_is_told_in_place(group: str) -> None:
    """A request server that never answers: after the deadline the loss is told, and the stream goes on."""
    policy = RepairPolicy(give_up_s=0.3)
    with Publisher(group, "T", requests=None) as pub:
        pub.publish_many("a", [b"x"] * 100)
        with Subscriber(group, "T", start=40, request_servers=["127.0.0.1:9"], repair=policy) as sub:
            assert sub.wait_joined(5)
            pub.publish("a", b"after")
            events = drain(sub, 1)
            assert [e.offset for e in events] == [100]
            assert [(lost.first, lost.last, lost.reason) for lost in sub.losses] == [(40, 99, Reason.GAVE_UP)]
            assert sub.ledger.account().balanced


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"group": "10.0.0.1:5000"}, "group"),
        ({"group": "239.1.1.1"}, "group"),
        ({"group": "239.1.1.1:0"}, "group"),
        ({"group": []}, "group"),
        ({"group": "239.1.1.1:5000", "start": "cursor"}, "start"),
        ({"group": "239.1.1.1:5000", "start": -1}, "start"),
        ({"group": "239.1.1.1:5000", "topics": "orders"}, "topics"),
        ({"group": "239.1.1.1:5000", "interface": "nosuch0", "request_servers": []}, "interface"),
        ({"group": "239.1.1.1:5000", "interface": "10.9.8.7"}, "request_servers"),
        ({"group": "239.1.1.1:5000", "auth_key": b"short"}, "auth_key"),
        ({"group": "239.1.1.1:5000", "io": "fast"}, "io"),
        ({"group": "239.1.1.1:5000", "busy_poll_s": -1}, "busy_poll_s"),
        ({"group": "239.1.1.1:5000", "session": "x" * 11}, "session"),
        ({"group": "239.1.1.1:5000", "interface": "nosuch0"}, "interface"),
    ],
)
def test_wrong_arguments_name_the_field(options: dict[str, object], field: str) -> None:
    """Every wrong argument is a ConfigError that names it."""
    with pytest.raises(ConfigError) as caught:
        Subscriber(**options)  # type: ignore[arg-type]
    assert caught.value.field == field
