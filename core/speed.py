"""Which implementation of the hot operations is used: the C module `_speed`, or the Python code that it mirrors.

The C module is optional: it is missing where there was no compiler, and not used with `BROKERLESS_PURE=1` in the
environment. Both accept, store and send the same bytes.
"""

import os
from types import ModuleType

speed: ModuleType | None = None
if os.environ.get("BROKERLESS_PURE", "") in ("", "0"):
    try:
        from brokerless.core import _speed

        speed = _speed
    except ImportError:  # built without it
        pass

# Whether the C module is used.
ACCELERATED: bool = speed is not None
