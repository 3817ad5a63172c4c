"""What every transport and every journal must do alike, with real sockets."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, Journal, MemoryJournal, Reason, Retention
from brokerless.core.errors import NotAcknowledged
from brokerless.direct import Publisher, Subscriber, Worker, read_dead_letters

from .conftest import eventually, have_room

DEADLINE = 20.0


def take(sub: Subscriber, n: int) -> list[bytes]:
    """The data of the next n events; fails if one does not come."""
    got: list[bytes] = []
    for event in sub.events(timeout=DEADLINE):
        got.append(event.data)
        if len(got) == n:
            break
    return got


def numbers(first: int, after: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, after)]


def test_a_late_subscriber_gets_everything_in_order(address: str, journal: Journal) -> None:
    """Events published before the subscriber joined come from the journal, later ones live, without a seam."""
    with Publisher(address, source="p", journal=journal) as pub:
        receipts = [pub.publish("t.a", data) for data in numbers(0, 500)]
        assert [r.offset for r in receipts] == list(range(500))
        with Subscriber(pub.address, start="oldest") as sub:
            assert take(sub, 500) == numbers(0, 500)
            assert sub.wait_joined(DEADLINE)
            assert pub.wait_for_subscribers(1, DEADLINE)
            for data in numbers(500, 700):
                pub.publish("t.a", data)
            assert take(sub, 200) == numbers(500, 700)
            account = sub.ledger.account("p")
            assert (account.delivered, account.lost, account.duplicates) == (700, 0, 0)
            assert account.balanced


def test_live_begins_with_the_next_event(address: str, journal: Journal) -> None:
    """start="live" gives nothing older than the join, and every event after it."""
    with Publisher(address, source="p", journal=journal) as pub:
        pub.publish("t", b"old")
        pub.flush()
        with Subscriber(pub.address, start="live") as sub:
            assert sub.wait_joined(DEADLINE)
            assert pub.wait_for_subscribers(1, DEADLINE)
            for data in numbers(0, 50):
                pub.publish("t", data)
            assert take(sub, 50) == numbers(0, 50)


@pytest.mark.parametrize("entry", ["orders.", "orders.**"])
def test_a_subscriber_of_some_topics_has_no_gap(address: str, journal: Journal, entry: str) -> None:
    """A subscriber of some topics sees exactly those, and its ledger has no gap for the others."""
    with Publisher(address, source="p", journal=journal) as pub:
        for i in range(300):
            pub.publish(("orders.eu", "orders.us", "stock")[i % 3], b"%d" % i)
        with Subscriber(pub.address, topics=[entry], start="oldest") as sub:
            expected = [b"%d" % i for i in range(300) if i % 3 != 2]
            assert take(sub, 200) == expected
            assert sub.ledger.account("p").delivered == 200
            assert not sub.ledger.account("p", None, "stock").accepted
            assert sub.ledger.account().balanced


def test_an_offset_is_a_start(address: str, journal: Journal) -> None:
    """start=N gives the event at offset N first, even in the middle of a stored frame."""
    with Publisher(address, source="p", journal=journal) as pub:
        pub.publish_many("t", numbers(0, 100))
        with Subscriber(pub.address, start=42) as sub:
            assert take(sub, 58) == numbers(42, 100)


def test_everything_of_an_event_arrives(address: str, journal: Journal) -> None:
    """Topic, seq, key, content type, time and binary data come out as they went in."""
    data = bytes(range(256)) * 4096  # 1 MiB
    with Publisher(address, source="p", journal=journal) as pub:
        pub.publish("a", b"")
        receipt = pub.publish("über", data, key="k1", content_type="application/json")
        with Subscriber(pub.address, start="oldest") as sub:
            events = [event for _, event in zip(range(2), sub.events(DEADLINE), strict=False)]
    assert [e.data for e in events] == [b"", data]
    last = events[1]
    assert (last.source, last.epoch, last.offset, last.topic, last.seq) == ("p", receipt.epoch, 1, "über", 0)
    assert (last.key, last.content_type) == ("k1", "application/json")
    assert last.time >= events[0].time > 1_600_000_000_000_000


def test_a_subscriber_that_did_not_read_catches_up(address: str, journal: Journal) -> None:
    """More than every queue holds is published while the subscriber looks away; nothing is lost."""
    with Publisher(address, source="p", journal=journal) as pub, Subscriber(pub.address) as sub:
        assert sub.wait_joined(DEADLINE)
        for i in range(400):
            pub.publish_many("t", [b"%d" % (i * 50 + k) + b"." * 500 for k in range(50)])
        got = [int(d.partition(b".")[0]) for d in take(sub, 20_000)]
        assert got == list(range(20_000))
        account = sub.ledger.account()
        assert (account.delivered, account.lost) == (20_000, 0)
        assert account.balanced


def test_whole_batches(address: str, journal: Journal) -> None:
    """publish_many and batches() carry the same events as publish and iteration."""
    with Publisher(address, source="p", journal=journal) as pub:
        receipt = pub.publish_many("t", numbers(0, 1000))
        assert (receipt.offset, receipt.seq, receipt.count) == (0, 0, 1000)
        with Subscriber(pub.address, start="oldest") as sub:
            got: list[bytes] = []
            for batch in sub.batches(timeout=DEADLINE):
                assert [e.data for e in batch.events] == batch.datas
                assert len(batch) == len(batch.datas)
                got += batch.datas
                if len(got) >= 1000:
                    break
            assert got == numbers(0, 1000)
            assert sub.ledger.account().delivered == 1000


def test_a_cursor_goes_on_where_it_was(address: str, journal: Journal, tmp_path: Path) -> None:
    """A subscriber that comes back with its cursor gets exactly what it had not had, and its accounting go on."""
    cursor = tmp_path / "cursor"
    with Publisher(address, source="p", journal=journal) as pub:
        pub.publish_many("t", numbers(0, 100))
        with Subscriber(pub.address, cursor=cursor) as sub:
            assert take(sub, 30) == numbers(0, 30)
        pub.publish_many("t", numbers(100, 150))
        with Subscriber(pub.address, cursor=cursor) as sub:
            assert take(sub, 120) == numbers(30, 150)
            account = sub.ledger.account()
            assert (account.delivered, account.duplicates, account.lost) == (150, 0, 0)


def test_an_event_whose_handler_failed_comes_again(address: str, journal: Journal, tmp_path: Path) -> None:
    """Leaving with an exception does not commit the current event."""
    cursor = tmp_path / "cursor"
    with Publisher(address, source="p", journal=journal) as pub:
        pub.publish_many("t", numbers(0, 10))
        with pytest.raises(ZeroDivisionError), Subscriber(pub.address, cursor=cursor) as sub:
            for event in sub:
                if event.data == b"4":
                    raise ZeroDivisionError
        with Subscriber(pub.address, cursor=cursor) as sub:
            assert take(sub, 6) == numbers(4, 10)


def test_fan_out_gives_everything_to_everybody(address: str, journal: Journal) -> None:
    """Three subscribers each get all events."""
    with Publisher(address, source="p", journal=journal) as pub:
        subs = [Subscriber(pub.address, start="oldest") for _ in range(3)]
        try:
            for data in numbers(0, 200):
                pub.publish("t", data)
            for sub in subs:
                assert take(sub, 200) == numbers(0, 200)
        finally:
            for sub in subs:
                sub.close()


def test_many_publishers_one_topic(transport: str, new_address: Callable[[str], str], tmp_path: Path) -> None:
    """One subscriber follows two sources of one topic; each is in order and in the accounting on its own."""
    with (
        Publisher(new_address(transport), source="p1", journal=MemoryJournal()) as one,
        Publisher(new_address(transport), source="p2", journal=DiskJournal(tmp_path / "j")) as two,
        Subscriber([one.address, two.address], start="oldest") as sub,
    ):
        for data in numbers(0, 100):
            one.publish("t", data)
            two.publish("t", data)
        got = [event for _, event in zip(range(200), sub.events(DEADLINE), strict=False)]
        for source in ("p1", "p2"):
            assert [e.data for e in got if e.source == source] == numbers(0, 100)
            assert sub.ledger.account(source).delivered == 100


def test_two_groups_of_two_workers(address: str, journal: Journal) -> None:
    """Every group gets every event, one worker of a group gets each, and the groups' accounting balance."""
    with Publisher(address, source="p", journal=journal) as pub:
        got: dict[str, list[bytes]] = {"g1": [], "g2": []}

        def work(worker: Worker) -> None:
            for delivery in worker:
                assert delivery.attempt == 1
                got[worker.group].append(delivery.event.data)
                delivery.ack()

        workers = [Worker(pub.address, group=g, prefetch=20) for g in ("g1", "g1", "g2", "g2")]
        threads = [threading.Thread(target=work, args=(w,)) for w in workers]
        try:
            for thread in threads:
                thread.start()
            eventually(
                lambda: have_room(pub, 4)
            )  # or one worker of a group may have all, before the other begins
            for data in numbers(0, 1000):
                pub.publish("t", data)
            eventually(lambda: all(g.acked == 1000 for g in pub.groups().values()))
        finally:
            for worker in workers:
                worker.close()
            for thread in threads:
                thread.join(DEADLINE)
        for group in ("g1", "g2"):
            assert sorted(got[group], key=int) == numbers(0, 1000)
            assert pub.groups()[group].balanced
        assert all(w.counters.delivered > 0 for w in workers)


def test_nack_delay_redelivery_and_dead_letter(address: str, journal: Journal) -> None:
    """A returned event comes again with the next attempt number, and after max_deliver it is a dead letter."""
    with (
        Publisher(address, source="p", journal=journal) as pub,
        Worker(pub.address, group="g", max_deliver=3) as worker,
    ):
        pub.publish("t", b"good")
        pub.publish("t", b"bad", key="k")
        attempts: Counter[bytes] = Counter()
        for delivery in worker.deliveries(timeout=DEADLINE):
            attempts[delivery.event.data] += 1
            assert delivery.attempt == attempts[delivery.event.data]
            if delivery.event.data == b"bad":
                delivery.nack(delay=0.05)
            else:
                delivery.ack()
            if attempts == {b"good": 1, b"bad": 3}:
                break
        eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].pending == 0)
        assert attempts == {b"good": 1, b"bad": 3}
        (letter,) = read_dead_letters(pub.dead_letters)
        assert (letter.group, letter.attempts, letter.event.data, letter.event.key) == ("g", 3, b"bad", "k")
        status = pub.groups()["g"]
        assert (status.acked, status.dead_lettered, status.pending) == (1, 1, 0)
        assert status.balanced


def test_a_lease_that_is_over_goes_to_another_worker(address: str, journal: Journal) -> None:
    """A worker that neither acks nor nacks loses its events to another one when the lease ends."""
    with (
        Publisher(address, source="p", journal=journal) as pub,
        Worker(pub.address, group="g", lease_s=0.3, max_deliver=100) as sleepy,
    ):
        pub.publish("t", b"x")
        held = sleepy.receive(DEADLINE)
        assert held is not None
        assert held.attempt == 1
        # The newest worker's lease counts for what is granted from now on, and this one may take its time.
        with Worker(pub.address, group="g", lease_s=DEADLINE, max_deliver=100) as awake:
            again = awake.receive(DEADLINE)
            assert again is not None
            assert again.attempt > 1
            again.ack()
            assert awake.receive(0.1) is None
        eventually(lambda: pub.groups()["g"].acked == 1)


def test_key_affinity_keeps_the_order_of_a_key(address: str, journal: Journal) -> None:
    """With key affinity all events of a key go to one worker, in order."""
    with Publisher(address, source="p", journal=journal) as pub:
        workers = [Worker(pub.address, group="g", prefetch=10, key_affinity=True) for _ in range(3)]
        seen: list[list[tuple[str, int]]] = [[], [], []]

        def work(i: int) -> None:
            for delivery in workers[i]:
                seen[i].append((delivery.event.key, int(delivery.event.data)))
                delivery.ack()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        try:
            for thread in threads:
                thread.start()
            assert pub.wait_for_workers(3, DEADLINE)
            for i in range(600):
                pub.publish("t", b"%d" % i, key=f"k{i % 20}")
            eventually(lambda: pub.groups()["g"].acked == 600)
        finally:
            for worker in workers:
                worker.close()
            for thread in threads:
                thread.join(DEADLINE)
        for key in {f"k{i}" for i in range(20)}:
            holders = [i for i in range(3) if any(k == key for k, _ in seen[i])]
            order = [n for i in holders for k, n in seen[i] if k == key]
            assert order == sorted(order)
            assert len(order) == 30


def test_publish_and_wait_for_the_acknowledgement(address: str, journal: Journal) -> None:
    """wait="acked" returns after the groups' acknowledgement, and raises with those that did not answer."""
    with (
        Publisher(address, source="p", journal=journal) as pub,
        Worker(pub.address, group="answers") as worker,
    ):

        def work() -> None:
            for delivery in worker:
                if delivery.event.data != b"ignore":
                    delivery.ack()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert pub.wait_for_workers(1, DEADLINE)
            assert pub.publish("t", b"x", wait="acked", timeout=DEADLINE).offset == 0
            for timeout in (0.3, DEADLINE):  # the group that answers has the time that it needs
                with pytest.raises(NotAcknowledged) as caught:
                    pub.publish("t", b"x", wait="acked", groups=["answers", "nobody"], timeout=timeout)
                if caught.value.missing == ("nobody",):
                    break
            assert caught.value.missing == ("nobody",)
            with pytest.raises(NotAcknowledged) as caught:
                pub.publish("t", b"ignore", wait="acked", timeout=0.2)
            assert caught.value.missing == ("answers",)
        finally:
            worker.close()
            thread.join(DEADLINE)


def test_a_publisher_without_a_journal_is_lossy_and_says_so(address: str) -> None:
    """Without a journal a subscriber that does not keep up loses events, and its ledger has each of them."""
    with Publisher(address, source="p") as pub, Subscriber(pub.address) as sub:
        assert sub.wait_joined(DEADLINE)
        total = 0
        for _ in range(400):
            pub.publish_many("t", [b"." * 1000] * 50)
            total += 50
        lost: list[int] = []
        sub.on_loss = lambda word: lost.append(word.count)
        got = sum(1 for _ in sub.events(timeout=2.0))
        sub.reconcile(DEADLINE)
        got += sum(1 for _ in sub.events(timeout=0.5))
        account = sub.ledger.account()
        assert account.delivered == got
        assert got + sum(lost) == total
        assert account.lost == sum(lost)
        assert account.lost_by_reason.get(Reason.OVERFLOW_SENDER, 0) == account.lost
        assert account.balanced


def test_what_a_small_journal_evicted_is_lost_exactly(address: str) -> None:
    """A subscriber away for longer than a MemoryJournal holds loses exactly the evicted offsets, with the reason."""
    small = MemoryJournal(retention=Retention(max_bytes=100_000))
    with Publisher(address, source="p", journal=small) as pub, Subscriber(pub.address, start="oldest") as sub:
        pub.publish_many("t", [b"%d" % i for i in range(100)])
        assert len(take(sub, 100)) == 100
        for i in range(5000):
            pub.publish(f"t{i % 7}", b"%d" % i + b"." * 2000)
        pub.flush()
        oldest = small.oldest
        assert oldest > 100
        got = []
        for event in sub.events(timeout=DEADLINE):
            got.append(event.offset)
            if event.offset == 5099:
                break
        lost = {o for word in sub.losses for o in range(word.first, word.last + 1)}
        assert {word.reason for word in sub.losses} == {Reason.EVICTED}
        assert sorted(got + list(lost)) == list(range(100, 5100))
        assert got[-1] == 5099
        account = sub.ledger.account()
        assert (account.delivered, account.lost) == (100 + len(got), len(lost))
        assert account.lost_by_reason == {Reason.EVICTED: len(lost)}
        assert account.balanced


def test_asyncio_is_the_same_and_cancelling_loses_nothing(address: str, journal: Journal) -> None:
    """async for gives the same events; receives that are cancelled at random lose none."""

    async def run() -> list[bytes]:
        async with (
            Publisher(address, source="p", journal=journal) as pub,
            Subscriber(pub.address, start="oldest") as sub,
            Worker(pub.address, group="g") as worker,
        ):

            async def produce() -> None:
                for i in range(300):
                    pub.publish("t", b"%d" % i)
                    await asyncio.sleep(0.001)

            task = asyncio.create_task(produce())
            got: list[bytes] = []
            while len(got) < 200:
                try:
                    event = await asyncio.wait_for(sub.areceive(), 0.0015)
                except TimeoutError:
                    continue
                assert event is not None
                got.append(event.data)
            async for event in sub:
                got.append(event.data)
                if len(got) == 300:
                    break
            await task
            acked = 0
            async for delivery in worker:
                delivery.ack()
                acked += 1
                if acked == 300:
                    break
            receipt = await pub.apublish("t", b"end")
            assert receipt.offset == 300
            assert await sub.areconcile(20)
            assert sub.ledger.account().accepted == 301
            return got

    assert asyncio.run(run()) == numbers(0, 300)
