"""Who has what, who may dispatch, when a promotion is safe, and where two histories of a source part."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.journal.epoch import TERM
from brokerless.direct.protocol.promotion import (
    LEASE_MARGIN,
    LEASE_S,
    MirrorPositions,
    divergence,
    first_after,
    objection,
    quorum,
)


@given(st.integers(1, 16), st.data())
def test_those_who_promise_and_those_who_acknowledge_have_one_in_common(n: int, data: st.DataObject) -> None:
    """Whichever mirrors promise and whichever have an event: one that promised has it, and so knows of it."""
    k = data.draw(st.integers(1, n))
    q = quorum(n, k)
    assert 1 <= q <= n
    mirrors = range(n)
    acknowledged = set(data.draw(st.permutations(mirrors))[:k])
    promised = set(data.draw(st.permutations(mirrors))[:q])
    assert acknowledged & promised
    others = set(data.draw(st.permutations(mirrors))[:q])
    assert promised & others  # two promotions at once ask one mirror in common


@given(
    have=st.lists(st.integers(0, 100), min_size=1, max_size=8),
    k=st.integers(1, 8),
    promoted=st.integers(0, 7),
    silent=st.sets(st.integers(0, 7)),
    epoch=st.integers(1, 9),
)
def test_a_promoted_mirror_has_everything_that_was_mirrored(
    have: list[int], k: int, promoted: int, silent: set[int], epoch: int
) -> None:
    """If nothing speaks against a promotion, every event that K mirrors had is with the promoted one."""
    n = len(have)
    k, promoted = min(k, n), promoted % n
    answers: dict[str, tuple[int, int] | str] = {
        str(i): "away" if i in silent else (epoch, have[i]) for i in range(n) if i != promoted
    }
    if not objection((epoch, have[promoted]), answers, n, k):
        mirrored = sorted(have, reverse=True)[k - 1]
        assert have[promoted] >= mirrored


def test_what_speaks_against_a_promotion_is_named() -> None:
    """A mirror that has more, mirrors that do not answer, and a publisher that waits for none."""
    assert "c has more" in objection((1, 5), {"c": (1, 6)}, 2, 1)
    assert "away" in objection((1, 5), {"c": "away"}, 2, 1)
    assert "mirrored=0" in objection((1, 5), {"c": (1, 5)}, 2, 0)
    assert not objection((1, 5), {"c": (1, 5)}, 2, 1)
    assert not objection((1, 5), {}, 1, 1)


def test_a_publisher_dispatches_only_while_its_mirrors_follow() -> None:
    """What counts is when the answer was sent that a mirror echoes, not when the echo arrived."""
    positions = MirrorPositions(["b", "c"], 1)
    assert not positions.may_dispatch(0.0)
    number = positions.answering("b", 10.0)
    positions.echoed("b", number + 1)
    positions.echoed("stranger", number)
    assert not positions.may_dispatch(10.1)
    positions.echoed("b", number)  # arrives whenever
    assert positions.may_dispatch(10.0 + LEASE_S - 0.01)
    assert not positions.may_dispatch(10.0 + LEASE_S)


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 3.0)), min_size=1, max_size=20),
    st.floats(0.0, 10.0),
)
def test_nobody_dispatches_in_the_old_epoch_when_the_new_one_begins(
    exchanges: list[tuple[float, float]], promised: float
) -> None:
    """However long answers and echoes take: no echo from before the promise lasts until the promotion is over."""
    positions = MirrorPositions(["b"], 1)
    now = 0.0
    for pause, delay in exchanges:
        now += pause
        number = positions.answering("b", now)
        if now + delay >= promised:
            break  # the mirror promised before it had this answer: it does not echo it
        positions.echoed("b", number)
    assert not positions.may_dispatch(promised + LEASE_S * LEASE_MARGIN)


@given(st.lists(st.tuples(st.sampled_from("bcd"), st.integers(0, 50)), max_size=30), st.integers(1, 3))
def test_reached_is_what_so_many_mirrors_have(acks: list[tuple[str, int]], k: int) -> None:
    """It never goes back, strangers do not count, and `missing` names exactly those who lack an event."""
    positions = MirrorPositions(["b", "c", "d"], k)
    have: dict[str, int] = {}
    for address, offset in acks:
        before = positions.reached
        positions.acknowledged("stranger", 1000, 0)
        positions.acknowledged(address, 1000, positions.challenges[address] - 1)  # nobody has told it that
        moved = positions.acknowledged(address, offset, positions.challenges[address])
        have[address] = max(offset, have.get(address, 0))
        assert positions.reached == (sorted(have.values(), reverse=True)[k - 1] if len(have) >= k else 0)
        assert moved == (positions.reached > before)
    for offset in range(50):
        assert positions.missing(offset) == [a for a in "bcd" if have.get(a, 0) <= offset]


@given(
    common=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    ours=st.lists(st.integers(0, 5), max_size=3),
    theirs=st.lists(st.integers(0, 5), max_size=3),
)
def test_histories_part_where_the_first_epoch_differs(
    common: list[int], ours: list[int], theirs: list[int]
) -> None:
    """Each list has how many events each epoch has. The copy is right up to the first epoch of only one side."""
    lengths = itertools.accumulate(common)
    shared = [(i + 1, at) for i, at in enumerate([0, *lengths][: len(common)])]
    end = sum(common)

    def history(extra: list[int], base: int) -> tuple[list[tuple[int, int]], int]:
        epochs, at = list(shared), end
        for i, n in enumerate(extra):
            epochs.append((base + i, at))
            at += n
        return epochs, at

    own, own_end = history(ours, 100)
    their, _ = history(theirs, TERM)
    parts = min(own_end, end if (ours or theirs) else own_end)
    assert divergence(own, own_end, their) == parts


def test_a_copy_behind_or_ahead_in_one_epoch_is_a_prefix() -> None:
    """Without another epoch nothing is cut; a writer that was replaced earlier cuts at where the next one began."""
    assert divergence([(1, 0)], 50, [(1, 0)]) == 50
    assert divergence([(1, 0)], 50, [(1, 0), (TERM, 40)]) == 40
    assert divergence([(1, 0), (2, 50)], 50, [(1, 0), (TERM, 40), (TERM + 5, 90)]) == 40
    assert divergence([], 0, [(1, 0)]) == 0
    assert divergence([(7, 0)], 5, [(1, 0)]) == -1


def test_a_consumer_goes_on_where_the_epoch_after_its_own_began() -> None:
    """Two epochs later, what the one between them had is not skipped."""
    assert first_after([(1, 0), (2, 100), (3, 200)], 1, 200) == 100
    assert first_after([(1, 0), (2, 100), (3, 200)], 2, 200) == 200
    assert first_after([(2, 100), (3, 200)], 1, 200) == 100
    assert first_after([], 1, 200) == 200
