"""Request and reply: load balanced over a group, with a deadline, at least or at most once."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Event, MemoryJournal, Retention
from brokerless.core.errors import ConfigError, InvalidEvent, UsageError
from brokerless.core.event import Headers
from brokerless.direct import NoReply, Publisher, RequestClient, Worker
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.requests import is_over

from .conftest import eventually, have_room

DEADLINE = 30.0


@contextmanager
def answering(address: str, name: str, done: "Counter[str]") -> Iterator[Worker]:
    """A worker in a thread of its own, which answers with what it was asked, in capitals."""
    with Worker(address, group="g", prefetch=1) as worker:

        def work() -> None:
            for delivery in worker:
                done[name] += 1
                delivery.reply(delivery.event.data.upper())

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield worker
        finally:
            worker.stop()
            thread.join(DEADLINE)


def test_requests_are_shared_by_the_workers(address: str) -> None:
    """Each caller gets its own reply, and every worker does its part."""
    done: Counter[str] = Counter()
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        client = RequestClient(pub)
        with answering(pub.address, "a", done), answering(pub.address, "b", done):
            eventually(lambda: have_room(pub, 2))
            replies: list[bytes] = []
            threads = [
                threading.Thread(
                    target=lambda t=t: replies.extend(  # type: ignore[misc]
                        client.request("t", b"x%d-%d" % (t, i), DEADLINE) for i in range(20)
                    )
                )
                for t in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
            assert sorted(replies) == sorted(b"X%d-%d" % (t, i) for t in range(4) for i in range(20))
            assert set(done) == {"a", "b"}
        eventually(lambda: pub.groups()["g"].pending == 0)
        assert pub.groups()["g"].balanced


def test_asyncio_and_cancellation() -> None:
    """Many at once; one that is cancelled is not waited for, and its late reply is dropped."""

    async def main(client: RequestClient) -> None:
        found = await asyncio.gather(*[client.arequest("t", b"a%d" % i, DEADLINE) for i in range(50)])
        assert found == [b"A%d" % i for i in range(50)]
        task = asyncio.create_task(client.arequest("t", b"x", DEADLINE))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not client._waiting

    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        with answering(pub.address, "a", Counter()):
            asyncio.run(main(RequestClient(pub)))
        eventually(lambda: pub.groups()["g"].balanced)


def test_a_request_that_waits_for_room_holds_up_no_loop() -> None:
    """The journal is full, and what makes room for the request runs in the same loop."""

    async def main(pub: Publisher, client: RequestClient) -> bytes:
        asking = asyncio.create_task(client.arequest("t", b"x", DEADLINE))
        while pub.journal.counters.blocked == 0:
            await asyncio.sleep(0.001)
        pub.journal.unregister("reader")
        return await asking

    journal = MemoryJournal(retention=Retention(max_events=4), on_full="block", block_timeout_s=DEADLINE)
    with Publisher("tcp://127.0.0.1:*", source="p", journal=journal) as pub:
        client = RequestClient(pub)
        with answering(pub.address, "a", Counter()):
            eventually(lambda: have_room(pub, 1))
            pub.journal.register("reader")
            for _ in range(4):
                pub.publish("t", b"filler", headers={"requestid": "nobody"})
                pub.flush()
            assert asyncio.run(asyncio.wait_for(main(pub, client), DEADLINE)) == b"X"


@pytest.mark.parametrize("at_most_once", [False, True])
def test_a_worker_that_leaves_without_a_reply(at_most_once: bool) -> None:
    """Another one does it, or nobody, as was chosen."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        client = RequestClient(pub, at_most_once=at_most_once)
        outcome: list[object] = []

        def ask() -> None:
            try:
                outcome.append(client.request("t", b"x", 3.0 if at_most_once else DEADLINE))
            except NoReply as error:
                outcome.append(error)

        thread = threading.Thread(target=ask)
        with Worker(pub.address, group="g") as first:
            thread.start()
            delivery = first.receive(DEADLINE)
            assert delivery is not None  # begun, and then it is gone
        done: Counter[str] = Counter()
        with answering(pub.address, "b", done):
            thread.join(DEADLINE)
            if at_most_once:
                assert isinstance(outcome[0], NoReply)
                assert not done
            else:
                assert outcome == [b"X"]
            eventually(lambda: pub.groups()["g"].pending == 0)
        assert pub.groups()["g"].balanced


def test_a_request_whose_deadline_is_over_is_not_handed_out() -> None:
    """A worker that comes later passes over it, and it is settled."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        client = RequestClient(pub)
        with pytest.raises(NoReply, match="offset 0"):
            client.request("t", b"late", 0.05)
        time.sleep(0.01)  # the deadline is by the clock, to the microsecond
        with Worker(pub.address, group="g") as worker:
            assert worker.receive(0.2) is None
            eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].acked == 1)
            assert worker.counters.over == 1


def test_what_is_refused() -> None:
    """No reply to what is no request, none that is too large, no deadline of nothing."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        with pytest.raises(ConfigError):
            RequestClient(pub).request("t", b"", 0)
        with pytest.raises(InvalidEvent):
            RequestClient(pub).request("", b"")
        pub.publish("t", b"x", headers={"requestid": "r"})
        pub.publish("t", b"y")
        with Worker(pub.address, group="g") as worker:
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            with pytest.raises(InvalidEvent):
                delivery.reply(b"x" * (messages.MAX_REPLY_DATA_BYTES + 1))
            delivery.reply(b"x" * messages.MAX_REPLY_DATA_BYTES)  # nobody waits for it, and it fits
            with pytest.raises(UsageError):
                delivery.reply(b"again")
            plain = worker.receive(DEADLINE)
            assert plain is not None
            with pytest.raises(UsageError, match="not a request"):
                plain.reply(b"")
            plain.ack()
            eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].pending == 0)


@given(
    st.dictionaries(
        st.sampled_from(["requestid", "requestby", "requestonce", "x"]),
        st.text("0159a²", max_size=4) | st.just("9" * 5000),
    ),
    st.integers(1, 3),
    st.integers(0, 2000),
)
def test_is_over(headers: dict[str, str], attempt: int, now: int) -> None:
    """Only requests can be over; whatever their headers say, nothing is raised."""
    event = Event("s", 1, 0, "t", 0, 0, b"", headers=Headers(headers))
    by = headers.get("requestby", "")
    late = 0 < len(by) <= 4 and all(c in "0159" for c in by) and int(by) < now
    expected = "requestid" in headers and (late or ("requestonce" in headers and attempt > 1))
    assert is_over(event, attempt, now) == expected
