"""How far a published counter can be trusted. `rollup.py` decides it: `CounterTotals.total`, and in
`Rollup` `_counters`, `_point` and `_add_unnumbered`.
"""

from enum import IntEnum


class Grade(IntEnum):
    """How well a counter is known, from best to worst."""

    EXACT = 0
    LEDGER = 1
    SOCKET_ONLY = 2
    UNKNOWN = 3

    @property
    def label(self) -> str:
        """`exact`, `ledger`, `socket-only` or `unknown`."""
        return self.name.lower().replace("_", "-")
