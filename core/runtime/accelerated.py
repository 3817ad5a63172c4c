"""Chooses between a package's C module `_speed` and the Python code that it mirrors.

The C modules are optional: they are missing where there was no compiler, and not used with `BROKERLESS_PURE=1` in
the environment. Both implementations accept, store and send the same bytes.
"""

import importlib
import os
from types import ModuleType


def load(package: str) -> ModuleType | None:
    """The C module of `brokerless.<package>`, or None if the Python code is to be used."""
    if os.environ.get("BROKERLESS_PURE", "") not in ("", "0"):
        return None
    try:
        return importlib.import_module(f"brokerless.{package}._speed")
    except ImportError:  # built without it
        return None


# The one of core, and whether it is used.
speed = load("core")
ACCELERATED: bool = speed is not None
