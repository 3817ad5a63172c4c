"""What a publisher does on its own: overload, durable names, restarts, mistakes of the caller."""

import inspect
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from brokerless.core import DiskJournal, MemoryJournal, Reason, Receipt, Retention
from brokerless.core.errors import Closed, ConfigError, InvalidEvent, JournalFull, UsageError
from brokerless.direct import Mirror, Publisher, Subscriber, Worker, read_dead_letters

from .conftest import eventually

DEADLINE = 20.0
SMALL = Retention(max_bytes=200_000)


def fill(pub: Publisher, n: int = 1000) -> int:
    """Publish until the journal refuses; how many were accepted."""
    for i in range(n):
        try:
            pub.publish("t", b"." * 1000)
        except JournalFull:
            return i
    return n


def test_reject_protects_a_durable_subscriber() -> None:
    """on_full="reject": what a durable subscriber has not committed is never dropped; publish raises instead."""
    journal = MemoryJournal(retention=SMALL, on_full="reject")
    with Publisher("inproc://reject", source="p", journal=journal) as pub:
        with Subscriber(pub.address, durable="d") as sub:
            assert sub.wait_joined(DEADLINE)
            accepted = fill(pub)
            assert 50 < accepted < 1000
        with Subscriber(pub.address, durable="d") as sub:
            got = [event.offset for _, event in zip(range(accepted), sub.events(DEADLINE), strict=False)]
            assert got == list(range(accepted))
            sub.commit()
            eventually(lambda: sub.receive(0.01) is None and journal.registered()["sub.d"] == accepted)
            assert fill(pub, 10) == 10
        with Subscriber(pub.address, durable="d") as sub:
            assert next(sub.events(timeout=DEADLINE)).offset == accepted


def test_block_holds_the_producer_until_the_group_has_had_it() -> None:
    """on_full="block": the producer waits for a slow group, memory stays bounded, nothing is lost."""
    journal = MemoryJournal(retention=SMALL, on_full="block", block_timeout_s=DEADLINE)
    with (
        Publisher("inproc://block", source="p", journal=journal) as pub,
        Worker(pub.address, group="g", prefetch=20) as worker,
    ):
        done = threading.Event()
        most = 0

        def work() -> None:
            for delivery in worker:
                delivery.ack()

        def produce() -> None:
            for _ in range(2000):
                pub.publish("t", b"." * 1000)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert pub.wait_for_workers(1, DEADLINE)
        producer = threading.Thread(target=produce)
        producer.start()
        while not done.wait(0.002):
            most = max(most, journal.held_bytes)
        producer.join()
        eventually(lambda: pub.groups()["g"].acked == 2000)
        worker.close()
        thread.join(DEADLINE)
        assert most <= SMALL.max_bytes + 1024  # room is kept for events, a frame's header comes on top
        assert journal.counters.blocked > 0
        assert pub.groups()["g"].lost == 0


def test_evict_tells_the_group_what_it_lost() -> None:
    """on_full="evict" with nobody working: the group's accounting show exactly what the journal dropped."""
    journal = MemoryJournal(retention=SMALL)
    with Publisher("inproc://evict", source="p", journal=journal) as pub:
        with Worker(pub.address, group="g", prefetch=1) as worker:
            pub.publish("t", b"x")
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            delivery.ack()
            assert worker.receive(0.05) is None
            eventually(lambda: pub.groups()["g"].acked == 1)
        eventually(
            lambda: pub.groups()["g"].workers == 0
        )  # or it would be told what is lost, instead of the next
        assert fill(pub, 1000) == 1000
        pub.flush()
        oldest = journal.oldest
        lost: list[tuple[int, int]] = []
        with Worker(pub.address, group="g", on_loss=lambda w: lost.append((w.first, w.last))) as worker:
            seen = []
            for delivery in worker.deliveries(timeout=DEADLINE):
                seen.append(delivery.event.offset)
                delivery.ack()
                if delivery.event.offset == 1000:
                    break
            eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].pending == 0)
        assert seen == list(range(oldest, 1001))
        assert lost == [(1, oldest - 1)]
        status = pub.groups()["g"]
        assert (status.lost, status.acked, status.pending) == (oldest - 1, len(seen) + 1, 0)
        assert status.balanced


def test_a_group_goes_on_after_its_publisher_restarted(tmp_path: Path) -> None:
    """Acknowledged events stay so, also out of order, and the rest comes with attempt 2 after a restart."""
    path = f"ipc://{tmp_path}/s"[:90]
    with (
        Publisher(path, source="p", journal=DiskJournal(tmp_path / "j")) as pub,
        Worker(path, group="g") as worker,
    ):
        pub.publish_many("t", [b"%d" % i for i in range(10)])
        held = [next(worker.deliveries(DEADLINE)) for _ in range(10)]
        for delivery in held[5:]:
            delivery.ack()
        worker.receive(0.05)
        eventually(lambda: pub.groups()["g"].acked == 5)
    with (
        Publisher(path, source="p", journal=DiskJournal(tmp_path / "j")) as pub,
        Worker(path, group="g") as worker,
    ):
        again = [next(worker.deliveries(DEADLINE)) for _ in range(5)]
        assert [(d.event.offset, d.attempt) for d in again] == [(i, 2) for i in range(5)]
        assert worker.receive(0.2) is None
        assert pub.groups()["g"].balanced


def test_events_of_an_older_epoch_can_be_worked_on(tmp_path: Path) -> None:
    """A journal whose epoch was raised (as after a power cut) still has old events: they are delivered and acked."""
    path = f"ipc://{tmp_path}/s"[:90]
    journal = DiskJournal(tmp_path / "j", source="p")
    journal.append_many("t", [b"old"] * 3)
    journal._begin_epoch()
    with (
        Publisher(path, source="p", journal=journal) as pub,
        Worker(path, group="g") as worker,
        Subscriber(path, start="oldest") as sub,
    ):
        pub.publish("t", b"new")
        epochs = set()
        for _, delivery in zip(range(4), worker.deliveries(DEADLINE), strict=False):
            epochs.add(delivery.event.epoch)
            delivery.ack()
        worker.receive(0.05)
        eventually(lambda: pub.groups()["g"].acked == 4)
        events = [event for _, event in zip(range(4), sub.events(DEADLINE), strict=False)]
        assert [e.data for e in events] == [b"old"] * 3 + [b"new"]
        assert {e.epoch for e in events} == epochs
        assert len(epochs) == 2
        assert [e.seq for e in events] == [0, 1, 2, 0]
        account = sub.ledger.account()
        assert (account.delivered, account.lost) == (4, 0)


def test_a_new_publisher_at_the_address_of_a_lost_one() -> None:
    """A MemoryJournal's publisher is replaced: the subscriber goes on with the new epoch, by itself."""
    with Subscriber("inproc://reborn", start="oldest") as sub:
        with Publisher("inproc://reborn", source="p", journal=MemoryJournal()) as pub:
            pub.publish("t", b"1")
            first = sub.receive(DEADLINE)
        with Publisher("inproc://reborn", source="p", journal=MemoryJournal()) as pub:
            pub.publish("t", b"2")
            second = sub.receive(DEADLINE)
        assert first is not None
        assert second is not None
        assert (first.data, second.data) == (b"1", b"2")
        assert first.epoch != second.epoch
        assert not sub.losses
        assert sub.ledger.account().balanced


def test_an_idle_publisher_sends_at_once_and_a_busy_one_in_batches() -> None:
    """One event alone is one frame; many in a row are far fewer frames than events, and none waits for more."""
    with Publisher("inproc://pace", source="p", journal=MemoryJournal()) as pub:
        pub.publish("t", b"x")
        assert pub.journal.next == 1  # sent before publish returned
        for _ in range(20_000):
            pub.publish("t", b"x")
        eventually(lambda: pub.journal.next == 20_001)
        assert pub.counters.frames < 5_000


@pytest.mark.parametrize("where", ["inproc://lone", "nng+tcp://127.0.0.1:*", "tcp://127.0.0.1:*"])
def test_events_that_come_one_by_one(where: str) -> None:
    """Each goes to subscribers and groups as soon as it is published, not with a later event or heartbeat."""
    with (
        Publisher(where, source="p", journal=MemoryJournal(), heartbeat_s=1.0) as pub,
        Subscriber(pub.address, topics=["a"]) as sub,
        Worker(pub.address, group="g") as worker,
    ):
        assert sub.wait_joined(DEADLINE)
        worker.receive(0.1)
        assert pub.wait_for_workers(1, DEADLINE)
        slow = 0
        for i in range(60):
            topic = "ab"[i % 3 == 2]
            receipt = pub.publish(topic, b"%d" % i)
            assert (receipt.offset, pub.journal.next) == (i, i + 1)
            began = time.monotonic()
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            assert delivery.event.offset == i
            delivery.ack()
            if topic == "a":
                event = sub.receive(DEADLINE)
                assert event is not None
                assert (event.offset, event.topic, event.seq) == (i, "a", i - i // 3)
            slow += time.monotonic() - began > 0.5
            time.sleep(0.002)  # a pause, so that the next one is not part of a batch
        assert slow < 5
        sub.commit()
        assert sub.ledger.account().delivered == 40
        assert sub.ledger.account().balanced
        assert sub.counters.gaps == sub.counters.replayed_frames == 0
        assert pub.counters.frames >= 50
        with Subscriber(pub.address, start="oldest") as late:
            assert [e.offset for _, e in zip(range(60), late.events(DEADLINE), strict=False)] == list(
                range(60)
            )
        assert pub.journal.counters.appended == 60


def test_a_subclass_may_override_publish() -> None:
    """The fast path of `publish` does not bypass a subclass's method."""

    class Upper(Publisher):
        def publish(self, topic: str, data: bytes, **options: Any) -> Receipt:
            return super().publish(topic, data.upper(), **options)

    with Upper("inproc://upper", source="p") as pub, Subscriber(pub.address) as sub:
        assert sub.wait_joined(DEADLINE)
        pub.publish("t", b"loud")
        event = sub.receive(DEADLINE)
        assert event is not None
        assert event.data == b"LOUD"


def test_publish_of_an_instance_is_documented_as_the_method() -> None:
    """inspect and help() show for `pub.publish` what they show for the method, although a fast path replaces it."""
    with Publisher("inproc://documented", source="p") as pub:
        named = inspect.signature(Publisher.publish)
        of_method = named.replace(parameters=list(named.parameters.values())[1:])
        assert inspect.signature(pub.publish) == of_method
        assert inspect.getdoc(pub.publish) == inspect.getdoc(Publisher.publish)
        assert pub.publish.__name__ == "publish"


@pytest.mark.parametrize("start", ["oldest", 0, 3])
def test_what_a_publisher_without_a_journal_cannot_send_again_is_lost_aloud(
    start: Literal["oldest"] | int,
) -> None:
    """Asking such a publisher for the past gives `Lost(offline)` for it, not silence."""
    with Publisher("inproc://no-past", source="p") as pub:
        pub.publish_many("t", [b"past"] * 10)
        with Subscriber(pub.address, start=start) as sub:
            assert sub.wait_joined(DEADLINE)
            pub.publish("t", b"present")
            event = sub.receive(DEADLINE)
            assert event is not None
            assert event.data == b"present"
            first = 0 if start == "oldest" else start
            assert [(lost.first, lost.last, lost.reason) for lost in sub.losses] == [
                (first, 9, Reason.OFFLINE)
            ]
            account = sub.ledger.account()
            assert account.lost == 10 - first
            assert account.pending == 0
            assert account.accepted == account.delivered + account.lost


def test_an_absence_at_a_publisher_without_a_journal_is_lost_aloud(tmp_path: Path) -> None:
    """A subscriber that comes back with its cursor is told what was published meanwhile."""
    with Publisher("inproc://away", source="p") as pub:
        for round_ in range(3):
            with Subscriber(pub.address, cursor=tmp_path / "cursor") as sub:
                assert sub.wait_joined(DEADLINE)
                pub.publish("t", b"here")
                event = sub.receive(DEADLINE)
                assert event is not None
                assert event.data == b"here"
                account = sub.ledger.account()
                assert account.lost_by_reason == ({Reason.OFFLINE: 10 * round_} if round_ else {})
                assert (account.delivered, account.pending) == (round_ + 1, 0)
            pub.publish_many("t", [b"away"] * 10)


def test_many_threads_may_publish() -> None:
    """Publishing from several threads keeps offsets contiguous and everybody's order."""
    with (
        Publisher("inproc://threads", source="p", journal=MemoryJournal()) as pub,
        Subscriber(pub.address, start="oldest") as sub,
    ):

        def produce(name: str) -> None:
            for i in range(2000):
                pub.publish(name, b"%d" % i)

        threads = [threading.Thread(target=produce, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        got = [event for _, event in zip(range(8000), sub.events(DEADLINE), strict=False)]
        for thread in threads:
            thread.join()
        assert [e.offset for e in got] == list(range(8000))
        for n in range(4):
            assert [int(e.data) for e in got if e.topic == f"t{n}"] == list(range(2000))


def test_drain_waits_for_those_who_listen() -> None:
    """drain is true only when the subscriber has taken everything."""
    with (
        Publisher("inproc://drain", source="p", journal=MemoryJournal()) as pub,
        Subscriber(pub.address) as sub,
    ):
        assert pub.drain(0.1)
        assert sub.wait_joined(DEADLINE)
        pub.publish("t", b"x")
        assert not pub.drain(0.2)
        thread = threading.Thread(target=lambda: list(sub.events(timeout=1.0)))
        thread.start()
        assert pub.drain(DEADLINE)
        thread.join()


def test_closing_from_another_thread_ends_an_iteration() -> None:
    """A loop that waits for events ends when somebody closes the subscriber or worker."""
    with Publisher("inproc://closing", source="p", journal=MemoryJournal()) as pub:
        sub, worker = Subscriber(pub.address), Worker(pub.address, group="g")
        threads = [threading.Thread(target=lambda it=it: list(it)) for it in (sub, worker)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        sub.close()
        worker.close()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        assert sub.receive(0.1) is None
        sub.close()


def test_mistakes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong arguments raise errors of ours that say which one; nothing is left open."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        for address in (pub.address, "tcp://203.0.113.1:1", "tcp://no.such.host.invalid:1"):
            with pytest.raises(ConfigError, match="cannot listen"):
                Publisher(address, source="q")
        for wrong in ("text", None, 5):
            with pytest.raises(InvalidEvent):
                pub.publish("t", wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent):
            pub.publish("", b"x")
        with pytest.raises(InvalidEvent):
            pub.publish_many("t", [])
    with pytest.raises(Closed):
        pub.publish("t", b"x")
    with pytest.raises(Closed):
        pub.flush()
    with pytest.raises(ConfigError, match="source"):
        Publisher("inproc://x", source="a/b")
    for wrong in ({"mirrors": "tcp://a:1"}, {"curve": "key"}, {"lease": "name"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Publisher("tcp://127.0.0.1:*", source="p", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group"):
        Worker("inproc://x", group="a\nb")
    with pytest.raises(ConfigError, match="journal"):
        Mirror("tcp://a:1", journal=MemoryJournal(), serve="tcp://127.0.0.1:*")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="snapshot"):
        Subscriber("inproc://x", start="begin")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allow"):
        Publisher("inproc://x", source="p", allow=[])
    with pytest.raises(ConfigError, match="brackets"):
        Subscriber("tcp://::1:5")
    with pytest.raises(ConfigError, match="at least one"):
        Subscriber([])
    with pytest.raises(ConfigError, match="list"):
        Subscriber("inproc://x", topics="orders")
    for start in ("latest", -1, True):
        with pytest.raises(ConfigError, match="start"):
            Subscriber("inproc://x", start=start)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cursor"):
        Subscriber("inproc://x", start="cursor")
    for wrong_worker in ({"prefetch": 0}, {"lease_s": 0}, {"max_deliver": 0}, {"start": 5}):
        with pytest.raises(ConfigError):
            Worker("inproc://x", group="g", **wrong_worker)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        Publisher("tcp://0.0.0.0:*", source="p").close()
    assert "plain text" in caplog.text


def test_ipv6() -> None:
    """A publisher on the IPv6 loopback serves subscribers, over both libraries."""
    for address in ("tcp://[::1]:*", "nng+tcp://[::1]:0"):
        with (
            Publisher(address, source="p", journal=MemoryJournal()) as pub,
            Subscriber(pub.address, start="oldest") as sub,
        ):
            pub.publish("t", b"six")
            event = sub.receive(DEADLINE)
            assert event is not None
            assert event.data == b"six"


FOLLOW = """
import sys
from brokerless.direct import Subscriber
with Subscriber(sys.argv[1]) as sub:
    for _ in sub:
        pass
"""


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_killed_subscriber_is_not_waited_for(scheme: str, tmp_path: Path) -> None:
    """It did not say goodbye; sending to it tells, seconds later and not a minute."""
    address = "tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/p"
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        child = subprocess.Popen([sys.executable, "-c", FOLLOW, pub.address])
        try:
            assert pub.wait_for_subscribers(1, 60.0)  # a process has to start
        finally:
            child.kill()
            child.wait()
        eventually(lambda: pub.subscribers == 0)
        pub.publish("t", b"x")
        assert pub.drain(DEADLINE)


def test_a_live_address_that_no_client_would_believe(tmp_path: Path) -> None:
    """It is refused at the start, not by every client in vain."""
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="beside"):
        Publisher(f"ipc://{tmp_path}/p", source="p", live=f"ipc://{tmp_path}/elsewhere/p.live")
    Publisher(f"ipc://{tmp_path}/p", source="p", live=f"ipc://{tmp_path}/p.mine").close()


@pytest.mark.parametrize("wrong", [{"wait": "bogus"}, {"groups": "billing"}, {"groups": []}], ids=str)
def test_a_wrong_wish_to_wait_is_refused_before_the_event_is_accepted(wrong: dict[str, Any]) -> None:
    """Whoever corrects it and publishes again publishes once."""
    with Publisher("inproc://wishes", source="p", journal=MemoryJournal()) as pub:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            pub.publish("t", b"x", **{"wait": "acked", "timeout": 0.1, **wrong})
        assert pub.publish("t", b"x").offset == 0


def test_two_publishers_cannot_share_a_journal() -> None:
    """The first one's subscribers would hear nothing any more; it can be used again when that one is closed."""
    journal = MemoryJournal()
    with (
        Publisher("inproc://first", source="p", journal=journal) as pub,
        Subscriber("inproc://first", start="oldest") as sub,
    ):
        with pytest.raises(UsageError, match="another publisher"):
            Publisher("inproc://second", source="p", journal=journal)
        pub.publish("t", b"x")
        event = sub.receive(DEADLINE)
        assert event is not None
        assert event.data == b"x"


def test_headers_travel_with_their_event(address: str, tmp_path: Path) -> None:
    """Live, replayed, delivered to a group, given up as a dead letter: an event keeps its headers, others have none."""
    sent = [{"traceparent": f"00-{i}-01"} if i % 3 == 0 else None for i in range(30)]
    with (
        Publisher(address, source="p", journal=DiskJournal(tmp_path / "j")) as pub,
        Subscriber(pub.address) as live,
    ):
        assert live.wait_joined(DEADLINE)
        for i, headers in enumerate(sent[:20]):
            pub.publish("t", b"%d" % i, headers=headers)
        pub.publish_many("t", [b"x"] * 10, headers=[headers or {} for headers in sent[20:]])
        wanted = [headers or {} for headers in sent]
        assert [dict(e.headers) for _, e in zip(sent, live.events(DEADLINE), strict=False)] == wanted
        with Subscriber(pub.address, start="oldest") as late:
            assert [dict(e.headers) for _, e in zip(sent, late.events(DEADLINE), strict=False)] == wanted
        found = {}
        with Worker(pub.address, group="g", start="oldest", max_deliver=1) as worker:
            for delivery in worker.deliveries(DEADLINE):
                found[delivery.event.offset] = dict(delivery.event.headers)
                delivery.nack()
                if len(found) == len(sent):
                    break
            assert [found[i] for i in range(len(sent))] == wanted
            eventually(lambda: pub.groups()["g"].dead_lettered == len(sent))
        letters = {letter.event.offset: letter.event for letter in read_dead_letters(pub.dead_letters)}
        assert [dict(letters[i].headers) for i in range(len(sent))] == wanted
        with pytest.raises(InvalidEvent, match="headers"):
            pub.publish("t", b"", headers={"a": 1})  # type: ignore[dict-item]


def test_a_publisher_that_moves_between_given_addresses_is_followed_from_where_we_were(
    tmp_path: Path,
) -> None:
    """Its journal repeats what was missed, and nothing that was delivered, whatever `start` says."""
    journal = tmp_path / "j"
    with Publisher("tcp://127.0.0.1:*", source="s", journal=journal) as first, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        second = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        subscriber = Subscriber([first.address, second], start="oldest")
        first.publish("t", b"0")
        assert subscriber.receive(timeout=30).data == b"0"
    with subscriber, Publisher(second, source="s", journal=journal) as moved:
        moved.publish("t", b"1")
        assert subscriber.receive(timeout=60).data == b"1"
        assert subscriber.ledger.account().lost == 0


@pytest.mark.parametrize("as_path", [True, False])
def test_a_publisher_that_cannot_begin_gives_the_journal_back(tmp_path: Path, as_path: bool) -> None:
    """Whatever is wrong, a port in use above all: the next publisher of this process can have the journal."""
    with Publisher("tcp://127.0.0.1:*", source="other") as other:
        for wrong in (
            {"address": other.address},
            {"live": other.address},
            {"address": "nonsense"},
            {"source": ""},
            {"max_wait_s": -1.0},
            {"id_window": 0},
            {"live_queue": 0},
            {"mirrors": "tcp://127.0.0.1:1"},
            {"metrics": "nowhere"},
        ):
            given: dict[str, Any] = {"address": "tcp://127.0.0.1:*", "source": "s", **wrong}
            journal = tmp_path / "j" if as_path else DiskJournal(tmp_path / "j")
            with pytest.raises(ConfigError):
                Publisher(journal=journal, **given)
    with Publisher("tcp://127.0.0.1:*", source="s", journal=tmp_path / "j") as publisher:
        publisher.publish("t", b"x")
        # Nor does a mistake take away the journal that somebody uses.
        with pytest.raises(UsageError):
            Publisher("tcp://127.0.0.1:*", source="s", journal=publisher.journal)
        with pytest.raises(ConfigError):
            Publisher("nonsense", source="s", journal=publisher.journal)
        assert publisher.publish("t", b"y").offset == 1


@pytest.mark.parametrize("wrong", [7, b"bytes", "", object()])
def test_what_is_no_journal_is_named(wrong: Any) -> None:
    """One line that says what is expected, not an AttributeError of something inside."""
    with pytest.raises(ConfigError, match="journal: must be a MemoryJournal, a DiskJournal or a path"):
        Publisher("tcp://127.0.0.1:*", source="s", journal=wrong)
