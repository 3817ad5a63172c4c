"""Signals at the worst moment: raises an exception at chosen points of our code, as a signal handler would.

Python looks for signals when a function is entered or resumed, after a call of something written in C, and where a
loop jumps back. These points are counted while a block runs in our packages; `Interrupt` is raised at those that were
chosen. A tracer can raise only in the instruction that follows; where that one is in other `with` and `try` blocks, it
would be somewhere that no signal's handler can raise, and does not count.
"""

import dis
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import brokerless.core
from brokerless.core import Lost

_OURS = os.path.dirname(os.path.dirname(brokerless.core.__file__))
_TESTS = os.path.dirname(__file__)
# After these the interpreter looks whether a signal has come.
_LOOKS = {
    dis.opmap[name]
    for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD", "CALL_INTRINSIC_1")
    if name in dis.opmap
}


class Interrupt(BaseException):
    """What the signal handler of an application raised."""


class Interrupts:
    """Counts points; raises `Interrupt` at those for which `chosen` says so."""

    def __init__(self, chosen: Callable[[int], bool], act: Callable[[], object] | None = None) -> None:
        self.points = 0
        self.raised = 0
        self.last = ""
        self._chosen = chosen
        self._act = act
        self._looked: dict[int, int] = {}  # by frame: the instruction after which the interpreter looks
        self._handlers: dict[CodeType, list[tuple[int, int, int]]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Interrupt what this thread does in the block."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if frame.f_code.co_name != "__init__" and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            # A function in Python, most likely called by Python: when it returns, nobody looks.
            self._looked.pop(id(frame.f_back), None)
        if (
            not name.startswith(_OURS)
            or name.startswith(_TESTS)
            or "site-packages" in name.removeprefix(_OURS)
        ):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "opcode":
            return self._step
        key, code, here = id(frame), frame.f_code, frame.f_lasti
        looked = self._looked.pop(key, -1)
        if code.co_code[here] in _LOOKS:
            self._looked[key] = here
        if looked >= 0 and self._handler(code, looked) == self._handler(code, here):
            self.points += 1
            if self._chosen(self.points):
                self.raised += 1
                self.last = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
                if self._act is None:
                    raise Interrupt(self.last)
                self._act()
        return self._step

    def _handler(self, code: CodeType, offset: int) -> int:
        """Where an exception in this instruction goes."""
        if code not in self._handlers:
            entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # not in typeshed
            self._handlers[code] = [(entry.start, entry.end, entry.target) for entry in entries]
        return next((target for start, end, target in self._handlers[code] if start <= offset < end), -1)


def now_and_then(seed: int, mean: float) -> Callable[[int], bool]:
    """Choose points at random."""
    rolls = random.Random(seed)
    return lambda _: rolls.random() < 1 / mean


def receive_some(sub: Any, how: str, got: list[int], interrupts: Interrupts) -> None:
    """Receive until nothing comes for a moment, or the interrupt. What is in the application's hands is its own.

    `sub` is a subscriber of any kind, `how` the name of its method; the offsets go to `got`.
    """
    given = None
    try:
        with interrupts.active():
            if how == "receive":
                event = sub.receive(0.02)
                if event is not None:
                    got.append(event.offset)
            elif how == "events":
                for event in sub.events(0.02):
                    got.append(event.offset)
            else:
                given = next(getattr(sub, how)(0.02), None)
    except Interrupt:
        pass
    if given is not None and not isinstance(given, Lost):
        got.extend(event.offset for event in given.events)
