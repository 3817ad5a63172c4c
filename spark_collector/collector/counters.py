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
    sent_counts: Annotated[int, count("producers' sent counts, appended")] = 0
    notes: Annotated[int, count("notes on loss appended")] = 0
    lost: Annotated[int, loss("events that an input declared lost")] = 0
    ahead: Annotated[int, count("events whose time is ahead of the collector's clock")] = 0
    refused: Annotated[
        int, count("appends that the spool refused; nothing was acknowledged, the input tries again")
    ] = 0
    uploaded: Annotated[int, count("events uploaded to the remote tier")] = 0
    upload_failures: Annotated[int, count("uploads that failed and are tried again")] = 0
    restarts: Annotated[int, count("times that an input failed and was started again")] = 0
    forgotten: Annotated[
        int, count("intervals dropped from the seen; duplicates that old are not recognised")
    ] = 0
