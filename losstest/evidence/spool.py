"""For `--spark`: each consumer is a collector, too, and appends what it commits to a spool that Spark reads."""

import re
from pathlib import Path

from brokerless.losstest.model import Cell

TOPIC = "losstest"
EPOCH = 1
# The time of event 0, in microseconds since 1970: any will do, because nothing is asked per window here.
START_US = 1_700_000_000_000_000


def source_name(cell: Cell, subscription: str) -> str:
    """The source under which a subscription's events are spooled."""
    return re.sub(r"[^\w.-]", "_", f"{cell.key}.{subscription}".replace("/", "."))


class Spool:
    """A collector without inputs: the loss test's consumer hands it every event that it commits.

    Event n gets offset n + 1. Offset 0 is an extra event that the check adds, so that a stream whose
    first events were all lost still begins at 0.
    """

    def __init__(self, path: Path, name: str, source: str) -> None:
        from brokerless.core.frame import encode_frame
        from brokerless.spark_collector import Collector, CollectorConfig, JournalIn, SpoolConfig

        self._encode, self._source = encode_frame, source
        path.parent.mkdir(parents=True, exist_ok=True)
        self._collector = Collector(
            CollectorConfig(
                name=name,
                spool=SpoolConfig(path=str(path), fsync="never"),  # processes are killed, power is not cut
                input=[JournalIn(path=str(path / "unused"))],  # never started: we call accept() ourselves
                status=None,
            )
        )

    def add(self, offset: int, data: bytes) -> None:
        """Append one event; it survives SIGKILL when this returns.

        Its time follows from its number: a copy that another process spools after a redelivery has the same, as every
        event of a producer has, or Spark could count the two copies in two windows.
        """
        frame = self._encode(
            self._source,
            EPOCH,
            offset,
            topics=[(TOPIC, offset)],
            topic_index=None,
            times=[START_US + offset],
            datas=[data],
        )
        self._collector.accept("losstest", [frame])

    def sent(self, next_offset: int) -> None:
        """What the producer says it sent."""
        self._collector.sent_counts("losstest", self._source, EPOCH, next_offset, {TOPIC: next_offset})

    def close(self) -> None:
        """Close the spool."""
        self._collector.close()
