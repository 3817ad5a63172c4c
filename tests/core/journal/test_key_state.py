"""Journals that compact: the newest event of every key outlives retention, whatever happens to the process."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from brokerless.core import DiskJournal, Event, Journal, MemoryJournal, Retention
from brokerless.core.errors import ConfigError, Evicted, FrameError, JournalError, UsageError
from brokerless.core.journal import key_state, witness
from brokerless.core.journal.head_file import NEXT, HeadFile
from brokerless.core.journal.key_state import MemoryState, StateBlock, StateFile
from tests.core.journal.copies import crashed
from tests.core.journal.test_format import decode_frame, vectors
from tests.power import Disk, PowerCuts

TABLE = dict[tuple[str, str], Event]
SMALL: dict[str, Any] = {"fsync": "never", "segment_bytes": 2048}


class DamagedState(Exception):
    """A state says itself that something of it cannot be read."""


def state_events(journal: Journal, max_bytes: int = 1 << 20) -> tuple[list[Event], int]:
    """All of a journal's state, and its end."""
    state = journal.state()
    events: list[Event] = []
    at = 0
    while at < state.end:
        chunk = state.read(at, state.end, max_bytes=max_bytes)
        if chunk.gone:
            raise DamagedState(chunk.gone)
        assert chunk.next > at
        events += [event for raw in chunk.blocks for event in StateBlock(raw).events() if event.offset >= at]
        at = chunk.next
    state.close()
    return events, state.end


def apply(table: TABLE, events: list[Event]) -> None:
    """What a consumer does with them."""
    for event in events:
        if event.key:
            table.pop((event.topic, event.key), None)
            if event.data:
                table[event.topic, event.key] = event


def last_values(journal: Journal, max_bytes: int = 1 << 20, *, gone: bool = False) -> TABLE:
    """The state, and then the journal from its end on; the state has each key once, by rising offsets."""
    events, end = state_events(journal, max_bytes)
    names = [(event.topic, event.key) for event in events]
    assert len(set(names)) == len(names)
    assert all(event.key and event.data and event.offset < end for event in events)
    assert [event.offset for event in events] == sorted({event.offset for event in events})
    assert journal.oldest <= end <= journal.next
    table: TABLE = {}
    apply(table, events)
    at = end
    while at < journal.next:
        chunk = journal.read(at)
        assert gone or not chunk.gone
        apply(table, [e for frame in chunk.frames for e in frame.events() if e.offset >= at])
        at = chunk.next
    return table


class CompactMachine(RuleBasedStateMachine):
    """Any calls in any order: the last value of every key can always be had, exactly as it was published."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="compact-model-")
        self.accepted: list[Event] = []
        self.table: TABLE = {}
        self.seqs: dict[str, int] = {}

    def open(self) -> Journal:
        raise NotImplementedError

    @initialize(bound=st.sampled_from([{"max_events": 40}, {"max_bytes": 8_000}, {"max_bytes": 30_000}]))
    def begin(self, bound: dict[str, int]) -> None:
        self.retention = Retention(**bound)
        self.journal = self.open()

    def note(self, receipt: Any, topic: str, data: bytes, key: str, headers: dict[str, str]) -> None:
        offset = len(self.accepted)
        seq = self.seqs.get(topic, 0)
        assert (receipt.offset, receipt.seq) == (offset, seq)
        event = Event(
            "src", receipt.epoch, offset, topic, seq, offset * 7, data, "t" * (offset % 2), key, headers
        )
        self.accepted.append(event)
        self.seqs[topic] = seq + 1
        apply(self.table, [event])

    @rule(
        topic=st.sampled_from("ab"),
        key=st.sampled_from(["", "k", "l", "m"]) | st.integers(0, 30).map(str),
        data=st.sampled_from([b"", b"x", b"y" * 300]),
        headed=st.booleans(),
        staged=st.booleans(),
        times=st.integers(1, 12),
    )
    def publish(self, topic: str, key: str, data: bytes, headed: bool, staged: bool, times: int) -> None:
        for _ in range(times):
            offset = len(self.accepted)
            headers = {"h": str(offset)} if headed else {}
            call = self.journal.stage if staged else self.journal.append
            receipt = call(topic, data, "t" * (offset % 2), key, offset * 7, headers)
            self.note(receipt, topic, data, key, headers)

    @rule(topic=st.sampled_from("ab"), count=st.integers(1, 30), tombstones=st.booleans())
    def many(self, topic: str, count: int, tombstones: bool) -> None:
        first = len(self.accepted)
        for start in range(first, first + count, 8):
            datas = [
                b"" if tombstones and i % 3 else b"%d" % i
                for i in range(start, min(start + 8, first + count))
            ]
            for data in datas:  # one call for each kind of content type
                offset = len(self.accepted)
                receipt = self.journal.append_many(
                    topic, [data], "t" * (offset % 2), keys=[str(offset % 11)], times=[offset * 7]
                )
                self.note(receipt, topic, data, str(offset % 11), {})

    @rule(max_bytes=st.sampled_from([1, 5000]))
    def compare(self, max_bytes: int) -> None:
        self.journal.flush()
        assert last_values(self.journal, max_bytes) == self.table

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.compare(1 << 20)
            self.journal.close()
        shutil.rmtree(self.directory)


class MemoryMachine(CompactMachine):
    def open(self) -> Journal:
        return MemoryJournal(source="src", compact="key", retention=self.retention)


class DiskMachine(CompactMachine):
    def open(self) -> DiskJournal:
        return DiskJournal(
            self.directory + "/j", source="src", compact="key", retention=self.retention, **SMALL
        )

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.journal = self.open()

    @rule()
    def copy(self) -> None:
        """What a crash right now would leave gives the same, without being told that it compacts."""
        copy = self.directory + "/copy"
        with self.journal._state_lock, crashed(Path(self.directory, "j"), Path(copy)):
            journal = DiskJournal(copy, retention=self.retention, **SMALL)
            with journal:
                assert not journal.recovered.gone
                assert last_values(journal) == self.table
        shutil.rmtree(copy)

    @precondition(lambda self: self.table)
    @rule()
    def pinned(self) -> None:
        """A state that is open stays what it is while the journal goes on."""
        self.journal.flush()
        state = self.journal.state()
        before = state.read(0, state.end, max_bytes=1 << 20).blocks
        self.publish("a", "k", b"y" * 300, False, False, 60)
        assert state.read(0, state.end, max_bytes=1 << 20).blocks == before
        state.close()


TestMemory = MemoryMachine.TestCase
TestDisk = DiskMachine.TestCase
for _kind in (TestMemory, TestDisk):
    _kind.settings = settings(settings.default, max_examples=25, stateful_step_count=30, deadline=None)
del _kind


# ---- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["topic", "keys", True, 1, b"key"])
def test_wrong_values_are_named(tmp_path: Path, value: Any) -> None:
    """The error says which option, and nothing is made."""
    for make in (lambda: DiskJournal(tmp_path / "j", compact=value), lambda: MemoryJournal(compact=value)):
        with pytest.raises(ConfigError, match="compact"):
            make()
    assert not (tmp_path / "j").exists()


def test_a_journal_that_does_not_compact_has_no_state(tmp_path: Path) -> None:
    """It says what was missing."""
    for journal in (DiskJournal(tmp_path / "j", source="s"), MemoryJournal(source="s")):
        with journal:
            assert journal.state_end() == -1
            with pytest.raises(UsageError, match='compact="key"'):
                journal.state()


def fill(journal: DiskJournal, count: int, first: int = 0, keys: int = 20) -> TABLE:
    """Publish numbers under keys in turn; what a consumer holds then."""
    table: TABLE = {}
    for i in range(first, first + count):
        receipt = journal.append("t", b"%d" % i, key=str(i % keys), time=i)
        apply(
            table,
            [Event("s", receipt.epoch, receipt.offset, "t", receipt.seq, i, b"%d" % i, "", str(i % keys))],
        )
    return table


def test_given_to_an_existing_journal_and_taken_away(tmp_path: Path) -> None:
    """It begins with what is left, is remembered, and ends with its file removed; older releases refuse meanwhile."""
    few = Retention(max_events=100)
    with DiskJournal(tmp_path, source="s", retention=few, **SMALL) as journal:
        fill(journal, 15, keys=15)
        fill(journal, 500, first=15, keys=3)
        assert journal.oldest > 15
    assert json.loads((tmp_path / "meta.json").read_text())["format"] == 1
    with DiskJournal(tmp_path, retention=few, compact="key", **SMALL) as journal:
        assert set(last_values(journal)) == {("t", "0"), ("t", "1"), ("t", "2")}, "those that are left"
        fill(journal, 500, keys=5)
    assert json.loads((tmp_path / "meta.json").read_text())["format"] == 2
    with DiskJournal(tmp_path, retention=few, **SMALL) as journal:
        fill(journal, 300, keys=2)
        assert set(last_values(journal)) == {("t", str(i)) for i in range(5)}, "it is remembered"
        assert journal.counters.compaction_damaged == 0
    with DiskJournal(tmp_path, retention=few, compact="", **SMALL) as journal:
        assert journal.state_end() == -1
    assert not list(tmp_path.glob("*.state*"))
    assert json.loads((tmp_path / "meta.json").read_text())["format"] == 1


def test_a_cursor_behind_is_evicted_as_ever(tmp_path: Path) -> None:
    """Compaction changes nothing for who reads by offset."""
    with DiskJournal(
        tmp_path, source="s", retention=Retention(max_events=100), compact="key", **SMALL
    ) as journal:
        journal.register("slow")
        fill(journal, 500)
        assert journal.counters.evicted > 300
        with pytest.raises(Evicted):
            journal.read(0)


def test_the_thread_keeps_ahead_of_retention(tmp_path: Path) -> None:
    """Sealed segments come into the state while nothing has to be dropped, so a snapshot is near the end."""
    compacted = threading.Event()
    real = key_state.compact

    def watched(*arguments: Any, **more: Any) -> Any:
        done = real(*arguments, **more)
        compacted.set()
        return done

    with (
        mock.patch("brokerless.core.journal.disk.compact", watched),
        DiskJournal(tmp_path, source="s", compact="key", **SMALL) as journal,
    ):
        fill(journal, 2000, keys=5)
        assert compacted.wait(60)
        pause = threading.Event()
        for _ in range(600):
            if journal.state_end() > 0:
                break
            pause.wait(0.1)
        assert journal.state_end() > 0
        assert journal.oldest == 0
        assert len(last_values(journal)) == 5


# ---- damage and crashes ----------------------------------------------------------------------------------------


def compacted(path: Path) -> TABLE:
    """A journal whose state has 400 keys in several blocks, and little behind it."""
    with (
        mock.patch.object(key_state, "_BLOCK_EVENTS", 32),
        DiskJournal(path, source="s", retention=Retention(max_events=80), compact="key", **SMALL) as journal,
    ):
        table = fill(journal, 400, keys=400)
        table.update(fill(journal, 300, first=400 * 3, keys=3))
    return table


def test_a_damaged_block_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its range is told, the rest is there; the next state counts it and carries on with the rest."""
    table = compacted(tmp_path)
    (path,) = tmp_path.glob("*.state")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    state = StateFile(str(path))
    events, gone, at = [], [], 0
    while at < state.end:
        chunk = state.read(at, state.end, max_bytes=1)
        events += [e for block in chunk.blocks for e in StateBlock(block).events()]
        gone += chunk.gone
        at = chunk.next
    ((first, after),) = gone
    missing = set(table) - {(e.topic, e.key) for e in events}
    assert missing == {name for name, e in table.items() if first <= e.offset < after} != set()
    state.close()
    with DiskJournal(tmp_path, retention=Retention(max_events=80), **SMALL) as journal:
        fill(journal, 300, first=4000 * 3, keys=3)
        assert journal.counters.compaction_damaged == 1
        left, _ = state_events(journal)
        assert {e.key for e in left} == {key for _, key in table} - {key for _, key in missing}
    assert "damaged" in caplog.text


@pytest.mark.parametrize("how", ["missing", "header", "cut", "foreign"])
def test_a_state_that_cannot_be_used_is_told(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At opening, and nothing that is out of date is served as the last value."""
    table = compacted(tmp_path)
    (path,) = tmp_path.glob("*.state")
    raw = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        changed = {
            "header": b"x" + raw[1:],
            "cut": raw[: len(raw) // 2],
            "foreign": raw[:12] + b"salt" + raw[16:],
        }
        path.write_bytes(changed[how])
    with DiskJournal(tmp_path, retention=Retention(max_events=80), **SMALL) as journal:
        assert journal.counters.compaction_damaged == 1
        state = journal.state()
        gone, at = [], 0
        found: TABLE = {}
        while at < state.end:
            chunk = state.read(at, state.end, max_bytes=1)
            gone += chunk.gone
            apply(found, [e for block in chunk.blocks for e in StateBlock(block).events()])
            at = chunk.next
        state.close()
        assert bool(gone) == (how == "cut")
        assert found.items() <= table.items()
        fill(journal, 10)
    assert "keys that did not change since are gone" in caplog.text


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The event is refused, or stays staged; segments stay; when there is room it goes on."""
    with DiskJournal(
        tmp_path, source="s", retention=Retention(max_events=80), compact="key", **SMALL
    ) as journal:
        table: TABLE = {}

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with (
            mock.patch.object(key_state, "write_all", full),
            pytest.raises(JournalError, match="No space left"),
        ):
            for i in range(10_000):
                table.update(fill(journal, 1, first=i))
        assert not list(tmp_path.glob("*.state.new"))
        assert last_values(journal) == table
        table.update(fill(journal, 1000, first=20_000))
        assert last_values(journal) == table


WRITER = """
import random, sys
from brokerless.core import DiskJournal, Retention
path, seed, fsync = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rng = random.Random(seed)
journal = DiskJournal(path, source="src", fsync=fsync, segment_bytes=16_384, compact="key",
                      retention=Retention(max_bytes=100_000))
out = sys.stdout
assert not journal.recovered.gone and not journal.counters.compaction_damaged
print("open", journal.next, flush=True)
while True:
    offset = journal.next + journal.staged
    key, data = str(rng.randrange(2000)), b"" if rng.random() < 0.2 else b"%d " % offset * rng.choice([1, 1, 30])
    print("offer", offset, key, data.decode(), flush=True)
    if rng.random() < 0.7:
        journal.stage("t", data, key=key)
    else:
        journal.append_many("t", [data], keys=[key])
    print("took", offset, flush=True)
"""


def kills(directory: Path, count: int, seed: int) -> None:
    """Kill the writer wherever it is, `count` times; after each kill every last value is there."""
    rng = random.Random(seed)
    path = directory / "journal"
    took: dict[str, tuple[int, bytes]] = {}
    for n in range(count):
        fsync = rng.choice(["never", "interval"])
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(seed * 1000 + n), fsync], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        lines: list[bytes] = []
        for _ in range(rng.randrange(20, 4000)):
            line = writer.stdout.readline()
            assert line, "the writer ended"
            lines.append(line)
        os.kill(writer.pid, signal.SIGKILL)
        lines += writer.stdout.read().splitlines(keepends=True)
        writer.wait()
        offers: dict[int, tuple[str, bytes]] = {}
        accepted: set[int] = set()
        for line in lines:
            if not line.endswith(b"\n"):
                continue
            kind, offset, *rest = line[:-1].split(b" ", 2)
            if kind == b"offer":
                key, _, data = rest[0].partition(b" ")
                offers[int(offset)] = key.decode(), data
            elif kind == b"took":
                accepted.add(int(offset))
        with DiskJournal(path, retention=Retention(max_bytes=100_000), segment_bytes=16_384) as journal:
            assert not journal.recovered.gone
            assert journal.counters.compaction_damaged == 0
            end = journal.next
            assert end > max(accepted, default=-1), "an accepted event is missing"
            for offset, (key, data) in sorted(offers.items()):
                if offset < end:
                    took.pop(key, None)
                    if data:
                        took[key] = offset, data
            found = {name[1]: (event.offset, event.data) for name, event in last_values(journal).items()}
            assert found == took, (n, end)


def test_last_values_survive_kills(tmp_path: Path) -> None:
    """Real processes, killed at random moments of staging, rolling over, compacting and deleting."""
    kills(tmp_path, 12, 1)


@pytest.mark.slow
def test_last_values_survive_many_kills(tmp_path: Path) -> None:
    """The same for longer."""
    kills(tmp_path, 300, 2)


class PowerRun:
    """A writer of a compacting journal on a watched disk, and what it was promised."""

    def __init__(self, seed: int, root: Path, fsync: str) -> None:
        self.rolls = random.Random(seed)
        self.fsync = fsync
        self.path = root / "disk" / "journal"
        (root / "disk").mkdir()
        self.disk = Disk(root / "disk")
        self.accepted: list[tuple[str, bytes]] = []
        self.promised = 0

    def begin(self) -> None:
        """Open the journal; the disk must be watched."""
        self.journal = self.open(self.path, "key")

    def open(self, path: Path, compact: Any = None) -> DiskJournal:
        return DiskJournal(
            path,
            source="src",
            fsync=self.fsync,  # type: ignore[arg-type]
            retention=Retention(max_events=100),
            sync_interval_s=3600,
            segment_bytes=2048,
            compact=compact,
        )

    def step(self) -> None:
        """One call of a writer."""
        roll = self.rolls.random()
        if roll < 0.8:
            for _ in range(self.rolls.choice([1, 20, 60])):
                key = str(self.rolls.randrange(60))
                data = b"" if self.rolls.random() < 0.2 else b"%d" % len(self.accepted)
                self.journal.append("t", data, key=key)
                self.accepted.append((key, data))
        elif roll < 0.9 and self.fsync != "never":
            self.journal.sync()
            self.promised = len(self.accepted)
        else:
            self.journal.close()
            self.journal = self.open(self.path)
            if self.fsync != "never":
                self.promised = len(self.accepted)
        if self.fsync == "batch":
            self.promised = len(self.accepted)

    def check(self, into: Path) -> None:
        """Cut the power now, and compare what is left with the events before its end."""
        with self.journal._state_lock:  # the simulator needs a disk that stands still
            self.disk.cut(self.rolls, into)
        path = into / "journal"
        if self.fsync == "never" and not path.is_dir():
            return
        with mock.patch.object(witness, "_directory", return_value=""):
            try:
                journal = self.open(path)
            except JournalError:
                if self.fsync != "never":
                    raise
                return
            with journal:
                self.compare(journal)

    def compare(self, journal: DiskJournal) -> None:
        facts = (
            self.fsync,
            journal.next,
            self.promised,
            journal.state_end(),
            journal.oldest,
            journal.recovered,
        )
        assert journal.next >= self.promised, facts
        if self.fsync == "never" and journal.state_end() < 0:
            return  # not even meta.json
        try:
            found = {name[1]: event.data for name, event in last_values(journal, gone=True).items()}
        except DamagedState:
            assert self.fsync == "never", facts
            return  # told, and never promised
        if self.fsync == "never" and journal.counters.compaction_damaged:
            return  # told, and never promised
        # Of what came after the promise any part may be gone; then an older value may be the last one that is left.
        allowed: dict[str, set[bytes]] = {}
        for offset, (key, data) in enumerate(self.accepted[: journal.next]):
            if offset < self.promised:
                allowed[key] = {data}
            else:
                allowed.setdefault(key, {b""}).add(data)
        for key, values in allowed.items():
            assert found.pop(key, b"") in values, (key, values, facts)
        assert not found, facts

    def close(self) -> None:
        self.journal.close()


class TestPowerCuts(PowerCuts):
    """What `fsync` promised of a key's last value is there after a cut, or (never) what is missing is told."""

    writer = PowerRun


# ---- the format ------------------------------------------------------------------------------------------------


def test_the_vectors_of_the_page(tmp_path: Path) -> None:
    """What we write has the bytes of docs/reference/journal-format.md."""
    known = vectors()
    first = decode_frame(known["frame-one"])[0][5]
    events = [
        Event("src", 7, 40, "a", 3, first, b"x", "", "k"),
        Event("src", 7, 95, "b", 9, first + 1, b"y", "", "k"),
    ]
    (raw,) = MemoryState(100, events).read(0, 100, max_bytes=1).blocks
    assert raw == known["state-block"]
    assert StateBlock(raw).events() == events
    writer = key_state.StateWriter(str(tmp_path), bytes.fromhex("0a0b0c0d"), sync=False)
    writer.add(StateBlock(raw))
    state = writer.finish(100)
    state.close()
    assert Path(state.path).name == "00000100.state"
    assert Path(state.path).read_bytes() == known["state-header"] + known["state-record"] + raw


def test_blocks_of_strangers_are_refused() -> None:
    """Numbers that do not rise, are out of range or do not fit; bytes that are no block."""
    frame, offsets, seqs = key_state.msgspec.msgpack.decode(vectors()["state-block"])
    swapped = offsets[8:] + offsets[:8]
    negative = (-1).to_bytes(8, "little", signed=True)
    huge = (1 << 62).to_bytes(8, "little")
    for bad in (
        [frame, swapped, seqs],
        [frame, offsets[:8] * 2, seqs],
        [frame, offsets[:8], seqs],
        [frame, offsets, negative + seqs[8:]],
        [frame, negative + offsets[8:], seqs],
        [frame, offsets[:8] + huge, seqs],
        [frame[:-1], offsets, seqs],
        [b"", b"", b""],
        [],
        "x",
    ):
        with pytest.raises(FrameError):
            StateBlock(key_state.msgspec.msgpack.encode(bad))
    for at in range(len(vectors()["state-block"])):
        raw = bytearray(vectors()["state-block"])
        raw[at] ^= 0x80
        try:
            StateBlock(bytes(raw)).events()
        except FrameError:
            continue


def test_large_and_odd_events_pass(tmp_path: Path) -> None:
    """Events larger than a block, several epochs, many topics."""
    table: TABLE = {}
    for epoch in range(2):
        with DiskJournal(
            tmp_path, source="s", retention=Retention(max_bytes=3_000_000), compact="key", fsync="never"
        ) as journal:
            for i in range(200):
                data = os.urandom(50_000) if i % 50 else os.urandom(900_000)
                receipt = journal.append(f"t{i % 70}", data, key=f"{epoch}-{i}", time=i)
                apply(
                    table,
                    [
                        Event(
                            "s",
                            receipt.epoch,
                            receipt.offset,
                            f"t{i % 70}",
                            receipt.seq,
                            i,
                            data,
                            "",
                            f"{epoch}-{i}",
                        )
                    ],
                )
            assert last_values(journal, 1) == table
        # The next opening cannot prove that it is the newest.
        for name in Path(witness._directory()).glob(f"{journal._meta.salt}.journal"):
            name.unlink()
    assert len({event.epoch for event in table.values()}) == 2


def test_offsets_below_a_state_are_not_used_again(tmp_path: Path) -> None:
    """A power cut can take segments whose events are in the state: the journal goes on behind it, and says so."""
    with DiskJournal(
        tmp_path, source="s", retention=Retention(max_events=80), compact="key", **SMALL
    ) as journal:
        table = fill(journal, 500)
        journal._compact_to(journal._bounds(journal.next), lambda: False)
        end, oldest = journal.state_end(), journal.oldest
    for path in sorted(tmp_path.glob("*.seg"))[1:]:
        path.unlink()
    head = HeadFile(str(tmp_path / "head"), create=True)
    head.set(NEXT, oldest + 1)
    head.close()
    with DiskJournal(tmp_path, retention=Retention(max_events=80), **SMALL) as journal:
        assert journal.next == end
        ((first, last),) = journal.recovered.gone
        assert oldest < first < last + 1 == end
        assert journal.recovered.epoch_raised
        assert journal.uncertain_from == end, "what a state has was not lost"
        assert journal.append("t", b"new", key="new").offset == end
        left = last_values(journal, gone=True)
    assert set(left) == {*table, ("t", "new")}
