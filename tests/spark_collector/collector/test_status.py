"""What a collector says of itself, over HTTP and in a terminal."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from brokerless.core import MemoryJournal, Retention
from brokerless.core.errors import ConfigError
from brokerless.core.runtime.http_host import HttpHost, listen
from brokerless.direct import Publisher
from brokerless.spark_collector import Collector, CollectorConfig, DirectIn, SpoolConfig
from brokerless.spark_collector.collector.status import progress_line, status_app
from tests.conftest import Until


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_status_metrics_and_health(tmp_path: Path, until: Until) -> None:
    """The pages show inputs, streams and counters as they are; health follows the inputs."""
    journal = MemoryJournal(retention=Retention(max_bytes=1 << 24))
    with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as p:
        p.publish_many("a", [b"x"] * 30)
        nobody = "tcp://127.0.0.1:9"
        config = CollectorConfig(
            name="c",
            spool=SpoolConfig(path=str(tmp_path / "spool")),
            input=[DirectIn(addresses=[p.address, nobody])],
        )
        with Collector(config) as collector:
            server = HttpHost(status_app(collector), listen("127.0.0.1", 0))
            until(lambda: collector.counters.events == 30)
            until(lambda: collector.inputs[0].status.connected)
            code, text = get(f"{server.address}/status")
            found = json.loads(text)
            assert (code, found["name"], found["counters"]["events"]) == (200, "c", 30)
            assert [(i["name"], i["connected"]) for i in found["inputs"]] == [
                (p.address, True),
                (nobody, False),
            ]
            stream = {
                "source": "p",
                "epoch": journal.epoch,
                "topic": "a",
                "received": 30,
                "pending": 0,
                "lost": 0,
            }
            assert found["streams"] == [stream]
            assert get(f"{server.address}/healthz")[0] == 503
            code, text = get(f"{server.address}/metrics")
            assert 'brokerless_collector_events_total{collector="c"} 30' in text
            line = progress_line(collector, {"events": 0}, 2.0)
            assert line.startswith("30 events, 15/s, 0 behind, 0 lost")
            assert f"away: {nobody}" in line
            with pytest.raises(ConfigError, match="cannot be used"):
                HttpHost(status_app(collector), listen("127.0.0.1", server.port))
            server.close()
