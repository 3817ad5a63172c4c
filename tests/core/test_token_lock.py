"""The token lock excludes."""

import threading

import pytest

from brokerless.core.token_lock import TokenLock


def test_many_threads_never_hold_it_together() -> None:
    """A counter that is read and written in two steps is right after many threads used it under the lock."""
    lock, state = TokenLock(), [0]

    def work() -> None:
        for i in range(2000):
            if i % 2:
                with lock:
                    value = state[0]
                    state[0] = value + 1
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


def test_an_error_inside_gives_it_back() -> None:
    """The lock is free after an exception."""
    lock = TokenLock()
    with pytest.raises(RuntimeError), lock:
        raise RuntimeError
    lock.acquire()
    lock.release()
