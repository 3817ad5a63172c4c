"""`Delivery.extend` renews the lease at once, whoever calls it and whatever the worker's loop does meanwhile."""

import asyncio
import threading
import time

from brokerless.core import MemoryJournal
from brokerless.direct import Delivery, Publisher, Worker

from .conftest import eventually

DEADLINE = 20.0
LEASE_S = 5.0


def extended(pub: Publisher, delivery: Delivery) -> None:
    """The publisher has heard of it without anything else being done by the worker."""
    (member,) = pub._coordinator.groups["g"].members.values()
    before = member.settles
    delivery.extend()
    eventually(lambda: member.settles > before)


def begin(pub: Publisher, worker: Worker) -> Delivery:
    pub.publish("t", b"x")
    delivery = worker.receive(DEADLINE)
    assert delivery is not None
    return delivery


def test_a_handler_extends_its_own_lease(address: str) -> None:
    """The thread that iterates calls it, and asks for nothing more."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", lease_s=LEASE_S) as worker,
    ):
        delivery = begin(pub, worker)
        extended(pub, delivery)
        extended(pub, delivery)
        delivery.ack()
        eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].acked == 1)


def test_another_thread_extends_while_the_worker_waits_or_not(address: str) -> None:
    """A pool's thread calls it: while the iteration is busy elsewhere, and while it waits for deliveries."""
    with (
        Publisher(address, source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", lease_s=LEASE_S) as worker,
    ):
        delivery = begin(pub, worker)
        failures: list[BaseException] = []

        def other() -> None:
            try:
                extended(pub, delivery)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(DEADLINE)
        waiter = threading.Thread(target=lambda: worker.receive(DEADLINE))
        waiter.start()
        eventually(lambda: worker.waiting)
        began = time.monotonic()
        other()
        assert time.monotonic() - began < DEADLINE / 2, "it waited until the iteration was done"
        worker.stop()
        waiter.join(DEADLINE)
        assert not failures


def test_a_task_extends(address: str) -> None:
    """In asyncio: by the handler itself, and by another task while the iteration waits."""

    async def main() -> None:
        with Publisher(address, source="p", journal=MemoryJournal()) as pub:
            async with Worker(pub.address, group="g", lease_s=LEASE_S) as worker:
                pub.publish("t", b"1")
                delivery = await worker.areceive(DEADLINE)
                assert delivery is not None
                extended(pub, delivery)
                waiting = asyncio.create_task(worker.areceive(DEADLINE))
                while not worker.waiting:
                    await asyncio.sleep(0)
                extended(pub, delivery)
                pub.publish("t", b"2")
                second = await waiting
                assert second is not None
                assert second.event.data == b"2"

    asyncio.run(main())
