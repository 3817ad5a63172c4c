"""A wall clock that jumps, inside one process and without privileges.

`time.time` and `time.time_ns` are replaced in the module and wherever they were imported by name, and
`datetime` likewise. The monotonic clock is not touched: that is the point of having one.
"""

import datetime
import sys
import time
from datetime import datetime as _real_datetime
from typing import Self

_real_time, _real_time_ns = time.time, time.time_ns
_shift_ns = 0


def _time() -> float:
    return _real_time() + _shift_ns / 1e9


def _time_ns() -> int:
    return _real_time_ns() + _shift_ns


class _Datetime(_real_datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(_time(), tz)

    @classmethod
    def utcnow(cls) -> Self:
        return cls.fromtimestamp(_time(), datetime.UTC).replace(tzinfo=None)


def shift_wall_clock(seconds: float) -> None:
    """From now on the wall clock of this process is `seconds` ahead of the machine's (0: right again)."""
    global _shift_ns  # noqa: PLW0603  # a process has one wall clock
    _shift_ns = int(seconds * 1e9)
    replacements = {id(_real_time): _time, id(_real_time_ns): _time_ns, id(_real_datetime): _Datetime}
    for module in list(sys.modules.values()):
        if module is sys.modules[__name__]:
            continue
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
