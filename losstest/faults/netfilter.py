"""The network's faults by the kernel's own packet filter, in a network namespace that the run makes for itself.

Needs root and `nft`. All processes of the run live in the namespace, whose loopback is theirs alone; it vanishes
with the last of them. Unlike the relay, the filter does not know which events it dropped, only how many packets;
and a cut TCP connection is repaired by TCP itself, with the waits that a real network would have.
"""

import os
import re
import shutil
import subprocess
import time
from typing import Any

from brokerless.core.errors import ConfigError, Fault
from brokerless.losstest.evidence.event_log import EventLog
from brokerless.losstest.evidence.witness import Kind, Witness
from brokerless.losstest.faults import namespaces
from brokerless.losstest.harness.control import ControlChannel

TABLE = "losstest"
MULTICAST = "224.0.0.0/4"
_TIMEOUT_S = 10.0  # for nft: milliseconds, unless the machine swaps
POLL_S = 0.01
PARTS = 10_000  # probabilities are given in these


class Rules:
    """The faults in force, as a text for `nft -f`. Pure."""

    def __init__(self, link: str, connects: str, ports: list[int]) -> None:
        their = "{ " + ", ".join(map(str, ports)) + " }"
        listener, client = (
            f"meta l4proto {{ tcp, udp }} th dport {their}",
            f"meta l4proto {{ tcp, udp }} th sport {their}",
        )
        self._to, self._from = ([listener], [client]) if connects == "producer" else ([client], [listener])
        if link == "multicast":
            self._to.append(f"ip daddr {MULTICAST} udp dport {their}")
            self._from = [f"ip daddr != {MULTICAST} udp dport {their}"]
        self._fault = ""
        self._cut = ""

    def instruct(self, line: str) -> None:
        """ControlChannel as the relay has them, without `reorder`: the filter cannot hold packets back."""
        word, *arguments = line.split()
        if word == "cut":
            self._cut = arguments[0]
        elif word == "uncut":
            self._cut = ""
        elif word in ("pass", "loss", "burst", "duplicate"):
            self._fault = "" if word == "pass" else line
        else:
            raise ConfigError("network", f"the kernel's filter does not know the instruction {line!r}")

    def text(self) -> str:
        """All rules, in place of those before."""
        cuts = (self._to if self._cut in ("to", "both") else []) + (
            self._from if self._cut in ("from", "both") else []
        )
        arriving = [f"{match} counter name dropped drop" for match in cuts]
        leaving = []
        word, *numbers = self._fault.split() or [""]
        for match in self._to:
            if word == "loss":
                chance = f"numgen random mod {PARTS} < {int(float(numbers[0]) * PARTS)}"
                arriving.append(f"{match} {chance} counter name dropped drop")
            elif word == "burst":
                length = int(numbers[1])
                every = length + int(1 / float(numbers[0]))  # the mean distance of the relay's bursts
                arriving.append(f"{match} numgen inc mod {every} < {length} counter name dropped drop")
            elif word == "duplicate":
                chance = f"numgen random mod {PARTS} < {int(float(numbers[0]) * PARTS)}"
                leaving.append(f'{match} {chance} counter name doubled dup to 127.0.0.1 device "lo"')
        rules = [f"flush chain ip {TABLE} arriving", f"flush chain ip {TABLE} leaving"]
        rules += [f"add rule ip {TABLE} arriving {rule}" for rule in arriving]
        rules += [f"add rule ip {TABLE} leaving {rule}" for rule in leaving]
        return "\n".join(rules) + "\n"


# Made once: the counters go on while rules come and go.
_TABLE_TEXT = f"""\
table ip {TABLE} {{
  counter dropped {{ }}
  counter doubled {{ }}
  chain arriving {{ type filter hook input priority 0; policy accept; }}
  chain leaving {{ type filter hook output priority 0; policy accept; }}
}}
"""


def missing() -> str:
    """Why the kernel's filter cannot be used here, or an empty text. Tries it in a namespace of its own."""
    if os.geteuid() != 0:
        return "root"
    if shutil.which("nft") is None:
        return "the program nft (package nftables)"
    rules = Rules("udp", "producer", [1])
    rules.instruct("loss 0.5")
    try:
        subprocess.run(
            ["nft", "-f", "-"],  # noqa: S607
            input=(_TABLE_TEXT + rules.text()).encode(),
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            preexec_fn=lambda: namespaces.unshare("net"),  # no threads here yet
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"a kernel that lets nft work in a namespace ({error})"
    return ""


def _nft(*words: str, text: str = "") -> str:
    done = subprocess.run(  # noqa: S603
        ["nft", *words],  # noqa: S607
        input=text,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise Fault(f"nft: {done.stderr.strip()}")
    return done.stdout


def _dropped() -> int:
    found = re.search(r"packets (\d+)", _nft("list", "counter", "ip", TABLE, "dropped"))
    return int(found[1]) if found else 0


def run_kernel(
    config: dict[str, Any], event_log: EventLog, witness: Witness, control: ControlChannel
) -> None:
    """Hold the namespace and apply instructions until told to stop. The process must be in its namespace already."""
    namespaces.loopback_up()
    rules = Rules(config["kind"], config["connects"], config["ports"])
    _nft("-f", "-", text=_TABLE_TEXT)
    event_log.write("tool", name=_nft("--version").strip())
    witness.write(Kind.READY)
    while not control.stop:
        while control.queue:
            instruction = control.queue.popleft()
            rules.instruct(instruction)
            begun = time.monotonic_ns()
            _nft("-f", "-", text=rules.text())
            event_log.write(
                "filter", instruction=instruction, begun=begun
            )  # in force by now, and not before `begun`
            event_log.write("drops", drops={"in_flight": _dropped()})
        control.wake.wait(POLL_S)
        control.wake.clear()
    event_log.write("drops", drops={"in_flight": _dropped()})
