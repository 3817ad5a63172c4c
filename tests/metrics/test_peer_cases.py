"""578 lines and what eight other daemons make of them: where those agree, ours agrees with them.

`peer_cases.json` has for each line the outcome here and at each peer of which it is known: the samples, as
`type name{tags} value`, or `refused`, `event`, `check`. The column of `etsy` is checked here against npm's daemon. The
others are written from what is documented of these parsers, and were not run.
"""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from brokerless.metrics.parser import Parsed, Passed, Refused, Sample, parse_line, split_series
from tests.conftest import Until
from tests.metrics import npm

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("peer_cases.json").read_text())


def digits(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def shown(sample: Sample) -> list[str]:
    name, tags = split_series(sample.series)
    pairs = sorted(key if value is None else f"{key}={value}" for key, value in tags)
    head = f"{sample.kind} {name}{{{','.join(pairs)}}} " if pairs else f"{sample.kind} {name} "
    values: tuple[Any, ...] = sample.values
    if sample.timestamp is not None:
        return [head + "T"]
    if sample.kind == "s":
        return [head + values[0]]
    if sample.kind == "c":
        return [head + digits(sum(values) * sample.weight)]
    if sample.kind == "g":
        moves = zip(values, sample.deltas, strict=True)
        return [head + ("=" if not moved else "+" if v >= 0 else "") + digits(v) for v, moved in moves]
    times = f" x{digits(sample.weight)}" if sample.weight != 1 else ""
    return [head + digits(value) + times for value in values]


def outcome(parsed: Parsed) -> list[str] | str:
    if isinstance(parsed, Refused):
        return f"refused:{parsed.reason}"
    if isinstance(parsed, Passed):
        return parsed.kind
    return [text for sample in parsed for text in shown(sample)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["line"])
def test_a_line_is_read_as_written_down_and_as_agreeing_peers_read_it(case: dict[str, Any]) -> None:
    """Two or more peers that agree decide; where they differ, the file says what is done here."""
    found = outcome(parse_line(case["line"].encode()))
    assert found == case["ours"]
    peers = list(case["peers"].values())
    if len(peers) > 1 and all(peer == peers[0] for peer in peers):
        assert (found.partition(":")[0] if isinstance(found, str) else found) == peers[0]


def test_there_are_enough_cases_in_which_peers_agree() -> None:
    """So that an emptied file does not pass."""
    agreed = [c for c in CASES if len(c["peers"]) > 1 and len({str(p) for p in c["peers"].values()}) == 1]
    assert (len(CASES), len(agreed)) == (578, 243)


def test_the_column_of_the_classic_daemon_is_what_it_does(tmp_path: Path, until: Until) -> None:
    """Every line to npm's daemon, one by one: counters, gauges and refusals are those in the file."""
    wrong = []
    with (
        npm.running(tmp_path) as peer,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        before = peer.values("counters")
        for case in CASES:
            expected = case["peers"].get("etsy")
            # It ends on some lines, and where half a line is bad the file says nothing.
            if expected in (None, "crash") or any(c in case["line"] for c in "{}'\"\\"):
                continue
            sock.sendto(case["line"].encode(), ("127.0.0.1", peer.port))
            received = before["statsd.packets_received"] + 1
            until(lambda n=received: peer.values("counters")["statsd.packets_received"] == n)  # type: ignore[misc]
            after = peer.values("counters")
            bad = after["statsd.bad_lines_seen"] - before["statsd.bad_lines_seen"]
            counted = {}
            for text in expected if isinstance(expected, list) else []:
                kind, series, value = text.split(" ", 2)
                name, _, tags = series.rstrip("}").partition("{")
                if kind == "c" and name and not tags:
                    counted[name] = counted.get(name, 0.0) + float(value)
            moved = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in counted}
            if bool(bad) != (expected == "refused") or moved != pytest.approx(counted):
                wrong.append((case["line"], expected, bad, moved))
            for name in counted:
                peer.ask(f"delcounters {name}")  # so that large amounts do not hide small ones
            before = peer.values("counters")
    assert not wrong, wrong
