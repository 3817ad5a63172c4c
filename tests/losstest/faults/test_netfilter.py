"""The kernel's filter: the rules as text, and the real thing where the machine allows it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.core.errors import ConfigError
from brokerless.losstest.faults import netfilter
from brokerless.losstest.faults.netfilter import Rules


def added(rules: Rules) -> list[str]:
    return [line for line in rules.text().splitlines() if line.startswith("add rule")]


def test_nothing_is_filtered_without_an_order() -> None:
    """Both chains are emptied, and no rule is added; also after every fault is taken back."""
    rules = Rules("tcp", "consumer", [1, 2])
    assert added(rules) == []
    for order in ("loss 0.05", "cut both", "pass", "uncut"):
        rules.instruct(order)
    assert added(rules) == []
    assert rules.text().count("flush chain") == 2


@pytest.mark.parametrize(
    ("connects", "there", "back"), [("producer", "dport", "sport"), ("consumer", "sport", "dport")]
)
def test_directions(connects: str, there: str, back: str) -> None:
    """Towards the consumer is to the port that listens if the producer connects, and from it if the consumer does."""
    rules = Rules("tcp", connects, [7, 8])
    rules.instruct("cut to")
    (to,) = added(rules)
    assert f"th {there} {{ 7, 8 }}" in to
    rules.instruct("cut from")
    (fro,) = added(rules)
    assert f"th {back} {{ 7, 8 }}" in fro
    rules.instruct("cut both")
    assert len(added(rules)) == 2


def test_multicast_goes_to_the_consumer() -> None:
    """Datagrams to a group are for the consumer whoever connects; requests are the consumer's own."""
    rules = Rules("multicast", "consumer", [7])
    rules.instruct("cut from")
    (request,) = added(rules)
    assert "ip daddr != 224.0.0.0/4" in request
    rules.instruct("cut to")
    assert any("ip daddr 224.0.0.0/4 udp dport { 7 }" in rule for rule in added(rules))


def test_faults_as_rules() -> None:
    """Probabilities in ten-thousandths, bursts at the relay's mean distance, copies on the way out."""
    rules = Rules("udp", "producer", [7])
    rules.instruct("loss 0.05")
    assert "numgen random mod 10000 < 500 counter name dropped drop" in added(rules)[0]
    rules.instruct("burst 0.01 20")
    assert "numgen inc mod 120 < 20 counter name dropped drop" in added(rules)[0]
    rules.instruct("duplicate 0.05")
    assert "leaving" in added(rules)[0]
    assert "dup to 127.0.0.1" in added(rules)[0]
    with pytest.raises(ConfigError):
        rules.instruct("reorder 0.05 0.02")


def test_what_the_kernel_dropped_is_what_is_lost(tmp_path: Path) -> None:
    """Plain UDP loses exactly as many as the filter counted; TCP repairs a cut itself; the directory names the tool."""
    if why := netfilter.missing():
        pytest.skip(f"not on this machine: {why}")
    words = ["--transport", "udp", "--transport", "tcp", "--scenario", "loss", "--scenario", "partition"]
    words += ["--scenario", "duplicate", "--scenario", "reorder", "--network", "kernel"]
    command = [sys.executable, "-m", "brokerless.cli", "losstest", "run", "--quick", *words]
    command += ["--out", "run", "--json-file", "k.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(r["transport"], r["scenario"]): r for r in json.loads((tmp_path / "k.json").read_text())["rows"]}
    for scenario in ("loss", "partition"):
        notes = (tmp_path / f"run/cells/udp/{scenario}/1/network-0.1.jsonl").read_text().splitlines()
        assert json.loads(notes[0])["name"].startswith("nftables")
        dropped = json.loads(notes[-1])["drops"]["in_flight"]
        assert rows["udp", scenario]["lost_by_reason"] == {"in_flight": dropped}
        assert dropped > 0
    assert rows["udp", "duplicate"]["duplicates"] > 0
    assert rows["tcp", "partition"]["lost"] == 0
    assert rows["tcp", "partition"]["unavailable_s"] > 0.9
    tools = {scenario: rows["udp", scenario]["network"] for scenario in ("loss", "reorder", "none")}
    assert tools == {"loss": "nft", "reorder": "relay", "none": ""}


def test_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nft the option is refused with the reason, before anything runs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "brokerless.cli",
            "losstest",
            "run",
            "--transport",
            "udp",
            "--network",
            "kernel",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--network relay needs nothing" in done.stderr
