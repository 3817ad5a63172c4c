"""How numbers are written for Graphite and people: as the classic daemon's JavaScript writes them."""

from math import isinf, isnan

# Beyond it not every whole number is a float, which is what Prometheus, Graphite and other daemons compute with.
LARGEST_WHOLE = 2**53


def format_number(value: float) -> str:
    """`5`, not `5.0`; the shortest digits that read back as the same number; exponents only beyond 10^21."""
    if isinstance(value, int):
        return str(value)
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == int(value) and abs(value) < 1e21:
        return str(int(value))
    text = repr(value)
    if "e" not in text:
        return text
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if -7 < power < 0:
        digits = mantissa.replace(".", "").lstrip("-")
        return ("-" if value < 0 else "") + "0." + "0" * (-power - 1) + digits
    return f"{mantissa}e{'+' if power > 0 else '-'}{abs(power)}"


def fit_64_bits(value: int | float) -> int | float:
    """The number, as a float if it is an integer that does not fit into 64 bits."""
    return value if isinstance(value, float) or -(2**63) <= value < 2**63 else float(value)
