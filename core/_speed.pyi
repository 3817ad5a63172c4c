"""The C module; see core/c/module.c. Every operation declines (None, False, -1) what is not the ordinary case."""

import builtins
from collections.abc import Callable
from typing import Any, TypeVar

from brokerless.core.journal.head_file import HeadFile

E = TypeVar("E")
R = TypeVar("R")

def crc32(data: bytes | bytearray | memoryview, value: int = 0, /) -> int: ...
def total_bytes(datas: list[bytes], /) -> int: ...
def pack_frame(
    source: str,
    epoch: int,
    first_offset: int,
    table: list[tuple[str, int, int]],
    contents: list[str],
    index: bytes,
    times: bytes,
    datas: list[bytes],
    content_index: bytes,
    keys: list[str],
    limit: int,
    headers: bytes,
    /,
) -> bytes | None: ...
def check_columns(
    raw: bytes, at: int, count: int, table: list[tuple[str, int, int]], contents: list[str], /
) -> bool: ...
def read_events(
    raw: bytes,
    at: int,
    count: int,
    table: list[tuple[str, int, int]],
    contents: list[str],
    source: str,
    epoch: int,
    first_offset: int,
    event: Callable[..., E],
    /,
) -> list[E] | None: ...
def read_single(raw: bytes, source: str, epoch: int, offset: int, event: Callable[..., E], /) -> E | None: ...

class Receiver:
    def __new__(cls, batch: int, slot: int, /) -> Receiver: ...
    def read(self, fd: int, /) -> tuple[list[builtins.bytes], list[int]]: ...

class Topic:
    def __init__(self, name: str, prefix: bytes, next_seq: int = 0) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def prefix(self) -> bytes: ...
    next_seq: int

class Batch:
    @property
    def first(self) -> int: ...
    @property
    def next(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    room: int
    def __len__(self) -> int: ...
    def topics(self) -> dict[str, int]: ...
    def columns(self) -> Any: ...
    def table(self) -> list[tuple[str, int, int]]: ...
    def single(self, source: str, epoch: int, /) -> builtins.bytes | None: ...

class Stage:
    def __init__(self, receipt: Callable[[int, int, int], Any], max_event_bytes: int) -> None: ...
    batch: Batch
    topics: dict[str, Topic]
    epoch: int
    keeps: bool
    kept_bytes: int
    @property
    def kept(self) -> list[tuple[bytes, int, str, int]]: ...
    def put(self, topic: str, data: bytes, time: int | None, /) -> Any: ...
    def add(
        self, topic: Topic, data: bytes, content_type: str, key: str, time: int, prefix: bytes, /
    ) -> Any: ...
    def begin(self, first: int, /) -> Batch: ...
    def mend(self) -> None: ...
    def attach(self, head: HeadFile, /) -> None: ...
    def detach(self) -> None: ...
    def take(self) -> None: ...
    def give(self, token: None, /) -> None: ...

class Lane:
    def __init__(
        self,
        stage: Stage,
        source: str,
        otherwise: Callable[..., Any],
        flush: Callable[[int], None],
        arm: Callable[[int], None],
        send_single: Callable[[builtins.bytes], None] | None,
    ) -> None: ...
    due: int
    pause: int
    credit: int
    armed: bool
    def __call__(self, topic: str, data: bytes, *args: Any, **kwargs: Any) -> Any: ...
