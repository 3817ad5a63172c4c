"""Events in counters that only add up, and yet each of them known again: powers of four, read as digits. Pure.

StatsD increments have no identity: of a counter only the sum arrives, and if one is missing nobody can say which.
But an increment may be of any size. Event n adds 4^k, with k its place among the EVENTS of its counter, so that in base
4 the sum has a digit for each event: how often it arrived, up to three times. Sums stay below 2^53, hence exact
also where a daemon adds up floats.
"""

import re

EVENTS = 25  # per counter: 25 digits of 2 bits are 50 bits, and a double has 53
_BITS = 2
_LIMIT = 1 << (_BITS * EVENTS)
_NAME = re.compile(r"losstest\.([0-9a-f]{16})\.(probe|\d+)")
_LINE = re.compile(rb"(losstest\.[0-9a-f]{16}\.\d+):(\d{1,20})\|c")


def counter(run: int, n: int) -> tuple[str, int]:
    """The counter that event `n` of a run increments, and by how much."""
    bucket, place = divmod(n, EVENTS)
    return f"losstest.{run:016x}.{bucket}", 1 << (_BITS * place)


def probe(run: int) -> tuple[str, int]:
    """The counter that a probe increments, and by how much."""
    return f"losstest.{run:016x}.probe", 1


def run_of(name: str) -> int | None:
    """The run that a counter belongs to, or None if it is not one of ours."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1], 16)


def arrivals(name: str, total: float) -> dict[int, int]:
    """Of a counter that is ours: event → how often it arrived, if it did.

    Raises ValueError if no events can have made such a sum.
    """
    if not 0 <= total < _LIMIT or total != int(total):
        raise ValueError(f"{name}: no events add up to {total}")
    first = int(name.rpartition(".")[2]) * EVENTS
    digits = ((place, int(total) >> (_BITS * place) & 3) for place in range(EVENTS))
    return {first + place: times for place, times in digits if times}


def find(packet: bytes, run: int) -> list[int]:
    """The numbers of all events of `run` that a StatsD packet carries: for the relay."""
    found = []
    for name, amount in _LINE.findall(packet):
        if run_of(name.decode()) == run and int(amount) < _LIMIT:
            for n, times in arrivals(name.decode(), int(amount)).items():
                found += [n] * times
    return found
