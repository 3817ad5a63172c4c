"""The compiled inner loops and the ones in Python do the same, byte by byte, on anything."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from time import monotonic
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brokerless.core.runtime.datagrams import enable_gro, probe_gso, send_segmented
from brokerless.multicast.wire import kernels as speed
from brokerless.multicast.wire import pure
from brokerless.multicast.wire.message import describe
from brokerless.multicast.wire.moldudp64 import HEADER, LENGTH, MAX_SEQUENCE

_speed = pytest.importorskip("brokerless.multicast._speed", reason="not compiled here")

SESSION = b"T000000001"
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
DATAS = st.lists(st.binary(max_size=40), min_size=1, max_size=40)


def test_the_compiled_ones_are_used_where_they_are() -> None:
    """A build that silently falls back would make every figure wrong."""
    assert speed.COMPILED is (os.environ.get("BROKERLESS_PURE", "") in ("", "0"))
    assert speed.unpack is (_speed.unpack if speed.COMPILED else pure.unpack)


def test_the_python_ones_can_be_forced() -> None:
    """BROKERLESS_PURE=1 runs the package without the compiled module."""
    code = "from brokerless.multicast.wire import kernels, pure; print(kernels.unpack is pure.unpack, kernels.COMPILED)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BROKERLESS_PURE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["True", "False"]


@given(st.lists(st.one_of(st.binary(max_size=9), st.just(bytearray(b"x")), st.just("x")), max_size=5))
def test_sizes_agree(datas: list[bytes]) -> None:
    """Smallest and largest, or None for what is not all bytes."""
    assert _speed.size_range(datas) == pure.size_range(datas)
    assert _speed.size_range(tuple(datas)) == pure.size_range(tuple(datas))
    assert _speed.size_range(iter(datas)) is None is pure.size_range(iter(datas))  # type: ignore[arg-type]


@given(
    first=st.integers(1, MAX_SEQUENCE - 100),
    seq=st.integers(0, 2**63),
    size=st.integers(0, 60),
    count=st.integers(1, 40),
    per_packet=st.integers(1, 12),
    cut=st.integers(0, 39),
    time=I64,
    topic=st.text("abc", min_size=1, max_size=9),
    data=st.data(),
)
def test_gso_batches_agree(
    first: int,
    seq: int,
    size: int,
    count: int,
    per_packet: int,
    cut: int,
    time: int,
    topic: str,
    data: st.DataObject,
) -> None:
    """Packing a run of one size gives the same bytes, and taking them apart the same events."""
    head = describe("", 7, topic, "", 0)
    datas = [os.urandom(size) for _ in range(count)]
    times = data.draw(st.sampled_from([time, [time] * count, list(range(count))]))
    start = min(cut, count - 1)
    args = (SESSION, first, head, seq, times, datas, start, count, per_packet)
    batch = pure.pack_gso_batch(*args)
    assert _speed.pack_gso_batch(*args) == batch
    n = min(per_packet, count - start)
    packet_bytes = 20 + n * (2 + len(head) + 16 + size)
    whole = batch[: len(batch) // packet_bytes * packet_bytes]
    header = pure.gso_batch_header(whole, packet_bytes)
    assert header == _speed.gso_batch_header(memoryview(whole), packet_bytes) == (SESSION, first, n)
    same(whole, packet_bytes, n, head, 0)
    found = _speed.unpack(whole, packet_bytes, n, head, 0)
    assert found is not None
    assert found[3] == datas[start : start + len(found[3])]


@given(U64, st.integers(0, 2**63), I64, DATAS, st.integers(0, 39), st.integers(0, 300))
def test_packets_agree(first: int, seq: int, time: int, datas: list[bytes], cut: int, limit: int) -> None:
    """Packing a run of any sizes gives the same packets, with what fits in each."""
    first = first % (MAX_SEQUENCE - 100)
    head = describe("src", 2**64 - 1, "topic", "text/plain", 0)
    start = min(cut, len(datas) - 1)
    args = (SESSION, first, head, seq, time, datas, start, len(datas), limit)
    packets = pure.pack_packets(*args)
    assert _speed.pack_packets(*args) == packets
    for packet in packets:
        count = HEADER.unpack_from(packet)[2]
        assert count == 1 or len(packet) <= limit
        same(packet, len(packet), count, head, 0)


@given(
    st.lists(st.tuples(st.integers(0, 80), U64, I64, st.binary(max_size=30)), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 3),
    st.data(),
)
def test_hostile_packets_agree(
    rows: list[tuple[int, int, int, bytes]], key_bytes: int, count: int, packets: int, data: st.DataObject
) -> None:
    """Lengths that lie, bytes that changed, keys that are no text: the same, and never an exception."""
    head = describe("", 1, "t", "", key_bytes)
    blocks = b""
    for lie, seq, time, rest in rows:
        message = (
            head + pure.STAMP.pack(seq, time) + data.draw(st.binary(min_size=key_bytes, max_size=key_bytes))
        )
        message += rest
        blocks += LENGTH.pack(len(message) if lie < 70 else lie * 3) + message
    packet = bytearray(HEADER.pack(SESSION, 1, count) + blocks)
    for _ in range(data.draw(st.integers(0, 2))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    batch = bytes(packet) * packets
    same(batch, len(packet), count, head, key_bytes)
    same(batch, data.draw(st.integers(-1, len(batch) + 1)), count, head, key_bytes)


@given(st.binary(max_size=200), st.integers(-1, 210), st.integers(-1, 70_000), st.integers(-1, 20))
@example(b"", 0, 0, 0)
def test_any_bytes_agree(batch: bytes, packet_bytes: int, count: int, key_bytes: int) -> None:
    """What is not ours at all is refused by both, whatever the arguments."""
    same(batch, packet_bytes, count, b"\xb1head", key_bytes)
    assert _speed.gso_batch_header(batch, packet_bytes) == pure.gso_batch_header(batch, packet_bytes)


@given(U64, st.integers(0, 0xFFFF), st.integers(1, 4), st.integers(0, 3))
def test_headers_agree(first: int, count: int, packets: int, wrong: int) -> None:
    """Packets in sequence, heartbeats, ends, sequences that run over 64 bits, and one that is out of line."""
    headers = [HEADER.pack(SESSION, (first + i * count) % 2**64, count) for i in range(packets)]
    if wrong == 1:
        headers[-1] = HEADER.pack(b"U000000001", first, count)
    elif wrong == 2:
        headers[-1] = HEADER.pack(SESSION, first, count ^ 1)
    batch = b"".join(header + b"xyz" for header in headers)
    assert _speed.gso_batch_header(batch, 23) == pure.gso_batch_header(batch, 23)


def arrive(packet: bytes, gro: bool, segment: int, *expected: bytes | int) -> tuple[object, object]:
    """What the compiled one and the one in Python say of a datagram (or GSO batch), and then of an empty socket."""
    said = []
    for implementation in (_speed, pure):
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inbound,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out,
        ):
            inbound.bind(("127.0.0.1", 0))
            inbound.setblocking(False)
            if gro:
                enable_gro(inbound)
            out.connect(inbound.getsockname())
            buffer = bytearray(65_536)
            if segment:
                send_segmented(out, packet, segment)
            else:
                out.send(packet)
            line, *found = implementation.wait_next((inbound,), (), 5 * 10**9, 0, buffer, *expected)
            assert line == 0
            assert buffer[: found[0]] == packet
            assert implementation.wait_next((inbound,), (), 0, 0, buffer, *expected) is None
            said.append(tuple(found))
    return said[0], said[1]


@given(
    session=st.sampled_from([SESSION, b"U000000001"]),
    first=st.sampled_from([0, 6, 7, 8, 2**63 - 1, 2**63, 2**64 - 1]),
    count=st.sampled_from([0, 1, 1, 1, 2, 0xFFFF]),
    head=st.sampled_from([b"head", b"heat", b""]),
    seq=st.one_of(st.integers(0, 9), U64),
    time=I64,
    data=st.binary(max_size=40),
    longer=st.integers(-3, 3),
    cut=st.integers(0, 70),
)
@example(SESSION, 7, 1, b"head", 3, -5, b"", 0, 0)
def test_the_next_packet_agrees(
    session: bytes,
    first: int,
    count: int,
    head: bytes,
    seq: int,
    time: int,
    data: bytes,
    longer: int,
    cut: int,
) -> None:
    """The packet that is expected is taken apart; what differs from it, is cut short or has something behind is not."""
    block = head + pure.STAMP.pack(seq, time) + data
    packet = HEADER.pack(session, first, count) + LENGTH.pack(max(0, len(block) + longer)) + block
    packet = packet[: len(packet) - cut] if cut < len(packet) else b""
    ours, theirs = arrive(packet, True, 0, SESSION, 7, b"head")
    assert ours == theirs
    good = (session, first, count, head, longer, cut) == (SESSION, 7, 1, b"head", 0, 0) and seq < MAX_SEQUENCE
    assert ours == (len(packet), len(packet) or 1, (seq, time, data) if good else None)


def test_nothing_is_taken_apart_for_who_expects_nothing() -> None:
    """No session, sequence or beginning to compare with: only the sizes are told, with receive offload and without."""
    block = b"head" + pure.STAMP.pack(1, 2) + b"data"
    packet = HEADER.pack(SESSION, 7, 1) + LENGTH.pack(len(block)) + block
    for expected in ((b"", 0, b""), (SESSION, 0, b"head"), (SESSION, 7, b"")):
        for gro in (False, True):
            assert arrive(packet, gro, 0, *expected) == ((len(packet), len(packet), None),) * 2


@pytest.mark.parametrize("implementation", [_speed, pure], ids=["compiled", "python"])
@pytest.mark.parametrize("spin_ns", [0, 10**10])
def test_a_wait_ends_in_time_and_by_other_descriptors(implementation: ModuleType, spin_ns: int) -> None:
    """Nothing is read when the time is over or something else is ready; closed sockets are passed over."""
    closed, other, buffer = socket.socket(), os.eventfd(0), bytearray(99)
    closed.close()
    try:
        for others in ((), (other, -1)):
            begun = monotonic()
            assert implementation.wait_next((closed,), others, 10**7, spin_ns, buffer, b"", 0, b"") is None
            assert monotonic() >= begun + 0.01
        os.eventfd_write(other, 1)
        begun = monotonic()
        assert implementation.wait_next((), (other,), 10**11, spin_ns * 10, buffer, b"", 0, b"") is None
        assert monotonic() < begun + 50
    finally:
        os.close(other)


@pytest.mark.parametrize("implementation", [_speed, pure], ids=["compiled", "python"])
@pytest.mark.parametrize("spin_ns", [0, 10**11])
def test_signals_are_handled_during_a_wait(implementation: ModuleType, spin_ns: int) -> None:
    """A handler runs at once: one that returns does not end the wait, one that raises does."""
    calls = []

    def handler(*_: object) -> None:
        calls.append(monotonic())
        if len(calls) == 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        begun = monotonic()
        with pytest.raises(KeyboardInterrupt):
            implementation.wait_next((), (), 10**11, spin_ns, bytearray(99), b"", 0, b"")
        assert monotonic() < begun + 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(calls) == 2


def test_a_gso_batch_is_told_by_the_size_of_its_packets() -> None:
    """With receive offload a batch arrives as one: its first packet is no lone event, even if it looks like one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if not (probe_gso(sock) and enable_gro(sock)):
            pytest.skip("this kernel has no UDP offload")
    block = b"head" + pure.STAMP.pack(1, 2) + b"data"
    packet = HEADER.pack(SESSION, 7, 1) + LENGTH.pack(len(block)) + block
    assert (
        arrive(packet * 3, True, len(packet), SESSION, 7, b"head")
        == ((3 * len(packet), len(packet), None),) * 2
    )


@given(
    head=st.binary(max_size=60),
    data=st.one_of(st.binary(max_size=60), st.integers(1900, 2100).map(bytes)),
    sequence=U64,
    seq=U64,
    time=I64,
)
def test_a_lone_event_is_sent_as_it_is_packed(
    head: bytes, data: bytes, sequence: int, seq: int, time: int
) -> None:
    """By every line up to the first that cannot take it at once: closed, or full. Larger ones are left to others."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
    packet = pure.pack_gso_batch(SESSION, sequence, head, seq, time, (data,), 0, 1, 1)
    try:
        lines = [out for out, _ in pairs]
        for sent in (3, 2, 0):
            if sent == 2:
                lines[2].close()
            elif sent == 0:
                lines[0].setblocking(False)
                with suppress(BlockingIOError):
                    while True:
                        lines[0].send(b"full")
                lines[0].setblocking(True)
            wanted = sent if len(packet) <= 2048 else 0
            assert _speed.send_lone(lines, SESSION, sequence, head, seq, time, data) == wanted
            for _, inbound in pairs[:wanted]:
                assert inbound.recv(65_536) == packet
        assert pure.send_lone(lines, SESSION, sequence, head, seq, time, data) == 0
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()
    with pytest.raises(TypeError, match="send_lone"):
        _speed.send_lone([], b"short", 1, b"", 0, 0, b"")
    with pytest.raises(OverflowError):
        _speed.send_lone([], SESSION, 1 << 64, b"", 0, 0, b"")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"session": b"short"}, ValueError),
        ({"datas": iter([b"x"])}, TypeError),
        ({"datas": [bytearray(b"x")]}, TypeError),
        ({"datas": [b"x", b"yy"], "stop": 2}, ValueError),
        ({"datas": [b"x" * 65_535]}, ValueError),
        ({"stop": 2}, ValueError),
        ({"start": 1}, ValueError),
        ({"start": -1}, ValueError),
        ({"times": []}, ValueError),
        ({"times": ["x"]}, TypeError),
        ({"times": [2**63]}, OverflowError),
        ({"per_packet": 0}, ValueError),
        ({"per_packet": 0xFFFF}, ValueError),
    ],
)
def test_misuse_is_an_error_and_not_a_crash(change: dict[str, object], error: type[Exception]) -> None:
    """The compiled packer checks what it is given."""
    good: dict[str, object] = {
        "session": SESSION,
        "first": 1,
        "head": b"h",
        "seq": 0,
        "times": 0,
        "datas": [b"x"],
        "start": 0,
        "stop": 1,
        "per_packet": 1,
    }
    assert _speed.pack_gso_batch(*good.values())
    with pytest.raises(error):
        _speed.pack_gso_batch(*{**good, **change}.values())


def same(batch: bytes, packet_bytes: int, count: int, head: bytes, key_bytes: int) -> None:
    ours = _speed.unpack(memoryview(batch), packet_bytes, count, head, key_bytes)
    theirs = pure.unpack(batch, packet_bytes, count, head, key_bytes)
    if theirs is None:
        assert ours is None
    else:
        assert ours is not None
        assert (list(ours[0]), *ours[1:]) == (list(theirs[0]), *theirs[1:])


@given(
    key=st.binary(min_size=1, max_size=32),
    buffer=st.binary(min_size=1, max_size=4000),
    packet_bytes=st.integers(1, 200),
    signer=U64,
    time=st.integers(0, 2**62),
    least=st.sampled_from([0, 1, 2]),
)
def test_signatures_agree(
    key: bytes, buffer: bytes, packet_bytes: int, signer: int, time: int, least: int
) -> None:
    """Any key and any packets: C with many at once (AVX-512, AVX2), C one by one, and Python sign the same."""
    prepared = _speed.mac_key(key, least)
    signed = _speed.sign_packets(prepared, buffer, packet_bytes, signer, time)
    assert signed == pure.sign_packets(pure.mac_key(key), buffer, packet_bytes, signer, time)
    whole = len(buffer) // packet_bytes * (packet_bytes + pure.TRAILER_BYTES)
    assert _speed.verify_packets(prepared, signed[:whole], packet_bytes + pure.TRAILER_BYTES) is (whole > 0)


@given(
    buffer=st.binary(min_size=1, max_size=300),
    packet_bytes=st.integers(1, 100),
    change=st.integers(0, 2**32),
    size=st.integers(-5, 200),
)
def test_verification_agrees(buffer: bytes, packet_bytes: int, change: int, size: int) -> None:
    """One changed bit, another length, no trailer: C and Python refuse and accept the same."""
    key, ours = b"k" * 16, _speed.mac_key(b"k" * 16)
    signed = bytearray(pure.sign_packets(key, buffer, packet_bytes, 1, 2))
    for batch in (bytes(signed), buffer):
        for length in (size, packet_bytes + pure.TRAILER_BYTES, len(batch)):
            agreed = pure.verify_packets(key, batch, length)
            assert _speed.verify_packets(ours, batch, length) is agreed
    signed[change // 8 % len(signed)] ^= 1 << change % 8
    length = packet_bytes + pure.TRAILER_BYTES
    assert _speed.verify_packets(ours, signed, length) is False
    assert pure.verify_packets(key, bytes(signed), length) is False


@pytest.mark.parametrize("packets", [1, 4, 5, 15, 16, 17, 33])
def test_long_messages_are_hashed_as_hashlib_does(packets: int) -> None:
    """Every length around the ends of blocks, up to the largest datagram, of one packet and of many at once."""
    for size in [*range(1, 200), 1399, 1400, 65_000 // packets]:
        batch = os.urandom(size * packets)
        expected = pure.sign_packets(b"k" * 32, batch, size, 7, 8)
        for least in (0, 1, 2):
            key = _speed.mac_key(b"k" * 32, least)
            assert _speed.sign_packets(key, batch, size, 7, 8) == expected
            assert _speed.verify_packets(key, expected, size + pure.TRAILER_BYTES)


def test_a_key_of_another_kind_is_refused() -> None:
    """Only what `mac_key` made is taken as a key."""
    with pytest.raises(ValueError, match="mac_key"):
        _speed.sign_packets(b"k" * 16, b"x", 1, 0, 0)
    with pytest.raises(ValueError, match="mac_key"):
        _speed.verify_packets(b"", b"x", 1)
    for size in (0, 33):
        for make in (_speed.mac_key, pure.mac_key):
            with pytest.raises(ValueError, match="1 to 32 bytes"):
                make(b"k" * size)
    with pytest.raises(ValueError, match="at least one byte"):
        _speed.sign_packets(_speed.mac_key(b"k"), b"", 1, 0, 0)
