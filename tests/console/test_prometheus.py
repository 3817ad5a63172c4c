"""Hours of history: from a real Prometheus that scrapes a real console."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brokerless.direct import Publisher


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus")
def test_history_comes_from_prometheus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """Rate, lag and loss of a publisher, by kind and name, as points in time."""
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "presence"))
    console_port, port = free_port(), free_port()
    file = tmp_path / "prometheus.yaml"
    file.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: b, static_configs: [{{targets: ['127.0.0.1:{console_port}']}}]}}]\n"
    )
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "brokerless.cli", "console", "--port", str(console_port)),
                *("--prometheus", f"http://127.0.0.1:{port}"),
            ],
            stdout=subprocess.DEVNULL,
        ),
        subprocess.Popen(
            [
                *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        ),
    ]

    def history() -> list[Any]:
        try:
            url = f"http://127.0.0.1:{console_port}/history?hours=0.1"
            with urllib.request.urlopen(url, timeout=30) as answer:
                found: list[Any] = json.load(answer)
        except urllib.error.URLError:
            return []
        return found

    try:
        with Publisher("tcp://127.0.0.1:*", source="orders") as publisher:

            def known() -> bool:
                publisher.publish("t", b"x")
                rows = [
                    row for row in history() if (row["kind"], row["name"]) == ("direct.publisher", "orders")
                ]
                return (
                    bool(rows)
                    and any(value > 0 for _, value in rows[0].get("rate", []))
                    and "lost" in rows[0]
                )

            until(known, timeout=90)
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(60)
