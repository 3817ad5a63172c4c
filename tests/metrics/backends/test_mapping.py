"""Mapping rules: what statsd_exporter's documentation says of its examples."""

import json
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest

from brokerless.core.errors import ConfigError
from brokerless.metrics import MetricsServer
from brokerless.metrics.aggregate.rollup import RollupConfig
from brokerless.metrics.backends import mapping
from brokerless.metrics.backends.prometheus import PrometheusPage
from tests.metrics.backends.test_prometheus import samples
from tests.metrics.simulation import SimulatedDaemon

# From the README of statsd_exporter, as it stands there.
GLOBS = """
mappings:
- match: "test.dispatcher.*.*.*"
  name: "dispatcher_events_total"
  labels:
    processor: "$1"
    action: "$2"
    outcome: "$3"
    job: "test_dispatcher"
- match: "*.signup.*.*"
  name: "signup_events_total"
  labels:
    provider: "$2"
    outcome: "$3"
    job: "${1}_server"
"""
REGEX = r"""
mappings:
- match: "test\\.(\\w+)\\.(\\w+)\\.counter"
  match_type: regex
  name: "${2}_total"
  labels:
    provider: "$1"
"""
FULL = """
defaults:
  observer_type: histogram
  histogram_options:
    buckets: [.005, .01, .025, .05, .1, .25, .5, 1, 2.5]
    native_histogram_bucket_factor: 1.1
    native_histogram_max_buckets: 256
  match_type: glob
  glob_disable_ordering: false
  ttl: 0 # metrics do not expire
mappings:
# This will be a histogram using the buckets set in `defaults`.
- match: "test.timing.*.*.*"
  name: "my_timer"
  labels:
    provider: "$2"
    outcome: "$3"
    job: "${1}_server"
# This will be a summary.
- match: "other.timing.*.*.*"
  observer_type: summary
  name: "other_timer"
  labels:
    provider: "$2"
    outcome: "$3"
    job: "${1}_server_other"
- match: "client.*"
  scale: 0.001
  name: "bytes_$1"
- match: "web.requests.*"
  match_metric_type: counter
  name: "web_requests"
  ttl: 20s
- match: "debug.*"
  action: drop
  name: "dropped"
"""


def page_of(rules: str, tmp_path: Path, *lines: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    path = tmp_path / "mapping.yml"
    path.write_text(rules)
    mapper = mapping.load(str(path))
    daemon = SimulatedDaemon(config=RollupConfig())
    daemon.rollup.buckets_for = mapper.buckets
    daemon.receive(["\n".join(lines).encode()])
    return samples(PrometheusPage(mapper=mapper).render(daemon.flush()))


def test_globs_of_the_documentation(tmp_path: Path) -> None:
    """test.dispatcher.FooProcessor.send.success and foo_product.signup.facebook.failure, as documented."""
    found = page_of(
        GLOBS,
        tmp_path,
        "test.dispatcher.FooProcessor.send.success:1|c",
        "foo_product.signup.facebook.failure:2|c",
        "test.web-server.foo.bar:3|g",
    )
    dispatcher = {
        "processor": "FooProcessor",
        "action": "send",
        "outcome": "success",
        "job": "test_dispatcher",
    }
    signup = {"provider": "facebook", "outcome": "failure", "job": "foo_product_server"}
    assert found["dispatcher_events_total", tuple(sorted(dispatcher.items()))] == 1
    assert found["signup_events_total", tuple(sorted(signup.items()))] == 2
    assert found["test_web_server_foo_bar", ()] == 3


def test_regular_expressions_of_the_documentation(tmp_path: Path) -> None:
    """test.provider.gauge.counter becomes gauge_total with the provider."""
    found = page_of(REGEX, tmp_path, "test.amazon.signup.counter:4|c")
    assert found["signup_total", (("provider", "amazon"),)] == 4


def test_histograms_summaries_scale_and_drop(tmp_path: Path) -> None:
    """Timers are in seconds, buckets come from the defaults, what is dropped is gone."""
    found = page_of(
        FULL,
        tmp_path,
        "test.timing.a.b.c:20|ms",
        "test.timing.a.b.c:300|ms",
        "other.timing.a.b.c:20|ms",
        "client.in:5000|g",
        "debug.x:1|c",
    )
    labels = (("job", "a_server"), ("outcome", "c"), ("provider", "b"))
    assert found["my_timer_bucket", tuple(sorted([*labels, ("le", "0.025")]))] == 1
    assert found["my_timer_bucket", tuple(sorted([*labels, ("le", "+Inf")]))] == 2
    assert found["my_timer_sum", labels] == pytest.approx(0.32)
    other = (("job", "a_server_other"), ("outcome", "c"), ("provider", "b"))
    assert found["other_timer_count", other] == 1
    assert not any(name == "other_timer_bucket" for name, _ in found)
    assert found["bytes_in", ()] == 5
    assert not any(name.startswith(("debug", "dropped")) for name, _ in found)


def test_series_of_one_name_are_added_up_and_expire(tmp_path: Path) -> None:
    """Two StatsD counters that a rule makes one; it disappears when its time to live is over."""
    path = tmp_path / "mapping.yml"
    path.write_text(FULL)
    daemon, page = SimulatedDaemon(), PrometheusPage(mapper=mapping.load(str(path)))
    daemon.receive([b"web.requests.a:1|c\nweb.requests.b:2|c"])
    assert samples(page.render(daemon.flush()))["web_requests_total", ()] == 3
    daemon.flush()
    daemon.flush()
    assert samples(page.render(daemon.flush())) == {}


def test_a_sum_goes_on_when_one_of_its_series_is_forgotten(tmp_path: Path) -> None:
    """It neither falls, which is a restart to Prometheus, nor becomes a gauge; what comes back is added."""
    path = tmp_path / "mapping.yml"
    path.write_text("mappings:\n- {match: web.*.hits, name: hits}\n")
    config = RollupConfig(series_ttl_s=15.0)
    daemon, page = SimulatedDaemon(config=config), PrometheusPage(mapper=mapping.load(str(path)))
    shown = []
    for lines in (
        "web.a.hits:5|c\nweb.b.hits:5|c",
        *["web.a.hits:1|c"] * 4,
        "web.a.hits:1|c\nweb.b.hits:2|c",
    ):
        daemon.receive([lines.encode(), b"web.b.hits:1|c|T1700000000"])
        flush = daemon.flush()
        found = samples(page.render(flush))
        shown.append((found["hits_total", ()], found["hits_raw_total", ()], found["hits_grade", ()]))
    assert len(flush.counters) == 2
    assert [total for total, _, _ in shown] == [11, 13, 15, 17, 19, 23]
    assert all((raw, grade) == (total, 2) for total, raw, grade in shown)


def test_rules_that_are_wrong_are_refused_by_name(tmp_path: Path) -> None:
    """When the daemon is made, not at the first scrape."""
    path = tmp_path / "mapping.yml"
    path.write_text("mappings:\n- name: x\n")
    with pytest.raises(ConfigError, match="match"):
        MetricsServer(udp=["127.0.0.1:0"], prometheus={"mapping": str(path)})


CASES: dict[str, Any] = json.loads(Path(__file__).with_name("statsd_exporter_cases.json").read_text())
# What its tests ask of quantiles has no meaning here: percentiles are the daemon's.
IGNORED = {"Duplicate quantiles are bad"}


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: str(case["name"]))
def test_what_statsd_exporters_own_tests_expect(case: dict[str, Any], tmp_path: Path) -> None:
    """Each configuration of its tests gives the names, labels, buckets and times to live that are expected there."""
    path = tmp_path / "mapping.yml"
    path.write_text(case["config"] or "{}")
    if case.get("bad") and case["name"] not in IGNORED:
        with pytest.raises(ConfigError):
            mapping.load(str(path))
        return
    mapper = mapping.load(str(path))
    for wanted in case["expected"]:
        metric = wanted["metric"]
        kind = "timer" if "buckets" in wanted else wanted.get("kind", "counter")
        found = mapper.map(metric, [], kind)
        if wanted.get("unmapped"):
            assert found is not None
            assert (found.name, found.tags) == (metric, [])
            continue
        if "name" in wanted:
            assert found is not None
            # Characters that Prometheus does not allow are replaced when the page is written.
            assert re.sub(r"\W", "_", found.name, flags=re.ASCII) == wanted["name"]
            assert dict(found.tags) == wanted["labels"]
            assert found.ttl_s == wanted.get("ttl", found.ttl_s)
            assert found.buckets == wanted.get("buckets", found.buckets)
        else:
            assert found is None or (found.name, found.tags) == (metric, [])


def test_the_published_example_file(tmp_path: Path) -> None:
    """config.example.yml as it is published: two histograms with their buckets, and a summary."""
    found = page_of(
        CASES["example"],
        tmp_path,
        "test.timing.a.b.c:20|ms",
        "consistent_app.timing.a.b.c:15|ms",
        "other.distribution.a.b.c:3|d",
        "not.mapped:7|ms",
    )
    labels = [("job", "a_server"), ("outcome", "c"), ("provider", "b")]
    edges = {
        name: sorted(float(dict(tags)["le"]) for found_name, tags in found if found_name == f"{name}_bucket")
        for name in ("my_timer", "my_consistent_timer", "not_mapped")
    }
    usual = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, inf]
    assert edges == {
        "my_timer": usual,
        "my_consistent_timer": [*(n / 1000 for n in range(10, 21)), inf],
        "not_mapped": usual,
    }
    assert found["my_timer_bucket", tuple(sorted([*labels, ("le", "0.025")]))] == 1
    assert found["my_consistent_timer_bucket", tuple(sorted([*labels, ("le", "0.014")]))] == 0
    assert found["my_consistent_timer_bucket", tuple(sorted([*labels, ("le", "0.015")]))] == 1
    other = tuple(sorted([("job", "a_server_other"), ("outcome", "c"), ("provider", "b")]))
    assert (found["other_distribution_count", other], found["other_distribution_sum", other]) == (1, 3)
    assert not any(name == "other_distribution_bucket" for name, _ in found)
