"""The JavaScript client, which was written from the documented protocol alone, against our publisher."""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import zmq

from brokerless.core import DiskJournal, Event, Journal, MemoryJournal, Retention, encode_frame
from brokerless.core.journal.key_state import MemoryState
from brokerless.direct import ClientKeys, KeyPair, Mirror, Publisher, ServerKeys, Worker
from brokerless.direct.protocol import messages
from brokerless.losstest.harness.ports import Ports
from tests.conftest import Until
from tests.node import install

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "js"
DEADLINE = 60.0
Start = Callable[..., "Actor"]


class Actor:
    """A process of actor.mjs. What it says goes into files: nobody reads along, and events can be large."""

    def __init__(self, role: str, address: str, options: dict[str, Any], argument: object) -> None:
        script = Path(__file__).with_name("actor.mjs")
        command = ["node", str(script), role, address, json.dumps(options), str(argument)]
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as this
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=self._out, stderr=self._errors)

    def _read(self, file: IO[str]) -> str:
        file.seek(0)
        return file.read()

    @property
    def errors(self) -> str:
        return self._read(self._errors)

    def ready(self) -> "Actor":
        deadline = time.monotonic() + DEADLINE
        while "ready\n" not in self._read(self._out):
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.02)
        return self

    def tables(self) -> list[Any]:
        """What `table` has said so far."""
        complete = self._read(self._out).rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines() if line.startswith('{"table"')]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def lines(self, *, stop: bool = False) -> list[Any]:
        """Wait for its end, or ask for it; the lines of JSON that it said."""
        if stop:
            self.process.terminate()
        self.process.wait(DEADLINE)
        return [json.loads(line) for line in self._read(self._out).splitlines() if line != "ready"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes, and ends those that a test leaves behind."""
    install(CLIENT, CLIENT / "node_modules" / "zeromq" / "package.json")
    actors: list[Actor] = []

    def begin(role: str, address: str, argument: object, **options: Any) -> Actor:
        actors.append(Actor(role, address, options, argument))
        return actors[-1]

    yield begin
    for actor in actors:
        if actor.process.poll() is None:
            actor.kill()


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, ports: Ports, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Addresses that a second publisher can have."""
    if request.param == "ipc":
        return f"ipc://{tmp_path_factory.mktemp('s')}/p"
    return f"tcp://127.0.0.1:{ports.take()}"


def offsets(path: Path) -> list[int]:
    """The complete lines of a witness."""
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def datas(lines: list[Any]) -> list[bytes]:
    return [bytes.fromhex(line["data"]) for line in lines if "data" in line]


def numbers(first: int, after: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, after)]


def test_the_vectors_of_the_documents(start: Start) -> None:
    """It reads and writes what the pages say, to the byte."""
    done = subprocess.run(
        ["node", "--test", "test/"], cwd=CLIENT, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout


def test_everything_of_an_event_arrives(start: Start, address: str) -> None:
    """From the journal and live, in one order, with all that an event can have."""
    large = bytes(range(256)) * 4096
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        receipt = pub.publish("a", b"")
        pub.publish("über", large, key="k1", content_type="application/json")
        pub.publish_many("a", numbers(0, 500))
        sub = start("print", pub.address, 505, start="oldest")
        assert pub.wait_for_subscribers(1, DEADLINE)
        pub.publish("b", b"live", headers={"traceparent": "00-ab"})
        pub.publish("a", b"1", content_type="text/plain")
        pub.publish("a", b"2")
        *events, last = sub.lines()
    assert [event["offset"] for event in events] == list(range(505))
    assert datas(events) == [b"", large, *numbers(0, 500), b"live", b"1", b"2"]
    assert {(event["source"], event["epoch"]) for event in events} == {("p", receipt.epoch)}
    assert [event["seq"] for event in events if event["topic"] == "a"] == list(range(503))
    assert (events[1]["topic"], events[1]["key"], events[1]["contentType"]) == (
        "über",
        "k1",
        "application/json",
    )
    assert events[1]["time"] >= events[0]["time"] > 1_600_000_000_000_000
    assert events[502]["headers"] == {"traceparent": "00-ab"}
    assert (events[503]["contentType"], events[504]["headers"]) == ("text/plain", {})
    assert last["losses"] == []


def test_where_to_begin(start: Start, address: str) -> None:
    """Patterns of topics; an offset, a time, the next event and a durable name are beginnings."""
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        for i in range(300):
            pub.publish(("orders.eu", "orders.us", "stock")[i % 3], b"%d" % i)
        some = start("print", pub.address, 200, start="oldest", topics=["orders.*"])
        since = start("print", pub.address, 300, start={"time": 0})
        at = start("print", pub.address, 258, start=42)
        kept = start("print", pub.address, 100, durable="d")
        live = start("print", pub.address, 50).ready()
        assert datas(some.lines()) == [b"%d" % i for i in range(300) if i % 3 != 2]
        assert datas(at.lines()) == numbers(42, 300)
        assert datas(since.lines()) == numbers(0, 300)
        assert datas(kept.lines()) == numbers(0, 100)
        pub.publish_many("t", numbers(300, 350))
        assert datas(live.lines()) == numbers(300, 350)
        again = start("print", pub.address, 250, durable="d")
        assert datas(again.lines()) == numbers(100, 350)


def test_a_slow_reader_gets_everything(start: Start, tmp_path: Path, until: Until) -> None:
    """More than all queues hold, while the process is stopped: gaps of the live stream are repaired."""
    witness = tmp_path / "witness"
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        sub = start("subscriber", pub.address, witness, start="oldest").ready()
        for i in range(400):
            pub.publish_many("t", [b"." * 500] * 100)
            if i == 50:
                sub.process.send_signal(19)  # SIGSTOP
        sub.process.send_signal(18)  # SIGCONT
        until(lambda: len(offsets(witness)) == 40_000, DEADLINE)
        assert offsets(witness) == list(range(40_000))
        assert sub.lines(stop=True)[-1]["losses"] == []


def test_what_is_gone_is_told(start: Start, address: str) -> None:
    """Evicted ranges, and what a publisher took with it that began again without its journal."""
    ring = MemoryJournal(retention=Retention(max_bytes=1 << 20, max_events=100))
    with Publisher(address, source="p", journal=ring) as pub:
        for data in numbers(0, 1000):
            pub.publish("t", data)
        pub.flush()
        oldest = pub.journal.oldest
        assert oldest > 0
        *events, last = start("print", address, 1000 - oldest, start="oldest").lines()
        assert datas(events) == numbers(oldest, 1000)
        epoch = pub.journal.epoch
        evicted = {"source": "p", "epoch": epoch, "first": 0, "last": oldest - 1, "reason": "evicted"}
        assert last["losses"] == [evicted]
        sub = start("print", address, 1, start="live").ready()
        # Heard of, and not had: its heartbeats name the end while it cannot read.
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        assert pub.wait_for_subscribers(1, DEADLINE)
        pub.publish("t", b"again")
        event, last = sub.lines()
        assert (event["offset"], event["epoch"], last["counters"]["joins"]) == (0, pub.journal.epoch, 2)


def test_a_refusal_is_an_error(start: Start, tmp_path: Path) -> None:
    """A client that the publisher does not want ends with its words."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        first, _ = start("worker", pub.address, tmp_path / "w", group="bad\nname").lines()
        assert first["error"].startswith("the publisher refused: ")


def test_encrypted(start: Start, tmp_path: Path) -> None:
    """CURVE, with an allow-list."""
    server, client = KeyPair.new(), KeyPair.new()
    keys = ClientKeys(client, server.public)
    curve = {
        "curveServerKey": keys.server.decode(),
        "curvePublicKey": client.public.decode(),
        "curveSecretKey": client.secret.decode(),
    }
    with Publisher(
        "tcp://127.0.0.1:*",
        source="p",
        journal=MemoryJournal(),
        curve=ServerKeys(server),
        allow=[client.public],
    ) as pub:
        sub = start("print", pub.address, 2, start="oldest", curve=curve)
        pub.publish("t", b"0")
        assert pub.wait_for_subscribers(1, DEADLINE)
        pub.publish("t", b"1")
        assert datas(sub.lines()) == [b"0", b"1"]


def test_workers_share_a_group_with_ours(start: Start, address: str, tmp_path: Path, until: Until) -> None:
    """Each event goes to one worker, whatever language it is written in; what is given back comes again."""
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        theirs = [
            start("flaky", address, tmp_path / f"w{i}", group="g", prefetch=20).ready() for i in range(2)
        ]
        ours: list[int] = []
        with Worker(address, group="g", prefetch=20) as worker:
            assert pub.wait_for_workers(2, DEADLINE)
            for i in range(3000):
                pub.publish("t", b"%d" % i)
            until(lambda: len(offsets(tmp_path / "w0")) > 5 and len(offsets(tmp_path / "w1")) > 5, DEADLINE)
            for delivery in worker.deliveries(timeout=1):
                ours.append(delivery.event.offset)
                delivery.ack()
            until(lambda: pub.groups()["g"].acked == 3000, DEADLINE)
        for actor in theirs:
            actor.lines(stop=True)
        status = pub.groups()["g"]
        assert status.balanced
        assert (status.lost, status.dead_lettered, status.pending) == (0, 0, 0)
    done = Counter(ours)
    for i in range(2):
        rows = [line.split() for line in (tmp_path / f"w{i}").read_text().splitlines()]
        done.update(int(row[0]) for row in rows if row[1] != "1")
    assert set(done) == set(range(3000))
    assert max(done.values()) == 1


def test_keys_stay_in_order(start: Start, tmp_path: Path, until: Until) -> None:
    """With affinity, an event that is given back comes before the later ones of its key."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        for i in range(600):
            pub.publish("t", b"", key=f"k{i % 7}")
        actors = [
            start("flaky", pub.address, tmp_path / f"w{i}", group="g", keyAffinity=True) for i in range(2)
        ]
        until(lambda: "g" in pub.groups() and pub.groups()["g"].acked == 600, DEADLINE)
        for actor in actors:
            actor.lines(stop=True)
    rows = [line.split() for i in range(2) for line in (tmp_path / f"w{i}").read_text().splitlines()]
    done = [(row[2], int(row[0])) for row in rows if row[1] != "1"]
    for key in {key for key, _ in done}:
        assert [offset for k, offset in done if k == key] == sorted(offset for k, offset in done if k == key)


def test_a_handler_that_leaves(start: Start, tmp_path: Path, until: Until) -> None:
    """A worker that is killed costs nothing: what it held comes again, with its attempt."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        pub.publish_many("t", numbers(0, 100))
        held = start("worker", pub.address, tmp_path / "held", group="g", prefetch=10).ready()
        until(lambda: "g" in pub.groups() and pub.groups()["g"].acked > 0, DEADLINE)
        held.kill()
        other = start("worker", pub.address, tmp_path / "other", group="g")
        until(lambda: pub.groups()["g"].acked == 100, DEADLINE)
        other.lines(stop=True)
        assert set(offsets(tmp_path / "held") + offsets(tmp_path / "other")) == set(range(100))


def campaign(start: Start, ports: Ports, tmp_path: Path, until: Until, seed: int, kills: int) -> None:
    """Kill publisher, subscriber and worker in turn, at random; nothing that was accepted is missing in the end."""
    rolls = random.Random(seed)
    address = f"tcp://127.0.0.1:{ports.take()}"
    path, cursor = tmp_path / "journal", str(tmp_path / "cursor")
    witness, work = tmp_path / "sub", tmp_path / "work"
    accepted = tmp_path / "accepted"
    script = ROOT / "tests" / "integration" / "direct_actors.py"

    def publisher() -> subprocess.Popen[str]:
        command = [sys.executable, str(script), "publisher", address, str(path), str(accepted), "2000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def subscriber() -> Actor:
        return start("subscriber", address, witness, cursor=cursor, commitEveryS=0.05)

    def worker() -> Actor:
        return start("worker", address, work, group="g", leaseS=2, maxDeliver=1000, prefetch=50)

    pub, sub, man = publisher(), subscriber(), worker()
    try:
        for _ in range(kills):
            before = len(offsets(witness)), len(offsets(work))
            until(lambda b=before: len(offsets(witness)) > b[0] and len(offsets(work)) > b[1], DEADLINE)
            victim = rolls.choice(["publisher", "subscriber", "worker"])
            if victim == "publisher":
                pub.kill()
                pub.communicate()
                pub = publisher()
            elif victim == "subscriber":
                sub.kill()
                sub = subscriber()
            else:
                man.kill()
                man = worker()
        pub.send_signal(10)  # SIGUSR1: publish no more
        assert pub.stdout is not None
        total = int(pub.stdout.readline())

        def saved() -> int:
            return int(json.loads(Path(cursor).read_text())["positions"]["p"]["offset"])

        def acked() -> bool:
            pub.send_signal(12)  # SIGUSR2: say what the groups have
            assert pub.stdout is not None
            return bool(json.loads(pub.stdout.readline())["g"] == [total, 0, 0, True])

        until(lambda: saved() == total, DEADLINE)
        until(acked, DEADLINE)
        assert sub.lines(stop=True)[-1]["losses"] == []
        assert man.lines(stop=True)[-1]["losses"] == []
    finally:
        pub.kill()
        pub.communicate()
    assert set(offsets(accepted)) <= set(range(total))
    assert set(offsets(witness)) == set(range(total))
    assert set(offsets(work)) == set(range(total))


def test_kills(start: Start, ports: Ports, tmp_path: Path, until: Until) -> None:
    """A few kills of each; the subscriber goes on with its cursor, and nothing is lost."""
    campaign(start, ports, tmp_path, until, seed=3, kills=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_kills(start: Start, ports: Ports, tmp_path: Path, until: Until, seed: int) -> None:
    """The same for longer."""
    campaign(start, ports, tmp_path, until, seed, kills=30)


def test_an_older_copy_is_told(start: Start, tmp_path: Path, ports: Ports) -> None:
    """A cursor beyond the end of a journal of the same epoch: the client says so, and reads all there is."""
    address = f"tcp://127.0.0.1:{ports.take()}"
    cursor = tmp_path / "cursor"
    journal: Journal = DiskJournal(tmp_path / "journal", fsync="never")
    with Publisher(address, source="p", journal=journal) as pub:
        pub.publish_many("t", numbers(0, 10))
        cursor.write_text(
            json.dumps({"format": 1, "positions": {"p": {"epoch": pub.journal.epoch, "offset": 50}}})
        )
        sub = start("print", address, 10, cursor=str(cursor))
        assert datas(sub.lines()) == numbers(0, 10)
        assert "RolledBack" in sub.errors


def position(path: Path, epoch: int, offset: int) -> Path:
    """A cursor's file."""
    path.write_text(json.dumps({"format": 1, "positions": {"p": {"epoch": epoch, "offset": offset}}}))
    return path


def test_epochs_that_it_has_missed_are_not_skipped(start: Start, tmp_path: Path, ports: Ports) -> None:
    """Two promotions while it was away: it goes on where the first one began, although it has had events of the
    replaced publisher that no other host had."""
    journal = DiskJournal(tmp_path / "journal", source="p", fsync="never")
    journal.append_many("t", numbers(0, 50))
    first = journal.epoch
    for after in (80, 85):
        journal.begin_epoch()
        journal.append_many("t", numbers(journal.next, after))
    with Publisher(f"tcp://127.0.0.1:{ports.take()}", source="p", journal=journal) as pub:
        cursor = position(tmp_path / "cursor", first, 60)
        assert datas(start("print", pub.address, 35, cursor=str(cursor)).lines()) == numbers(50, 85)


def test_a_mirror_that_is_behind_is_waited_for(
    start: Start, tmp_path: Path, ports: Ports, until: Until
) -> None:
    """It ends before what the client has had of the publisher: nothing comes twice, and no copy is suspected."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))

    def publisher() -> Publisher:
        return Publisher(a, source="p", journal=DiskJournal(tmp_path / "a", fsync="never"), mirrors=[b])

    def mirror() -> Mirror:
        return Mirror(a, journal=DiskJournal(tmp_path / "b", fsync="never"), serve=b)

    with publisher() as pub, mirror():
        pub.publish_many("t", numbers(0, 10), wait="mirrored", timeout=DEADLINE)
        epoch = pub.journal.epoch
    with publisher() as pub:
        pub.publish_many("t", numbers(10, 15))
    with mirror() as copy:
        sub = start("print", b, 1, cursor=str(position(tmp_path / "cursor", epoch, 15))).ready()
        assert copy.journal.next == 10
        with publisher() as pub:
            pub.publish("t", b"15", wait="mirrored", timeout=DEADLINE)
            assert datas(sub.lines()) == [b"15"]
    assert "RolledBack" not in sub.errors


def test_a_replaced_publisher_is_told_and_not_followed(
    start: Start, tmp_path: Path, ports: Ports, until: Until
) -> None:
    """Its cursor is from after a promotion, and the publisher that it finds is from before."""
    newest = (1 << 42) + 5
    address = f"tcp://127.0.0.1:{ports.take()}"
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        pub.publish_many("t", numbers(0, 10))
        heard: list[int] = []
        answer = pub._mirrored.answer

        def listen(mirror: str, request: messages.Request, now: float) -> messages.Reply | None:
            if isinstance(request, messages.Superseded):
                heard.append(request.epoch)
            return answer(mirror, request, now)

        pub._mirrored.answer = listen  # type: ignore[method-assign]
        sub = start("print", address, 1, cursor=str(position(tmp_path / "cursor", newest, 3)))
        until(lambda: heard, DEADLINE)
        assert set(heard) == {newest}
        assert datas(sub.lines(stop=True)) == []


def test_a_damaged_cursor_is_told(start: Start, tmp_path: Path) -> None:
    """Never a silent new start."""
    (tmp_path / "cursor").write_bytes(b"")
    sub = start("print", "tcp://127.0.0.1:1", 1, cursor=str(tmp_path / "cursor"))
    assert sub.lines() == []
    assert "is not a cursor, or is damaged" in sub.errors


def test_node_is_named_in_the_reason_to_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without node these tests are skipped, and say why."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(pytest.skip.Exception, match="node is not installed"):
        install(tmp_path, tmp_path / "nothing")


def test_the_last_value_of_every_key(start: Start, tmp_path: Path, ports: Ports, until: Until) -> None:
    """A late subscriber has all of them; one that was away too long has a new snapshot; a restart needs none."""
    address = f"tcp://127.0.0.1:{ports.take()}"
    rolls = random.Random(4)
    truth: dict[str, str] = {}

    def publisher() -> Publisher:
        few = Retention(max_events=200)
        return Publisher(
            address, source="p", journal=DiskJournal(tmp_path / "j", compact="key", retention=few)
        )

    def publish(pub: Publisher, count: int) -> None:
        for i in range(count):
            topic, key = rolls.choice("ab"), str(rolls.randrange(300))
            data = b"" if rolls.random() < 0.2 else b"%d" % i
            pub.publish(topic, data, key=key)
            truth.pop(f"{topic} {key}", None)
            if data:
                truth[f"{topic} {key}"] = data.decode()
        pub.publish("end", b"%d" % count, key="end")
        truth["end end"] = f"{count}"
        pub.flush()

    with publisher() as pub:
        publish(pub, 3000)
        sub = start("table", address, "end", start="snapshot", cursor=str(tmp_path / "cursor")).ready()
        until(lambda: sub.tables()[-1:] == [{"table": truth, "begun": 1}])
        publish(pub, 100)
        until(lambda: sub.tables()[-1:] == [{"table": truth, "begun": 1}])
    with publisher() as pub:
        publish(pub, 50)
        until(lambda: sub.tables()[-1:] == [{"table": truth, "begun": 1}])
        sub.lines(stop=True)
        publish(pub, 2000)
        again = start("table", address, "end", start="snapshot", cursor=str(tmp_path / "cursor")).ready()
        # The marker before may come with the state.
        until(lambda: again.tables()[-1:] == [{"table": truth, "begun": 1}])
        (last,) = [line for line in again.lines(stop=True) if "counters" in line]
        assert last["losses"] == []


def test_live_frames_do_not_come_in_the_middle_of_a_snapshot(start: Start) -> None:
    """What a live queue still holds from before the snapshot's end must not take the place of the rest of it."""
    epoch, end = 5, 10
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, live = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    router.rcvtimeo = int(DEADLINE * 1000)
    peer = b""

    def asked(kind: type[messages.Request]) -> Any:
        """The next request of that kind; heartbeats go out meanwhile, so that the client finds the live stream."""
        nonlocal peer
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if router.poll(50):
                peer, raw = router.recv_multipart()
                request = messages.decode_request(raw)
                if isinstance(request, kind):
                    return request
            live.send(messages.encode(messages.Beat(7, epoch, end)))
        raise AssertionError(f"no {kind.__name__}")

    def answer(reply: messages.Reply) -> None:
        router.send_multipart([peer, messages.encode(reply)])

    def some(offset: int) -> bytes:
        (raw,) = MemoryState(end, state).read(offset, end, max_bytes=1).blocks
        return raw

    def frame(first: int, after: int) -> bytes:
        datas = [b"old"] * (after - first)
        topics = [("t", first)]
        return encode_frame(
            "p", epoch, first, topics=topics, topic_index=None, times=[1] * len(datas), datas=datas
        ).raw

    state = [Event("p", epoch, at, "t", 1, at, b"kept", "", f"k{at}") for at in (1, 4)]
    rest = [Event("p", epoch, at, "t", 1, at, b"kept", "", f"k{at}") for at in (7, 9)]
    try:
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        port = str(live.bind_to_random_port("tcp://127.0.0.1"))
        sub = start("print", address, 8, start="snapshot")
        asked(messages.Hello)
        answer(messages.Welcome(messages.VERSION, "p", 7, epoch, 0, end, end, port, 0.25, state=end))
        first = asked(messages.Replay)
        assert (first.offset, first.state) == (0, end)
        asked(messages.Ready)  # it hears the live stream
        answer(messages.KeyState(first.request, epoch, end, 5, [some(0)]))
        second = asked(messages.Replay)
        assert (second.offset, second.state) == (5, end)
        live.send(frame(5, end))
        assert asked(messages.Ready).position == 5, "it took the place of the rest of the snapshot"
        state = rest
        answer(messages.KeyState(second.request, epoch, end, end, [some(5)]))
        live.send(frame(end, end + 4))
        *events, last = sub.lines()
    finally:
        context.destroy(linger=0)
    assert [(event["offset"], event["key"]) for event in events] == [
        (1, "k1"),
        (4, "k4"),
        (7, "k7"),
        (9, "k9"),
        *((at, "") for at in range(end, end + 4)),
    ]
    assert last["losses"] == []


def test_what_arrives_live_while_it_greets_again_is_not_thrown_away(start: Start) -> None:
    """Without a journal nobody could send it once more; nor is what WELCOME counts missing while it is on its way."""
    epoch, newest = 5, 0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, live = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    peer = b""

    def asked(kind: type[messages.Request]) -> None:
        """Wait for a request of that kind; heartbeats go out meanwhile."""
        nonlocal peer
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if router.poll(50):
                peer, raw = router.recv_multipart()
                if isinstance(messages.decode_request(raw), kind):
                    return
            live.send(messages.encode(messages.Beat(7, epoch, newest)))
        raise AssertionError(f"no {kind.__name__}")

    def welcome() -> None:
        reply = messages.Welcome(messages.VERSION, "p", 7, epoch, 0, 0, newest, port, 0.25, replay=False)
        router.send_multipart([peer, messages.encode(reply)])

    def send(first: int, after: int) -> None:
        datas = [b"x"] * (after - first)
        topics = [("t", first)]
        frame = encode_frame(
            "p", epoch, first, topics=topics, topic_index=None, times=[1] * len(datas), datas=datas
        )
        live.send(frame.raw)

    try:
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        port = str(live.bind_to_random_port("tcp://127.0.0.1"))
        sub = start("print", address, 8, start="live")
        asked(messages.Hello)
        welcome()
        asked(messages.Ready)  # it hears the live stream
        router.send_multipart([peer, messages.encode(messages.Refused("say hello first", again=True))])
        asked(messages.Hello)
        send(0, 2)
        newest = 4
        asked(messages.Hello)  # it greets once more, and has had the frame by then
        welcome()
        send(2, 4)
        send(4, 8)
        *events, last = sub.lines()
    finally:
        context.destroy(linger=0)
    assert [event["offset"] for event in events] == list(range(8))
    assert last["losses"] == []


def test_a_publisher_without_a_state_is_an_error(start: Start, address: str) -> None:
    """The client does not wait for what will not come."""
    with Publisher(address, source="p", journal=MemoryJournal()):
        (error, _) = start("table", address, "end", start="snapshot").lines()
        assert 'compact="key"' in error["error"]
