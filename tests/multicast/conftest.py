"""A group of its own for every test: no two tests hear each other."""

from collections.abc import Callable

import pytest

from tests.multicast.groups import free_port, new_group


@pytest.fixture
def port() -> int:
    """A free port for a group; the one after it is free, too."""
    return free_port()


@pytest.fixture
def group() -> str:
    """A group address of this test alone."""
    return new_group()


@pytest.fixture
def another_group() -> Callable[[], str]:
    """A function that makes more of them."""
    return new_group
