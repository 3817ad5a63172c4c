"""Both implementations of the journal's inner loops, in C and in Python, for the tests that compare them."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from brokerless.core import Journal
from brokerless.core import frame as frames
from brokerless.core.journal import base as journals
from brokerless.core.journal import staging, types

try:
    from brokerless.core import _speed
except ImportError:
    pytest.skip("built without the C module", allow_module_level=True)


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Journals and frames made here are of that implementation."""
    c = name == "c"
    with (
        mock.patch.object(frames, "speed", _speed if c else None),
        mock.patch.object(types, "speed", _speed if c else None),
        mock.patch.object(types, "Topic", _speed.Topic if c else staging.PureTopic),
        mock.patch.object(journals, "Stage", _speed.Stage if c else staging.PureStage),
        mock.patch.object(journals, "Lane", _speed.Lane if c else staging.PureLane),
    ):
        yield


@pytest.fixture(params=["python", "c"])
def either(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both implementations in turn."""
    with implementation(request.param):
        yield str(request.param)


def raws(journal: Journal) -> list[bytes]:
    found: list[bytes] = []
    at = journal.oldest
    while at < journal.next:
        chunk = journal.read(at)
        found += [frame.raw for frame in chunk.frames]
        at = chunk.next
    return found
