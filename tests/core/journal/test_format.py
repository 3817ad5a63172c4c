"""The documented format of journals: its vectors, and a decoder that was written from the page alone."""

import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from brokerless.core import DiskJournal, Event, Frame, encode_frame
from brokerless.core.errors import FrameError
from brokerless.core.journal.head_file import NEXT, HeadFile
from brokerless.core.journal.segment import Snapshot, encode_header, index_entry

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "journal-format.md"
T = 1_700_000_000_000_000


def vectors() -> dict[str, bytes]:
    """The blocks of hex on the page, by name."""
    found = re.findall(r"```hex (\S+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return {name: bytes.fromhex(text) for name, text in found}


# -- a reader, from the page ---------------------------------------------------------------------------------


def decode_frame(raw: bytes) -> list[tuple[Any, ...]]:
    """Events as `(source, epoch, offset, topic, seq, time, data, content type, key, headers)`."""
    magic, version, _, header_bytes, body_bytes, crc = struct.unpack_from("<2sBBIII", raw)
    assert (magic, version) == (b"\xb5\x1e", 1)
    assert len(raw) == 16 + header_bytes + body_bytes
    assert zlib.crc32(raw[:12] + raw[16:]) == crc
    source, epoch, first, count, topics, contents = msgspec.msgpack.decode(raw[16 : 16 + header_bytes])
    index, times, datas, content_index, keys, *newer = msgspec.msgpack.decode(raw[16 + header_bytes :])
    headers = newer[0] if newer else []
    which = struct.unpack(f"<{count}H", index) if index else [0] * count
    content = struct.unpack(f"<{count}H", content_index) if content_index else [0] * count
    stamps = struct.unpack(f"<{count}q", times)
    seqs = [topic[1] for topic in topics]
    events = []
    for i in range(count):
        at = which[i]
        kind = contents[content[i]] if contents else ""
        key = keys[i] if keys else ""
        extra = headers[i] if headers else {}
        row = topics[at][0], seqs[at], stamps[i], datas[i], kind, key, extra
        events.append((source, epoch, first + i, *row))
        seqs[at] += 1
    return events


def decode_segment(raw: bytes, salt: bytes) -> Iterator[list[tuple[Any, ...]]]:
    """The frames of a segment that is not damaged."""
    magic, version, _, found, _, _, length = struct.unpack_from("<8sHH4sQQI", raw)
    assert (magic, version, found) == (b"BLSEGMT\x00", 1, salt)
    (crc,) = struct.unpack_from("<I", raw, 36)
    assert zlib.crc32(raw[:36] + raw[40 : 40 + length]) == crc
    at = 40 + length
    while at < len(raw):
        assert raw[at : at + 4] == salt
        header_bytes, body_bytes = struct.unpack_from("<II", raw, at + 8)
        end = at + 4 + 16 + header_bytes + body_bytes
        yield decode_frame(raw[at + 4 : end])
        at = end


def decode_word(raw: bytes) -> int | None:
    """The value of a word of the head."""
    (word,) = struct.unpack("<Q", raw)
    value = int(word) & 0xFFFF_FFFF_FFFF
    check = ((value ^ 0x5BD1E995A5A5) * 0x9E3779B97F4A7C15 >> 40) & 0xFFFF
    return value if word >> 48 == check else None


# -- the vectors ---------------------------------------------------------------------------------------------


def test_frame_vectors() -> None:
    """Our encoder writes the bytes of the page, and both decoders read them alike."""
    one = encode_frame("src", 7, 100, topics=[("a", 5)], topic_index=None, times=[T], datas=[b"hello"])
    three = encode_frame(
        "src",
        7,
        101,
        topics=[("a", 6), ("b", 0)],
        topic_index=[0, 1, 0],
        times=[T + 1, T + 2, T + 3],
        datas=[b"1", b"", b"\x00\xff"],
        content_types=["", "text/plain", ""],
        keys=["", "k", ""],
    )
    headed = encode_frame(
        "src",
        7,
        104,
        topics=[("a", 8)],
        topic_index=None,
        times=[T, T],
        datas=[b"x", b"y"],
        headers=[{"traceparent": "00-ab-cd-01"}, {}],
    )
    assert headed.raw == vectors()["frame-headers"]
    assert one.raw == vectors()["frame-one"]
    assert three.raw == vectors()["frame-three"]
    for name in ("frame-one", "frame-three", "frame-headers"):
        raw = vectors()[name]
        assert [msgspec.structs.astuple(event) for event in Frame.parse(raw).events()] == decode_frame(raw)
    assert decode_frame(three.raw)[1] == ("src", 7, 102, "b", 0, T + 2, b"", "text/plain", "k", {})


def test_vectors_of_files(tmp_path: Path) -> None:
    """Segment header, index entry and a word of the head."""
    header = encode_header(bytes.fromhex("0a0b0c0d"), 3, 100, Snapshot(7, {"a": 5}))
    assert header == vectors()["segment-header"]
    assert index_entry(100, len(header)) == vectors()["index-entry"]
    assert list(decode_segment(header, bytes.fromhex("0a0b0c0d"))) == []
    head = HeadFile(str(tmp_path / "head"), create=True)
    head.set(NEXT, 104)
    assert bytes(head.map[8:16]) == vectors()["head-word"]
    head.close()
    assert decode_word(vectors()["head-word"]) == 104
    assert decode_word(b"\x00" * 8) is None


@pytest.mark.parametrize("changed", [0, 2, 4, 20, 40])
def test_a_changed_byte_is_noticed(changed: int) -> None:
    """By either decoder, before anything of it is used."""
    raw = bytearray(vectors()["frame-one"])
    raw[changed] ^= 1
    with pytest.raises(AssertionError):
        decode_frame(bytes(raw))
    with pytest.raises(FrameError):
        Frame.parse(bytes(raw))


def test_a_journal_is_read_by_a_decoder_from_the_page(tmp_path: Path) -> None:
    """Every event of a journal of several segments, with all that an event can have."""
    written: list[Event] = []
    with DiskJournal(tmp_path, source="s", fsync="never", segment_bytes=4096) as journal:
        for i in range(200):
            journal.append(
                f"t{i % 7}", b"%d" % i * (i % 50), "text/plain" if i % 3 else "", f"k{i}" if i % 2 else ""
            )
        journal.append_many("many", [b"x"] * 500, keys=["k"] * 500)
        for i in range(50):
            journal.stage(f"t{i % 7}", b"staged")
        journal.flush()
        journal.register("reader", 12)
        at = 0
        while at < journal.next:
            chunk = journal.read(at)
            written += [event for frame in chunk.frames for event in frame.events()]
            at = chunk.next
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert (meta["format"], meta["source"]) == (1, "s")
    salt = bytes.fromhex(meta["salt"])
    found = [
        event
        for path in sorted(tmp_path.glob("*.seg"))
        for frame in decode_segment(path.read_bytes(), salt)
        for event in frame
    ]
    assert found == [msgspec.structs.astuple(event) for event in written]
    head = (tmp_path / "head").read_bytes()
    assert head[:8] == b"BLHEAD\x00\x01"
    assert decode_word(head[8:16]) == len(found)
    slot = (tmp_path / "cursors").read_bytes()[:512]
    position, _, crc, length = struct.unpack_from("<QQIH", slot)
    assert (position, slot[22 : 22 + length], crc) == (12, b"reader", zlib.crc32(b"reader"))
