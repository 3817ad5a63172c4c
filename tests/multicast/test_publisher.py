"""What a publisher accepts, refuses, and says."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.core.errors import Closed, ConfigError, InvalidEvent, JournalFull, JournalLocked
from brokerless.multicast import Publisher, Subscriber


def test_large_events_pass_and_too_large_ones_are_refused(group: str) -> None:
    """Up to about 58 kB in one datagram; beyond it InvalidEvent, and nothing was accepted."""
    with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        pub.publish("a", b"x" * 50_000)
        event = sub.receive(5)
        assert event is not None
        assert len(event.data) == 50_000
        with pytest.raises(InvalidEvent):
            pub.publish("a", b"x" * 60_000)
        with pytest.raises(InvalidEvent):
            pub.publish_many("a", [b"x", b"x" * 60_000])
        assert pub.journal.next == 1
        assert pub.counters.published == 1


@pytest.mark.parametrize("topics", [["a"], ["a", "b"]])
def test_events_of_any_size_and_any_kind_of_bytes_come_as_they_were(group: str, topics: list[str]) -> None:
    """Equal sizes, mixed sizes, bytearrays and views, with times, keys and content types: nothing is changed."""
    datas: list[list[bytes]] = [
        [b"x" * 30] * 50,
        [b"y" * i for i in range(50)],
        [bytearray(b"ab"), memoryview(b"cde"), b"f"],  # type: ignore[list-item]
        [b""],
    ]
    with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        wanted = []
        for some in datas:
            for topic in topics:
                times = list(range(len(some)))
                pub.publish_many(topic, some, "text/plain", times_us=times)
                pub.publish_many(topic, some, keys=[f"k{i % 3}" for i in times], times_us=times)
                wanted += [
                    (topic, bytes(data), time, "text/plain", "")
                    for data, time in zip(some, times, strict=True)
                ]
                wanted += [
                    (topic, bytes(data), time, "", f"k{time % 3}")
                    for data, time in zip(some, times, strict=True)
                ]
        got = [sub.receive(5) for _ in wanted]
        assert [(e.topic, e.data, e.time, e.content_type, e.key) for e in got if e is not None] == wanted
        seqs = {topic: [e.seq for e in got if e is not None and e.topic == topic] for topic in topics}
        assert all(column == list(range(len(column))) for column in seqs.values())


def test_an_idle_publisher_sends_at_once_and_a_busy_one_in_company(group: str) -> None:
    """The first event of a burst goes out alone; the burst behind it shares packets; nothing waits for long."""
    with Publisher(group, "T", max_wait_s=0.05) as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        for _ in range(1000):
            pub.publish("a", b"x" * 20)
        assert pub.counters.packets < 300
        deadline = time.monotonic() + 5
        got = 0
        while got < 1000 and time.monotonic() < deadline:
            got += sub.receive(1) is not None
        assert got == 1000, "the last of them was sent without another publish() or flush()"


def test_many_threads_may_publish(group: str) -> None:
    """Every event of every thread arrives once, in the order of its offset."""
    with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)

        def work(number: int) -> None:
            for i in range(500):
                pub.publish(f"t{number}", b"%d" % i)
                if i % 50 == 0:
                    pub.publish_many(f"t{number}", [b"many"] * 3)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pub.flush()
        total = 4 * 530
        events = [event for event in (sub.receive(5) for _ in range(total)) if event]
        assert [event.offset for event in events] == list(range(total))
        for n in range(4):
            assert [e.seq for e in events if e.topic == f"t{n}"] == list(range(530))


def test_what_somebody_appends_to_the_journal_is_sent_too(group: str) -> None:
    """The journal may be shared with other code of the process."""
    journal = MemoryJournal()
    with Publisher(group, "T", journal=journal) as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        journal.append("a", b"direct")
        pub.publish("a", b"published")
        assert [sub.receive(5).data, sub.receive(5).data] == [b"direct", b"published"]  # type: ignore[union-attr]


def test_the_rate_is_held(group: str) -> None:
    """Pacing holds the producer back: so many bytes take at least so long."""
    with Publisher(group, "T", rate_bytes_s=1_000_000) as pub:
        begun = time.monotonic()
        for _ in range(10):
            pub.publish_many("a", [b"x" * 100] * 300)
        assert time.monotonic() - begun > (pub.counters.sent_bytes - 200_000) / 1_000_000
        assert pub.counters.paced > 0


def test_a_full_journal_that_rejects_is_told_to_the_caller(group: str) -> None:
    """`on_full="reject"` with a registered cursor: JournalFull, and what was accepted before is sent."""
    journal = MemoryJournal(retention=Retention(max_events=100), on_full="reject")
    with Publisher(group, "T", journal=journal) as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        journal.register("somebody", 0)
        pub.publish_many("a", [b"x"] * 100)
        with pytest.raises(JournalFull):
            pub.publish_many("a", [b"x"] * 50)
        assert sum(1 for _ in sub.events(0.3)) == 100


def test_after_closing_nothing_is_accepted(group: str, tmp_path: Path) -> None:
    """Closed is an error of its own; a second publisher on the same disk journal is refused while it is open."""
    pub = Publisher(group, "T", journal=DiskJournal(tmp_path / "j"))
    with pytest.raises(JournalLocked):
        DiskJournal(tmp_path / "j")
    pub.publish("a", b"x")
    pub.close()
    pub.close()
    with pytest.raises(Closed):
        pub.publish("a", b"x")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"session": "TOOLONG"}, "session"),
        ({"session": ""}, "session"),
        ({"ttl": 300}, "ttl"),
        ({"datagram_bytes": 50}, "datagram_bytes"),
        ({"interface": "nosuch0"}, "interface"),
        ({"interface": "lo", "requests": "nowhere"}, "address"),
        ({"auth_key": b"short"}, "auth_key"),
        ({"io": "fast"}, "io"),
        ({"max_wait_s": -1}, "max_wait_s"),
    ],
)
def test_wrong_arguments_name_the_field(group: str, options: dict[str, object], field: str) -> None:
    """Every wrong argument is a ConfigError that names it, and leaves nothing open."""
    with pytest.raises(ConfigError) as caught:
        Publisher(group, **{"session": "T", **options})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_two_interfaces_and_two_lines_send_on_each(another_group: Callable[[], str]) -> None:
    """Every pair of group and interface is a line with a socket of its own."""
    with Publisher([another_group(), another_group()], "T", interface=["127.0.0.1", "lo"]) as pub:
        pub.publish("a", b"x")
        pub.flush()
        assert len(pub._sockets) == 4
        assert pub.counters.packets == 4
