"""The data source in the JVM yields exactly what the one in Python yields, whatever lies in the spool."""

import json
import random
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from brokerless.core import DiskJournal, Frame, encode_frame
from brokerless.spark_collector import local
from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.collector.spool import NESTED
from brokerless.spark_collector.tier.parts import decode_part, encode_part
from brokerless.spark_collector.tier.uploader import TierUploader
from tests.conftest import Until
from tests.spark_collector.spools import BIG, fill, fill_journal, open_spool
from tests.spark_collector.twins import JVM, require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

TOPICS = ["a", "b.c", "größe", "\U0001f600/x", "t" * 255, "ü" * 255]
HEADERS: list[dict[str, str]] = [
    {},
    {"a": ""},
    {"größe": "\U0001f600", "b": "x" * 300},
    {str(n): "v" for n in range(64)},
]
TYPES = ["", "text/plain", "application/json", "текст"]


@pytest.fixture(autouse=True)
def _jvm(spark: "SparkSession") -> None:
    require(spark, JVM)


def random_frame(rng: random.Random, first: int, now: int) -> Frame:
    """A frame of any shape: topics, content types, keys, sizes, times ahead of now."""
    n = rng.choice([1, 2, 3, 17, 40, 300])
    names = rng.sample(TOPICS, min(n, rng.randint(1, 4)))
    index = list(range(len(names))) + [rng.randrange(len(names)) for _ in range(n - len(names))]
    rng.shuffle(index)
    sizes = [0, 1, 31, 32, 255, 256, 1000] if n > 3 else [0, 65_535, 65_536, 90_000]
    return encode_frame(
        rng.choice(["p", "zweite-größe"]),
        rng.choice([0, 1, 127, 128, 255, 256, 65_536, 1 << 33, (1 << 62) - 1]),
        first,
        topics=[(name, rng.choice([0, 200, 70_000, 1 << 40])) for name in names],
        topic_index=index,
        times=[now + rng.randint(-(10**9), 10**6) for _ in range(n)],
        datas=[rng.randbytes(rng.choice(sizes)) for _ in range(n)],
        content_types=rng.choice([None, [rng.choice(TYPES)] * n, [rng.choice(TYPES) for _ in range(n)]]),
        keys=rng.choice([None, [rng.choice(["", "k", "schlüssel" * 9]) for _ in range(n)]]),
        headers=rng.choice([None, [rng.choice(HEADERS) for _ in range(n)]]),
    )


def by_jvm(spark: "SparkSession", options: dict[str, str]) -> Any:
    """All rows, by Spark. Times are microseconds, because they may be of any year."""
    frame = spark.read.format(JVM).options(**options).load()
    micros = {column: f"unix_micros({column}) AS {column}" for column in ("time", "received")}
    return frame.selectExpr(*(micros.get(column, column) for column in frame.columns)).collect()


def by_python(_: object, options: dict[str, str]) -> Any:
    """All rows, by what the data source in Python yields; without Spark, which would take a second for each."""
    for batch in local.read_rows(options):
        columns = [c.cast("int64") if str(c.type).startswith("timestamp") else c for c in batch.columns]
        columns = [[dict(v) for v in c.to_pylist()] if c is columns[-1] else c.to_pylist() for c in columns]
        yield from zip(*columns, strict=True)


def outcome(spark: "SparkSession", read: Any, path: object, **options: str) -> Any:
    """All rows in order, or the name of the error."""
    try:
        rows = [tuple(row) for row in read(spark, {"path": str(path), "numPartitions": "2", **options})]
    except Exception as error:
        found = [w for w in ("FrameError", "Corrupt", "DataLoss") if w in f"{type(error).__name__}: {error}"]
        if not found:
            raise
        return found[0]
    return sorted(rows, key=lambda row: (row[:-1], sorted(row[-1].items())))


def compare(spark: "SparkSession", path: object, **options: str) -> Any:
    """Both must have the same; returns it."""
    ours, theirs = (outcome(spark, read, path, **options) for read in (by_jvm, by_python))
    assert ours == theirs
    return ours


def compare_lenient(spark: "SparkSession", path: object) -> Any:
    """The same where damage and loss are passed over, but for the time at which the loss was found."""
    ours, theirs = (
        [r[:5] + r[7:] for r in outcome(spark, read, path, onCorrupt="quarantine", failOnDataLoss="false")]
        for read in (by_jvm, by_python)
    )
    assert ours == theirs
    return ours


def test_any_spool(spark: "SparkSession", tmp_path: Path) -> None:
    """Frames of every shape and kind, alone and several in an outer frame, over many segments."""
    rng = random.Random(1)
    now = time.time_ns() // 1000
    count = 0
    with open_spool(tmp_path / "s", segment_bytes=256 * 1024) as spool:
        for n in range(120):
            kind = rng.choice(
                ["direct/event", "multicast/event", "direct/sent", "webhooks/ledger", "odd", "a/b/c"]
            )
            frames = [random_frame(rng, 1000 * n + 300 * m, now) for m in range(rng.choice([1, 1, 3]))]
            spool.append_many(kind, [f.raw for f in frames], NESTED, times=[now] * len(frames))
            count += sum(f.count for f in frames)
    rows = compare(spark, tmp_path / "s")
    assert len(rows) == count


def test_any_part_of_any_journal(spark: "SparkSession", tmp_path: Path) -> None:
    """A producer's own journal, from any offset to any other, also within frames of several topics."""
    rng = random.Random(2)
    path = str(tmp_path / "j")
    with DiskJournal(path, source="p", retention=BIG, fsync="never", segment_bytes=64 * 1024) as journal:
        while journal.next < 3000:
            datas = [rng.randbytes(rng.choice([0, 40, 400])) for _ in range(rng.choice([1, 5, 120]))]
            keys = rng.choice([None, ["k"] * len(datas)])
            journal.append_many(rng.choice(TOPICS[:-1]), datas, rng.choice(TYPES), keys=keys)
        for n in range(500):  # staged one by one: several topics in a frame
            journal.stage(rng.choice(TOPICS[:-1]), b"%d" % n)
        journal.flush()
        end = journal.next
    assert len(compare(spark, path)) == end
    for _ in range(6):
        first = rng.randrange(end)
        stop = rng.randint(first, end)
        bounds = {"startingOffsets": json.dumps({path: first}), "endingOffsets": json.dumps({path: stop})}
        assert [row[4] for row in sorted(compare(spark, path, **bounds), key=lambda r: r[4])] == list(
            range(first, stop)
        )


def test_damaged_frames_inside(spark: "SparkSession", tmp_path: Path) -> None:
    """A frame that a hostile producer made, its bytes changed anywhere: both refuse it, or both read the same."""
    rng = random.Random(3)
    now = time.time_ns() // 1000
    refused = 0
    for n in range(30):
        frame = random_frame(rng, 0, now)
        raw = bytearray(frame.raw)
        head = 16 + int.from_bytes(raw[4:8], "little")
        for _ in range(rng.choice([1, 1, 2])):
            raw[rng.choice([rng.randrange(4, head), rng.randrange(head, min(len(raw), head + 40))])] = (
                rng.choice([0, 1, 0x7F, 0x80, 0xC1, 0xD9, 0xDD, 0xFF, rng.randrange(256)])
            )
        with open_spool(tmp_path / f"s{n}") as spool:
            fill(spool, "p", 0, 20)
            spool.append("direct/event", bytes(raw), NESTED, time=now)
            fill(spool, "p", 20, 20)
        refused += compare(spark, tmp_path / f"s{n}") == "FrameError"
    assert 5 < refused < 30, "some were refused, some were not"


def test_damaged_files(spark: "SparkSession", tmp_path: Path) -> None:
    """Bytes changed anywhere in the files, a segment deleted, a tail cut: the same rows and the same lost rows."""
    rng = random.Random(4)
    for n in range(8):
        path = tmp_path / f"s{n}"
        with open_spool(path, segment_bytes=16 * 1024) as spool:
            fill(spool, "p", 0, 1500, size=40)
        segments = sorted(path.glob("*.seg"))
        victim = rng.choice(segments[1:])
        if n == 0:
            victim.unlink()
        elif n == 1:
            victim.write_bytes(victim.read_bytes()[: -rng.randrange(1, 2000)])
        else:
            raw = bytearray(victim.read_bytes())
            for _ in range(3):
                raw[rng.randrange(len(raw)) if n > 4 else rng.randrange(60)] ^= 1 << rng.randrange(8)
            victim.write_bytes(raw)
        compare_lenient(spark, path)
        if not 2 <= n <= 4:  # without its header, all the records of a segment are found all the same
            assert compare(spark, path) in ("Corrupt", "DataLoss")


def test_damaged_parts(spark: "SparkSession", tmp_path: Path) -> None:
    """Parts of a tier that are whole, changed anywhere, cut, gone, or hold a frame that is none: the same rows."""
    rng = random.Random(5)
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 1500, size=40)
        end = spool.next
    whole = tmp_path / "whole"
    made = TierUploader(str(tmp_path / "s"), f"file://{whole}", counters=CollectorCounters(), part_bytes=8192)
    made.start()
    made.stop()
    path = str(whole)
    assert len(compare(spark, path)) == 1500
    for first, stop in ((0, 1), (7, end - 3), (end - 1, end)):
        bounds = {"startingOffsets": json.dumps({path: first}), "endingOffsets": json.dumps({path: stop})}
        assert len(compare(spark, path, **bounds)) == 10 * (stop - first)
    for n in range(5):
        path = str(tmp_path / f"t{n}")
        shutil.copytree(whole, path)
        victim = rng.choice(sorted(Path(path, "parts").iterdir())[1:-1])
        raw = bytearray(victim.read_bytes())
        if n == 0:
            victim.unlink()
        elif n == 1:
            victim.write_bytes(raw[: -rng.randrange(1, 2000)])
        elif n == 2:  # as another version might write it: the part is intact, a frame is not
            header, frames = decode_part("", bytes(raw))
            broken = Frame(b"\xb5\x1e\x01" + b"?" * 60, frames[0].header)
            victim.write_bytes(encode_part(header, [frames[0], broken, *frames[1:]]))
        else:
            raw[rng.randrange(len(raw)) if n > 3 else rng.randrange(40)] ^= 1 << rng.randrange(8)
            victim.write_bytes(raw)
        ours = compare_lenient(spark, path)
        assert 1000 < len(ours) < 1500
        assert outcome(spark, by_jvm, path) == ("DataLoss" if n == 0 else "Corrupt")


def test_the_python_side_ends_with_the_jvm(until: Until) -> None:
    """It serves as long as its input is open, answers nonsense with an error, and is gone afterwards."""
    command = [sys.executable, "-m", "brokerless.spark_collector.source.server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(question: dict[str, Any]) -> tuple[bytes, bytes]:
            process.stdin.write(json.dumps(question).encode() + b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            letter = process.stdout.read(1)  # type: ignore[union-attr]
            return letter, process.stdout.read(int.from_bytes(process.stdout.read(4), "big"))  # type: ignore[union-attr]

        assert ask({"task": "ping"}) == (b"A", b"{}")
        assert ask({"task": "latest"})[0] == b"E"
        assert ask({"task": "plan", "options": {"path": "x", "nonsense": "1"}})[0] == b"E"
        assert ask({"task": "plan", "options": {"path": "x"}}) == (b"A", b'{"max_events":2000000}')
        letter, why = ask({"task": "fly"})
        assert letter == b"E"
        assert b"fly" in why
        letter, why = ask({"task": "initial"})
        assert letter == b"E"
        assert b"no spool or journal" in why
        process.stdin.close()
        until(lambda: process.poll() is not None, what="the end of the process")
        assert process.returncode == 0


def test_an_index_that_is_gone(spark: "SparkSession", tmp_path: Path) -> None:
    """What has to be passed over before the first row may be more than a batch; the rows come all the same."""
    path = str(tmp_path / "j")
    with DiskJournal(path, source="p", retention=BIG, fsync="never", segment_bytes=64 << 20) as journal:
        for _ in range(24):
            journal.append("a", bytes(1 << 20))
    for index in (tmp_path / "j").glob("*.idx"):
        index.unlink()
    frame = spark.read.format(JVM).options(numPartitions="1", startingOffsets=json.dumps({path: 20}))
    assert sorted(row.offset for row in frame.load(path).select("offset").collect()) == [20, 21, 22, 23]


def packed(header: list[Any], columns: list[Any], more_header: bytes = b"", more: bytes = b"") -> bytes:
    """A frame with entries at the end that this version does not know."""
    parts = []
    for values, extra in ((header, more_header), (columns, more)):
        raw = bytearray(msgspec.msgpack.encode(values))
        raw[0] += 1 if extra else 0
        parts.append(bytes(raw) + extra)
    prefix = b"\xb5\x1e\x01\x00" + struct.pack("<II", *map(len, parts))
    return prefix + struct.pack("<I", zlib.crc32(b"".join([prefix, *parts]))) + b"".join(parts)


@pytest.mark.parametrize(
    ("extra", "good"),
    [
        (b"\xd4\x01x", True),
        (b"\xd8\x01" + bytes(16), True),
        (b"\xc7\x03\x01abc", True),
        (b"\xc8\x00\x03\x01abc", True),
        (b"\xc9\x00\x00\x00\x03\x01abc", True),
        (b"\xdf\x00\x00\x00\x01\xa1a\x01", True),
        (b"\xdd\x00\x00\x00\x02\x01\xff", True),
        (b"\xdd\xff\xff\xff\xff", False),
        (b"\xdf\xff\xff\xff\xff", False),
        (b"\xdf\x80\x00\x00\x00", False),
        (b"\xc9\xff\xff\xff\xff\x01", False),
        (b"\xc6\xff\xff\xff\xff", False),
        (b"\x91" * 5000 + b"\x01", False),
    ],
    ids=lambda value: value[:3].hex() if isinstance(value, bytes) else None,
)
def test_entries_of_a_newer_version(spark: "SparkSession", tmp_path: Path, extra: bytes, good: bool) -> None:
    """Values of every kind are passed over, and what announces more than there is is refused, by both."""
    header = ["p", 1, 0, 1, [["a", 0, 1]], []]
    columns = [b"", bytes(8), [b"data"], b"", [], []]
    with open_spool(tmp_path / "s") as spool:
        for raw in (packed(header, columns, extra), packed(header, columns, b"", extra)):
            spool.append("direct/event", raw, NESTED, time=1)
    found = compare(spark, tmp_path / "s")
    assert len(found) == 2 if good else found == "FrameError"


@pytest.mark.parametrize(
    ("column", "good"),
    [
        (b"\x91\x81\xa1a\xa1b", True),
        (b"\x91\xde\x00\x01\xa1a\xa1b", True),
        (b"\x91\xdf\x00\x00\x00\x01\xa1a\xa1b", True),
        (b"\x91\x82\xa1a\xa1b\xa1a\xa1c", True),  # a name twice: the last value
        (b"\x91\xde\x00\x50" + b"\xa1a\xa1b" * 80, True),
        (msgspec.msgpack.encode([{str(n): "" for n in range(65)}]), False),
        (b"\x92\x80\x80", False),  # for two events
        (b"\x91\x81\xa1a\xc0", False),
        (b"\x91\x81\x01\xa1b", False),
        (b"\x91\x81\xa1\xff\xa1b", False),
        (b"\x91\x90", False),
        (b"\x91\xdf\xff\xff\xff\xff", False),
        (b"\x80", False),
    ],
    ids=lambda value: value[:4].hex() if isinstance(value, bytes) else None,
)
def test_columns_of_headers(spark: "SparkSession", tmp_path: Path, column: bytes, good: bool) -> None:
    """Both read the same headers, and refuse the same columns."""
    raw = packed(["p", 1, 0, 1, [["a", 0, 1]], []], [b"", bytes(8), [b"data"], b"", []], b"", column)
    with open_spool(tmp_path / "s") as spool:
        spool.append("direct/event", raw, NESTED, time=1)
    found = compare(spark, tmp_path / "s")
    assert len(found) == 1 if good else found == "FrameError"


class Reflected:
    """The package-private classes of the jar, by reflection."""

    def __init__(self, spark: "SparkSession") -> None:
        self.jvm: Any = spark._jvm
        self.gateway: Any = spark.sparkContext._gateway

    def array(self, kind: Any, values: list[Any]) -> Any:
        made = self.gateway.new_array(kind, len(values))
        for n, value in enumerate(values):
            made[n] = value
        return made

    def call(self, target: Any, name: str, method: str, *values: Any) -> Any:
        """Call a method that this name has once."""
        declared = self.jvm.java.lang.Class.forName(f"brokerless.spark.{name}").getDeclaredMethods()
        found = next(m for m in declared if m.getName() == method and m.getParameterCount() == len(values))
        found.setAccessible(True)
        return found.invoke(target, self.array(self.jvm.java.lang.Object, list(values)))

    def new(self, name: str, *values: Any) -> Any:
        made = self.jvm.java.lang.Class.forName(f"brokerless.spark.{name}").getDeclaredConstructors()[0]
        made.setAccessible(True)
        return made.newInstance(self.array(self.jvm.java.lang.Object, list(values)))

    def two_workers(self) -> bool:
        """Whether two that take one get different ones."""
        one, two = self.call(None, "Worker", "take"), self.call(None, "Worker", "take")
        different = not one.equals(two)
        for worker in (one, two):
            self.call(worker, "Worker", "end")
        return different


def test_given_back_twice(spark: "SparkSession", tmp_path: Path) -> None:
    """A planner and a reader that are closed twice give their process back once: no two queries share one."""
    java = Reflected(spark)
    fill_journal(tmp_path / "j", "p", 30)
    options = java.jvm.java.util.HashMap({"path": str(tmp_path / "j")})
    planner = java.new("Planner", options)
    assert java.call(planner, "Planner", "maxEvents") == 2_000_000
    for _ in range(2):
        java.call(planner, "Planner", "close")
    assert java.two_workers()
    with pytest.raises(Exception, match="the query has ended"):
        java.call(planner, "Planner", "maxEvents")
    salt = java.array(java.jvm.byte, [])
    partition = java.new("RangePartition", str(tmp_path / "j"), 0, 30, "p", 1, "", "", -1, 0, salt)
    frames = java.new("PythonFrames", partition, 0, options, False)
    while java.call(frames, "PythonFrames", "advance"):
        pass
    for _ in range(2):
        java.call(frames, "PythonFrames", "close")
    assert java.two_workers()


def test_given_back_with_an_answer_on_its_way(spark: "SparkSession", tmp_path: Path) -> None:
    """Such a process is ended: the next query would get the answer of the one before."""
    java = Reflected(spark)
    worker = java.call(None, "Worker", "take")
    request = java.jvm.com.fasterxml.jackson.databind.ObjectMapper().readTree('{"task": "ping"}')
    java.call(worker, "Worker", "send", request)
    java.call(worker, "Worker", "free")
    other = java.call(None, "Worker", "take")
    assert not other.equals(worker)
    java.call(other, "Worker", "end")


def test_stopped_while_a_publisher_is_away(spark: "SparkSession", tmp_path: Path, until: Until) -> None:
    """A query that waits for answers, several seconds for each address, is stopped at once."""
    away = ",".join(f"tcp://127.0.0.{n}:9" for n in range(1, 31))
    stream = spark.readStream.format(JVM).option("endpoint", away).load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
    until(lambda: query.status["isTriggerActive"], 60, "the first batch")
    time.sleep(0.5)  # it is waiting now, and will for a minute and a half
    begun = time.monotonic()
    query.stop()
    assert time.monotonic() - begun < 30
    assert query.exception() is None


def test_a_query_may_pause_for_longer_than_a_process_is_kept(until: Until) -> None:
    """Its planner waits for it, however long a batch takes; once the query has ended, the minute begins."""
    code = "from brokerless.spark_collector.source import server as s; s.IDLE_S = 0.2; s.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"task": "plan", "options": {"path": "x"}}\n')
        process.stdin.flush()
        assert process.stdout.read(1) == b"A"
        process.stdout.read(int.from_bytes(process.stdout.read(4), "big"))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.stdin.write(b'{"task": "free"}\n')
        process.stdin.flush()
        until(lambda: process.poll() is not None, what="the end of the process")
        assert process.stdout.read() == b""
