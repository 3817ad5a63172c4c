"""How fast frames, journals and ledgers are, against doing the least that could be done with the same bytes."""

import os
import shutil
import tempfile
from itertools import count
from statistics import median
from time import perf_counter

import msgspec
from common import Report, best_rate

from brokerless.core import (
    DiskJournal,
    Event,
    Frame,
    JournalReader,
    Ledger,
    MemoryJournal,
    Retention,
    encode_frame,
)
from brokerless.core.journal.key_state import StateBlock

BATCH = 100
EVENTS = 100_000
DATA = [os.urandom(100) for _ in range(BATCH)]
TIMES = list(range(BATCH))
BATCHES = EVENTS // BATCH


def encode() -> Frame:
    return encode_frame("source", 1, 0, topics=[("topic", 0)], topic_index=None, times=TIMES, datas=DATA)


def main() -> None:
    report = Report("core")
    frame = encode()
    rows = [Event("source", 1, i, "topic", i, i, d) for i, d in enumerate(DATA)]
    raw_encode, raw_decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[Event]).decode
    packed = raw_encode(rows)

    plain = best_rate(lambda: [raw_encode(rows) for _ in range(BATCHES)], EVENTS)
    ours = best_rate(lambda: [encode() for _ in range(BATCHES)], EVENTS)
    report.add("msgspec, list of events: encode", plain, "events/s")
    report.add(
        "frame: encode",
        ours,
        "events/s",
        against="msgspec rows",
        ratio=ours / plain,
        goal="≥ 2 M/s",
        met=ours >= 2e6,
    )
    plain = best_rate(lambda: [raw_decode(packed) for _ in range(BATCHES)], EVENTS)
    ours = best_rate(lambda: [Frame.parse(frame.raw).events() for _ in range(BATCHES)], EVENTS)
    report.add("msgspec, list of events: decode", plain, "events/s")
    report.add(
        "frame: check CRC, decode to events",
        ours,
        "events/s",
        against="msgspec rows",
        ratio=ours / plain,
        goal="≥ 2 M/s",
        met=ours >= 2e6,
    )
    ours = best_rate(lambda: [Frame.parse(frame.raw) for _ in range(BATCHES)], EVENTS)
    report.add("frame: check CRC, header only", ours, "events/s")

    folder = tempfile.mkdtemp(prefix="bench-core-")
    try:
        journals(report, folder, frame)
    finally:
        shutil.rmtree(folder)

    ledger = Ledger()
    at = count(0, BATCH)
    observe = ledger.observe
    rate = best_rate(lambda: [observe("s", 1, "t", next(at), BATCH) for _ in range(10_000)], 10_000)
    report.add("ledger: in-order range", 1e6 / rate, "µs", goal="≤ 2 µs", met=1e6 / rate <= 2)
    report.close()


def journals(report: Report, folder: str, frame: Frame) -> None:
    kept = Retention(max_bytes=1 << 30)
    fd = os.open(os.path.join(folder, "bare"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with DiskJournal(os.path.join(folder, "disk"), source="s", fsync="never", retention=kept) as disk:
        # In turn, and each compared with its neighbour: a shared machine changes its mind between runs.
        rounds = [
            (
                best_rate(lambda: [os.write(fd, frame.raw) for _ in range(BATCHES)], EVENTS, repeat=1),
                best_rate(lambda: [os.write(fd, encode().raw) for _ in range(BATCHES)], EVENTS, repeat=1),
                best_rate(
                    lambda: [disk.append_many("topic", DATA) for _ in range(BATCHES)], EVENTS, repeat=1
                ),
            )
            for _ in range(15)
        ]
        os.close(fd)
        bare, both, many = (median(column) for column in zip(*rounds, strict=True))
        report.add("bare os.write of frames that are there already", bare, "events/s")
        report.add("encode_frame and bare os.write", both, "events/s")
        ratio = median(ours / plain for plain, _, ours in rounds)
        report.add(
            "DiskJournal.append_many, 100 a call",
            many,
            "events/s",
            against="bare os.write",
            ratio=ratio,
            goal="≥ 1 M/s, ≥ 0.5×",
            met=many >= 1e6 and ratio >= 0.5,
        )
        report.add("the same", many, "events/s", against="encode and os.write", ratio=many / both)
        rate = best_rate(lambda: stage_and_flush(disk), EVENTS)
        report.add(
            "DiskJournal.stage one by one, flush per 100",
            rate,
            "events/s",
            against="bare os.write",
            ratio=rate / bare,
        )
        with JournalReader(disk.path) as reader:
            rate = best_rate(lambda: read_all(reader), reader.next - reader.oldest, repeat=2)
        report.add("JournalReader: headers of everything", rate, "events/s")
    with DiskJournal(os.path.join(folder, "synced"), source="s", fsync="batch") as disk:
        rate = best_rate(lambda: [disk.append_many("topic", DATA) for _ in range(50)], 50 * BATCH, repeat=3)
        report.add('DiskJournal fsync="batch", 100 a call', rate, "events/s")
    compacting(report, folder)
    memory = MemoryJournal(source="s")
    rate = best_rate(lambda: [memory.append_many("topic", DATA) for _ in range(BATCHES)], EVENTS)
    report.add("MemoryJournal.append_many, 100 a call", rate, "events/s")
    rate = best_rate(lambda: stage_and_flush(memory), EVENTS)
    report.add("MemoryJournal.stage one by one, flush per 100", rate, "events/s")


def compacting(report: Report, folder: str) -> None:
    """What keeping the newest event of every key costs a producer at full rate, and how long reading a state takes."""
    events = 500_000
    for distinct in (1_000, 500_000):
        keys = [[f"key-{i % distinct}" for i in range(at, at + BATCH)] for at in range(0, events, BATCH)]
        rates = {}
        for compact in ("", "key"):
            path = os.path.join(folder, f"keyed-{distinct}-{compact}")
            retention = Retention(max_bytes=32 * 1024 * 1024)
            with DiskJournal(path, source="s", fsync="never", retention=retention, compact=compact) as disk:
                began = perf_counter()
                for column in keys:
                    disk.append_many("topic", DATA, keys=column)
                rates[compact] = events / (perf_counter() - began)
        report.add(f"DiskJournal.append_many with {distinct:,} keys, 100 a call", rates[""], "events/s")
        report.add(
            f'the same with compact="key", {distinct:,} keys',
            rates["key"],
            "events/s",
            against="without compact",
            ratio=rates["key"] / rates[""],
        )
    many = 1_000_000
    path = os.path.join(folder, "state")
    retention = Retention(max_bytes=32 * 1024 * 1024)
    with DiskJournal(path, source="s", fsync="never", compact="key", retention=retention) as disk:
        for at in range(0, many, BATCH):
            disk.append_many("topic", DATA, keys=[f"key-{i}" for i in range(at, at + BATCH)])
        while disk.oldest < many:
            disk.append_many("topic", DATA)
        state = disk.state()
        began, at, found = perf_counter(), 0, 0
        while at < state.end:
            chunk = state.read(at, state.end, max_bytes=1024 * 1024)
            found += sum(len(StateBlock(raw).events()) for raw in chunk.blocks)
            at = chunk.next
        report.add(f"state of {found:,} keys: read and decode", perf_counter() - began, "s")
        state.close()


def stage_and_flush(journal: DiskJournal | MemoryJournal) -> None:
    stage = journal.stage
    for _ in range(BATCHES):
        for data in DATA:
            stage("topic", data)
        journal.flush()


def read_all(reader: JournalReader) -> None:
    at = reader.oldest
    while at < reader.next:
        at = reader.read(at).next


if __name__ == "__main__":
    main()
