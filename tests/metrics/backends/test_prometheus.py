"""The Prometheus page: valid by others' parsers, no sample twice, names that do not change hands, nothing goes down."""

import shutil
import subprocess
from math import isfinite
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from brokerless.metrics.aggregate.flush import CounterPoint, Flush
from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.rollup import RollupConfig
from brokerless.metrics.backends.mapping import load
from brokerless.metrics.backends.prometheus import PrometheusOptions, PrometheusPage
from brokerless.metrics.server.saved_state import restore, save
from tests.metrics.simulation import SimulatedClient, SimulatedDaemon, points

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus")
NAMES = [
    "a",
    "a.b",
    "a_b",
    "a-b",
    "a_total",
    "a_sum",
    "a_count",
    "a_raw",
    "a_bound",
    "_",
    "9",
    "le",
    "a_bucket",
]
TAGS = [
    "",
    "__name__:x",
    "k",
    "k:true",
    "k:",
    "v:1.2:3",
    "v:1.23",
    "url:/a",
    "url:-a",
    "é:ü",
    "le:1",
    'q:"\\',
    "k.x:1",
    "k-x:1",
    "tag__name__:x",
    "_:1",
    "-:1",
]
line = st.builds(
    lambda name, value, kind, tags: f"{name}:{value}|{kind}" + (f"|#{tags}" if tags else ""),
    st.sampled_from(NAMES),
    st.sampled_from(["1", "-3", "0.5", "1e100", "7:8"]),
    st.sampled_from(["c", "g", "ms", "h", "d", "s", "c|T1700000000", "g|T1700000000", "ms|@0.1", "h|@0.3"]),
    st.lists(st.sampled_from(TAGS), max_size=3).map(",".join),
)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parse_text(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def check_types(text: str) -> None:
    typed = [row.split()[2] for row in text.splitlines() if row.startswith("# TYPE")]
    assert len(typed) == len(set(typed)), "one TYPE line per family"


@given(
    st.lists(st.lists(line, max_size=12), min_size=1, max_size=3),
    st.sampled_from([[], [0.1, 1.0], [-1.0, 5.0]]),
)
def test_pages_are_valid_and_complete_whatever_was_sent(
    windows: list[list[str]], buckets: list[float]
) -> None:
    """Others' parsers read every page in both formats, no sample is there twice, and no counter is missing."""
    daemon, page = SimulatedDaemon(config=RollupConfig(buckets=buckets)), PrometheusPage()
    for lines in windows:
        daemon.receive(["\n".join(lines).encode()])
        flush = daemon.flush()
        text = page.render(flush)
        check_types(text)
        found = samples(text)
        grades = [key for key in found if key[0].endswith("_grade")]
        assert len(grades) == len(
            {p.series for p in flush.counters} | {p.series for p in flush.timestamped_totals if p.kind == "c"}
        )
        assert all(isfinite(value) for value in found.values())
        list(parse_openmetrics(page.render(flush, openmetrics=True)))


@promtool
def test_promtool_accepts_hostile_pages() -> None:
    """All names, types and tags above at once: promtool reads the page (what it says about users' names is theirs)."""
    daemon, page = SimulatedDaemon(), PrometheusPage()
    kinds = ("c", "g", "ms", "s", "c|T1700000000")
    daemon.receive([f"{n}:1|{k}|#{t}".encode() for n in NAMES for k in kinds for t in TAGS])
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page.render(daemon.flush()),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 3), done.stderr  # 3: lint
    assert "error" not in done.stderr.lower()


def test_the_corrected_figure_comes_first_and_the_others_beside_it() -> None:
    """`x_total` is what was sent; raw, bound and grade can be switched off."""
    flush = Flush(0.0, 10.0, 10.0)
    flush.counters = [CounterPoint("x", 7, 10, 2.5, Grade.LEDGER, 70, 100, 5.0, Grade.LEDGER)]
    found = samples(PrometheusPage().render(flush))
    assert found == {("x_total", ()): 100, ("x_raw_total", ()): 70, ("x_bound", ()): 5, ("x_grade", ()): 1}
    assert samples(PrometheusPage(PrometheusOptions(loss=False)).render(flush)) == {("x_total", ()): 100}
    flush.counters[0].total_bound = None
    assert ("x_bound", ()) not in samples(PrometheusPage().render(flush))


def test_no_counter_goes_down() -> None:
    """An estimate that was too high stands still, and says that it is not exact; negative increments make a gauge."""
    page, flush = PrometheusPage(), Flush(0.0, 10.0, 10.0)
    flush.counters = [CounterPoint("x", 0, 0, 0.0, Grade.LEDGER, 90, 110, 9.0, Grade.LEDGER)]
    page.render(flush)
    flush.counters = [CounterPoint("x", 0, 0, 0.0, Grade.EXACT, 90, 100, 0.0, Grade.EXACT)]
    found = samples(page.render(flush))
    assert (found["x_total", ()], found["x_bound", ()], found["x_grade", ()]) == (110, 10, 1)
    flush.counters = [CounterPoint("x", 0, 0, 0.0, Grade.EXACT, 90, 111, 0.0, Grade.EXACT)]
    found = samples(page.render(flush))
    assert (found["x_total", ()], found["x_bound", ()], found["x_grade", ()]) == (111, 0, 0)
    daemon, page = SimulatedDaemon(), PrometheusPage()
    for amount, shown in ((5, {"y_total": 5.0}), (-3, {"y": 2.0})):
        daemon.receive([f"y:{amount}|c".encode()])
        text = page.render(daemon.flush())
        assert {
            name: value for (name, _), value in samples(text).items() if name in ("y", "y_total")
        } == shown


def test_a_counter_that_was_deleted_or_forgotten_begins_anew() -> None:
    """Also if it is back before the next page: it is a counter still, and the smaller figure is the true one."""
    for how in ("deleted", "forgotten"):
        daemon, page = SimulatedDaemon(config=RollupConfig(series_ttl_s=15.0)), PrometheusPage()
        daemon.receive([b"a:100|c"])
        page.render(daemon.flush())
        if how == "deleted":
            daemon.rollup.delete("counters", ["a"])
        else:
            daemon.flush()
            daemon.flush()
        daemon.receive([b"a:3|c"])
        found = samples(page.render(daemon.flush()))
        assert (found["a_total", ()], found["a_raw_total", ()], found["a_grade", ()]) == (3, 3, 2)


def test_no_counter_goes_down_over_a_restart(tmp_path: Path) -> None:
    """A daemon with state goes on where the page before ended; to Prometheus a smaller value is a restart."""
    daemon, page, client = SimulatedDaemon(), PrometheusPage(), SimulatedClient("aaaaaaaa")
    daemon.receive([client.heartbeat()] + [client.datagram([("a", 10)]) for _ in range(9)])
    for _ in range(9):
        client.datagram([("b", 1)])  # lost
    daemon.receive([client.datagram([("a", 10)]), b"down:5|c\nup:1|c|T1700000000"])
    before = samples(page.render(daemon.flush()))
    daemon.receive([b"down:-3|c"])
    before = samples(page.render(daemon.flush()))
    assert before["a_total", ()] > client.truth["a"]
    for ended in (False, True):
        save(daemon.rollup, tmp_path / "state", page=page.carried)
        daemon.start_anew()
        head = restore(daemon.rollup, tmp_path / "state")
        assert head is not None
        page = PrometheusPage()
        page.resume(daemon.rollup.standing(), head.page)
        daemon.receive([client.heartbeat()] if ended else [])
        found = samples(page.render(daemon.flush()))
        for name in ("a_total", "up_total", "down"):
            assert found[name, ()] == before[name, ()]
    assert points(daemon.flush())["a"].total == client.truth["a"] == 100
    assert found["a_grade", ()] == Grade.LEDGER
    assert found["a_bound", ()] == before["a_total", ()] - 100


def test_no_label_is_one_of_prometheus_own() -> None:
    """A label that begins with `__` would be taken away at the scrape, and two series with equal labels are one."""
    daemon = SimulatedDaemon()
    daemon.receive([b"a:1|c|#_:1,-:2,.:3\na:2|c|#__name__:x,k:1\na:4|c|#tag__name__:x,k:1"])
    found = samples(PrometheusPage(PrometheusOptions(loss=False)).render(daemon.flush()))
    assert sorted(found.values()) == [1, 2, 4]
    assert not [key for _, labels in found for key, _ in labels if key.startswith("__")]


def test_who_comes_first_keeps_its_name() -> None:
    """A counter `foo` beside a gauge `foo_total`, and `a.b` beside `a_b`: one name each, also when more come."""
    daemon, page = SimulatedDaemon(), PrometheusPage()
    daemon.receive([b"foo:1|c\na.b:1|c"])
    page.render(daemon.flush())
    daemon.receive([b"foo_total:7|g\na_b:5|c"])
    found = samples(page.render(daemon.flush()))
    assert found["foo_total", ()] == 1
    assert found["foo_total_value", ()] == 7
    assert found["a_b_total", ()] == 1
    assert found["a_b_total", (("statsd", "a_b"),)] == 5


def test_sampled_timers_count_what_they_stand_for() -> None:
    """`320|ms|@0.1` is ten timings: count 10, sum 3200; in seconds where asked for."""
    daemon = SimulatedDaemon()
    daemon.receive([b"t:320|ms|@0.1"])
    flush = daemon.flush()
    assert (flush.timers["t"]["count"], flush.timers["t"]["sum"]) == (10, 3200)
    found = samples(PrometheusPage().render(flush))
    assert (found["t_count", ()], found["t_sum", ()], found["t", (("quantile", "0.5"),)]) == (10, 3200, 320)
    found = samples(PrometheusPage(PrometheusOptions(seconds=True)).render(flush))
    assert (found["t_seconds_count", ()], found["t_seconds_sum", ()]) == (10, 3.2)


def test_lines_with_a_timestamp_are_counted() -> None:
    """Counters with a time of their own are in the total, gauges show the latest, and a counter says how many came."""
    daemon = SimulatedDaemon()
    daemon.receive([b"c:2|c|T1700000000\nc:3|c|T1700000001\nc:1|c\ng:5|g|T1700000009\ng:4|g|T1700000003"])
    flush = daemon.flush()
    found = samples(PrometheusPage().render(flush))
    assert (found["c_total", ()], found["g", ()]) == (6, 5)
    assert flush.rollup["timestamped"] == 4


def test_what_is_added_up_for_a_page_has_the_grade_of_the_sum(tmp_path: Path) -> None:
    """Lines with a time beside exact ones; series that a rule makes one, beyond what a float can hold."""
    daemon, client = SimulatedDaemon(), SimulatedClient("aaaaaaaa")
    daemon.receive(
        [
            client.datagram([("c", 1), ("x.1", 2**53 - 1), ("x.2", 2)]),
            client.heartbeat(),
            b"c:5|c|T1700000000",
        ]
    )
    rules = tmp_path / "rules.yml"
    rules.write_text("mappings:\n- {match: x.*, name: x}\n")
    flush = daemon.flush()
    assert {point.series: point.total_grade.label for point in flush.counters} == {
        "c": "exact",
        "x.1": "exact",
        "x.2": "exact",
    }
    found = samples(PrometheusPage(mapper=load(str(rules))).render(flush))
    assert (found["c_total", ()], found["c_grade", ()]) == (6, Grade.SOCKET_ONLY)
    assert found["x_grade", ()] == Grade.UNKNOWN
    assert ("x_bound", ()) not in found
