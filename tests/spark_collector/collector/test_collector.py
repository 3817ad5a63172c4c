"""The collector as a library, with journals as its inputs."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from brokerless.core import DiskJournal, Reason, Retention, encode_frame
from brokerless.core.errors import ConfigError, JournalLocked
from brokerless.spark_collector import local
from brokerless.spark_collector.collector.collector import Collector
from brokerless.spark_collector.collector.config import CollectorConfig, JournalIn, SpoolConfig
from tests.spark_collector.spools import spooled

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
            # The journals' sent counts about all that they have; there may be some about what they had before.
            sent_counts = {(f"p{n}", done // 2) for n in range(2)}
            until(lambda sent_counts=sent_counts: sent_counts <= set(spooled(tmp_path / "spool", "sent")))
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
        assert collector.counters.ahead == 3


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
            account = collector.ledger.account()
            assert (account.lost, account.balanced) == (oldest - 10, True)
            assert account.lost_by_reason == {Reason.EVICTED: oldest - 10}
            assert account.accepted == account.delivered + account.lost
    assert ("p0", 10) in spooled(tmp_path / "spool", "ledger")


def test_one_writer_per_spool(tmp_path: Path) -> None:
    """A second collector on the same spool is refused."""
    with Collector(config(tmp_path)), pytest.raises(JournalLocked):
        Collector(config(tmp_path))


def test_a_cut_spool_is_read_again(tmp_path: Path) -> None:
    """A saved state of a part of the spool which a power cut took are not believed.

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
    from brokerless.core.journal.head_file import NEXT, HeadFile

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


def test_a_damaged_state_file_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state that a crash cut off costs reading the spool, not the collector."""
    with Collector(config(tmp_path)) as collector:
        collector.accept("direct", [frame("p", 0, 10)])
    state = tmp_path / "spool" / "collector.state"
    whole = state.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        state.write_bytes(whole[:cut])
        with Collector(config(tmp_path)) as again:
            assert again.accept("direct", [frame("p", 0, 10)]) == 0
        assert "read from its beginning" in caplog.text
    assert len(spooled(tmp_path / "spool")) == 10


def test_an_idle_producer_costs_nothing(tmp_path: Path) -> None:
    """Sent counts are recorded when they change: a thousand topics, asked a thousand times, are one record."""
    with Collector(config(tmp_path)) as collector:
        collector.accept("direct", [frame("p", 0, 10)])
        seqs = {f"topic{n}": n for n in range(1000)}
        collector.sent_counts("direct", "p", 1, 1000, seqs)
        size = collector.spool.counters.bytes
        for _ in range(1000):
            collector.sent_counts("direct", "p", 1, 1000, seqs)
        assert collector.spool.counters.bytes == size
        collector.sent_counts("direct", "p", 1, 1001, seqs | {"topic7": 8})
        assert collector.spool.counters.bytes - size < 1000, "and then the one that changed"
        assert collector.counters.sent_counts == 2
    # The old count of topic7 once more, at the last time that it was true, and the new one.
    assert len(spooled(tmp_path / "spool", "sent")) == 1002


def test_sent_counts_that_came_before_their_events_are_corrected(tmp_path: Path) -> None:
    """Once the events are there, the same counts are recorded with the producer's own time, and then no more."""
    now = time.time_ns() // 1000
    with Collector(config(tmp_path)) as collector:
        collector.accept("direct", [frame("p", 0, 10, time_us=now - 7_000_000)])
        collector.sent_counts("direct", "p", 1, 10, {"t": 20})
        collector.sent_counts("direct", "p", 1, 11, {"t": 20})
        collector.accept("direct", [frame("p", 10, 10, time_us=now - 5_000_000)])
        for _ in range(3):
            collector.sent_counts("direct", "p", 1, 20, {"t": 20})
    assert spooled(tmp_path / "spool", "sent") == [("p", 10), ("p", 20)]


def test_positions_while_sources_come(tmp_path: Path) -> None:
    """Inputs that start ask what the spool has while others append to it."""
    import threading

    failed: list[Exception] = []
    with Collector(config(tmp_path)) as collector:
        done = threading.Event()

        def ask() -> None:
            try:
                while not done.is_set():
                    collector.positions()
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for n in range(2000):
            collector.accept("direct", [frame(f"p{n}", 0, 1)])
        done.set()
        for thread in threads:
            thread.join()
        assert len(collector.positions()) == 2000
    assert failed == []


def test_two_collectors_of_a_producer_whose_clock_is_ahead(tmp_path: Path) -> None:
    """An event has one time, whoever received it when: it is counted in one window, once."""
    now = time.time_ns() // 1000
    for name, received in (("a", now), ("b", now + 200_000_000)):
        spool = SpoolConfig(path=str(tmp_path / name))
        inputs = [JournalIn(path=str(tmp_path / "j0"))]
        with Collector(CollectorConfig(name=name, spool=spool, input=list(inputs), status=None)) as collector:
            ahead = frame("p", 0, 100, time_us=now + 300_000_000)
            collector.accept("direct", [ahead], received=received)
    paths = {"path": f"{tmp_path}/a,{tmp_path}/b"}
    rows = local.counts(paths).to_pylist()
    assert [(r["events"], r["duplicates"]) for r in rows] == [(100, 100)]
    assert sum(r["received"] for r in local.loss(paths).to_pylist()) == 100


def test_a_first_event_that_never_came_is_lost(tmp_path: Path) -> None:
    """An input that wants everything from the beginning: what is missing there counts, without any other word."""
    with Collector(config(tmp_path)) as collector:
        collector.accept("multicast", [frame("p", 3, 10)], complete=True)
        collector.accept("multicast", [frame("late", 3, 10)])
    found = {
        r["source"]: r
        for r in local.loss({"path": str(tmp_path / "spool")}, settle_s=0, by="topic").to_pylist()
    }
    assert (found["p"]["sent"], found["p"]["lost"]) == (13, 3)
    assert (found["late"]["sent"], found["late"]["lost"]) == (10, 0)


LIMITED = """
import resource, sys
from brokerless.spark_collector import Collector, CollectorConfig, DirectIn, SpoolConfig
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[2])))
addresses = [f"tcp://127.0.0.1:{9000 + n}" for n in range(40)]
spool = SpoolConfig(path=sys.argv[1])
config = CollectorConfig(name="c", spool=spool, input=[DirectIn(addresses=addresses)], status=None)
with Collector(config):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("hard", "message"), [(2048, "768"), (512, "768 open files")])
def test_many_inputs_get_the_files_that_they_need(tmp_path: Path, hard: int, message: str) -> None:
    """The limit is raised as far as allowed; if that is not enough it is an error at the start, not an abort."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "spool"), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert message in done.stdout + done.stderr
    assert done.returncode == (0 if hard > 768 else 1)
