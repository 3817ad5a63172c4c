"""metrics/prometheus.py: pages that Prometheus accepts, whatever the series are called."""

import re

from hypothesis import given
from hypothesis import strategies as st

from brokerless.metrics.flush import CounterPoint, Flush, Grade
from brokerless.metrics.prometheus import page

SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*",?)*\})? (\S+)'
)
SERIES = st.text(alphabet="ab.-_1;=x", min_size=1, max_size=8)


def flush_of(counters: list[str], gauges: list[str], timers: list[str]) -> Flush:
    points = [CounterPoint(s, 1, 2, None, Grade.UNKNOWN, 3, 4.5, None, Grade.UNKNOWN) for s in counters]
    figures = {"upper_90": 3.0, "median": 2.0, "count": 1, "histogram": {"bin_1": 1}}
    return Flush(
        0, 1, 1, counters=points, gauges=dict.fromkeys(gauges, 1), timers=dict.fromkeys(timers, figures)
    )


@given(
    st.lists(SERIES, max_size=6, unique=True),
    st.lists(SERIES, max_size=6, unique=True),
    st.lists(SERIES, max_size=6, unique=True),
    st.booleans(),
)
def test_every_line_is_valid_and_no_sample_is_there_twice(
    counters: list[str], gauges: list[str], timers: list[str], openmetrics: bool
) -> None:
    """Names that collide after cleaning, or that are a counter and a gauge at once, stay apart."""
    text = page(flush_of(counters, gauges, timers), [], {}, openmetrics=openmetrics)
    seen, types = set(), {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in types, f"{name} has two types"
            types[name] = kind
        elif not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert (match[1], match[2]) not in seen, line
            seen.add((match[1], match[2]))
    assert text.endswith("# EOF\n") == openmetrics


def test_an_unknown_bound_is_not_a_number_and_values_are_cumulative() -> None:
    """x_total is what arrived since the start; the bound says NaN where nothing is known."""
    text = page(flush_of(["a.b;k=v"], [], ["t"]), [], {"t": (7, 21.5)})
    assert 'a_b_total{k="v"} 3\n' in text
    assert 'a_b_corrected{k="v"} 4.5\n' in text
    assert 'a_b_bound{k="v"} NaN\n' in text
    assert 'a_b_grade{k="v"} 3\n' in text
    assert 't{quantile="0.9"} 3\nt{quantile="0.5"} 2\nt_sum 21.5\nt_count 7\n' in text
