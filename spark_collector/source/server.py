"""The Python side of the data source in the JVM: `python -m brokerless.spark_collector.source.server`.

Requests are lines of JSON on its input, and it ends with that. `plan` begins a query, whose questions follow.
`read` wants the frames of one partition that the JVM does not read itself: from a publisher's address, or from a
journal where something is unusual. `free` ends a query, without an answer. `sink` checks a query that writes, and
`append` appends one of its batches, whose bytes follow the line. Each answer is a letter, a big-endian length and so
many bytes: A an answer as JSON, F a frame, P a part of a remote tier, L a lost range, Z the end of them, E an error.
"""

import contextlib
import fcntl
import os
import select
import struct
import time
from typing import Any, BinaryIO

import msgspec

from brokerless.core import Frame
from brokerless.core.errors import BrokerlessError
from brokerless.spark_collector.collector.spool import is_nested, unnest
from brokerless.spark_collector.sink.batches import append_batch
from brokerless.spark_collector.sink.events import check_columns, parse_sink_options
from brokerless.spark_collector.source.discovery import location_of
from brokerless.spark_collector.source.locations import JournalLocation
from brokerless.spark_collector.source.options import SourceOptions, parse_options
from brokerless.spark_collector.source.planning import (
    UNLIMITED,
    Partition,
    Planner,
    check_allowed,
    dump_offsets,
    load_offsets,
    max_rows,
)
from brokerless.spark_collector.source.remote import RemoteLocation
from brokerless.spark_collector.source.rows import lost_row, range_row

_encode = msgspec.json.encode
_LENGTH = struct.Struct(">cI")
# Kept for the next query; then the memory is worth more than the fifth of a second that a new one takes.
IDLE_S = 60.0


class PlanServer:
    """Answers what the driver asks; keeps what a stream's planner keeps."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.planner = Planner(options)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One answer. Raises BrokerlessError."""
        planner = self.planner
        planner.cores = question.get("cores", planner.cores)
        match question["task"]:
            case "initial":
                return {"offsets": dump_offsets(planner.initial())}
            case "latest":
                most = question["max_events"]
                bytes_ = self.options.max_bytes if most else 0
                last = planner.latest(
                    load_offsets(question["start"]), 0 if most == UNLIMITED else most, bytes_
                )
                return {"offsets": dump_offsets(last)}
            case "fix_target":
                planner.fix_target({})
                return {}
            case "report":
                return {"offsets": dump_offsets(planner.newest())}
            case "behind":
                return {"behind": planner.backlog(load_offsets(question["done"]))}
            case "partitions":
                found = planner.partitions(load_offsets(question["start"]), load_offsets(question["end"]))
                return {"partitions": [self._task(partition) for partition in found]}
            case "everything":
                return {"partitions": [self._task(partition) for partition in planner.everything()]}
            case unknown:
                raise BrokerlessError(f"a question that this version does not know: {unknown}")

    def _task(self, partition: Partition) -> dict[str, Any]:
        found = _located(partition)
        if self.options.ranges and not partition.lost:
            row = range_row(partition.source, partition.epoch, partition.first, _encode(partition))
            found["lost"] = _encode(row | {"data": row["data"].decode(), "count": 0}).decode()
        return found


def _located(partition: Partition) -> dict[str, Any]:
    """A partition for the JVM: with the row if it is lost, and with its position in a journal's files."""
    found: dict[str, Any] = msgspec.to_builtins(partition) | {"segment": -1, "position": 0, "salt": ""}
    if partition.lost:
        found["lost"] = _lost(partition, partition.first, partition.stop - 1, partition.lost)
        return found
    location = location_of(partition.key)
    if isinstance(location, JournalLocation) and (where := location.locate(partition.first)) is not None:
        found["segment"], found["position"], found["salt"] = where
    return found


def _lost(partition: Partition, first: int, last: int, reason: str) -> str:
    row = lost_row(partition.source, partition.epoch, first, last, reason, time.time_ns() // 1000)
    return _encode(row | {"data": row["data"].decode(), "count": last - first + 1}).decode()


class ReadRequest(msgspec.Struct):
    """What an executor wants read. `parts`: the objects of a remote tier may come whole, and it checks them itself."""

    options: dict[str, str]
    key: str
    first: int
    stop: int
    source: str
    epoch: int
    id: str = ""
    parts: bool = False


class AppendRequest(msgspec.Struct):
    """A batch that a query writes; messages of these sizes follow."""

    options: dict[str, str]
    query: str
    batch: int
    sizes: list[int]


class Server:
    """One JVM's requests, one after the other."""

    def __init__(self, requests: BinaryIO, out: BinaryIO) -> None:
        self._requests = requests
        self._out = out
        self._plan: PlanServer | None = None

    @property
    def idle_s(self) -> float | None:
        """How long to wait for the next request: a query may think about a batch for as long as it likes."""
        return IDLE_S if self._plan is None else None

    def handle(self, line: bytes) -> None:
        """Answer one request; errors of ours are answers too."""
        try:
            request = msgspec.json.decode(line)
            match request["task"]:
                case "ping":
                    self._send(b"A", b"{}")
                case "plan":
                    self._plan = None  # with wrong options there is none
                    self._plan = PlanServer(parse_options(request["options"]))
                    self._send(b"A", _encode({"max_events": max_rows(self._plan.options)}))
                case "free":
                    self._plan = None
                case "sink":
                    check_columns(request["columns"], parse_sink_options(request["options"]).topic)
                    self._send(b"A", b"{}")
                case "append":
                    self._append(msgspec.convert(request, AppendRequest))
                case "read":
                    self._read(msgspec.convert(request, ReadRequest))
                case _ if self._plan is None:
                    raise BrokerlessError("a question about a query that was not begun")
                case _:
                    self._send(b"A", _encode(self._plan.answer(request)))
        except BrokerlessError as error:
            self._send(b"E", f"{type(error).__name__}: {error}".encode())
        self._out.flush()

    def _send(self, letter: bytes, body: bytes) -> None:
        self._out.write(_LENGTH.pack(letter, len(body)))
        self._out.write(body)

    def _append(self, request: AppendRequest) -> None:
        """Append one batch to a journal."""
        messages = [self._exactly(size) for size in request.sizes]
        options = parse_sink_options(request.options)
        self._send(b"A", _encode({"events": append_batch(options, messages, request.query, request.batch)}))

    def _exactly(self, size: int) -> bytes:
        held = bytearray()
        while len(held) < size:
            more = self._requests.read(size - len(held))
            if not more:
                raise BrokenPipeError
            held += more
        return bytes(held)

    def _read(self, request: ReadRequest) -> None:
        """Send the frames of one partition, checked, and the ranges of it that are gone."""
        options = parse_options(request.options)
        partition = Partition(
            request.key, request.first, request.stop, request.source, request.epoch, id=request.id
        )
        location = location_of(partition.key, options.storage_options)
        first = partition.first
        if request.parts and isinstance(location, RemoteLocation):
            first = self._send_parts(location, partition)
            if first >= partition.stop:
                self._send(b"Z", b"")
                return
        for part in location.frames(first, partition.stop, id=partition.id, epoch=partition.epoch):
            if isinstance(part, Frame):
                _check(part)
                self._send(b"F", part.raw)
            else:
                check_allowed(location, part, options)
                self._send(b"L", _lost(partition, part.first, part.last, part.reason).encode())
        self._send(b"Z", b"")

    def _send_parts(self, location: RemoteLocation, partition: Partition) -> int:
        """Send objects as they are, as long as none is missing; the offset after them."""
        first = partition.first
        for part, raw in location.objects(first, partition.stop, id=partition.id):
            if raw is None or part.first > first:
                break
            self._send(b"P", raw)
            first = part.next
        return first


def _check(frame: Frame) -> None:
    """Raise FrameError if its columns, or those of a frame inside it, are damaged."""
    frame.check()
    if is_nested(frame):
        for item in unnest(frame, frame.first_offset, frame.next_offset):
            item.frame.check()


def main() -> None:
    """Serve the JVM until it closes its side, or has had no query or task for a minute."""
    # The JVM listens to what was standard output; what a library prints must not get between.
    answers = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
    with contextlib.suppress(
        OSError
    ):  # fewer changes between the two processes; a limit of the user's may forbid it
        fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.dup2(2, 1)
    requests: Any = os.fdopen(0, "rb", buffering=0)  # unbuffered: `select` has to see what is there
    server = Server(requests, answers)
    try:
        while select.select([requests], [], [], server.idle_s)[0]:
            line = requests.readline()
            if not line:
                break
            server.handle(line)
    except (BrokenPipeError, KeyboardInterrupt):
        # The task or the query was stopped: nobody reads the rest.
        os._exit(0)


if __name__ == "__main__":
    main()
