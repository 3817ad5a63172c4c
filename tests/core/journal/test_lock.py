"""The token lock excludes."""

import contextlib
import gc
import random
import signal
import threading
from collections.abc import Callable

import pytest

from brokerless.core.journal.lock import TokenLock


def test_many_threads_never_hold_it_together() -> None:
    """A counter that is read and written in two steps is right after many threads used it under the lock."""
    lock, state = TokenLock(), [0]

    def work() -> None:
        for i in range(2000):
            if i % 2:
                lock.acquire()
                try:
                    value = state[0]
                    state[0] = value + 1
                finally:
                    lock.give(None)
            else:
                try:
                    lock.take()
                except IndexError:
                    lock.acquire()
                try:
                    value = state[0]
                    state[0] = value + 1
                finally:
                    lock.give(None)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state[0] == 16_000


def test_an_interrupt_at_any_instant_neither_leaks_nor_doubles_the_token() -> None:
    """A signal handler that raises anywhere in taking and giving leaves exactly one token."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    lock = TokenLock()
    rng = random.Random(5)
    gc.disable()  # what a callback of the collector raises is swallowed
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(2000):
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1e-4))
                for _ in range(100_000):
                    lock.acquire()
                    try:
                        _work = [None] * 3
                    finally:
                        lock.give(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    lock.take()
    with pytest.raises(IndexError):
        lock.take()


def test_who_gives_way_is_second(until: Callable[..., None]) -> None:
    """After give_way() whoever waited has the lock, or has had it, however fast the first thread is."""
    lock, order = TokenLock(), []

    def wait() -> None:
        lock.acquire()
        order.append("waited")
        lock.give(None)

    for _ in range(20):
        lock.acquire()
        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lock._queue.locked)
        order.append("first")
        lock.give(None)
        lock.give_way()
        lock.acquire()
        order.append("again")
        lock.give(None)
        waiting.join()
    assert order == ["first", "waited", "again"] * 20
