"""Shared by all tests: how much Hypothesis tries, and how to wait for something."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from brokerless.losstest.harness.ports import Ports

# A test run that a shell started in the background ignores SIGINT, and so would every process that the tests start
# and then end with Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machines are shared: no deadline per example. The quick profile tries the same examples in every build, because a
# build judges a change; looking for new counterexamples is what `make soak` does, with the thorough profile.
settings.register_profile(
    "quick", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(
    "thorough", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# About the built wheel and site: run by `make check`, which says where they are.
_BUILT = {"BROKERLESS_WHEEL": "test_wheel.py", "BROKERLESS_SITE": "test_site.py"}
collect_ignore = [file for name, file in _BUILT.items() if not os.environ.get(name)]

# Hundreds of components of tests would fill the list of whoever works on this machine. Tests of presence switch it on.
os.environ.setdefault("BROKERLESS_PRESENCE", "off")

Until = Callable[..., None]


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Ports for what is bound later, or again: neither another test nor the kernel, for a connection, takes them."""
    leases = Ports()
    yield leases
    leases.close()


@pytest.fixture
def until() -> Until:
    """`until(condition, timeout=20)` waits for a condition with a deadline and fails with its name."""

    def wait(condition: Callable[[], object], timeout: float = 20.0, what: str = "") -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout} s: {what or condition}")
            time.sleep(0.005)

    return wait
