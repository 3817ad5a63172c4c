"""Counting equal elements at the speed of C: `collections.Counter`'s own loop, on a plain dict."""

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T", bound=Hashable)


def _count_slowly(counts: dict[T, int], elements: Iterable[T]) -> None:
    for element in elements:
        counts[element] = counts.get(element, 0) + 1


if TYPE_CHECKING:
    count_into = _count_slowly
else:
    try:
        from _collections import _count_elements as count_into
    except ImportError:  # other Pythons: correct, and slower
        count_into = _count_slowly
