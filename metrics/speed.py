"""Which implementation of the hot loops is used: the C module `_speed`, or the Python code that it mirrors.

Both give the same figures.
"""

from brokerless.core.runtime.accelerated import load

speed = load("metrics")
# Whether the C module is used.
ACCELERATED: bool = speed is not None
