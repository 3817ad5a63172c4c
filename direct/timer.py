"""A timer that one thread sets and another waits for, without either waking the other when it is moved.

A `threading.Event` with a timeout cannot be moved without waking the waiter, and waking a thread costs a busy
Python program two changes of the interpreter lock. Linux' timerfd can: moving it is one system call.
"""

import ctypes
import os

_CLOEXEC = os.O_CLOEXEC
_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


# PyDLL keeps the interpreter lock during the call, which is shorter than giving it away.
_libc = ctypes.PyDLL(None, use_errno=True)


class Timer:
    """A one-shot timer. `set` may be called from any thread, `wait` from the one that owns it."""

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(_MONOTONIC, _CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._value = self._spec.value
        self._pointer = ctypes.byref(self._spec)
        self._settime = _libc.timerfd_settime

    def set(self, nanoseconds: int) -> None:
        """Fire once, so long from now; replaces what was set before. At least 1 ns."""
        value = self._value
        value.sec, value.nsec = divmod(max(1, nanoseconds), 1_000_000_000)
        self._settime(self._fd, 0, self._pointer, None)

    def wait(self) -> None:
        """Wait until it fires."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Release it; nobody may wait any more."""
        fd, self._fd = self._fd, -1  # a late `set` must not hit whatever gets this number next
        if fd >= 0:
            os.close(fd)
