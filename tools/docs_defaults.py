"""What mkdocstrings calls: the defaults in the API reference are values, not names of constants."""

import importlib
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Replaces a default such as `MAX_WAIT_S` by what it is."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Evaluate each default where it was written; what has no short form stays as it is."""
        for parameter in func.parameters:
            if not isinstance(parameter.default, (griffe.ExprName, griffe.ExprAttribute)):
                continue
            value = _value(func.module.path, str(parameter.default))
            if isinstance(value, (int, float, str, bytes, tuple)) and len(repr(value)) <= 60:
                parameter.default = repr(value)


def _value(module: str, expression: str) -> object:
    found: object = importlib.import_module(module)
    for name in expression.split("."):
        found = getattr(found, name, None)
    return found
