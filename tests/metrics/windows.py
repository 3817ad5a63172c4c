"""How long a window lasts that only the test itself closes."""

# Windows end at multiples of their length by the clock, so that one of an hour ends at the full hour, in the middle of
# whatever test runs then. This one ends in 2033.
NEVER_S = 1e9
