"""Events become frames that hold exactly those events."""

import random

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Event
from brokerless.spark_collector.collector.frames import frames_of


@given(st.integers())
def test_frames_hold_the_events(seed: int) -> None:
    """Whatever the jumps in source, epoch, offset and seq, the frames' events are the events, in order."""
    rng = random.Random(seed)
    events, offset, seqs = [], 0, {"a": 0, "b": 5}
    source, epoch = "s", 1
    for n in range(rng.randint(0, 60)):
        topic = rng.choice("ab")
        content, key = rng.choice(["", "x/y"]), rng.choice(["", "k"])
        events.append(Event(source, epoch, offset, topic, seqs[topic], n, b"%d" % n, content, key))
        offset += rng.choice([1, 1, 1, 1, 3])
        seqs[topic] += rng.choice([1, 1, 1, 1, 2])
        if rng.random() < 0.1:
            source, epoch = rng.choice(["s", "r"]), epoch + rng.randint(0, 1)
    frames = list(frames_of(events))
    assert [e for f in frames for e in f.events()] == events
