"""One at a time, and what a signal's handler finds in the middle."""

import threading

import pytest

from brokerless.core.errors import UsageError
from brokerless.core.runtime.serial_section import SerialSection


def test_a_turn_in_the_middle_of_a_turn_is_refused() -> None:
    """A handler that would wait for its own thread is told; what may be part of the section is."""
    section = SerialSection()

    def work() -> str:
        with pytest.raises(UsageError):
            section.run(work)
        return section.inside(lambda: "inside")

    assert section.run(work) == "inside"
    assert section.inside(lambda: 1) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_closing_in_the_middle_waits_for_the_end(fails: bool) -> None:
    """What a handler closes is closed when the section ends, by an exception or not, and once."""
    section = SerialSection()
    done: list[str] = []

    def work() -> None:
        section.close(lambda: done.append("closed"))
        done.append("worked")
        if fails:
            raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            section.run(work)
    else:
        section.run(work)
    section.close(lambda: done.append("closed again"))
    assert done == ["worked", "closed"]


def test_closing_from_another_thread_waits_for_the_turn() -> None:
    """`last` is never done while somebody has its section."""
    section = SerialSection()
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        assert go_on.wait(20)
        done.append("worked")

    worker = threading.Thread(target=section.run, args=(work,))
    worker.start()
    assert begun.wait(20)
    closer = threading.Thread(target=section.close, args=(lambda: done.append("closed"),))
    closer.start()
    go_on.set()
    worker.join(20)
    closer.join(20)
    assert done == ["worked", "closed"]
