"""An acknowledgement leaves when it is given, whatever the worker does next."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core import DiskJournal, MemoryJournal
from brokerless.direct import Publisher, Worker

from .conftest import eventually

DEADLINE = 20.0


@pytest.mark.parametrize("scheme", ["tcp", "nng+tcp"])
def test_acks_leave_while_the_next_handler_runs(new_address: Callable[[str], str], scheme: str) -> None:
    """Ten events are acknowledged at once, and the handler of the next one takes long: the publisher has the ten."""
    with (
        Publisher(new_address(scheme), source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g") as worker,
    ):
        pub.publish_many("t", [b"x"] * 11)
        for _ in range(10):
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            delivery.ack()
        assert worker.receive(DEADLINE) is not None
        # The application is busy with the eleventh: it does not come back to the worker.
        eventually(lambda: pub.groups()["g"].acked == 10)


def test_a_waiting_publisher_gets_the_ack_of_a_busy_worker(new_address: Callable[[str], str]) -> None:
    """publish(wait="acked") returns although the worker goes on with other work after the acknowledgement."""
    with (
        Publisher(new_address("tcp"), source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g") as worker,
    ):
        acked, done = threading.Event(), threading.Event()

        def work() -> None:
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            delivery.ack()
            acked.set()
            done.wait(DEADLINE)

        thread = threading.Thread(target=work)
        thread.start()
        assert pub.wait_for_workers(1, DEADLINE)
        pub.publish("t", b"x", wait="acked", timeout=DEADLINE)
        assert acked.is_set()
        done.set()
        thread.join()


def test_acks_of_a_busy_coroutine_leave(new_address: Callable[[str], str]) -> None:
    """The same from asyncio: the loop is blocked by the next handler."""

    async def work(address: str, pub: Publisher) -> None:
        async with Worker(address, group="g") as worker:
            async for delivery in worker.adeliveries(DEADLINE):
                delivery.ack()
                if delivery.event.offset == 4:
                    break
            await worker.areceive(DEADLINE)
            eventually(lambda: pub.groups()["g"].acked == 5)  # blocks the loop

    with Publisher(new_address("tcp"), source="p", journal=MemoryJournal()) as pub:
        pub.publish_many("t", [b"x"] * 6)
        asyncio.run(work(pub.address, pub))


def test_an_orderly_restart_repeats_nothing_that_was_acknowledged(
    new_address: Callable[[str], str], tmp_path: Path
) -> None:
    """Acknowledged, and the publisher is closed in the same moment: its successor does not deliver them again. What the
    first one has not read any more, the worker tells the second."""
    address = new_address("ipc")
    for round_ in range(2):  # three seconds each: so long a worker waits for a word of its publisher
        path = tmp_path / f"j{round_}"
        with Worker(address, group="g") as worker:
            with Publisher(address, source="p", journal=DiskJournal(path)) as pub:
                pub.publish_many("t", [b"x"] * 20)
                for _ in range(20):
                    delivery = worker.receive(DEADLINE)
                    assert delivery is not None
                    delivery.ack()
            with Publisher(address, source="p", journal=DiskJournal(path)) as pub:
                pub.publish("t", b"next")
                delivery = worker.receive(DEADLINE)
                assert delivery is not None
                assert (delivery.event.offset, delivery.attempt) == (20, 1)
                delivery.ack()
                eventually(lambda: pub.groups()["g"].acked == 21)
                assert pub.groups()["g"].redelivered == 0


def test_a_publisher_that_is_closed_reads_what_was_sent_to_it(
    new_address: Callable[[str], str], tmp_path: Path
) -> None:
    """Acknowledgements that have left the worker count, also if that one is gone when the successor comes."""
    address = new_address("ipc")
    for round_ in range(5):
        path = tmp_path / f"j{round_}"
        with (
            Publisher(address, source="p", journal=DiskJournal(path)) as pub,
            Worker(address, group="g") as worker,
        ):
            pub.publish_many("t", [b"x"] * 20)
            for _ in range(20):
                delivery = worker.receive(DEADLINE)
                assert delivery is not None
                delivery.ack()
            eventually(lambda: worker.counters.acked == 20)
            pub.close()
        with Publisher(address, source="p", journal=DiskJournal(path)) as pub:
            assert pub.groups()["g"].acked == 20
