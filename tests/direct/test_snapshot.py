"""Last value per key over real sockets: late subscribers, restarts, kills, mirrors."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from brokerless.core import DiskJournal, Event, Journal, MemoryJournal, Reason, Retention
from brokerless.core.errors import ConfigError, PeerError, UsageError
from brokerless.direct import Mirror, Publisher, Snapshot, Subscriber, Worker
from brokerless.direct.batch import StateBatch
from brokerless.losstest.harness.ports import Ports

from .conftest import eventually

DEADLINE = 30.0
FEW = Retention(max_events=200)


@pytest.fixture(params=["memory", "disk"])
def keyed(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    """A small journal of either kind that compacts."""
    if request.param == "disk":
        return DiskJournal(tmp_path / "journal", retention=FEW, compact="key", fsync="never")
    return MemoryJournal(retention=FEW, compact="key")


class Table:
    """What an application keeps: the last value of every key."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], bytes] = {}
        self.edges: list[Snapshot] = []

    def edge(self, snapshot: Snapshot) -> None:
        self.edges.append(snapshot)
        if not snapshot.complete:
            self.values.clear()

    def take(self, event: Event) -> None:
        if event.key:
            self.values.pop((event.topic, event.key), None)
            if event.data:
                self.values[event.topic, event.key] = event.data

    @property
    def begun(self) -> int:
        return sum(not edge.complete for edge in self.edges)


class Keys:
    """Publishes random events, and knows the last value of every key."""

    def __init__(self, seed: int = 0) -> None:
        self.rolls = random.Random(seed)
        self.values: dict[tuple[str, str], bytes] = {}
        self.count = 0

    def publish(self, pub: Publisher, n: int, size: int = 0) -> None:
        for _ in range(n):
            topic, key = self.rolls.choice(["a", "b.x"]), self.rolls.choice(["", *map(str, range(50))])
            data = b"" if self.rolls.random() < 0.2 else (b"%d" % self.count).ljust(size, b".")
            self.count += 1
            pub.publish(topic, data, key=key)
            if key:
                self.values.pop((topic, key), None)
                if data:
                    self.values[topic, key] = data
        pub.flush()


def read_until(sub: Subscriber, table: Table, end: int, timeout: float = DEADLINE) -> int:
    """Take events until the position is there; how many came."""
    deadline = time.monotonic() + timeout
    taken = 0
    while time.monotonic() < deadline:
        event = sub.receive(0.05)
        if event is None:
            if any(at.offset >= end for at in sub.positions.values()):
                return taken
            continue
        taken += 1
        table.take(event)
    pytest.fail(f"{end} was not reached: {sub.positions}, {sub.unanswered}")


def test_a_late_subscriber_has_every_last_value(address: str, keyed: Journal) -> None:
    """Over every transport and journal: the state, then the stream, and each event is accounted for."""
    keys, table = Keys(), Table()
    with Publisher(address, source="p", journal=keyed) as pub:
        keys.publish(pub, 3000)
        with Subscriber(pub.address, start="snapshot", on_snapshot=table.edge) as sub:
            taken = read_until(sub, table, 3000)
            assert table.values == keys.values
            assert [edge.complete for edge in table.edges] == [False, True]
            assert table.edges[0].at >= pub.journal.oldest > 2000
            keys.publish(pub, 100)
            taken += read_until(sub, table, 3100)
            assert table.values == keys.values
            assert sub.reconcile(DEADLINE)
            account = sub.ledger.account()
            assert account.balanced
            assert (account.accepted, account.delivered, account.lost, account.pending) == (3100, taken, 0, 0)
            assert account.compacted == 3100 - taken
            assert not sub.losses
            for topic, sent in pub.journal.sent().items():
                assert sub.ledger.account(topic=topic).accepted == sent


def test_topics_filter_both_parts(keyed: Journal) -> None:
    """State and stream; what was compacted of other topics is not counted."""
    keys, table = Keys(), Table()
    with Publisher("inproc://snapshot-topics", source="p", journal=keyed) as pub:
        keys.publish(pub, 2000)
        with Subscriber(pub.address, topics=["b.*"], start="snapshot", on_snapshot=table.edge) as sub:
            read_until(sub, table, 2000)
            keys.publish(pub, 50)
            read_until(sub, table, 2050)
            assert table.values == {name: data for name, data in keys.values.items() if name[0] == "b.x"}
            assert sub.reconcile(DEADLINE)
            account = sub.ledger.account()
            assert (account.accepted, account.pending, account.lost) == (pub.journal.sent()["b.x"], 0, 0)
            assert account.balanced


def test_batches_items_and_asyncio(keyed: Journal) -> None:
    """The other ways to receive give the same."""
    keys = Keys()
    with Publisher("inproc://snapshot-ways", source="p", journal=keyed) as pub:
        keys.publish(pub, 2000)
        table = Table()
        with Subscriber(pub.address, start="snapshot", on_snapshot=table.edge) as sub:
            for batch in sub.batches(timeout=1):
                assert [event.data for event in batch] == batch.datas
                for event in batch:
                    table.take(event)
                if isinstance(batch, StateBatch):
                    with pytest.raises(UsageError, match="no frame"):
                        _ = batch.frame
        assert table.values == keys.values

        async def run() -> Table:
            found = Table()
            async with Subscriber(pub.address, start="snapshot", on_snapshot=found.edge) as sub:
                while (event := await sub.areceive(1)) is not None:
                    found.take(event)
            return found

        assert asyncio.run(run()).values == keys.values


def test_wrong_uses_are_named() -> None:
    """A publisher without a state, a durable name, no journal at all."""
    with pytest.raises(ConfigError, match="durable"):
        Subscriber("inproc://nobody", start="snapshot", durable="d")
    for journal in (MemoryJournal(), None):
        with (
            Publisher("inproc://plain", source="p", journal=journal) as pub,
            Subscriber(pub.address, start="snapshot") as sub,
            pytest.raises(PeerError, match='compact="key"'),
        ):
            sub.receive(DEADLINE)


def test_others_are_told_what_was_evicted(keyed: Journal) -> None:
    """A cursor that is older than the journal, and a group, see the stream and its losses as ever."""
    keys = Keys()
    with Publisher("inproc://snapshot-others", source="p", journal=keyed) as pub:
        with Worker(pub.address, group="g") as worker:
            eventually(lambda: worker.receive(0.01) is None and "g" in pub.groups())
        keys.publish(pub, 2000)
        with Subscriber(pub.address, start="oldest") as sub:
            first = sub.receive(DEADLINE)
            assert first is not None
            (lost,) = sub.losses
            assert (lost.reason, lost.first, lost.last) == (Reason.EVICTED, 0, first.offset - 1)
        with Worker(pub.address, group="g") as worker:
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            delivery.ack()
        eventually(lambda: pub.groups()["g"].lost_by_reason.get("evicted", 0) > 0)


def test_a_cursor_is_gone_on_from_until_it_is_too_old(tmp_path: Path, keyed: Journal) -> None:
    """No snapshot while the journal has what comes after it; then a new one, and the ledger still balances."""
    keys, table = Keys(), Table()
    options: dict[str, Any] = {
        "start": "snapshot",
        "cursor": tmp_path / "cursor",
        "on_snapshot": table.edge,
        "commit_every_s": 0,
    }
    with Publisher("inproc://snapshot-cursor", source="p", journal=keyed) as pub:
        for count, snapshots in ((3000, 1), (20, 1), (3000, 2), (0, 2)):
            keys.publish(pub, count)
            with Subscriber(pub.address, **options) as sub:
                if count:
                    read_until(sub, table, keys.count)
                assert table.begun == snapshots
                assert table.values == keys.values
                assert sub.reconcile(DEADLINE)
                account = sub.ledger.account()
                assert account.balanced
                assert (account.accepted, account.lost, account.pending) == (keys.count, 0, 0)


def test_stopped_in_the_middle_it_begins_again(tmp_path: Path) -> None:
    """With a cursor, too: what was deleted since would not be told otherwise."""
    journal = DiskJournal(tmp_path / "journal", retention=FEW, compact="key", fsync="never")
    with Publisher("inproc://snapshot-half", source="p", journal=journal) as pub:
        for i in range(1000):
            pub.publish("t", b"x", key=str(i))
        for _ in range(300):
            pub.publish("t", b"y", key="other")
        pub.flush()
        cursor = tmp_path / "cursor"
        with Subscriber(pub.address, start="snapshot", cursor=cursor) as sub:
            for _ in range(100):
                assert sub.receive(DEADLINE) is not None
        for i in range(50):
            pub.publish("t", b"", key=str(i))
        for _ in range(300):
            pub.publish("t", b"z", key="other")
        pub.flush()
        table = Table()
        with Subscriber(pub.address, start="snapshot", cursor=cursor, on_snapshot=table.edge) as sub:
            read_until(sub, table, 1650)
        assert table.begun == 1
        assert set(table.values) == {("t", str(i)) for i in range(50, 1000)} | {("t", "other")}


def test_a_live_subscriber_that_falls_too_far_behind_gets_a_new_one(keyed: Journal) -> None:
    """It is told by `on_snapshot`, and not that it lost something."""
    keys, table = Keys(), Table()
    with Publisher("tcp://127.0.0.1:*", source="p", journal=keyed) as pub:
        keys.publish(pub, 100)
        with Subscriber(pub.address, start="snapshot", on_snapshot=table.edge, live_queue=1) as sub:
            read_until(sub, table, 100)
            begun = table.begun
            keys.publish(pub, 5000, size=8000)  # nobody receives meanwhile, and no socket holds 32 MB
            read_until(sub, table, 5100)
            assert table.values == keys.values
            assert table.begun > begun
            assert not sub.losses
            assert sub.reconcile(DEADLINE)
            account = sub.ledger.account()
            assert account.balanced
            assert (account.accepted, account.lost) == (5100, 0)


def test_seek_asks_for_one(keyed: Journal) -> None:
    """From wherever the subscriber is."""
    keys, table = Keys(), Table()
    with Publisher("inproc://snapshot-seek", source="p", journal=keyed) as pub:
        keys.publish(pub, 1000)
        with Subscriber(pub.address, start="oldest", on_snapshot=table.edge) as sub:
            assert sub.receive(DEADLINE) is not None
            sub.seek("snapshot")
            eventually(lambda: sub.wait_joined(DEADLINE))
            read_until(sub, table, 1000)
            assert table.begun == 1
            assert table.values == keys.values


def test_a_callback_that_raises_loses_nothing(keyed: Journal) -> None:
    """The exception reaches the caller; the next receive goes on behind it."""
    keys, table = Keys(), Table()
    failing = iter([True])

    def edge(snapshot: Snapshot) -> None:
        table.edge(snapshot)
        if next(failing, False):
            raise RuntimeError("mine")

    with Publisher("inproc://snapshot-raises", source="p", journal=keyed) as pub:
        keys.publish(pub, 1000)
        with Subscriber(pub.address, start="snapshot", on_snapshot=edge) as sub:
            with pytest.raises(RuntimeError, match="mine"):
                sub.receive(DEADLINE)
            read_until(sub, table, 1000)
            assert table.values == keys.values


# ---- restarts, kills, mirrors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_the_publisher_restarts(tmp_path: Path, ports: Ports, kind: str) -> None:
    """A DiskJournal goes on without a snapshot; a MemoryJournal has other keys, so the table is cleared."""
    address = f"tcp://127.0.0.1:{ports.take()}"
    keys, table = Keys(), Table()

    def publisher() -> Publisher:
        journal: Journal = MemoryJournal(retention=FEW, compact="key")
        if kind == "disk":
            journal = DiskJournal(tmp_path / "j", retention=FEW, compact="key", fsync="never")
        return Publisher(address, source="p", journal=journal)

    pub = publisher()
    keys.publish(pub, 1000)
    with Subscriber(address, start="snapshot", on_snapshot=table.edge) as sub:
        read_until(sub, table, 1000)
        assert table.values == keys.values
        pub.close()
        with publisher() as pub:
            if kind == "memory":
                keys.values.clear()
            epoch = pub.journal.epoch
            keys.publish(pub, 1)
            eventually(lambda: sub.receive(0.05) is None and sub.connected)
            end = pub.journal.next
            deadline = time.monotonic() + DEADLINE
            while time.monotonic() < deadline:
                event = sub.receive(0.1)
                if event is not None:
                    table.take(event)
                at = sub.positions["p"]
                if event is None and (at.epoch, at.offset) == (epoch, end):
                    break
            assert table.begun == (1 if kind == "disk" else 2)
            if kind == "memory":
                assert set(table.values) <= set(keys.values)


PUBLISHER = """
import random, sys
from brokerless.core import DiskJournal, Retention
from brokerless.direct import Publisher
address, path, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
journal = DiskJournal(path, retention=Retention(max_bytes=200_000), compact="key", fsync="never")
assert not journal.recovered.gone and not journal.counters.compaction_damaged
with Publisher(address, source="p", journal=journal) as pub:
    print("up", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            key = str(rng.randrange(3000))
            pub.publish("t", b"" if rng.random() < 0.2 else b"%d" % rng.randrange(10**9) * 3, key=key)
        pub.flush()
        print("done", pub.journal.next, flush=True)
"""

SUBSCRIBER = """
import json, os, sys
from brokerless.direct import Subscriber
address, cursor, store = sys.argv[1:]
table = {}
if os.path.exists(store):
    table = json.load(open(store))

def edge(snapshot):
    if not snapshot.complete:
        table.clear()

with Subscriber(address, start="snapshot", cursor=cursor, on_snapshot=edge, commit_every_s=3600) as sub:
    for n, event in enumerate(sub):
        table.pop(event.key, None)
        if event.data:
            table[event.key] = event.data.decode()
        if n % 500 == 0 and sub.positions:
            # The effect and then the position, as every consumer must: of all events before this one.
            with open(store + ".new", "w") as file:
                json.dump(table, file)
            os.replace(store + ".new", store)
            sub.commit()
        if n % 100 == 0:
            print(event.offset, flush=True)
"""


def last_values(path: Path) -> dict[str, str]:
    """From the files of a publisher that is gone."""
    table: dict[str, str] = {}
    with (
        DiskJournal(path, retention=Retention(max_bytes=200_000), fsync="never") as journal,
        Publisher("inproc://files", source="p", journal=journal) as pub,
        Subscriber(pub.address, start="snapshot") as sub,
    ):
        for event in sub.events(1):
            table.pop(event.key, None)
            if event.data:
                table[event.key] = event.data.decode()
    return table


def campaign(tmp_path: Path, ports: Ports, rounds: int, seed: int) -> None:
    """Publisher and subscriber killed at random moments, again and again; in the end nothing is missing or stale."""
    rng = random.Random(seed)
    address = f"tcp://127.0.0.1:{ports.take()}"
    journal, cursor, store = tmp_path / "journal", tmp_path / "cursor", tmp_path / "table.json"

    def publisher() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PUBLISHER, address, str(journal), str(rng.randrange(10**6))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    def subscriber() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", SUBSCRIBER, address, str(cursor), str(store)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    pub, sub = publisher(), subscriber()
    try:
        for _ in range(rounds):
            assert pub.stdin is not None
            assert pub.stdout is not None
            assert sub.stdout is not None
            pub.stdin.write(f"{rng.choice([100, 3000, 15000])}\n")
            pub.stdin.flush()
            what = rng.random()
            if what < 0.4:
                for _ in range(rng.randrange(3)):
                    sub.stdout.readline()
                sub.kill()
                sub.wait()
                if rng.random() < 0.5:
                    pub.stdout.readline()
                sub = subscriber()
            elif what < 0.8:
                for _ in range(rng.randrange(2)):
                    sub.stdout.readline()
                pub.kill()
                pub.wait()
                pub = publisher()
            else:
                pub.stdout.readline()
        sub.kill()
        sub.wait()
        pub.kill()
        pub.wait()
        expected = last_values(journal)
        with DiskJournal(journal, retention=Retention(max_bytes=200_000), fsync="never") as left:
            table: dict[str, str] = {}
            with Publisher(address, source="p", journal=left) as last:
                import json

                if store.exists():
                    table = json.loads(store.read_text())

                def edge(snapshot: Snapshot) -> None:
                    if not snapshot.complete:
                        table.clear()

                with Subscriber(address, start="snapshot", cursor=cursor, on_snapshot=edge) as final:
                    end = last.journal.next
                    deadline = time.monotonic() + DEADLINE
                    while time.monotonic() < deadline:
                        event = final.receive(0.2)
                        if event is not None:
                            table.pop(event.key, None)
                            if event.data:
                                table[event.key] = event.data.decode()
                        elif final.positions and final.positions["p"].offset >= end:
                            break
                    assert final.ledger.account().balanced
                    assert final.ledger.account().lost == 0
        assert table == expected
    finally:
        for process in (pub, sub):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_kills_of_publisher_and_subscriber(tmp_path: Path, ports: Ports) -> None:
    """Real processes, killed at random moments."""
    campaign(tmp_path, ports, 8, 1)


@pytest.mark.slow
def test_many_kills_of_publisher_and_subscriber(tmp_path: Path, ports: Ports) -> None:
    """The same for longer."""
    for seed in range(2, 8):
        place = tmp_path / str(seed)
        place.mkdir()
        campaign(place, ports, 30, seed)


def test_a_mirror_keeps_the_state(tmp_path: Path, ports: Ports) -> None:
    """One that is new takes it over, one that was away too long does so again; consumers go on there; so does
    a promotion."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    keys, table = Keys(), Table()

    def mirror() -> Mirror:
        return Mirror(a, journal=DiskJournal(tmp_path / "b", retention=FEW, fsync="never"), serve=b)

    with ExitStack() as stack:
        journal = DiskJournal(tmp_path / "a", retention=FEW, compact="key", fsync="never")
        pub = stack.enter_context(Publisher(a, source="p", journal=journal, mirrors=[b], mirrored=0))
        keys.publish(pub, 2000)
        with mirror() as first:
            eventually(lambda: first.journal.next == 2000)
            assert first.journal.oldest > 0
            assert first.journal.state_end() >= first.journal.oldest
            assert first.counters.lost == 0
        keys.publish(pub, 2000)
        copy = stack.enter_context(mirror())
        eventually(lambda: copy.journal.next == 4000)
        assert copy.counters.lost == 0
        early = Table()
        with Subscriber(b, start="snapshot", on_snapshot=early.edge) as sub:
            read_until(sub, early, 4000)
            assert early.values == keys.values
        with Subscriber(a, start="snapshot", on_snapshot=table.edge) as sub:
            read_until(sub, table, 4000)
            keys.publish(pub, 3000)
            eventually(lambda: copy.journal.next == 7000)
            pub.close()
            read_until(sub, table, 7000)
            assert table.values == keys.values
            assert not sub.losses
            new = stack.enter_context(copy.promote(force=True))
            keys.publish(new, 1000)
            read_until(sub, table, 8000)
            deadline = time.monotonic() + DEADLINE
            while table.values != keys.values and time.monotonic() < deadline:
                event = sub.receive(0.1)
                if event is not None:
                    table.take(event)
            assert table.values == keys.values
            assert not sub.losses


def test_a_mirror_of_a_journal_that_begins_to_compact(tmp_path: Path, ports: Ports) -> None:
    """It begins with it."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    keys = Keys()
    copy = Mirror(a, journal=DiskJournal(tmp_path / "b", retention=FEW, fsync="never"), serve=b)
    with copy:
        for compact, count in (("", 50), ("key", 3000)):
            journal = DiskJournal(tmp_path / "a", retention=FEW, compact=compact, fsync="never")  # type: ignore[arg-type]
            with Publisher(a, source="p", journal=journal, mirrors=[b], mirrored=0) as pub:
                keys.publish(pub, count)
                eventually(lambda: copy.journal.next == keys.count)
                assert (copy.journal.state_end() >= 0) == bool(compact)
        table = Table()
        with Subscriber(b, start="snapshot", on_snapshot=table.edge) as sub:
            read_until(sub, table, keys.count)
            assert table.values == keys.values


def test_it_is_bounded_what_one_client_gets_unread(new_address: Callable[[str], str]) -> None:
    """A client that asks for a large state and does not read is answered no further."""
    journal = MemoryJournal(retention=Retention(max_bytes=1_000_000), compact="key")
    with Publisher(new_address("tcp"), source="p", journal=journal) as pub:
        for i in range(400):
            pub.publish("t", os.urandom(100_000), key=str(i))
        pub.flush()
        with Subscriber(pub.address, start="snapshot") as sub:
            assert sub.receive(DEADLINE) is not None
            time_out = time.monotonic() + 1.0
            while time.monotonic() < time_out:
                sub.wait_joined(0.05)
            assert pub._control_server.unread.total < 16 * 1024 * 1024
            taken = 1 + sum(1 for _ in sub.events(2))
            assert taken == 400


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_it_arrives_while_the_publisher_goes_on(tmp_path: Path, kind: str) -> None:
    """A full journal that drops something with every batch: a late subscriber gets its snapshot, and catches up."""
    few = Retention(max_bytes=4_000_000)
    journal: Journal = MemoryJournal(retention=few, compact="key")
    if kind == "disk":
        journal = DiskJournal(tmp_path / "j", retention=few, compact="key", fsync="never")
    stop = threading.Event()
    with Publisher("tcp://127.0.0.1:*", source="p", journal=journal) as pub:
        last: dict[str, bytes] = {}

        def publish() -> None:
            number = 0
            while not stop.wait(0.002):
                for _ in range(40):
                    data = b"%d" % number * 20
                    last[str(number % 5000)] = data
                    pub.publish("t", data, key=str(number % 5000))
                    number += 1

        thread = threading.Thread(target=publish)
        thread.start()
        table = Table()
        try:
            eventually(lambda: pub.journal.oldest > 0, DEADLINE)
            with Subscriber(pub.address, start="snapshot", on_snapshot=table.edge) as sub:
                deadline = time.monotonic() + DEADLINE
                while not (table.edges and table.edges[-1].complete and len(table.values) == 5000):
                    assert time.monotonic() < deadline, (table.edges, len(table.values))
                    event = sub.receive(0.1)
                    if event is not None:
                        table.take(event)
                stop.set()
                thread.join()
                pub.flush()
                read_until(sub, table, pub.journal.next)
        finally:
            stop.set()
            thread.join()
        assert {key: data for (_, key), data in table.values.items()} == last
        assert sub.ledger.account().balanced
