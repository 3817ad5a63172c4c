"""Mirrors: the copy, reading on from it, waiting for it, becoming the publisher, and coming back as a mirror."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from brokerless.core import DiskJournal, Event, Frame
from brokerless.core.errors import ConfigError, NotMirrored, NotPromoted, RolledBack, Superseded, UsageError
from brokerless.core.runtime.clock import elapsed_s
from brokerless.direct import (
    AdminClient,
    ClientKeys,
    KeyPair,
    Mirror,
    Publisher,
    ReplayClient,
    ServerKeys,
    Subscriber,
    Worker,
    read_dead_letters,
)
from brokerless.direct.address import parse_address
from brokerless.direct.groups.members import GroupState
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.protocol import messages
from brokerless.losstest.harness.ports import Ports
from brokerless.multicast import RequestServer
from brokerless.multicast.wire.moldudp64 import wire_session

from .conftest import eventually


class Hosts:
    """Publishers, mirrors and consumers of one source `s`, at addresses that stay theirs."""

    def __init__(self, path: Path, ports: Ports, stack: ExitStack) -> None:
        self.path = path
        self.a, self.b, self.c, self.d = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(4))
        self._stack = stack

    def keep(self, thing: Any) -> Any:
        self._stack.callback(thing.close)
        return thing

    def publisher(self, mirrors: list[str] | None = None, **options: Any) -> Publisher:
        journal = DiskJournal(self.path / "a", fsync="never")
        mirrors = [self.b, self.c] if mirrors is None else mirrors
        return self.keep(Publisher(self.a, source="s", journal=journal, mirrors=mirrors, **options))

    def mirror(self, name: str, of: str = "", **options: Any) -> Mirror:
        journal = DiskJournal(self.path / name, fsync="never")
        return self.keep(Mirror(of or self.a, journal=journal, serve=getattr(self, name), **options))


@pytest.fixture
def hosts(tmp_path: Path, ports: Ports) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(tmp_path, ports, stack)


def frames_of(path: Path) -> list[bytes]:
    """All frames of a journal that is closed."""
    with DiskJournal(path, fsync="never") as journal:
        frames: list[Frame] = []
        offset = journal.oldest
        while offset < journal.next:
            chunk = journal.read(offset)
            frames += chunk.frames
            offset = chunk.next
        return [frame.raw for frame in frames]


def take(sub: Subscriber, n: int, timeout: float = 30.0) -> list[Event]:
    """So many events, or a failure."""
    found = []
    deadline = time.monotonic() + timeout
    while len(found) < n and time.monotonic() < deadline:
        event = sub.receive(timeout=0.2)
        if event is not None:
            found.append(event)
    assert len(found) == n, f"{len(found)} of {n} events"
    return found


def ask(address: str, request: messages.Fence, timeout: float = 30.0) -> messages.Fenced | None:
    """Ask a mirror for a promise, as anybody can."""
    client = ReplayClient(address)
    try:
        return client.fence(request, timeout)
    finally:
        client.close()


def cursor_of(path: Path, group: str) -> int:
    """What a mirror has stored of a group."""
    store = GroupStore(str(path / "groups"))
    try:
        state = store.load().get(group)
        return -1 if state is None else state.cursor
    finally:
        store.close()


def test_a_mirror_has_the_same_frames_and_catches_up(hosts: Hosts) -> None:
    """What was there before it, what came meanwhile and what came while it was down: the same bytes."""
    pub = hosts.publisher([hosts.b])
    for i in range(50):
        pub.publish("t", b"%d" % i, key="k")
        pub.flush()
    mirror = hosts.mirror("b")
    eventually(lambda: mirror.journal.next == 50)
    pub.publish_many("u", [b"x"] * 100)
    eventually(lambda: mirror.journal.next == 150)
    mirror.close()
    pub.publish("t", b"meanwhile", headers={"a": "b"})
    pub.flush()
    mirror = hosts.mirror("b")
    eventually(lambda: mirror.journal.next == 151)
    eventually(lambda: pub.mirrors() == {hosts.b: 151})
    mirror.close()
    pub.close()
    assert frames_of(hosts.path / "b") == frames_of(hosts.path / "a")


def test_wait_mirrored_returns_when_they_have_it_or_names_who_does_not(hosts: Hosts) -> None:
    """With one mirror of two that is enough; without any the event stays accepted and both are named."""
    pub = hosts.publisher()
    with pytest.raises(NotMirrored) as failed:
        pub.publish("t", b"0", wait="mirrored", timeout=0.2)
    assert failed.value.missing == (hosts.b, hosts.c)
    assert not pub._mirrored._waiting  # nothing stays of those who gave up
    mirror = hosts.mirror("b")
    receipt = pub.publish("t", b"1", wait="mirrored", timeout=30)
    assert mirror.journal.next > receipt.offset == 1
    receipt = pub.publish_many("t", [b"x"] * 1000, wait="mirrored", timeout=30)
    assert mirror.journal.next == 1002
    mirror.close()
    with pytest.raises(NotMirrored) as failed:
        pub.publish_many("t", [b"x"] * 2, wait="mirrored", timeout=0.2)
    assert failed.value.offset == 1003
    assert pub.journal.next == 1004


def test_acknowledgements_are_few_while_nobody_waits(hosts: Hosts) -> None:
    """Many small batches: much fewer acknowledgements, and the last batch is acknowledged all the same. A caller that
    waits has its acknowledgement at once, and then each batch has its own."""
    pub = hosts.publisher([hosts.b])
    mirror = hosts.mirror("b")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    eventually(lambda: not mirror._awaited)
    said: list[int] = []
    told = pub._mirrored.acknowledged

    def note(address: str, offset: int, proof: int) -> None:
        said.append(offset)
        told(address, offset, proof)

    pub._mirrored.acknowledged = note  # type: ignore[method-assign]
    began = time.monotonic()
    before = mirror.counters.frames
    for _ in range(300):
        pub.publish_many("t", [b"x"] * 2)
    eventually(lambda: pub.mirrors()[hosts.b] == 601)
    took = time.monotonic() - began
    assert mirror.counters.frames - before == 300
    assert len(said) <= took / 0.005 + 2
    pub.publish("t", b"y", wait="mirrored", timeout=30)
    eventually(lambda: mirror._awaited)
    assert pub.publish("t", b"z", wait="mirrored", timeout=30).offset == 602
    assert said[-2:] == [602, 603]


def test_wait_mirrored_needs_mirrors(hosts: Hosts) -> None:
    """Misuse is told, and nothing is accepted."""
    pub = hosts.publisher([])
    with pytest.raises(UsageError):
        pub.publish("t", b"", wait="mirrored")
    assert pub.journal.next + pub.journal.staged == 0
    with pytest.raises(ConfigError):
        Publisher("tcp://127.0.0.1:*", source="x", journal=hosts.path / "x", mirrors=[hosts.b], mirrored=2)


def test_a_mirror_that_serves_everywhere_finds_its_address_in_the_list(hosts: Hosts) -> None:
    """`serve="tcp://0.0.0.0:…"`: it is the mirror with that port and an address of this host."""
    port = parse_address(hosts.b).port
    pub = hosts.publisher([hosts.c, hosts.b])
    journal = DiskJournal(hosts.path / "b", fsync="never")
    mirror = hosts.keep(Mirror(hosts.a, journal=journal, serve=f"tcp://0.0.0.0:{port}"))
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    assert mirror.own == hosts.b
    assert pub.mirrors()[hosts.b] == 1


def test_a_subscriber_reads_on_from_a_mirror_and_goes_back(hosts: Hosts) -> None:
    """Publisher away: what the mirror has comes from there. Publisher back: the rest, once and in order."""
    pub = hosts.publisher([hosts.b])
    mirror = hosts.mirror("b")
    with Subscriber(hosts.a, start="oldest") as sub:
        pub.publish_many("t", [b"%d" % i for i in range(10)], wait="mirrored", timeout=30)
        events = take(sub, 5)
        pub.close()
        events += take(sub, 5)
        eventually(lambda: sub.receive(0.1) is None and sub._sources[0].protocol.at_copy)
        pub = hosts.publisher([hosts.b])
        pub.publish_many("t", [b"more"] * 10, wait="mirrored", timeout=30)
        events += take(sub, 10)
        eventually(lambda: sub.receive(0.1) is None and not sub._sources[0].protocol.at_copy)
        pub.publish("t", b"last")
        events += take(sub, 1)
        account = sub.ledger.account()
    assert [event.offset for event in events] == list(range(21))
    assert (account.lost, account.duplicates, account.balanced) == (0, 0, True)
    assert not mirror.counters.failed


def test_a_subscriber_that_is_ahead_of_the_mirror_waits(hosts: Hosts) -> None:
    """A mirror that lacks the end does not send a subscriber back, and nothing comes twice."""
    pub = hosts.publisher([hosts.b])
    mirror = hosts.mirror("b")
    pub.publish_many("t", [b"x"] * 10, wait="mirrored", timeout=30)
    with Subscriber(hosts.a, start="oldest") as sub:
        assert len(take(sub, 10)) == 10
        mirror.close()
        pub.publish_many("t", [b"x"] * 5)
        assert len(take(sub, 5)) == 5
        pub.close()
        mirror = hosts.mirror("b")
        eventually(lambda: sub.receive(0.1) is None and sub._sources[0].protocol.at_copy)
        pub = hosts.publisher([hosts.b])
        pub.publish("t", b"last", wait="mirrored", timeout=30)
        assert [event.offset for event in take(sub, 1)] == [15]
        assert sub.counters.rolled_back == 0
        assert not sub.losses


def test_a_cursor_remembers_the_mirrors(hosts: Hosts) -> None:
    """A subscriber that starts while the publisher is gone goes on at a mirror that an earlier process learned of."""
    pub = hosts.publisher([hosts.b])
    hosts.mirror("b")
    pub.publish_many("t", [b"x"] * 10, wait="mirrored", timeout=30)
    cursor = hosts.path / "cursor"
    with Subscriber(hosts.a, cursor=cursor) as sub:
        take(sub, 5)
    pub.close()
    with Subscriber(hosts.a, cursor=cursor) as sub:
        assert [event.offset for event in take(sub, 5)] == [5, 6, 7, 8, 9]


def test_a_mirrors_address_is_as_good_as_the_publishers(hosts: Hosts) -> None:
    """Subscribers and batch readers (Spark's endpoint) may be given it, also when the publisher is gone."""
    pub = hosts.publisher([hosts.b])
    hosts.mirror("b")
    pub.publish_many("t", [b"x"] * 10, wait="mirrored", timeout=30)
    pub.close()
    with Subscriber(hosts.b, start="oldest") as sub:
        assert len(take(sub, 10)) == 10
    client = ReplayClient(hosts.b)
    try:
        welcome = client.welcome(30)
        assert welcome is not None
        assert (welcome.source, welcome.next, welcome.copy) == ("s", 10, True)
        client.ask(welcome.epoch, 0)
        chunk = client.answer(30)
        assert chunk is not None
        assert chunk.next == 10
    finally:
        client.close()


def test_a_promoted_mirror_goes_on_where_the_publisher_was(hosts: Hosts) -> None:
    """Machine gone: subscribers and groups go on at the promoted one; settled events and dead letters are there."""
    pub = hosts.publisher()
    b, c = hosts.mirror("b"), hosts.mirror("c")
    sub = hosts.keep(Subscriber(hosts.a, start="oldest"))
    worker = hosts.keep(Worker(hosts.a, group="g", max_deliver=2, prefetch=1))
    pub.publish_many("t", [b"%d" % i for i in range(10)], wait="mirrored", timeout=30)
    take(sub, 10)
    deliveries = worker.deliveries(30)
    for _ in range(5):  # the last one twice
        delivery = next(deliveries)
        if delivery.event.offset == 3:
            delivery.nack()
        else:
            delivery.ack()
    eventually(lambda: pub.groups()["g"].dead_lettered == 1)
    # What comes after the last state is asked for comes again: wait until the mirror has it.
    eventually(lambda: b._dead is not None and b._dead.next == 1)
    eventually(lambda: cursor_of(hosts.path / "b", "g") == 4)
    pub.close()
    new = hosts.keep(b.promote(timeout=30))
    assert new.address == hosts.b
    receipt = new.publish("t", b"new", wait="mirrored", timeout=30)
    assert (receipt.offset, receipt.seq) == (10, 0)
    assert [event.offset for event in take(sub, 1)] == [10]
    offsets: list[int] = []
    for delivery in worker.deliveries(30):
        delivery.ack()
        offsets.append(delivery.event.offset)
        if set(offsets) == set(range(4, 11)):
            break
    assert sorted(set(offsets)) == list(range(4, 11))
    assert [letter.event.offset for letter in read_dead_letters(new.dead_letters)] == [3]
    eventually(lambda: new.groups()["g"].acked == 10)
    assert new.groups()["g"].balanced
    assert c.journal.epochs() == new.journal.epochs()


def test_a_replaced_publisher_stops_and_says_what_only_it_has(hosts: Hosts) -> None:
    """Alive and replaced: it does not dispatch, refuses to publish, names the range, and comes back as a mirror."""
    pub = hosts.publisher()
    b, c = hosts.mirror("b"), hosts.mirror("c")
    pub.publish_many("t", [b"x"] * 10, wait="mirrored", timeout=30)
    eventually(lambda: pub._mirrored.may_dispatch(elapsed_s()))
    eventually(lambda: c.journal.next == 10)
    pub._mirrored._asks = lambda _: False  # type: ignore[method-assign]  # it cannot reach its mirrors
    with b._lock, c._lock:
        pub.publish_many("t", [b"unmirrored"] * 3)  # nobody takes it
        b._settings.promised = c._settings.promised = (
            pub.journal.epoch + 1
        )  # follow nobody before the next one
    eventually(lambda: not b.following and not c.following)
    new = hosts.keep(b.promote(timeout=30))
    assert not pub._mirrored.may_dispatch(elapsed_s())
    first = new.journal.next
    assert first == 10
    del pub._mirrored._asks
    eventually(lambda: pub.superseded is not None)
    with pytest.raises(Superseded) as refused:
        pub.publish("t", b"late")
    assert refused.value.unmirrored == (10, 12)
    with pytest.raises(Superseded):
        pub.publish_many("t", [b"late"])
    new.publish_many("t", [b"new"] * 5, wait="mirrored", timeout=30)
    pub.close()
    old = hosts.mirror("a", of=hosts.b)
    eventually(lambda: old.journal.next == 15)
    assert old.counters.set_aside == 3
    (aside,) = (hosts.path / "a" / "unmirrored").iterdir()
    assert aside.name.endswith("-10-12")
    with DiskJournal(aside) as kept:
        assert [e.data for f in kept.read(10).frames for e in f.events()] == [b"unmirrored"] * 3
    eventually(lambda: new.mirrors()[hosts.a] == 15)
    assert old.journal.epochs() == new.journal.epochs()


def test_a_mirror_that_lacks_something_catches_up_before_it_is_promoted(hosts: Hosts) -> None:
    """Two mirrors of which the other has more: nothing that was mirrored once is lost."""
    pub = hosts.publisher()
    b, c = hosts.mirror("b"), hosts.mirror("c")
    pub.publish_many("t", [b"x"] * 10, wait="mirrored", timeout=30)
    eventually(lambda: b.journal.next == c.journal.next == 10)
    b.close()
    pub.publish_many("t", [b"y"] * 5, wait="mirrored", timeout=30)  # with c alone
    pub.close()
    b = hosts.mirror("b")
    new = hosts.keep(b.promote(timeout=30))
    assert new.journal.next == 15


def test_no_promotion_without_enough_mirrors(hosts: Hosts) -> None:
    """The other one might have more, or might be promoted itself: refused, unless the operator says so."""
    pub = hosts.publisher()
    b, c = hosts.mirror("b"), hosts.mirror("c")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    eventually(lambda: b.journal.next == 1)
    c.close()
    with pytest.raises(NotPromoted, match=r"2 of 2 mirrors must take part.*does not answer"):
        b.promote()
    pub.publish("t", b"y", wait="mirrored", timeout=30)  # everything is as before
    pub.close()
    new = hosts.keep(b.promote(force=True))
    assert new.journal.next == 2


def test_a_stranger_cannot_stop_a_publisher(hosts: Hosts) -> None:
    """Whoever claims a higher epoch only makes it ask its mirrors."""
    pub = hosts.publisher([hosts.b])
    hosts.mirror("b")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    client = ReplayClient(hosts.a)
    try:
        assert client.welcome(30) is not None
        client._socket.send(messages.encode(messages.Superseded(1 << 60)))
        assert client.welcome(30) is not None  # it was read
    finally:
        client.close()
    pub.publish("t", b"y", wait="mirrored", timeout=30)
    assert pub.superseded is None


def test_a_stranger_is_no_mirror(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever greets as a mirror and acknowledges everything is not reached at its address, and does not count."""
    pub = hosts.publisher([hosts.b], mirrored=1)
    stranger = ReplayClient(hosts.a)
    try:
        hello = messages.Hello(messages.VERSION, "stranger", start="oldest", mirror=hosts.b)
        stranger._hello = messages.encode(hello)
        welcome = stranger.welcome(30)
        assert welcome is not None
        state = messages.encode(messages.StateRequest(0, 0))
        for proof in (0, 1, 1 << 61):
            stranger._socket.send(messages.encode(messages.Advance(welcome.epoch, 1 << 40, proof)))
            for reply in stranger._replies(state, 30):  # what was sent before this has been read
                if isinstance(reply, messages.State):
                    state = messages.encode(messages.StateRequest(reply.number, 0, proof))
                    break
        with pytest.raises(NotMirrored):
            pub.publish("t", b"x", wait="mirrored", timeout=0.5)
        assert not pub._mirrored.may_dispatch(elapsed_s())
        eventually(lambda: f"the mirror {hosts.b}, but nobody answers there" in caplog.text)
        hosts.mirror("b")
        pub.publish("t", b"y", wait="mirrored", timeout=30)  # the one that is there does
        eventually(lambda: pub._mirrored.may_dispatch(elapsed_s()))
    finally:
        stranger.close()


def test_a_stranger_cannot_begin_or_end_a_promotion(hosts: Hosts) -> None:
    """A mirror believes only the candidate itself, at its address, that it is one or is one no more."""
    pub = hosts.publisher([hosts.b, hosts.c], mirrored=2)
    b, c = hosts.mirror("b"), hosts.mirror("c")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    epoch = pub.journal.epoch + (1 << 43)
    for somebody in ("tcp://127.0.0.1:9", hosts.b):
        answer = ask(hosts.b, messages.Fence(epoch, somebody))
        assert answer is not None
        assert answer.refused
    assert ask(hosts.b, messages.Fence(epoch, hosts.c), 1.0) is None  # c says that it is not being promoted
    pub.publish("t", b"y", wait="mirrored", timeout=30)
    assert b.status()["promised"] == c.status()["promised"] == 0
    # c is a candidate: b learns that from c, and keeps its promise whatever others say.
    c._settings.promised, c._settings.candidate = epoch, hosts.c
    assert ask(hosts.b, messages.Fence(epoch, hosts.c)) == messages.Fenced(pub.journal.epoch, 2, "", epoch)
    assert ask(hosts.b, messages.Fence(0, hosts.c), 1.0) is None
    assert b.status()["promised"] == epoch
    c._settings.promised, c._settings.candidate = 0, ""
    assert ask(hosts.b, messages.Fence(0, hosts.c)) is not None
    assert b.status()["promised"] == 0


def test_a_promotion_that_fails_keeps_what_it_promised_to_another(hosts: Hosts) -> None:
    """Two mirrors are promoted at once: the earlier one has promised itself to the later one, and stays so."""
    silent = [
        f"tcp://127.0.0.1:{port}" for port in (2, 3, 4, 5)
    ]  # asked for three seconds each: time enough for the rest
    pub = hosts.publisher([hosts.b, hosts.c, *silent], mirrored=1)
    b, c = hosts.mirror("b"), hosts.mirror("c")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    eventually(lambda: b.journal.next == c.journal.next == 1)

    def promote() -> None:
        with pytest.raises(NotPromoted):
            b.promote()

    earlier = threading.Thread(target=promote)
    earlier.start()
    eventually(lambda: c.status()["promised"] > 0)
    c._settings.promised, c._settings.candidate = b.status()["promised"] + 1, hosts.c
    promised = ask(hosts.b, messages.Fence(c.status()["promised"], hosts.c))
    assert promised is not None
    assert not promised.refused
    earlier.join(60)
    assert b.status()["promised"] == c.status()["promised"]


def test_a_promotion_that_has_its_promises_is_not_disturbed(hosts: Hosts) -> None:
    """Somebody promotes the other mirror, too, while the first waits for the old publisher's end: only that is refused,
    again and again. Otherwise two that do not give up would keep each other from it for ever."""
    pub = hosts.publisher()
    b, c = hosts.mirror("b"), hosts.mirror("c")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    eventually(lambda: b.journal.next == c.journal.next == 1)
    pub.close()
    promoted: list[Publisher] = []
    first = threading.Thread(target=lambda: promoted.append(hosts.keep(b.promote())))
    first.start()
    eventually(lambda: c.status()["promised"] > 0)
    epoch = c.status()["promised"]
    for _ in range(3):
        with pytest.raises(NotPromoted):
            c.promote(timeout=3)
        assert c.status()["promised"] == epoch
    first.join(60)
    assert promoted[0].journal.epoch == epoch


def test_a_mirror_promises_to_one_until_that_one_gives_up(hosts: Hosts) -> None:
    """Of three mirrors one was away while another was promoted, and is promoted as well: the third has promised
    already, so there are never two publishers, each with enough promises."""
    pub = hosts.publisher([hosts.b, hosts.c, hosts.d], mirrored=2)
    b, c, d = hosts.mirror("b"), hosts.mirror("c"), hosts.mirror("d")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    eventually(lambda: b.journal.next == c.journal.next == d.journal.next == 1)
    pub.close()
    c.close()
    promoted: list[Publisher] = []
    first = threading.Thread(target=lambda: promoted.append(hosts.keep(b.promote())))
    first.start()
    eventually(lambda: b._agreed)  # it has enough promises, and waits for the old publisher's end
    epoch = d.status()["promised"]
    c = hosts.mirror("c")
    with pytest.raises(NotPromoted, match="promised to"):
        c.promote(timeout=10)
    first.join(60)
    assert promoted[0].journal.epoch == epoch
    eventually(lambda: c.journal.epoch == d.journal.epoch == epoch)


def test_a_promise_to_one_that_gave_up_is_over(hosts: Hosts) -> None:
    """It was killed before it began, or not heard when it gave up: it is asked, and the next promotion goes on."""
    pub = hosts.publisher([hosts.b, hosts.c, hosts.d], mirrored=2)
    b, c, d = hosts.mirror("b"), hosts.mirror("c"), hosts.mirror("d")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    eventually(lambda: b.journal.next == c.journal.next == d.journal.next == 1)
    pub.close()
    for mirror in (b, d):
        mirror._settings.promised, mirror._settings.candidate = pub.journal.epoch + (1 << 42), hosts.b
        mirror._save_settings()
    b.close()  # killed meanwhile
    with pytest.raises(NotPromoted, match="promised to"):
        c.promote()
    b = hosts.mirror("b")

    def promote() -> Publisher | None:
        with suppress(NotPromoted):
            return hosts.keep(c.promote())
        return None

    promoted: list[Publisher] = []
    eventually(lambda: promoted.extend(filter(None, [promote()])) or promoted, 60)
    eventually(lambda: d.journal.epoch == promoted[0].journal.epoch)


def test_a_lease_that_passes_on_twice_loses_nothing(hosts: Hosts) -> None:
    """One mirror that took the lease was gone right after the others had promised to it: the next one takes over all
    that is there, and begins an epoch that they follow."""
    pub = hosts.publisher([hosts.b, hosts.c], mirrored=1)
    b = hosts.mirror("b")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    c = hosts.mirror("c")
    eventually(lambda: c.journal.next == 1)
    c.close()
    pub.publish("t", b"y", wait="mirrored", timeout=30)
    pub.close()
    promised = pub.journal.epoch + (1 << 60)  # the clock of the one that is gone was far ahead
    b._settings.promised, b._settings.candidate = promised, hosts.d
    c = hosts.mirror("c")
    new = hosts.keep(c.promote(force=True))
    assert new.journal.next == 2, "what another mirror had is lost"
    assert new.journal.epoch > promised
    new.publish("t", b"z", wait="mirrored", timeout=30)


def lose(path: Path, snapshot: Path) -> None:
    """The disk has only what it had at the snapshot."""
    shutil.rmtree(path)
    shutil.copytree(snapshot, path)


def test_a_publisher_that_lost_its_end_takes_it_from_its_mirrors(hosts: Hosts) -> None:
    """Its disk went back (a power cut, a restored copy): what was mirrored is neither lost nor put aside."""
    pub = hosts.publisher([hosts.b, hosts.c], mirrored=1)
    b = hosts.mirror("b")
    hosts.mirror("c")
    pub.publish_many("t", [b"%d" % i for i in range(10)], wait="mirrored", timeout=30)
    snapshot = hosts.path / "snapshot"
    shutil.copytree(hosts.path / "a", snapshot)
    pub.publish_many("t", [b"%d" % i for i in range(10, 30)], wait="mirrored", timeout=30)
    epoch = pub.journal.epoch
    pub.close()
    lose(hosts.path / "a", snapshot)
    pub = hosts.publisher([hosts.b, hosts.c], mirrored=1)
    assert pub.journal.next == 30
    assert pub.journal.epochs() == [(epoch, 0), (pub.journal.epoch, 30)]
    pub.publish("t", b"30", wait="mirrored", timeout=30)
    with hosts.keep(Subscriber(hosts.a, start="oldest")) as sub:
        assert [event.data for event in take(sub, 31)] == [b"%d" % i for i in range(31)]
    eventually(lambda: b.journal.next == 31)
    assert b.counters.set_aside == 0


@pytest.mark.parametrize("left", ["nothing", "the journal without its events"])
def test_a_publisher_that_lost_everything_does_not_begin_anew_beside_its_mirrors(
    hosts: Hosts, left: str
) -> None:
    """Its disk was replaced, or a power cut took all events: what was mirrored is not given up for a new beginning."""
    pub = hosts.publisher([hosts.b])
    snapshot = hosts.path / "snapshot"
    shutil.copytree(hosts.path / "a", snapshot)
    b = hosts.mirror("b")
    pub.publish_many("t", [b"x"] * 3, wait="mirrored", timeout=30)
    pub.close()
    if left == "nothing":
        shutil.rmtree(hosts.path / "a")
        with pytest.raises(RolledBack, match="Promote that mirror"):
            hosts.publisher([hosts.b])
        pub = hosts.keep(b.promote())
    else:
        lose(hosts.path / "a", snapshot)
        pub = hosts.publisher([hosts.b])
        pub.publish("t", b"x", wait="mirrored", timeout=30)
        assert b.counters.set_aside == 0
    with hosts.keep(Subscriber(pub.address, start="oldest")) as sub:
        assert [event.offset for event in take(sub, 3)] == [0, 1, 2]


def test_a_publisher_hears_of_a_mirror_that_cannot_follow(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """It began anew on an empty disk while the mirror was away: both say so, and neither gives up what it has."""
    pub = hosts.publisher([hosts.b])
    b = hosts.mirror("b")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    pub.close()
    b.close()
    shutil.rmtree(hosts.path / "a")
    pub = hosts.publisher([hosts.b])
    b = hosts.mirror("b")
    eventually(lambda: f"the mirror {hosts.b} holds another history of this source" in caplog.text)
    eventually(lambda: "holds another history of the source than the publisher" in caplog.text)
    with pytest.raises(NotMirrored):
        pub.publish("t", b"y", wait="mirrored", timeout=0.5)
    assert (b.journal.next, b.counters.set_aside, pub.superseded) == (1, 0, None)


def test_a_candidate_keeps_what_other_mirrors_told_it(hosts: Hosts) -> None:
    """A group that another mirror heard of is not forgotten for an older answer of the publisher that comes late."""
    pub = hosts.publisher([hosts.b])
    b = hosts.mirror("b")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    pub.close()
    b._stand(pub.journal.epoch + (1 << 42))
    group = msgspec.msgpack.encode(GroupState(1, 1))
    b._merge_state(messages.State(0, {"g": group}))
    b._keep_state(messages.State(1))
    assert "g" in b._states


class RolledBackHost:
    """A publisher's machine that goes back with its memory to where it had 10 events, after its mirror has had 30."""

    def __init__(self, hosts: Hosts) -> None:
        pub = hosts.publisher([hosts.b])
        self.mirror = hosts.mirror("b")
        pub.publish_many("t", [b"%d" % i for i in range(10)], wait="mirrored", timeout=30)
        pub.close()
        assert isinstance(pub.journal, DiskJournal)
        witness = Path(pub.journal._witness._path)
        snapshot, testimony = hosts.path / "snapshot", witness.read_bytes()
        shutil.copytree(hosts.path / "a", snapshot)
        pub = hosts.publisher([hosts.b])
        pub.publish_many("t", [b"%d" % i for i in range(10, 30)], wait="mirrored", timeout=30)
        self.epoch = pub.journal.epoch
        pub.close()
        lose(hosts.path / "a", snapshot)
        witness.write_bytes(testimony)


@pytest.mark.parametrize("others", [0, 5, 50])
def test_a_publisher_that_went_back_with_its_memory_stops_for_its_mirrors(hosts: Hosts, others: int) -> None:
    """Its journal claims to be the newest, and a mirror has more, or others, of the same epoch: it accepts nothing
    more. Restarted it takes what it lacks; if it has given those offsets to other events, it does not start."""
    host = RolledBackHost(hosts)
    host.mirror.close()
    pub = hosts.publisher([hosts.b])
    assert (pub.journal.epoch, pub.journal.next) == (host.epoch, 10)
    for _ in range(others):
        pub.publish("t", b"other")
    hosts.mirror("b")
    eventually(lambda: pub.rolled_back is not None)
    with pytest.raises(RolledBack):
        pub.publish("t", b"x")
    pub.close()
    if others:
        with pytest.raises(RolledBack):
            hosts.publisher([hosts.b])
    else:
        pub = hosts.publisher([hosts.b])
        assert pub.journal.next == 30
        assert pub.journal.epoch > host.epoch


@pytest.mark.parametrize("others", [5, 50])
def test_a_mirror_takes_nothing_from_a_publisher_with_another_history(
    hosts: Hosts, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher does not know of it, and goes on in a new epoch: nothing of that is mixed with the copy."""
    host = RolledBackHost(hosts)
    host.mirror.close()
    pub = hosts.publisher([])
    for _ in range(others):
        pub.publish("t", b"other")
    mirror = hosts.mirror("b")
    eventually(lambda: "another history" in caplog.text)
    pub.publish("t", b"more")
    eventually(lambda: pub.journal.epoch > host.epoch)
    assert mirror.journal.next + mirror.counters.set_aside == 30


def test_an_administrator_sees_which_subscriber_is_a_mirror(hosts: Hosts) -> None:
    """By its address, and how far it is."""
    pub = hosts.publisher([hosts.b], mirrored=1)
    hosts.mirror("b")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    admin = hosts.keep(AdminClient(hosts.a))
    eventually(
        lambda: [(s["client"], s["lag"]) for s in admin.status()["subscribers"]] == [(f"mirror {hosts.b}", 0)]
    )


def test_a_mirror_does_not_follow_itself(hosts: Hosts) -> None:
    """The publisher's address as its own: it would wait for itself for ever, and say that nobody answers."""
    with pytest.raises(ConfigError, match="one of its own"):
        Mirror(hosts.a, journal=hosts.path / "b", serve=hosts.a)
    assert not (hosts.path / "b").exists()


def test_a_copy_is_no_publishers_journal(hosts: Hosts) -> None:
    """Two writers would give the same offsets to different events."""
    pub = hosts.publisher([hosts.b], mirrored=1)
    b = hosts.mirror("b")
    pub.publish("t", b"x", wait="mirrored", timeout=30)
    b.close()
    pub.close()
    with pytest.raises(UsageError, match="mirror promote"):
        Publisher(hosts.a, source="s", journal=hosts.path / "b")


def test_mirrors_with_keys(hosts: Hosts) -> None:
    """Encrypted and by allow-lists, also the promotion; a publisher without a key for its mirrors counts none."""
    server, ours, theirs, friend = (KeyPair.new() for _ in range(4))
    allow = [ours.public, theirs.public, friend.public]
    keys = {"curve": ServerKeys(server), "allow": allow}
    b = hosts.mirror("b", client_curve=ClientKeys(theirs, server.public), **keys)
    c = hosts.mirror("c", client_curve=ClientKeys(theirs, server.public), **keys)
    pub = hosts.publisher(mirrored=2, **keys)
    eventually(lambda: b.journal.epoch == c.journal.epoch == pub.journal.epoch)
    with pytest.raises(NotMirrored):
        pub.publish("t", b"0", wait="mirrored", timeout=0.5)
    pub.close()
    pub = hosts.publisher(mirrored=2, mirror_keys=ClientKeys(ours, server.public), **keys)
    pub.publish("t", b"1", wait="mirrored", timeout=30)
    with hosts.keep(Subscriber(hosts.a, start="oldest", curve=ClientKeys(friend, server.public))) as sub:
        assert [event.data for event in take(sub, 2)] == [b"0", b"1"]
        pub.close()
        new = hosts.keep(b.promote())
        new.publish("t", b"2", wait="mirrored", timeout=30)
        assert [event.data for event in take(sub, 1)] == [b"2"]


@pytest.mark.parametrize("scheme", ["nng+tcp"])
def test_mirrors_work_over_nng(tmp_path: Path, ports: Ports, scheme: str) -> None:
    """The same classes over the other library."""
    a, b = (f"{scheme}://127.0.0.1:{ports.take()}" for _ in range(2))
    with (
        Mirror(a, journal=tmp_path / "b", serve=b) as mirror,
        Publisher(a, source="s", journal=tmp_path / "a", mirrors=[b]) as pub,
    ):
        pub.publish("t", b"x", wait="mirrored", timeout=30)
        assert mirror.journal.next == 1


def test_a_multicast_request_server_answers_from_a_mirrors_copy(hosts: Hosts) -> None:
    """The copy is a journal like any other: its directory serves requests while the mirror writes it."""
    pub = hosts.publisher([hosts.b])
    hosts.mirror("b")
    pub.publish_many("t", [b"one", b"two"], wait="mirrored", timeout=30)
    session = wire_session("s", pub.journal.epoch)
    pub.close()
    with (
        RequestServer(hosts.path / "b", "s", announce=False) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
    ):
        client.settimeout(30)
        client.sendto(session + (2).to_bytes(8, "big") + (1).to_bytes(2, "big"), server.address)
        answer = client.recv(2000)
    assert answer[:18] == session + (2).to_bytes(8, "big")
    assert b"two" in answer


def test_a_mirror_of_a_mirror(hosts: Hosts) -> None:
    """It has the same frames and serves them, follows whoever is promoted, and is not promoted itself without force.
    Workers and administrators who ask a mirror are told that it is one."""
    pub = hosts.publisher([hosts.b])
    b = hosts.mirror("b")
    c = hosts.mirror("c", of=hosts.b)
    pub.publish_many("t", [b"x"] * 5, wait="mirrored", timeout=30)
    with Subscriber(hosts.c, start="oldest") as sub:
        assert [event.offset for event in take(sub, 5)] == list(range(5))
    with pytest.raises(NotPromoted, match="another one"):
        c.promote()
    with AdminClient(hosts.b) as admin, pytest.raises(UsageError, match="this is a mirror"):
        admin.status()
    with Worker(hosts.b, group="g") as worker:
        eventually(lambda: worker.receive(0.1) is None and "does not dispatch" in str(worker.unanswered))
    pub.close()
    new = hosts.keep(b.promote())
    new.publish("t", b"y")
    eventually(lambda: c.journal.next == 6)
    assert c.journal.epoch == new.journal.epoch
