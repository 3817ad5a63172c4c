"""Hostile publishers on real sockets: their clients stay well, and so do the other publishers of these clients."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from brokerless.core import Cursor, MemoryJournal, Position
from brokerless.core.errors import PeerError
from brokerless.direct import Publisher, Subscriber, Worker
from brokerless.direct.address import parse_address
from brokerless.direct.io.zmq import ZmqNetwork
from brokerless.direct.protocol import messages

from .conftest import eventually

DEADLINE = 20.0


class Liar:
    """A publisher that answers each request as `answer` says, and sends heartbeats."""

    def __init__(self, answer: Callable[["Liar", messages.Request], list[messages.Reply]]) -> None:
        self.answer = answer
        self.epoch = 5
        self.hellos = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._pub = self._context.socket(zmq.PUB)
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self.live = str(self._pub.bind_to_random_port("tcp://127.0.0.1"))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def welcome(self, **changes: object) -> messages.Welcome:
        """What an honest publisher says, with changes."""
        words: dict[str, object] = {
            "version": messages.VERSION,
            "source": "liar",
            "instance": 7,
            "epoch": self.epoch,
            "begin": 0,
            "oldest": 0,
            "next": 0,
            "live": self.live,
            "beat_s": 0.25,
        }
        return messages.Welcome(**(words | changes))  # type: ignore[arg-type]

    def _run(self) -> None:
        while not self._stopping:
            if self._router.poll(20):
                peer, data = self._router.recv_multipart()
                request = messages.decode_request(data)
                self.hellos += isinstance(request, messages.Hello)
                for reply in self.answer(self, request):
                    self._router.send_multipart([peer, messages.encode(reply)])
            self._pub.send(messages.encode(messages.Beat(7, self.epoch, 0)))

    def __enter__(self) -> "Liar":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        self._context.destroy(linger=0)


def refuses(_: Liar, request: messages.Request) -> list[messages.Reply]:
    """Nobody is welcome."""
    return [messages.Refused("no")] if isinstance(request, messages.Hello) else []


def misleads(liar: Liar, request: messages.Request) -> list[messages.Reply]:
    """The live stream is where none can be."""
    return [liar.welcome(live="nonsense")] if isinstance(request, messages.Hello) else []


BAD = pytest.mark.parametrize(("answer", "problem"), [(refuses, "refused: no"), (misleads, "nonsense")])


@BAD
def test_one_bad_publisher_does_not_stop_the_others_of_a_subscriber(
    answer: Callable[[Liar, messages.Request], list[messages.Reply]],
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told in the log and in `failed`, and the events of the others come."""
    with (
        Liar(answer) as liar,
        Publisher("tcp://127.0.0.1:*", source="good", journal=MemoryJournal()) as pub,
        Subscriber([liar.address, pub.address], start="oldest") as sub,
    ):
        for i in range(10):
            pub.publish("t", b"%d" % i)
        assert [event.data for _, event in zip(range(10), sub.events(DEADLINE), strict=False)] == [
            b"%d" % i for i in range(10)
        ]
        deadline = time.monotonic() + DEADLINE
        while not sub.failed:
            assert sub.receive(0.01) is None
            assert time.monotonic() < deadline
        assert list(sub.failed) == [liar.address]
        assert problem in str(sub.failed[liar.address])
        assert [record.levelname for record in caplog.records if liar.address in record.message] == ["ERROR"]
        assert sub.connected == 1
        pub.publish("t", b"more")
        event = asyncio.run(sub.areceive(DEADLINE))
        assert event is not None
        assert event.data == b"more"


@BAD
def test_one_bad_publisher_does_not_stop_the_others_of_a_worker(
    answer: Callable[[Liar, messages.Request], list[messages.Reply]], problem: str
) -> None:
    """A worker has no live stream, so a wrong hint is nothing to it."""
    with (
        Liar(answer) as liar,
        Publisher("tcp://127.0.0.1:*", source="good", journal=MemoryJournal()) as pub,
        Worker([liar.address, pub.address], group="g") as worker,
    ):
        for i in range(10):
            pub.publish("t", b"%d" % i)
        for count, delivery in enumerate(worker.deliveries(DEADLINE), 1):
            delivery.ack()
            if count >= 10:
                if worker.failed or answer is misleads:
                    break
                pub.publish("t", b"more")
        assert count >= 10
        assert all(problem in str(error) for error in worker.failed.values())


@BAD
def test_if_all_publishers_are_bad_receiving_raises(
    answer: Callable[[Liar, messages.Request], list[messages.Reply]], problem: str
) -> None:
    """With one publisher or two, each time; and the error is the publisher's, not one of configuration."""
    with Liar(answer) as first, Liar(answer) as second:
        for addresses in ([first.address], [first.address, second.address]):
            with Subscriber(addresses) as sub:
                for _ in range(3):
                    with pytest.raises(PeerError, match=problem):
                        sub.receive(DEADLINE)
                assert set(sub.failed) == set(addresses)


def test_a_promise_of_no_heartbeats_is_no_flood_of_greetings() -> None:
    """Whatever WELCOME says of heartbeats, the subscriber greets at most about twice a second."""

    def answer(liar: Liar, request: messages.Request) -> list[messages.Reply]:
        return (
            [liar.welcome(beat_s=-1.0), messages.Refused("", again=True)]
            if isinstance(request, messages.Hello)
            else []
        )

    with Liar(answer) as liar, Subscriber(liar.address) as sub:
        eventually(lambda: sub.receive(0.5) is None and liar.hellos)
        assert liar.hellos < 10


def test_answers_that_nobody_reads_wait_with_the_sender() -> None:
    """Of messages that may be large few are kept for an application that is busy."""
    network = ZmqNetwork()
    try:
        client = network.connect_control(parse_address("tcp://127.0.0.1:1"))
        assert int(client._socket.getsockopt(zmq.RCVHWM)) <= 16
        client.close()
    finally:
        network.close()


def test_a_publisher_cannot_speak_for_another(tmp_path: Path) -> None:
    """One that takes the name and epoch of another, and says that all is gone, changes nothing for it."""
    with Publisher("tcp://127.0.0.1:*", source="good", journal=MemoryJournal()) as pub:
        joined = threading.Event()

        def answer(liar: Liar, request: messages.Request) -> list[messages.Reply]:
            joined.wait(DEADLINE)
            if isinstance(request, messages.Hello):
                return [liar.welcome(source="good", epoch=pub.journal.epoch, next=10)]
            if isinstance(request, messages.Replay):
                return [messages.Chunk(request.request, pub.journal.epoch, 1 << 61, 1 << 61, [], [])]
            return []

        with Liar(answer) as liar, Subscriber([pub.address, liar.address], cursor=tmp_path / "c") as sub:
            pub.publish("t", b"0")
            assert sub.receive(DEADLINE) is not None
            joined.set()
            deadline = time.monotonic() + DEADLINE
            while not sub.counters.bad_messages:
                assert sub.receive(0.01) is None
                assert time.monotonic() < deadline
            pub.publish("t", b"1")
            event = sub.receive(DEADLINE)
            assert event is not None
            assert event.data == b"1"
            assert sub.connected == 1
        assert sub.positions == {"good": Position(pub.journal.epoch, 2)}
        assert sub.counters.lost == 0


def test_a_position_that_was_made_up_is_put_right(tmp_path: Path) -> None:
    """Also in the file: the next start goes on where this one ended."""
    with Publisher("tcp://127.0.0.1:*", source="good", journal=MemoryJournal()) as pub:
        Cursor(tmp_path / "c").save({"good": Position(pub.journal.epoch, 1 << 61)}, b"")
        pub.publish_many("t", [b"0", b"1", b"2"])  # one batch, of which the first start takes a part
        with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
            event = sub.receive(DEADLINE)
            assert event is not None
            assert event.data == b"0"
        assert sub.counters.bad_messages == 1
        with Subscriber(pub.address, cursor=tmp_path / "c") as sub:
            event = sub.receive(DEADLINE)
            assert event is not None
            assert event.data == b"1"
        assert sub.counters.bad_messages == 0
