"""The Python side of the data source in the JVM: `python -m brokerless.spark_collector.server plan|read`.

`plan` answers questions of the driver, one JSON line each, until its input ends. `read` sends one executor the
frames of one piece that the JVM does not read itself: from a publisher's address, or from a journal where
something is unusual. Each message is a letter, a big-endian length and so many bytes: F a frame, L a lost
range, E an error, Z the end.
"""

import os
import struct
import sys
import time
from typing import Any, BinaryIO

import msgspec

from brokerless.core import Frame
from brokerless.core.errors import BrokerlessError
from brokerless.spark_collector.options import SourceOptions, parse_options
from brokerless.spark_collector.places import JournalPlace, place_of
from brokerless.spark_collector.planning import Marks, Piece, Planner, dump_marks, load_marks, refuse
from brokerless.spark_collector.rows import lost_row
from brokerless.spark_collector.spool import is_nested, unnest

_encode = msgspec.json.encode
_LENGTH = struct.Struct(">cI")


class PlanServer:
    """Answers what the driver asks; keeps what a stream's planner keeps."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.planner = Planner(options)
        self._last: Marks = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One answer. Raises BrokerlessError."""
        planner = self.planner
        match question["ask"]:
            case "initial":
                return {"marks": dump_marks(planner.initial())}
            case "latest":
                self._last = planner.latest(load_marks(question["start"]), question["max_events"])
                return {"marks": dump_marks(self._last)}
            case "aim":
                planner.aim({})
                return {}
            case "report":
                held = planner.extents(self._last)
                return {"marks": dump_marks({key: e.mark(e.next) for key, e in held.items()})}
            case "pieces":
                found = planner.pieces(load_marks(question["start"]), load_marks(question["end"]))
                return {"pieces": [_located(piece) for piece in found]}
            case "everything":
                return {"pieces": [_located(piece) for piece in planner.everything()]}
            case unknown:
                raise BrokerlessError(f"a question that this version does not know: {unknown}")


def _located(piece: Piece) -> dict[str, Any]:
    """A piece for the JVM: with the row if it is lost, and with its position in a journal's files."""
    found = msgspec.to_builtins(piece) | {"segment": -1, "position": 0, "salt": ""}
    if piece.lost:
        found["lost"] = _lost(piece, piece.first, piece.stop - 1, piece.lost)
        return found
    place = place_of(piece.key)
    if isinstance(place, JournalPlace) and (where := place.locate(piece.first)) is not None:
        found["segment"], found["position"], found["salt"] = where
    return found


def _lost(piece: Piece, first: int, last: int, reason: str) -> str:
    row = lost_row(piece.source, piece.epoch, first, last, reason, time.time_ns() // 1000)
    return _encode(row | {"data": row["data"].decode()}).decode()


def plan(questions: BinaryIO, answers: BinaryIO) -> None:
    """Serve one driver until it closes its side."""
    server: PlanServer | None = None
    for line in questions:
        try:
            asked = msgspec.json.decode(line)
            if server is None:
                server = PlanServer(parse_options(asked))
                found: dict[str, Any] = {"max_events": server.options.max_events}
            else:
                found = server.answer(asked)
        except BrokerlessError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(_encode(found) + b"\n")
        answers.flush()


class ReadRequest(msgspec.Struct):
    """What an executor wants read."""

    options: dict[str, str]
    key: str
    first: int
    stop: int
    source: str
    epoch: int


def read(request: ReadRequest, out: BinaryIO) -> None:
    """Send the frames of one piece, checked, and the ranges of it that are gone."""
    options = parse_options(request.options)
    piece = Piece(request.key, request.first, request.stop, request.source, request.epoch)
    place = place_of(piece.key)

    def send(letter: bytes, body: bytes) -> None:
        out.write(_LENGTH.pack(letter, len(body)))
        out.write(body)

    try:
        for part in place.frames(piece.first, piece.stop):
            if isinstance(part, Frame):
                _check(part)
                send(b"F", part.raw)
            else:
                refuse(place, part, options)
                send(b"L", _lost(piece, part.first, part.last, part.reason).encode())
        send(b"Z", b"")
    except BrokerlessError as error:
        send(b"E", f"{type(error).__name__}: {error}".encode())
    out.flush()


def _check(frame: Frame) -> None:
    """Raise FrameError if its columns, or those of a frame inside it, are damaged."""
    frame.check()
    if is_nested(frame):
        for item in unnest(frame, frame.first_offset, frame.next_offset):
            item.frame.check()


def main() -> None:
    """Do what the JVM asks for; whoever ends it is not told."""
    # The JVM speaks on these; whatever a library prints must not get between.
    answers = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
    os.dup2(2, 1)
    try:
        if sys.argv[1:] == ["plan"]:
            plan(sys.stdin.buffer, answers)
        elif sys.argv[1:] == ["read"]:
            read(msgspec.json.decode(sys.stdin.buffer.read(), type=ReadRequest), answers)
        else:
            sys.exit("usage: python -m brokerless.spark_collector.server plan|read, with the JVM at the other end")
    except (BrokenPipeError, KeyboardInterrupt):
        # The task or the query was stopped: nobody reads the rest.
        os._exit(0)


if __name__ == "__main__":
    main()
