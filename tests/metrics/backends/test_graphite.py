"""metrics/backends/graphite.py: what Carbon gets for known traffic, written out by hand byte by byte."""

import pytest

from brokerless.metrics.backends.graphite import GraphiteFormat, lines, pickled
from brokerless.metrics.server.config import GraphiteNames
from tests.metrics.simulation import SimulatedDaemon

# One window of ten seconds that ends at time 10.
TRAFFIC = b"a.b:3|c\na.b:1|c|@0.5\nt:10|ms\nt:20|ms\ng:2.5|g\ns:x|s\ntag:1|c|#k:v"

TIMER_AND_REST = b"""\
stats.timers.t.count_90 2 10
stats.timers.t.mean_90 15 10
stats.timers.t.upper_90 20 10
stats.timers.t.sum_90 30 10
stats.timers.t.sum_squares_90 500 10
stats.timers.t.std 5 10
stats.timers.t.upper 20 10
stats.timers.t.lower 10 10
stats.timers.t.count 2 10
stats.timers.t.count_ps 0.2 10
stats.timers.t.sum 30 10
stats.timers.t.sum_squares 500 10
stats.timers.t.mean 15 10
stats.timers.t.median 15 10
stats.gauges.g 2.5 10
stats.sets.s.count 1 10
"""
LEGACY = (
    b"""\
stats.a.b 0.5 10
stats_counts.a.b 5 10
stats.tag;k=v 0.1 10
stats_counts.tag;k=v 1 10
"""
    + TIMER_AND_REST
    + b"""\
statsd.numStats 5 10
stats.statsd.processing_time 0 10
"""
)
NEW = (
    b"""\
stats.counters.a.b.rate 0.5 10
stats.counters.a.b.count 5 10
stats.counters.tag.rate;k=v 0.1 10
stats.counters.tag.count;k=v 1 10
"""
    + TIMER_AND_REST
    + b"""\
stats.statsd.numStats 5 10
stats.statsd.processing_time 0 10
"""
)
NEW_WITH_LOSS = NEW.replace(
    b"stats.counters.a.b.count 5 10\n",
    b"""\
stats.counters.a.b.count 5 10
stats.counters.a.b.corrected 5 10
stats.counters.a.b.bound 0 10
stats.counters.a.b.grade 2 10
""",
).replace(
    b"stats.counters.tag.count;k=v 1 10\n",
    b"""\
stats.counters.tag.count;k=v 1 10
stats.counters.tag.corrected;k=v 1 10
stats.counters.tag.bound;k=v 0 10
stats.counters.tag.grade;k=v 2 10
""",
)


@pytest.mark.parametrize(
    ("legacy", "loss", "wanted"),
    [(True, False, LEGACY), (False, False, NEW), (False, True, NEW_WITH_LOSS)],
    ids=["legacy", "new", "new with loss"],
)
def test_lines(legacy: bool, loss: bool, wanted: bytes) -> None:
    """Legacy names, new names, and new names with the loss figures."""
    receiver = SimulatedDaemon()
    receiver.receive([TRAFFIC])
    names = GraphiteNames(legacy=legacy, loss=loss)
    assert lines(list(GraphiteFormat(names).points(receiver.flush()))) == wanted


def text(name: str, memo: int) -> bytes:
    """Pickle's opcodes for a short text: BINUNICODE, length, bytes, BINPUT."""
    return b"X" + len(name).to_bytes(4, "little") + name.encode() + b"q" + bytes([memo])


@pytest.mark.parametrize(
    ("legacy", "names"),
    [
        (True, ("stats.a", "stats_counts.a", "statsd.numStats", "stats.statsd.processing_time")),
        (
            False,
            (
                "stats.counters.a.rate",
                "stats.counters.a.count",
                "stats.statsd.numStats",
                "stats.statsd.processing_time",
            ),
        ),
    ],
    ids=["legacy", "new"],
)
def test_pickles(legacy: bool, names: tuple[str, str, str, str]) -> None:
    """Length in network order, then protocol 2: a list of (name, (10, value)), put together opcode by opcode."""
    receiver = SimulatedDaemon()
    receiver.receive([b"a:5|c"])
    points = list(GraphiteFormat(GraphiteNames(legacy=legacy, loss=False)).points(receiver.flush()))
    # K is a small integer, G a double in network order (0.5), \x86 a pair, q the memo, ( … e fill the list.
    half = b"G\x3f\xe0\x00\x00\x00\x00\x00\x00"
    body = b"\x80\x02]q\x00("
    body += text(names[0], 1) + b"K\x0a" + half + b"\x86q\x02\x86q\x03"
    body += text(names[1], 4) + b"K\x0aK\x05\x86q\x05\x86q\x06"
    body += text(names[2], 7) + b"K\x0aK\x01\x86q\x08\x86q\x09"
    body += text(names[3], 10) + b"K\x0aK\x00\x86q\x0b\x86q\x0c"
    body += b"e."
    assert pickled(points) == len(body).to_bytes(4, "big") + body
