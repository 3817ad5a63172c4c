from collections.abc import Sequence

def size_range(datas: Sequence[bytes], /) -> tuple[int, int] | None: ...
def pack_gso_batch(
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
def gso_batch_header(batch: bytes | memoryview, packet_bytes: int, /) -> tuple[bytes, int, int] | None: ...
def unpack(
    batch: bytes | memoryview, packet_bytes: int, count: int, head: bytes, key_bytes: int, /
) -> tuple[Sequence[int], list[int], list[str], list[bytes]] | None: ...
def mac_key(key: bytes, least: int = 0, /) -> bytes: ...
def sign_packets(key: bytes, buffer: bytes, packet_bytes: int, signer: int, time_us: int, /) -> bytes: ...
def verify_packets(key: bytes, batch: bytes | memoryview, packet_bytes: int, /) -> bool: ...
