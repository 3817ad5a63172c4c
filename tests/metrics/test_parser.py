"""metrics/parser.py: dialects, refusals, and that no bytes can hurt it."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.metrics.limits import MAX_LINE_BYTES
from brokerless.metrics.parser import (
    REASONS,
    ParserOptions,
    Passed,
    Refused,
    Sample,
    join_series,
    parse_line,
    sanitize,
    series_key,
    split_series,
)


def one(line: bytes) -> Sample:
    """The only sample of a line that must be accepted."""
    parsed = parse_line(line)
    assert isinstance(parsed, list)
    assert len(parsed) == 1
    return parsed[0]


@pytest.mark.parametrize(
    ("line", "kind", "values", "weight"),
    [
        (b"a:1|c", "c", (1,), 1),
        (b"a:-3|c", "c", (-3,), 1),
        (b"a:1|c|@0.1", "c", (1,), 10.0),
        (b"a:320|ms", "ms", (320,), 1),
        (b"a:3.20|ms|@0.5", "ms", (3.2,), 2.0),
        (b"a:1e3|ms", "ms", (1000.0,), 1),
        (b"a:7|h", "h", (7,), 1),
        (b"a:7|d", "d", (7,), 1),
        (b"a:.5|g", "g", (0.5,), 1),
        (b"a:user:1|s", "s", ("user:1",), 1),
        (b"a:|s", "s", ("0",), 1),
        (b"a:1:2:3|ms", "ms", (1, 2, 3), 1),
        (b"a:1|c\r", "c", (1,), 1),
    ],
)
def test_every_type_is_read(line: bytes, kind: str, values: tuple[object, ...], weight: float) -> None:
    """StatsD and DogStatsD types with values, rates and packed values."""
    sample = one(line)
    assert (sample.kind, sample.series, sample.values, sample.weight) == (kind, "a", values, weight)


def test_gauges_know_which_values_are_relative() -> None:
    """A sign makes a gauge value a movement, value by value."""
    assert one(b"a:5|g").deltas == (False,)
    assert one(b"a:+5|g").deltas == (True,)
    sample = one(b"a:5:-2|g")
    assert (sample.values, sample.deltas) == ((5, -2), (False, True))


@pytest.mark.parametrize(
    "line",
    [
        b"a:1|c|@0.5|#env:prod,b|c:ci-1234|T1656581400|e:it-false|card:high",
        b"a:1|c|card:high|T1656581400|#env:prod,b|e:it-false|@0.5|c:ci-1234",
        b"a:1|c|#b,env:prod|@0.5|T1656581400",
    ],
)
def test_fields_may_come_in_any_order(line: bytes) -> None:
    """DogStatsD 1.0 to 1.3 fields after the type, shuffled, mean the same; tags are sorted."""
    sample = one(line)
    assert sample.series == "a;b;env=prod"
    assert (sample.weight, sample.timestamp) == (2.0, 1656581400)


def test_the_classic_daemons_several_values_are_read() -> None:
    """`name:1|c:2|ms|@0.1` carries two samples with types and rates of their own."""
    parsed = parse_line(b"a:1|c:2|ms|@0.1|#x:y")
    assert isinstance(parsed, list)
    assert [(s.kind, s.values, s.weight, s.series) for s in parsed] == [
        ("c", (1,), 1, "a;x=y"),
        ("ms", (2,), 10.0, "a;x=y"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"a", "no_value"),
        (b"a:1", "no_type"),
        (b":1|c", "empty_name"),
        (b"\xff\xfe:1|c", "empty_name"),
        (b"a:x|c", "bad_number"),
        (b"a:|c", "bad_number"),
        (b"a:nan|g", "bad_number"),
        (b"a:inf|g", "bad_number"),
        (b"a:1e999|g", "bad_number"),
        (b"a:1_000|c", "bad_number"),
        (b"a:-1|ms", "bad_number"),
        (b"a:1:x:3|ms", "bad_number"),
        (b"a:1|c|@0", "bad_rate"),
        (b"a:1|c|@2", "bad_rate"),
        (b"a:1|c|@x", "bad_rate"),
        (b"a:1|c|Tx", "bad_timestamp"),
        (b"a:1|q", "unknown_type"),
        (b"a:1|", "unknown_type"),
        (b"a:1|c|@5e-324", "bad_rate"),
        (b"a:1|c|@1e-310", "bad_rate"),
        (b"a:1|c|#" + b"t" * 3000, "too_long"),
        (b"a:1|c:2", "no_type"),
        (b"_e{5,4}:title|tex", "bad_event"),
        (b"_e{x}:t|t", "bad_event"),
        (b"_sc|name|9", "bad_check"),
        (b"x" * MAX_LINE_BYTES + b":1|c", "too_long"),
    ],
)
def test_what_is_wrong_is_refused_whole_and_by_reason(line: bytes, reason: str) -> None:
    """One wrong part refuses the line, and the reason says which."""
    assert parse_line(line) == Refused(reason)


def test_events_and_checks_are_passed_on() -> None:
    """DogStatsD events (byte lengths, UTF-8) and service checks are recognised and kept as they came."""
    event = "_e{6,4}:tïtle|text|d:1|#a:b".encode()
    assert parse_line(event) == Passed("event", event)
    check = b"_sc|db.up|0|h:web|#a:b|m:all fine"
    assert parse_line(check) == Passed("check", check)


def test_names_are_cleaned_as_the_classic_daemon_does_it() -> None:
    """Spaces to `_`, slashes to `-`, the rest dropped; Graphite's own tags in a name are tags."""
    assert sanitize("a b/c(d)é") == "a_b-cd"
    assert series_key("a;y=2;x=1") == series_key("a", "x:1,y:2") == "a;x=1;y=2"
    assert series_key("a", "url:http://x,,") == "a;url=http://x"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("v:1.2:3", "v:1.23"),
        ("url:/a/b", "url:-a-b"),
        ("x:ä", "x:ö"),
        ("x:a;b", "x:a_b"),
        ("x:100%", "x:100%25"),
        ("x", "x:true"),
        ("a", "b"),
        ("k=1:2", "k:1:2"),
    ],
)
def test_tags_that_differ_stay_different(one: str, other: str) -> None:
    """Any text may be in a tag: nothing is mangled into something else, and it can be read back."""
    assert series_key("a", one) != series_key("a", other)
    key, colon, value = one.partition(":")
    assert split_series(series_key("a", one)) == ("a", [(key, value if colon else None)])


@given(st.lists(st.tuples(st.text(min_size=1), st.none() | st.text()), max_size=5))
def test_series_keys_can_be_read_back(tags: list[tuple[str, str | None]]) -> None:
    """Whatever tags consist of, split_series gives them back."""
    name, found = split_series(join_series("a", tags))
    assert (name, set(found)) == ("a", set(tags))
    assert len(join_series("a", tags).splitlines()) <= 1 or "\n" not in join_series("a", tags)


@pytest.mark.parametrize(
    ("line", "series"),
    [
        (b"a,x=1,y=2:1|c", "a;x=1;y=2"),
        (b"a#x=1,y=2:1|c", "a;x=1;y=2"),
        (b"a[x=1,y=2]:1|c", "a;x=1;y=2"),
        (b"a[x=1].b:1|c", "a.b;x=1"),
        (b"a,x=1:1|c|#y:2", "a;x=1;y=2"),
        (b"a,x,=2,y=:1|c", "a"),
    ],
)
def test_tags_within_the_name(line: bytes, series: str) -> None:
    """InfluxDB's, Librato's and SignalFx's styles; what is no pair is dropped, as statsd_exporter does it."""
    assert one(line).series == series


def test_styles_of_tags_can_be_switched_off() -> None:
    """Then the classic rule for names applies."""
    off = ParserOptions(influx_tags=False, librato_tags=False, signalfx_tags=False)
    for line in (b"a,x=1:1|c", b"a#x=1:1|c", b"a[x=1]:1|c"):
        parsed = parse_line(line, off)
        assert isinstance(parsed, list)
        assert parsed[0].series == "ax=1"


@pytest.mark.parametrize(
    ("line", "ignored"),
    [(b"a:1|c|zzz", 1), (b"a:1|c|", 1), (b"a:1|c||x:y|#a:b|c:ci-1|e:it-false|card:low", 2)],
)
def test_unknown_and_empty_fields_are_ignored_and_counted(line: bytes, ignored: int) -> None:
    """As agents do it: a newer protocol's field must not cost the line."""
    assert (one(line).values, one(line).ignored) == ((1,), ignored)


@pytest.mark.parametrize(
    ("line", "dialect", "relative"),
    [
        (b"a:-5|g", "auto", True),
        (b"a:-5|g", "dogstatsd", False),
        (b"a:+5|g|#x:1", "auto", False),
        (b"a:-5|g|#x:1", "auto", False),
        (b"a:-5|g|#x:1", "statsd", True),
        (b"a:-5|g|c:ci-1", "auto", False),
    ],
)
def test_dogstatsd_has_no_relative_gauges(line: bytes, dialect: Any, relative: bool) -> None:
    """By dialect, or by the fields that only DogStatsD has."""
    parsed = parse_line(line, ParserOptions(dialect=dialect))
    assert isinstance(parsed, list)
    assert parsed[0].deltas == (relative,)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_parser_raise(line: bytes) -> None:
    """Whatever arrives is samples, passed on, or refused with a known reason."""
    parsed = parse_line(line)
    if isinstance(parsed, Refused):
        assert parsed.reason in REASONS
    elif isinstance(parsed, list):
        assert parsed
        assert all(sample.series and sample.values for sample in parsed)


@given(st.text(alphabet="a:|@#c,gms-+.0195eT{}_ \n", max_size=120))
def test_no_text_made_of_the_grammar_makes_it_raise(text: str) -> None:
    """The same for lines made of the characters that matter."""
    parse_line(text.encode())


@pytest.mark.parametrize(
    "piece", [b":", b"|", b"|#", b",", b"1:", b"|@0.1", b" ", b"|c:", b"9", b".", b";a=b"]
)
def test_time_grows_no_faster_than_the_line(piece: bytes) -> None:
    """Eight times the bytes take well below 64 times as long (what a quadratic parser would take)."""

    def best(size: int) -> float:
        line = b"a:1|c" + piece * (size // len(piece))
        times = []
        for _ in range(9):
            began = time.perf_counter()
            parse_line(line)
            times.append(time.perf_counter() - began)
        return min(times)

    assert best(8000) < 40 * max(best(1000), 2e-6)
