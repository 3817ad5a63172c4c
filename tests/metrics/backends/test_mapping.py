"""Mapping rules: what statsd_exporter's documentation says of its examples."""

from pathlib import Path

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
    assert ("other_timer_bucket", other) not in found
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


def test_rules_that_are_wrong_are_refused_by_name(tmp_path: Path) -> None:
    """When the daemon is made, not at the first scrape."""
    path = tmp_path / "mapping.yml"
    path.write_text("mappings:\n- name: x\n")
    with pytest.raises(ConfigError, match="match"):
        MetricsServer(udp=["127.0.0.1:0"], prometheus={"mapping": str(path)})
