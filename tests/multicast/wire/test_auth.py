"""Authentication trailers."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.multicast.wire.auth import Freshness, Role, Signer, Verifier, signed_at
from brokerless.multicast.wire.pure import TRAILER_BYTES

KEY = b"0123456789abcdef"


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_signed_packet_is_verified_and_any_change_is_noticed(packet: bytes, data: st.DataObject) -> None:
    """One flipped bit anywhere, a wrong key, a cut or grown packet: None."""
    signed = packet + Signer(KEY, "group")(packet)
    assert len(signed) == len(packet) + TRAILER_BYTES
    verify = Verifier(KEY, "group")
    assert verify(memoryview(signed)) == packet
    changed = bytearray(signed)
    changed[data.draw(st.integers(0, len(signed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert verify(memoryview(bytes(changed))) is None
    assert verify(memoryview(signed[:-1])) is None
    assert verify(memoryview(signed + b"\0")) is None
    assert Verifier(b"x" * 16, "group")(memoryview(signed)) is None
    assert verify(memoryview(packet)) is None


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(["group", "request", "answer"], 2)))
def test_a_packet_of_one_kind_is_not_one_of_another(one: Role, other: Role) -> None:
    """A signed question is no heartbeat, an answer to one subscriber is none to the group, and so on."""
    packet = b"x" * 20
    signed = memoryview(packet + Signer(KEY, one)(packet))
    assert Verifier(KEY, one)(signed) == packet
    assert Verifier(KEY, other)(signed) is None


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_without_an_exception(noise: bytes) -> None:
    """Nobody guesses a tag."""
    assert Verifier(KEY, "group")(memoryview(noise)) is None


def test_no_time_is_used_twice_by_threads() -> None:
    """Threads that share a signer (TCP answers) never sign two packets with one time; none is new twice."""
    sign, fresh = Signer(KEY, "group", lambda: 5), Freshness(window_s=0)
    stamps: list[tuple[int, int]] = []
    new: list[bool] = []

    def work() -> None:
        for _ in range(300):
            stamp = signed_at(b"x" + sign(b"x"))
            stamps.append(stamp)
        new.extend(fresh.is_new(1, time) for time in range(1, 200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(stamps)) == 1200
    assert sum(new) <= 199


def test_a_short_key_is_refused() -> None:
    """Keys that can be guessed are a mistake."""
    with pytest.raises(ConfigError):
        Signer(b"short", "group")


def test_a_repeat_an_old_packet_and_one_of_the_future_are_not_new() -> None:
    """Each signer's times must rise, and be within the window of our clock."""
    now = 1_000_000_000
    fresh = Freshness(window_s=60, clock_us=lambda: now)
    assert fresh.is_new(1, now)
    assert not fresh.is_new(1, now)
    assert not fresh.is_new(1, now - 1)
    assert fresh.is_new(2, now - 1), "another signer"
    assert fresh.is_new(1, now + 59_000_000)
    assert not fresh.is_new(3, now + 61_000_000)
    assert not fresh.is_new(4, now - 61_000_000)


def test_in_one_stream_an_older_signer_is_refused() -> None:
    """What an earlier run of the publisher signed is older than what the present one did."""
    now = 1_000_000_000
    fresh = Freshness(window_s=60, one_stream=True, clock_us=lambda: now)
    assert fresh.is_new(2, now)
    assert not fresh.is_new(1, now - 10)
    assert fresh.is_new(1, now + 10)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 1000)), max_size=200), st.integers(1, 5))
def test_nothing_is_new_twice_however_many_signers_there_are(
    stamps: list[tuple[int, int]], max_signers: int
) -> None:
    """Forgetting signers, to bound memory, never makes a repeat new."""
    fresh = Freshness(window_s=0, max_signers=max_signers)
    accepted: set[tuple[int, int]] = set()
    for stamp in stamps:
        if fresh.is_new(*stamp):
            assert stamp not in accepted
            accepted.add(stamp)
