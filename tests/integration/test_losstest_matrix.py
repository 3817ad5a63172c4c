"""Real transports through real faults: what they promise holds, and kernel counters agree with the verdict."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from brokerless.losstest import resolve
from brokerless.losstest.faults import namespaces, small_disk
from tests.losstest import kafka_mock


def run(
    directory: Path, *arguments: str, timeout: float = 200, controls: bool = False
) -> tuple[int, list[dict[str, Any]], str]:
    command = [
        sys.executable,
        "-m",
        "brokerless.cli",
        "losstest",
        "run",
        *arguments,
        "--json-file",
        "rows.json",
    ]
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"not within {timeout} s: {late.stdout!r} {late.stderr!r}")
    said = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    if not (directory / "rows.json").exists():
        pytest.fail(f"no rows were written: {said}")
    rows = json.loads((directory / "rows.json").read_text())["rows"]
    return done.returncode, [row for row in rows if controls or not row["control"]], said


def chosen(*names: str) -> list[str]:
    return [word for name in names for word in ("--transport", name)]


def test_udp_loss_by_overflow_is_what_the_kernel_counted(tmp_path: Path) -> None:
    """The lost events of a stopped UDP receiver are exactly as many as the kernel says it dropped."""
    code, rows, said = run(tmp_path, *chosen("udp"), "--scenario", "pause-long", "--quick", "--out", "out")
    assert code == 0, said
    notes = (tmp_path / "out/cells/udp/pause-long/1/consumer-0.1.jsonl").read_text().splitlines()
    dropped = [json.loads(line)["drops"]["overflow_receiver"] for line in notes if '"drops"' in line][-1]
    assert rows[0]["lost_by_reason"] == {"overflow_receiver": dropped}
    assert dropped > 0


def test_bytes_on_the_wire_are_all_that_the_runs_own_network_carried(tmp_path: Path) -> None:
    """A datagram is its 200 bytes and 28 of headers; a pipe has no network; of a broker both halves are counted."""
    if not namespaces.network_possible():
        pytest.skip("needs root, and a kernel with network namespaces")
    brokers = [name for name in ("redis-stream",) if not resolve(name).missing()]
    code, rows, said = run(
        tmp_path, *chosen("udp", "pipe", *brokers), "--scenario", "none", "--quick", controls=True
    )
    assert code == 0, said
    found = {
        row["transport"]: (row["price"]["wire_bytes"], row["accepted"])
        for row in rows
        if row["scenario"] == "none"
    }
    carried, accepted = found["udp"]
    assert 0 <= carried - 228 * accepted <= 20 * 228  # a probe or two may have been on its way when it began
    assert found["pipe"][0] == 0
    for name in brokers:
        assert found[name][0] > 2 * 200 * found[name][1]


def test_a_relay_loses_what_it_says(tmp_path: Path) -> None:
    """UDP loses exactly what the relay dropped; multicast with a journal repairs the same loss."""
    code, rows, said = run(
        tmp_path, *chosen("udp", "mcast-memory"), "--scenario", "loss", "--quick", "--expect",
        "lost == 0 when transport == mcast-memory",
    )  # fmt: skip
    assert code == 0, said
    udp = next(row for row in rows if row["transport"] == "udp")
    assert udp["lost_by_reason"] == {"in_flight": udp["lost"]}
    assert udp["lost"] > 0


def test_a_short_pause_is_less_than_the_buffers_hold(tmp_path: Path) -> None:
    """Also over NNG, whose subscriber drops what its own queue does not take: the scenario sizes that one, too."""
    code, rows, said = run(tmp_path, *chosen("nng-fanout-none"), "--scenario", "pause-short", "--quick")
    assert code == 0, said
    assert rows[0]["unavailable_s"] > 0.9
    assert rows[0]["lost"] == 0


def test_a_full_disk_refuses_or_keeps(tmp_path: Path) -> None:
    """While the disk is full the outbox refuses events, and loses none that it accepted."""
    code, rows, said = run(tmp_path, *chosen("webhooks"), "--scenario", "disk-full", "--quick")
    assert code == 0, said
    assert rows[0]["rejected"] > 0
    assert rows[0]["lost"] == 0
    assert rows[0]["accepted"] + rows[0]["rejected"] == rows[0]["offered"]


def test_receivers_that_misbehave(tmp_path: Path) -> None:
    """500 and hanging cost a plain POST its events and the outbox nothing."""
    code, rows, said = run(
        tmp_path,
        *chosen("http-post", "webhooks"),
        "--scenario",
        "answer-500",
        "--scenario",
        "hang",
        "--quick",
    )
    assert code == 0, said
    for row in rows:
        assert (row["lost"] == 0) == (row["transport"] == "webhooks"), row


def present(*names: str) -> list[str]:
    """Those of the brokers that are on this machine; without any of them the test is left out."""
    found = [name for name in names if not resolve(name).missing()]
    if not found:
        pytest.skip("no broker on this machine")
    return found


def processes_of(directory: Path) -> list[str]:
    """Command lines of processes that were started for a run in this directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(directory) in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(" ".join(process.cmdline()))
    return [line for line in found if "pytest" not in line]


def test_brokers_for_comparison(tmp_path: Path) -> None:
    """With a broker in between, a killed or late consumer loses nothing; of the broker no process stays behind."""
    names = present("redis-stream", "nats-jetstream")
    code, rows, said = run(tmp_path, *chosen(*names), "--scenario", "kill", "--scenario", "late", "--quick")
    assert code == 0, said
    assert [row["lost"] for row in rows] == [0] * 2 * len(names)
    assert processes_of(tmp_path) == []


def test_a_broker_whose_disk_is_full(tmp_path: Path) -> None:
    """It says so, to a producer that is then refused; what it had written is all there after a restart."""
    if why := small_disk.missing():
        pytest.skip(f"needs {why}")
    names = present("redis-stream")
    code, rows, said = run(tmp_path, *chosen(*names), "--scenario", "disk-full", "--quick", "--out", "out")
    assert code == 0, said
    [row] = rows
    # While a sync is under way, Redis answers before it writes: that may find the disk full, and nothing else may.
    assert row["lost"] == row["lost_by_reason"].get("in_flight", 0)
    assert row["committed"] == row["accepted"] - row["lost"] > 0
    assert row["rejected"] > 0
    assert row["accepted"] + row["rejected"] == row["offered"]
    log = (tmp_path / "out/cells/redis-stream/disk-full/1/logs/service-0.1.log").read_text()
    assert "write" in log.partition("Ready to accept")[2].lower()  # of its file: an error, or a part only
    assert "Received SIGTERM" in log
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_broker_that_crashes(tmp_path: Path) -> None:
    """A broker killed and restarted with its state holds the producer back, and delivers what it had confirmed."""
    names = present("redis-stream", "nats-jetstream", "rabbitmq")
    words = ("--scenario", "broker-kill", "--scenario", "kill", "--quick")
    code, rows, said = run(tmp_path, *chosen(*names), *words)
    assert code == 0, said
    assert processes_of(tmp_path) == []
    for row in rows:
        assert row["unavailable_s"] > 0.9, row
        assert row["committed"] + row["lost"] == row["accepted"] == row["offered"]


@pytest.mark.parametrize("scenario", ["none", pytest.param("kill", marks=pytest.mark.slow)])
def test_kafka_speaks_its_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    """Found in KAFKA_HOME, formatted and started (here: librdkafka's mock), produced to and consumed from."""
    pytest.importorskip("confluent_kafka")
    home = kafka_mock.install(tmp_path / "kafka")
    monkeypatch.setenv("KAFKA_HOME", str(home))
    code, rows, said = run(tmp_path, *chosen("kafka"), "--scenario", scenario, "--quick", controls=True)
    assert code == 0, said
    row = next(row for row in rows if row["scenario"] == scenario)
    assert row["committed"] == row["accepted"] > 0
    assert row["acked"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_outage_of_more_than_a_minute_measures_the_transport(tmp_path: Path) -> None:
    """Journals on disk lose nothing, and a producer that is held back waits: nobody gives up before it is over."""
    names = ("zmq-fanout-disk", "nng-fanout-disk", "zmq-group-disk", "mcast-disk", "webhooks", "tcp")
    words = (
        "--scenario",
        "kill",
        "--scenario",
        "partition",
        "--offline",
        "65",
        "--rate",
        "100",
        "--jobs",
        "12",
    )
    code, rows, said = run(tmp_path, *chosen(*names), *words, timeout=550)
    assert code == 0, said
    assert len(rows) == 2 * len(names)
    for row in rows:
        assert row["unavailable_s"] > 60, row["transport"]
        assert row["transport"] == "tcp" or row["lost"] == 0


@pytest.mark.slow
@pytest.mark.serial
def test_fifty_thousand_events_per_second(tmp_path: Path) -> None:
    """Witnesses keep up: every event is offered, accepted and committed, the seeded loss is exact, the fault too."""
    words = ("--scenario", "kill", "--rate", "50000", "--duration", "2.5", "--offline", "0.5", "--jobs", "1")
    code, rows, said = run(tmp_path, *chosen("zmq-fanout-memory"), *words, controls=True)
    assert code == 0, said
    assert {row["scenario"]: row["accepted"] for row in rows} == {
        "none": 114_999,
        "seeded": 114_999,
        "kill": 125_000,
    }
    assert all(row["balanced"] and not row["withheld"] for row in rows)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_agrees_with_the_witnesses(tmp_path: Path) -> None:
    """The loss that Spark computes from the consumers' spools is that of the verdict; a difference would be exit 1."""
    code, rows, said = run(
        tmp_path, *chosen("udp", "zmq-fanout-memory"), "--scenario", "kill", "--scenario", "late", "--quick",
        "--spark", "--out", "out", timeout=500,
    )  # fmt: skip
    assert code == 0, said
    assert "Spark reads" in said
    assert any(row["lost"] for row in rows)
    # And the check can fail: an event that the witness has and the spool has not.
    spools = tmp_path / "out/cells/zmq-fanout-memory/kill/1/spools"
    shutil.rmtree(spools / "consumer-0.2")
    from brokerless.losstest.analysis.spark_check import check_with_spark

    differences = check_with_spark(tmp_path / "out", say=print)
    assert differences
    assert all("zmq-fanout-memory.kill" in text for text in differences)
