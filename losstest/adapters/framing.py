"""Length-prefixed frames on a byte stream, with a marker to find the next frame after an incomplete one. Pure."""

import struct

_HEAD = struct.Struct("<4sI")
MARK = b"\xf5bl\n"
MAX_BODY = 1 << 24


def frame(body: bytes) -> bytes:
    """One frame."""
    return _HEAD.pack(MARK, len(body)) + body


class Deframer:
    """Bytes in, bodies out. Bytes that are no frame (the rest of an incomplete one) are skipped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the bodies that are complete."""
        self._buffer += data
        bodies: list[bytes] = []
        while True:
            at = self._buffer.find(MARK)
            if at < 0:
                self._buffer = self._buffer[-(len(MARK) - 1) :]
                return bodies
            if at:
                self._buffer = self._buffer[at:]
            if len(self._buffer) < _HEAD.size:
                return bodies
            _, size = _HEAD.unpack_from(self._buffer)
            if size > MAX_BODY:
                self._buffer = self._buffer[len(MARK) :]
                continue
            if len(self._buffer) < _HEAD.size + size:
                return bodies
            bodies.append(self._buffer[_HEAD.size : _HEAD.size + size])
            self._buffer = self._buffer[_HEAD.size + size :]
