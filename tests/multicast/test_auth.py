"""Authentication trailers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.multicast.auth import TRAILER_BYTES, opener, sealer

KEY = b"0123456789abcdef"


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_sealed_packet_opens_and_any_change_is_noticed(packet: bytes, data: st.DataObject) -> None:
    """One flipped bit anywhere, a wrong key, a cut or grown packet: None."""
    sealed = packet + sealer(KEY)(packet)
    assert len(sealed) == len(packet) + TRAILER_BYTES
    unseal = opener(KEY)
    assert unseal(memoryview(sealed)) == packet
    changed = bytearray(sealed)
    changed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert unseal(memoryview(bytes(changed))) is None
    assert unseal(memoryview(sealed[:-1])) is None
    assert unseal(memoryview(sealed + b"\0")) is None
    assert opener(b"x" * 16)(memoryview(sealed)) is None
    assert unseal(memoryview(packet)) is None


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_without_an_exception(noise: bytes) -> None:
    """Nobody guesses a tag."""
    assert opener(KEY)(memoryview(noise)) is None


def test_a_short_key_is_refused() -> None:
    """Keys that can be guessed are a mistake."""
    with pytest.raises(ConfigError):
        sealer(b"short")
