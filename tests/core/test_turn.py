"""One at a time, and what a signal's handler finds in the middle."""

import threading

import pytest

from brokerless.core.errors import UsageError
from brokerless.core.turn import Turn


def test_a_turn_in_the_middle_of_a_turn_is_refused() -> None:
    """A handler that would wait for its own thread is told; what may be part of the turn is."""
    turn = Turn()

    def work() -> str:
        with pytest.raises(UsageError):
            turn.run(work)
        return turn.inside(lambda: "inside")

    assert turn.run(work) == "inside"
    assert turn.inside(lambda: 1) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_closing_in_the_middle_waits_for_the_end(fails: bool) -> None:
    """What a handler closes is closed when the turn ends, by an exception or not, and once."""
    turn = Turn()
    done: list[str] = []

    def work() -> None:
        turn.close(lambda: done.append("closed"))
        done.append("worked")
        if fails:
            raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            turn.run(work)
    else:
        turn.run(work)
    turn.close(lambda: done.append("closed again"))
    assert done == ["worked", "closed"]


def test_closing_from_another_thread_waits_for_the_turn() -> None:
    """`last` is never done while somebody has its turn."""
    turn = Turn()
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        assert go_on.wait(20)
        done.append("worked")

    worker = threading.Thread(target=turn.run, args=(work,))
    worker.start()
    assert begun.wait(20)
    closer = threading.Thread(target=turn.close, args=(lambda: done.append("closed"),))
    closer.start()
    go_on.set()
    worker.join(20)
    closer.join(20)
    assert done == ["worked", "closed"]
