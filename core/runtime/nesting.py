"""Does a signal handler or a finalizer call an object in whose middle it runs? Waiting for that would never end."""

import sys
from collections.abc import Callable
from types import FrameType

_PACKAGE = "brokerless."


def interrupts(is_owner: Callable[[object], bool]) -> bool:
    """Whether this thread is inside a method of such an owner, apart from the call that it is making now.

    Looks at the stack: first come the frames of the present call, then somebody else's (the handler's), and if there
    is a method of an owner below these, it was interrupted. Costs nothing to whoever does not ask.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None:
        if (
            _is_ours(frame)
            and frame.f_code.co_varnames[:1] == ("self",)
            and is_owner(frame.f_locals.get("self"))
        ):
            return True
        frame = frame.f_back
    return False


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith(_PACKAGE)
