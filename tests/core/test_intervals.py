"""IntervalSet against a plain set."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import IntervalSet

ranges = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda t: (t[0], t[0] + t[1]))
steps = st.lists(st.tuples(st.sampled_from(["add", "remove"]), ranges), max_size=40)


def numbers(intervals: IntervalSet) -> set[int]:
    return {n for a, b in intervals for n in range(a, b + 1)}


@given(steps)
def test_add_and_remove_behave_like_a_set(script: list[tuple[str, tuple[int, int]]]) -> None:
    """Any sequence of additions and removals gives the set's contents, and returns how many changed."""
    real, model = IntervalSet(), set()
    for what, (first, last) in script:
        touched = set(range(first, last + 1))
        if what == "add":
            assert real.add(first, last) == len(touched - model)
            model |= touched
        else:
            assert real.remove(first, last) == len(touched & model)
            model -= touched
        assert numbers(real) == model
        assert real.total == len(model)
        pairs = list(real)
        assert all(b + 1 < c for (_, b), (c, _) in pairwise(pairs))


@given(steps, ranges)
def test_overlap_and_missing_split_a_range(
    script: list[tuple[str, tuple[int, int]]], wanted: tuple[int, int]
) -> None:
    """Overlap and missing of a range are disjoint and together are the range."""
    real = IntervalSet()
    for what, (first, last) in script:
        getattr(real, what)(first, last)
    inside = {n for a, b in real.overlap(*wanted) for n in range(a, b + 1)}
    outside = {n for a, b in real.missing(*wanted) for n in range(a, b + 1)}
    assert inside == numbers(real) & set(range(wanted[0], wanted[1] + 1))
    assert inside | outside == set(range(wanted[0], wanted[1] + 1))
    assert not inside & outside


def test_pop_lowest_returns_the_lowest_intervals_and_forgets_them() -> None:
    """pop_lowest takes from the low end, and `total` follows."""
    real = IntervalSet([(1, 3), (5, 5), (9, 10)])
    assert real.pop_lowest(2) == [(1, 3), (5, 5)]
    assert list(real) == [(9, 10)]
    assert real.total == 2
    assert real.pop_lowest(5) == [(9, 10)]
    assert not real


def test_repr_of_a_long_set_is_short() -> None:
    """A set with many intervals does not flood a log."""
    assert len(repr(IntervalSet((i * 2, i * 2) for i in range(1000)))) < 100
