"""What a publisher accepts, refuses, and says."""

import errno
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.core.errors import (
    Closed,
    ConfigError,
    InvalidEvent,
    JournalError,
    JournalFull,
    JournalLocked,
)
from brokerless.multicast import (
    AnswerPolicy,
    FlowControl,
    HeartbeatPolicy,
    Publisher,
    RepairPolicy,
    RequestServer,
    SocketFault,
    Subscriber,
)
from brokerless.multicast.wire.status import ANY_SESSION, Requester, extended_request, is_status
from tests.multicast.lossy import attach_loss


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
                pub.publish_many(topic, some, content_type="text/plain", times_us=times)
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


def test_the_time_that_sending_takes_makes_no_event_of_a_burst_a_lone_one(group: str) -> None:
    """Behind a batch whose sending took milliseconds, the next event is batched as well."""

    def lone_per_batch() -> float:
        with Publisher(group, "T", rate_bytes_s=10_000_000, requests=None) as pub:
            for _ in range(12_000):
                pub.publish("a", b"x" * 100)
            pub.flush()
            counts = [frame.header.count for frame in pub.journal.read(0, max_bytes=1 << 30).frames]
        assert sum(counts) == 12_000
        return counts.count(1) / sum(count > 1 for count in counts)

    # A busy machine pauses this process, and what follows a pause is a lone event: one burst in five is left alone.
    assert min(lone_per_batch() for _ in range(5)) <= 0.5, "about one lone event for each batch"


def test_an_event_a_millisecond_after_another_is_sent_at_once(group: str) -> None:
    """At 1,000 events/s every event has left when `publish` returns: none waits for others."""
    with Publisher(group, "T") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(5)
        for i in range(50):
            time.sleep(0.0008)  # less than `max_wait_s`
            pub.publish("a", b"%d" % i)
            assert pub.counters.packets == i + 1
        assert [event.data for event in itertools.islice(sub.events(5), 50)] == [b"%d" % i for i in range(50)]
        assert pub.journal.next == 50


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
        ({"interface": "lo", "requests": "nowhere"}, "requests"),
        ({"auth_key": b"short"}, "auth_key"),
        ({"io": "fast"}, "io"),
        ({"max_wait_s": -1}, "max_wait_s"),
        ({"rate_bytes_s": math.nan}, "rate_bytes_s"),
        ({"linger_s": -1}, "linger_s"),
        ({"linger_s": math.inf}, "linger_s"),
    ],
)
def test_wrong_arguments_name_the_field(group: str, options: dict[str, object], field: str) -> None:
    """Every wrong argument is a ConfigError that names it, and leaves nothing open."""
    with pytest.raises(ConfigError) as caught:
        Publisher(group, **{"session": "T", **options})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("as_path", [True, False])
def test_a_publisher_that_cannot_begin_gives_the_journal_back(
    group: str, another_group: Callable[[], str], tmp_path: Path, as_path: bool
) -> None:
    """Whatever is wrong, a port in use above all: the next publisher of this process can have the journal."""
    with Publisher(another_group(), "O") as other:
        for wrong in (
            {"requests": str(other.request_address)},
            {"session": "TOOLONG"},
            {"source": "a:b"},
            {"ttl": 300},
            {"interface": "nosuch0"},
            {"datagram_bytes": 50},
            {"auth_key": b"short"},
            {"requests": None, "flow_control": FlowControl()},
            {"metrics": "nowhere"},
        ):
            journal = tmp_path / "j" if as_path else DiskJournal(tmp_path / "j")
            with pytest.raises((ConfigError, InvalidEvent, SocketFault)):
                Publisher(group, **{"session": "T", "journal": journal, **wrong})  # type: ignore[arg-type]
    with Publisher(group, "T", journal=tmp_path / "j") as publisher:
        publisher.publish("t", b"x")


@pytest.mark.parametrize("wrong", [7, b"bytes", "", object()])
def test_what_is_no_journal_is_named(group: str, wrong: Any) -> None:
    """One line that says what is expected, not an AttributeError of something inside."""
    with pytest.raises(ConfigError, match="journal: must be"):
        Publisher(group, "T", journal=wrong)
    with pytest.raises((ConfigError, JournalError), match="journal"):
        RequestServer(wrong, "T")


@pytest.mark.parametrize("policy", [RepairPolicy, AnswerPolicy, FlowControl, HeartbeatPolicy])
def test_policies_refuse_what_is_no_number(policy: type[msgspec.Struct]) -> None:
    """NaN compares with nothing: a time or rate that is one would never be over, or never be reached."""
    fields = [f.name for f in msgspec.structs.fields(policy) if f.type in (int, float)]
    assert len(fields) >= 2
    for name in fields:
        for value in (math.nan, -1.0):
            with pytest.raises(ConfigError):
                policy(**{name: value})


def test_group_a_is_tied_to_interface_a(another_group: Callable[[], str]) -> None:
    """As many groups as interfaces are pairs; one of either goes with all of the other; anything else is refused."""
    two, three = [another_group() for _ in range(2)], [another_group() for _ in range(3)]
    for groups, interfaces, lines in (
        (two, ["127.0.0.1", "lo"], 2),
        (two, ["lo"], 2),
        (two[:1], ["127.0.0.1", "lo"], 2),
    ):
        with Publisher(groups, "T", interface=interfaces) as pub:
            pub.publish("a", b"x")
            pub.flush()
            assert pub.counters.packets == lines
    with pytest.raises(ConfigError):
        Publisher(three, "T", interface=["127.0.0.1", "lo"])


def test_closing_waits_for_those_who_have_not_got_everything(group: str) -> None:
    """A subscriber that loses a tenth of all packets gets everything, although the publisher closes at once."""
    received: list[int] = []
    pub = Publisher(group, "T", linger_s=20)
    with Subscriber(group, "T", stop_at_end=True, io="plain") as sub:
        assert sub.wait_joined(10)
        keep = attach_loss(sub._engine._lines[0].sock, 7, 0.1)
        closing = threading.Thread(target=lambda: (pub.publish_many("a", [b"x" * 1000] * 2000), pub.close()))
        closing.start()
        for batch in sub.batches(10):
            received += range(batch.first_offset, batch.next_offset)
        closing.join(30)
        assert keep is not None
        assert sub.counters.lost == 0
    assert received == list(range(2000))
    assert pub.counters.lingered == 0


def test_closing_waits_for_one_who_has_just_come(group: str) -> None:
    """A subscriber that asked for a cookie is not known yet: `close` gives it the time to tell its position."""
    pub = Publisher(group, "T", linger_s=20)
    assert pub.request_server is not None
    where = pub.request_server.address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        sock.sendto(extended_request(ANY_SESSION, 1, 0, Requester(0, 77, 1, 0)), (where.host, where.port))
        assert is_status(sock.recv(2048))
        begun = time.monotonic()
        pub.publish("a", b"x")
        pub.close()
        assert time.monotonic() - begun > 0.2
        assert time.monotonic() - begun < 10


def test_closing_does_not_wait_for_nobody(group: str) -> None:
    """Without a subscriber, and after one that left, `close` takes no time to speak of."""
    pub = Publisher(group, "T", linger_s=30)
    with Subscriber(group, "T") as sub:
        assert sub.wait_joined(10)
        pub.publish("a", b"x")
        assert sub.receive(10) is not None
    begun = time.monotonic()
    pub.close()
    assert time.monotonic() - begun < 10


def test_a_failed_interface_is_noticed_and_opened_again(
    group: str, caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    """The kernel says ENODEV: logged once, counted, the line is opened again, and receivers get everything."""
    with Publisher(group, "T", io="plain") as pub, Subscriber(group, "T") as sub:
        assert sub.wait_joined(10)
        line = pub._lines[0]
        broken = FailingSocket(fileno=line._sock.detach())
        line._use(broken)
        pub.publish("a", b"1")
        pub.flush()
        until(lambda: pub.counters.reopened == 1, 10, "opened again")
        pub.publish("a", b"2")
        assert [event.data for event in itertools.islice(sub.events(10), 2)] == [b"1", b"2"]
        assert pub.counters.send_errors >= 1
        assert pub.failed_lines == 0
        assert caplog.text.count("nothing is sent any more") == 1


class FailingSocket(socket.socket):
    """A socket whose interface was deleted."""

    def fileno(self) -> int:
        return -1

    def send(self, *_: object) -> int:  # type: ignore[override]
        raise OSError(errno.ENODEV, "No such device")
