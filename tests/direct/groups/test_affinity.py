"""Key affinity: order within a key, and what an event that is given back costs the others of its key."""

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import MemoryJournal
from brokerless.direct import Publisher, Worker
from brokerless.direct.groups.affinity import KeyQueue

DEADLINE = 30.0


def test_nacks_do_not_make_busy_keys_travel_again_and_again(new_address: Callable[[str], str]) -> None:
    """One nack in twenty, ten keys: in order within each key, and each event is sent three times on average."""
    chance, n = random.Random(1), 2000
    with (
        Publisher(new_address("tcp"), source="p", journal=MemoryJournal()) as pub,
        Worker(pub.address, group="g", key_affinity=True, max_deliver=100) as worker,
    ):
        pub.publish_many("t", [b"x"] * n, keys=[f"k{i % 10}" for i in range(n)])
        done: dict[str, list[int]] = {}
        for delivery in worker.deliveries(DEADLINE):
            if chance.random() < 0.05:
                delivery.nack()
                continue
            done.setdefault(delivery.event.key, []).append(delivery.event.offset)
            delivery.ack()
            if sum(map(len, done.values())) == n:
                break
        assert done == {f"k{k}": list(range(k, n, 10)) for k in range(10)}
        assert pub._coordinator.counters.granted <= 3 * n


@given(st.lists(st.sampled_from(["nack", "ack"]), max_size=60))
def test_a_key_that_was_slowed_down_always_goes_on(steps: list[str]) -> None:
    """Whatever is nacked and acknowledged, the oldest unsettled event can be taken when none is under way."""
    queue = KeyQueue()
    queue.join("w")
    for offset in range(100):
        queue.add(offset, "k")
    oldest = 0
    for step in steps:
        taken = queue.take("w", 1000, 0.0)
        assert taken[0] == oldest
        if step == "nack":
            queue.slow_down(taken[0])
        else:
            queue.settle(taken[0], taken[0])
            oldest += 1
        for offset in taken:
            if offset >= oldest:
                queue.give_back(offset, None)
