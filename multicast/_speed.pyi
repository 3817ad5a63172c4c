from collections.abc import Sequence

def size_range(datas: Sequence[bytes], /) -> tuple[int, int] | None: ...
def pack_train(
    session: bytes,
    first_sequence: int,
    head: bytes,
    seq: int,
    times: int | Sequence[int],
    datas: Sequence[bytes],
    start: int,
    stop: int,
    per_packet: int,
    /,
) -> bytes: ...
def pack_packets(
    session: bytes,
    first_sequence: int,
    head: bytes,
    seq: int,
    times: int | Sequence[int],
    datas: Sequence[bytes],
    start: int,
    stop: int,
    limit: int,
    /,
) -> list[bytes]: ...
def train_header(train: bytes | memoryview, packet_bytes: int, /) -> tuple[bytes, int, int] | None: ...
def unpack(
    train: bytes | memoryview, packet_bytes: int, count: int, head: bytes, key_bytes: int, /
) -> tuple[Sequence[int], list[int], list[str], list[bytes]] | None: ...
