"""Payloads: known again when whole, not when damaged."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest.evidence import payload

u63 = st.integers(0, 2**63 - 1)


@given(run=u63, n=u63, size=st.integers(0, 300), extra=st.binary(max_size=30))
def test_round_trip_and_search(run: int, n: int, size: int, extra: bytes) -> None:
    """Decoded it is the same event, of the wanted size; the relay finds it inside a larger packet."""
    data = payload.encode(run, 0, n, size)
    assert len(data) == max(size, payload.MIN_SIZE)
    assert payload.decode(data) == payload.Tag(run, 0, n)
    assert payload.find(extra.replace(b"b", b"") + data + data, run) == [n, n]
    assert payload.find(data, run ^ 1) == []


@given(n=u63, at=st.integers(0, 59), flip=st.integers(1, 255))
def test_damage_is_noticed(n: int, at: int, flip: int) -> None:
    """A payload with any byte changed is not decoded."""
    data = bytearray(payload.encode(5, 0, n, 60))
    data[at] ^= flip
    assert payload.decode(bytes(data)) is None


@given(st.binary(max_size=100))
def test_noise_is_no_payload(data: bytes) -> None:
    """Random bytes are no event."""
    assert payload.decode(data) is None


def test_probes_are_no_events() -> None:
    """A probe is decoded as one, and is not found by the relay."""
    data = payload.encode(5, payload.PROBE, 3, 60)
    tag = payload.decode(data)
    assert tag is not None
    assert tag.probe
    assert payload.find(data, 5) == []
