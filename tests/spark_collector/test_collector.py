"""The collector as a library, with journals as its inputs."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from brokerless.core import DiskJournal, JournalReader, Retention, encode_frame
from brokerless.core.errors import ConfigError, JournalLocked
from brokerless.spark_collector.collector import Collector
from brokerless.spark_collector.config import CollectorConfig, JournalIn, SpoolConfig
from brokerless.spark_collector.spool import as_items

BIG = Retention(max_bytes=1 << 30)


def config(tmp_path: Path, **options: object) -> CollectorConfig:
    spool = SpoolConfig(path=str(tmp_path / "spool"), **options)  # type: ignore[arg-type]
    inputs = [JournalIn(path=str(tmp_path / f"j{n}"), transport="metrics") for n in range(2)]
    return CollectorConfig(name="c", spool=spool, input=list(inputs), status=None)


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def spooled(path: Path, kind: str = "event") -> list[tuple[str, int]]:
    """(source, offset) of everything in a spool, in order."""
    with JournalReader(path) as reader:
        at, found = reader.oldest, []
        while at < reader.next:
            chunk = reader.read(at)
            for outer in chunk.frames:
                for item in as_items(outer, at, outer.next_offset):
                    if item.kind == kind:
                        found += [(e.source, e.offset) for e in item.frame.events()]
            at = chunk.next
    return found


def frame(source: str, first: int, count: int, time_us: int = 1000):  # type: ignore[no-untyped-def]
    return encode_frame(
        source,
        1,
        first,
        topics=[("t", first)],
        topic_index=None,
        times=[time_us] * count,
        datas=[b"x"] * count,
    )


def test_journals_are_followed_into_the_spool(tmp_path: Path) -> None:
    """Two journals, written before and while the collector runs, land once each.

    Over restarts of the collector.
    """
    journals = [
        DiskJournal(tmp_path / f"j{n}", source=f"p{n}", retention=BIG, fsync="never") for n in range(2)
    ]
    done = 0
    for _ in range(3):
        for j in journals:
            j.append_many("a", [b"before"] * 50)
        with Collector(config(tmp_path)) as collector:
            for j in journals:
                j.append_many("a", [b"during"] * 50)
            done += 200
            until(lambda: collector.counters.events == 200)
            # The journals' words about all that they have; there may be some about what they had before.
            words = {(f"p{n}", done // 2) for n in range(2)}
            until(lambda words=words: words <= set(spooled(tmp_path / "spool", "sent")))
        assert sorted(spooled(tmp_path / "spool")) == sorted(
            (f"p{n}", i) for n in range(2) for i in range(done // 2)
        )


def test_what_comes_again_is_recognised(tmp_path: Path) -> None:
    """Repeated, overlapping and partly repeated frames leave each event once.

    Also after a restart without state.
    """
    collector = Collector(config(tmp_path)).start()
    assert collector.accept("direct", [frame("p", 0, 10)]) == 10
    assert collector.accept("direct", [frame("p", 5, 10), frame("p", 0, 3)]) == 5
    assert collector.accept("direct", [frame("p", 20, 5)]) == 5
    collector.close()
    (tmp_path / "spool" / "collector.state").unlink()
    again = Collector(config(tmp_path)).start()
    assert again.accept("direct", [frame("p", 0, 30)]) == 10
    assert again.counters.duplicates == 20
    again.close()
    assert sorted(spooled(tmp_path / "spool")) == [("p", n) for n in range(30)]


def test_acknowledged_after_the_sync(tmp_path: Path) -> None:
    """With fsync=interval an ack is given by the sync, not by the append; with never, at once."""
    acks: list[str] = []
    slow = Collector(config(tmp_path, sync_interval_s=60.0))
    slow.accept("direct", [frame("p", 0, 1)], lambda: acks.append("a"))
    assert acks == []
    slow.flush()
    assert acks == ["a"]
    slow.accept("direct", [frame("p", 0, 1)], lambda: acks.append("again"))
    slow.close()
    assert acks == ["a", "again"], "a duplicate is acknowledged too, or it would come for ever"
    with Collector(config(tmp_path, fsync="never")) as fast:
        fast.accept("direct", [frame("p", 1, 1)], lambda: acks.append("b"))
        assert acks[-1] == "b"


def test_times_ahead_are_counted(tmp_path: Path) -> None:
    """An event from the future is appended unchanged and counted."""
    with Collector(config(tmp_path)) as collector:
        collector.accept("direct", [frame("p", 0, 3, time_us=10**18), frame("p", 3, 2)])
        assert collector.counters.clamped == 3


def test_evicted_events_are_noted(tmp_path: Path) -> None:
    """What the producer's journal dropped before the collector came is a note in the spool.

    And not waited for.
    """
    small = Retention(max_bytes=64 * 1024)
    with DiskJournal(
        tmp_path / "j0", source="p0", retention=small, segment_bytes=16 * 1024, fsync="never"
    ) as j:
        with Collector(config(tmp_path)) as collector:
            j.append_many("a", [b"x"] * 10)
            until(lambda: collector.counters.events == 10)
        for _ in range(100):
            j.append_many("a", [b"y" * 1000] * 10)
        oldest = j.oldest
        with Collector(config(tmp_path)) as collector:
            until(lambda: collector.counters.events == 1010 - oldest)
            assert collector.counters.lost == oldest - 10
    assert ("p0", 10) in spooled(tmp_path / "spool", "ledger")


def test_one_writer_per_spool(tmp_path: Path) -> None:
    """A second collector on the same spool is refused."""
    with Collector(config(tmp_path)), pytest.raises(JournalLocked):
        Collector(config(tmp_path))


def test_a_cut_spool_is_read_again(tmp_path: Path) -> None:
    """Books that speak of a part of the spool which a power cut took are not believed.

    What was cut comes again.
    """
    collector = Collector(config(tmp_path)).start()
    collector.accept("direct", [frame("p", 0, 10)])
    at = collector.spool.next
    collector.accept("direct", [frame("p", 10, 10)])
    collector.close()
    meta = tmp_path / "spool" / "meta.json"
    known = msgspec.json.decode(meta.read_bytes())
    known["epochs"].append([known["epochs"][-1][0] + 1, at])
    meta.write_bytes(msgspec.json.encode(known))
    segment = max((tmp_path / "spool").glob("*.seg"))
    raw = segment.read_bytes()
    from brokerless.core.headfile import NEXT, HeadFile

    segment.write_bytes(raw[: raw.rfind(bytes.fromhex(known["salt"]))])
    head = HeadFile(str(tmp_path / "spool" / "head"), create=True)
    head.set(NEXT, at)
    head.close()
    with Collector(config(tmp_path)) as again:
        assert again.accept("direct", [frame("p", 0, 20)]) == 10
    assert sorted(spooled(tmp_path / "spool")) == [("p", n) for n in range(20)]


def test_a_collector_needs_inputs(tmp_path: Path) -> None:
    """An empty configuration is an error that names the field."""
    with pytest.raises(ConfigError, match="input"):
        CollectorConfig(name="c", spool=SpoolConfig(path=str(tmp_path)))
