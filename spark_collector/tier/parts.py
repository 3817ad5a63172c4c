"""The objects of a remote tier; pure.

    <url>/parts/000000000012     frames of consecutive offsets, numbered without holes, never changed
    <url>/manifests/00000001     which parts hold which offsets: 1,000 parts each; only the newest one changes
    <url>/newest                 the newest manifest, so that planning reads one object and lists nothing
    <url>/state                  which events of producers the parts hold, so that another machine can go on

A part is created only if there is none with its number, so that of two writers of one tier one is refused. Manifests
are an index of the parts and can be made again from them.
"""

import struct
from typing import Any

import msgspec

from brokerless.core import Frame
from brokerless.core.errors import Fault, FrameError
from brokerless.core.frame import PREFIX_BYTES, frame_length
from brokerless.core.runtime.crc import crc32

PARTS_PER_MANIFEST = 1000
NEWEST = "newest"
STATE = "state"
_MAGIC = b"BLPART1\n"
_LENGTHS = struct.Struct("<8sIII")  # magic, length of the header, CRC of the header, CRC of the frames


class PartDamaged(Fault):
    """An object of a remote tier is not what it should be; `key` names it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class PartHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a part says of itself. `id` is that of the journal, `writer` of the process that wrote it."""

    number: int
    id: str
    writer: str
    first: int
    next: int
    events: int
    time: int = 0


class PartEntry(msgspec.Struct, frozen=True, array_like=True):
    """A part in a manifest: offsets `[first, next)`, how many events of producers these are, and their bytes.

    `time` is that of the first offset, in µs; 0 in tiers of earlier versions.
    """

    number: int
    first: int
    next: int
    events: int
    time: int = 0
    bytes: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """The parts of one journal, from number `index * PARTS_PER_MANIFEST` on."""

    id: str
    source: str
    epochs: list[tuple[int, int]]
    index: int
    oldest: int
    parts: list[PartEntry] = []
    # After another machine took the tier over, or a power cut took back what was uploaded: the local journal, whose
    # offsets are `shift` less, the offset of the tier at which it begins, and the epochs before.
    local: str = ""
    shift: int = 0
    joined: int = 0
    inherited: list[tuple[int, int]] = []

    @property
    def local_id(self) -> str:
        """The id of the journal that is uploaded."""
        return self.local or self.id

    @property
    def next(self) -> int:
        """The offset after the newest part."""
        return self.parts[-1].next if self.parts else self.oldest


class TierState(msgspec.Struct, frozen=True, array_like=True):
    """What a collector has seen, when everything before offset `next` was in the tier."""

    next: int
    seen: bytes


def part_key(number: int) -> str:
    """The name of a part."""
    return f"parts/{number:012d}"


def manifest_key(index: int) -> str:
    """The name of a manifest that is full."""
    return f"manifests/{index:08d}"


def decode_manifest(key: str, raw: Any) -> Manifest:
    """A manifest. Raises PartDamaged."""
    try:
        return msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise PartDamaged(
            key, f"is damaged ({error}): restore an earlier version, later parts are found by their numbers"
        ) from None


def encode_part(header: PartHeader, frames: list[Frame]) -> bytes:
    """A part as bytes."""
    head = msgspec.msgpack.encode(header)
    body = b"".join(frame.raw for frame in frames)
    return _LENGTHS.pack(_MAGIC, len(head), crc32(head), crc32(body)) + head + body


def decode_header(key: str, raw: bytes) -> tuple[PartHeader, int]:
    """The header of a part, and where its frames begin. Raises PartDamaged."""
    if len(raw) < _LENGTHS.size or raw[:8] != _MAGIC:
        raise PartDamaged(key, "is not a part of a spool")
    _, length, crc, _ = _LENGTHS.unpack_from(raw)
    head = raw[_LENGTHS.size : _LENGTHS.size + length]
    if len(head) != length or crc32(head) != crc:
        raise PartDamaged(key, "its header is damaged")
    try:
        return msgspec.msgpack.decode(head, type=PartHeader), _LENGTHS.size + length
    except msgspec.MsgspecError:
        raise PartDamaged(key, "its header is damaged") from None


def decode_part(key: str, raw: bytes) -> tuple[PartHeader, list[Frame]]:
    """The header and the frames of a part, checked as a whole. Raises PartDamaged."""
    header, at = decode_header(key, raw)
    if crc32(memoryview(raw)[at:]) != _LENGTHS.unpack_from(raw)[3]:
        raise PartDamaged(key, "its frames are damaged")
    frames = []
    try:
        while at < len(raw):
            end = at + frame_length(raw[at : at + PREFIX_BYTES])
            frames.append(Frame.parse(raw[at:end], verify=False))
            at = end
    except FrameError as error:
        raise PartDamaged(key, str(error)) from None
    return header, frames
