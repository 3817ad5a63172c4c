"""What the collector counts."""

from typing import Annotated

from brokerless.core.counters import Counters, count, loss


class CollectorCounters(Counters):
    """What a Collector did, over all its inputs."""

    component = "collector"

    frames: Annotated[int, count("frames appended to the spool")] = 0
    events: Annotated[int, count("events appended to the spool")] = 0
    bytes: Annotated[int, count("bytes of frames appended to the spool")] = 0
    duplicates: Annotated[int, count("events that came again and were not appended again")] = 0
    words: Annotated[int, count("producers' words of what they sent, appended")] = 0
    notes: Annotated[int, count("notes on loss appended")] = 0
    lost: Annotated[int, loss("events that an input declared lost")] = 0
    clamped: Annotated[
        int, count("events whose time is ahead of when they were received; Spark sees the latter")
    ] = 0
    refused: Annotated[
        int, count("appends that the spool refused; nothing was acknowledged, the input tries again")
    ] = 0
    restarts: Annotated[int, count("times that an input failed and was started again")] = 0
    forgotten: Annotated[
        int, count("intervals dropped from the books; duplicates that old are not recognised")
    ] = 0
