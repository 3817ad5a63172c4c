"""Two hosts on two networks: several interfaces, source-specific joins, IPv6, in network namespaces made here."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Does what it is told on standard input, one JSON command per line, and answers each with one line.
HOST = """
import json, sys
from brokerless.multicast import Publisher, Subscriber

ends = {}
for line in sys.stdin:
    word = json.loads(line)
    name, said = word["name"], {}
    if word["do"] == "publisher":
        ends[name] = Publisher(word["group"], "NET", **word["options"])
        said = {"requests": ends[name].request_address}
    elif word["do"] == "subscriber":
        ends[name] = Subscriber(word["group"], "NET", **word["options"])
    elif word["do"] == "publish":
        ends[name].publish_many("a", [name.encode() + b"%90d" % i for i in range(word["count"])])
    elif word["do"] == "joined":
        said = {"joined": ends[name].wait_joined(word["seconds"])}
    elif word["do"] == "follow":
        sub, offsets, who = ends[name], [], set()
        for event in sub.events(word["seconds"]):
            offsets.append(event.offset)
            who.add(event.data[:1].decode())
            if len(offsets) == word["count"]:
                break
        c = sub.counters
        said = {"offsets": [offsets[0], offsets[-1]] if offsets else [], "got": len(offsets), "who": sorted(who)}
        said |= {"duplicates": c.duplicates, "gaps": c.gaps, "repaired": c.repaired, "lost": c.lost}
        said |= {"in_order": offsets == sorted(set(offsets)), "packets": c.packets}
        said |= {"stale": sub.stale, "stales": c.stale, "rejoins": c.rejoins}
    elif word["do"] == "counters":
        said = {**ends[name].counters.snapshot(), "stale": getattr(ends[name], "stale", None)}
    print(json.dumps(said), flush=True)
"""


class Host:
    """A network namespace with a Python process in it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "ip link set lo up && echo up && exec sleep 600"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        self.up = self._holder.stdout.readline().strip() == "up"
        self._python: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        return self._holder.pid

    def ip(self, *arguments: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "ip", *arguments], check=True, timeout=20)

    def nft(self, *arguments: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "nft", *arguments], check=True, timeout=20)

    def reaches(self, group: str, interface: str) -> bool:
        """Whether the kernel would send to the group by that interface: it takes a moment until a link is up."""
        command = ["nsenter", "-t", str(self.pid), "-n", "ip", "route", "get", group, "oif", interface]
        return not subprocess.run(command, capture_output=True, timeout=20, check=False).returncode

    def tell(self, name: str, do: str, **word: Any) -> dict[str, Any]:
        if self._python is None:
            self._python = subprocess.Popen(
                ["nsenter", "-t", str(self.pid), "-n", sys.executable, "-c", HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps({"name": name, "do": do, **word}) + "\n")
        self._python.stdin.flush()
        answer: dict[str, Any] = json.loads(self._python.stdout.readline())
        return answer

    def end(self) -> None:
        for process in (self._python, self._holder):
            if process is not None:
                process.kill()
                process.wait(20)
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()


def connect(pair: tuple[Host, Host], n: int) -> None:
    """Make network number `n` between two hosts (again)."""
    ends = [["name", f"net{n}", "netns", str(host.pid)] for host in pair]
    made = subprocess.run(
        ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"cannot make a network here: {made.stderr.strip()}")
    for number, host in enumerate(pair, start=1):
        host.ip("addr", "add", f"10.77.{n}.{number}/24", "dev", f"net{n}")
        host.ip("addr", "add", f"fd77:0:0:{n}::{number}/64", "dev", f"net{n}", "nodad")
        host.ip("link", "set", f"net{n}", "up")


@pytest.fixture
def hosts(until: Callable[..., None]) -> Iterator[tuple[Host, Host]]:
    """Two hosts with two networks between them: 10.77.0.0/24 and 10.77.1.0/24, and the same as fd77:0:0:N::/64."""
    pair = Host(), Host()
    try:
        if not all(host.up for host in pair):
            pytest.skip("cannot make network namespaces here")
        for n in (0, 1):
            connect(pair, n)
        for n in (0, 1):
            until(
                lambda n=n: all(host.reaches("ff35::7:7", f"net{n}") for host in pair),
                20,
                "the networks are up",
            )
        yield pair
    finally:
        for host in pair:
            host.end()


GROUP = "239.255.7.7:30001"
BOTH = {"interface": ["10.77.0.1", "10.77.1.1"], "ttl": 1}


def test_two_networks_carry_one_stream_and_one_may_fail(
    hosts: tuple[Host, Host], until: Callable[..., None]
) -> None:
    """Sent and joined on two interfaces: each event once; with one network down nothing is missing."""
    here, there = hosts
    at = here.tell("p", "publisher", group=GROUP, options=BOTH)["requests"]
    assert at == "10.77.0.1:30002"
    options = {"interface": ["10.77.0.2", "net1"], "request_servers": [at]}
    there.tell("s", "subscriber", group=GROUP, options=options)
    assert there.tell("s", "joined", seconds=10)["joined"]
    here.tell("p", "publish", count=3000)
    said = there.tell("s", "follow", count=3000, seconds=10)
    assert (said["offsets"], said["got"], said["in_order"], said["lost"]) == ([0, 2999], 3000, True, 0)
    # The copies may come after the events that they repeat.
    until(
        lambda: there.tell("s", "follow", count=1, seconds=0.1)["duplicates"] == 3000, what="all came twice"
    )
    there.ip("link", "set", "net1", "down")
    here.tell("p", "publish", count=3000)
    said = there.tell("s", "follow", count=3000, seconds=10)
    assert (said["offsets"], said["got"], said["in_order"], said["lost"]) == ([3000, 5999], 3000, True, 0)
    assert there.tell("s", "follow", count=1, seconds=0.3)["duplicates"] == 3000, "the first half came twice"


def test_what_both_networks_lose_is_asked_for_over_the_network(hosts: tuple[Host, Host]) -> None:
    """A host that was cut off comes back: the request server on the other host has it, by UDP or TCP."""
    here, there = hosts
    at = here.tell("p", "publisher", group=GROUP, options=BOTH)["requests"]
    options = {"interface": ["net0", "net1"], "request_servers": [at]}
    there.tell("s", "subscriber", group=GROUP, options=options)
    assert there.tell("s", "joined", seconds=10)["joined"]
    for count in (100, 5000):
        for n in (0, 1):
            there.ip("link", "set", f"net{n}", "down")
        here.tell("p", "publish", count=count)
        for n in (0, 1):
            there.ip("link", "set", f"net{n}", "up")
        said = there.tell("s", "follow", count=count, seconds=20)
        assert (said["got"], said["in_order"], said["lost"]) == (count, True, 0)
    assert said["repaired"] == 5100


@pytest.mark.parametrize(
    ("group", "ours", "sender", "interface"),
    [
        ("232.1.7.7:30001", {"interface": "10.77.0.1", "ttl": 1}, "10.77.0.1", "10.77.0.2"),
        ("232.1.7.7:30001", {"interface": "10.77.0.1", "ttl": 1}, "10.77.0.1", "net0"),
        (
            "[ff35::7:7]:30001",
            {"interface": "net0", "ttl": 1, "requests": "[fd77::1]:30002"},
            "fd77::1",
            "net0",
        ),
    ],
)
def test_a_source_specific_join_hears_its_source_alone(
    hosts: tuple[Host, Host], group: str, ours: dict[str, Any], sender: str, interface: str
) -> None:
    """Two hosts send to one group: who joined for one of them gets its events, and no packet of the other."""
    here, there = hosts
    other = {**ours, "interface": interface}
    if "requests" in ours:
        other["requests"] = "[fd77::2]:30002"
    here.tell("p", "publisher", group=group, options=ours)
    there.tell("q", "publisher", group=group, options=other)
    options = {"interface": interface, "sender": sender}
    there.tell("s", "subscriber", group=group, options=options)
    wrong = {**options, "sender": sender[:-1] + "9", "request_servers": []}
    there.tell("w", "subscriber", group=group, options=wrong)
    assert there.tell("s", "joined", seconds=10)["joined"]
    there.tell("q", "publish", count=500)
    here.tell("p", "publish", count=2000)
    said = there.tell("s", "follow", count=2000, seconds=10)
    assert (said["got"], said["who"], said["lost"]) == (2000, ["p"], 0)
    assert there.tell("w", "follow", count=1, seconds=0.5)["packets"] == 0


def test_ipv6_is_repaired_from_another_host(hosts: tuple[Host, Host]) -> None:
    """An IPv6 group of link scope by interface name, late join, and a long gap over TCP to an IPv6 address."""
    here, there = hosts
    group = "[ff12::7:7]:30001"
    options = {"interface": "net1", "ttl": 1, "requests": "[fd77:0:0:1::1]:30002"}
    at = here.tell("p", "publisher", group=group, options=options)["requests"]
    here.tell("p", "publish", count=5000)
    there.tell(
        "s", "subscriber", group=group, options={"interface": "net1", "request_servers": [at], "start": 0}
    )
    said = there.tell("s", "follow", count=5000, seconds=20)
    assert (said["offsets"], said["got"], said["in_order"], said["lost"]) == ([0, 4999], 5000, True, 0)
    assert said["repaired"] > 2000


def test_by_default_nothing_leaves_the_host(hosts: tuple[Host, Host]) -> None:
    """A publisher without `interface` and `ttl` is heard on its own host, and nowhere else."""
    here, there = hosts
    there.tell("s", "subscriber", group=GROUP, options={"interface": ["net0", "net1"], "request_servers": []})
    here.tell("p", "publisher", group=GROUP, options={})
    here.tell("s", "subscriber", group=GROUP, options={})
    assert here.tell("s", "joined", seconds=10)["joined"]
    here.tell("p", "publish", count=100)
    assert here.tell("s", "follow", count=100, seconds=10)["got"] == 100
    assert there.tell("s", "follow", count=1, seconds=0.5)["packets"] == 0


def test_link_local_ipv6_groups_are_heard_on_every_interface(
    hosts: tuple[Host, Host], until: Callable[..., None]
) -> None:
    """The same group of link scope on two networks: every event comes by both."""
    here, there = hosts
    group = "[ff12::7:8]:30001"
    options = {"interface": ["net0", "net1"], "ttl": 1, "requests": "[fd77::1]:30002"}
    at = here.tell("p", "publisher", group=group, options=options)["requests"]
    there.tell(
        "s", "subscriber", group=group, options={"interface": ["net0", "net1"], "request_servers": [at]}
    )
    assert there.tell("s", "joined", seconds=10)["joined"]
    here.tell("p", "publish", count=1000)
    assert there.tell("s", "follow", count=1000, seconds=20)["got"] == 1000
    until(lambda: there.tell("s", "follow", count=1, seconds=0.1)["duplicates"] == 1000, 20, "all came twice")


def test_line_a_goes_by_interface_a(hosts: tuple[Host, Host]) -> None:
    """Two groups and two interfaces are two lines: the first group is not sent on the second network."""
    here, there = hosts
    groups = ["239.255.7.1:30001", "239.255.7.2:30001"]
    at = here.tell("p", "publisher", group=groups, options=BOTH)["requests"]
    crossed = {"interface": ["net1", "net0"], "request_servers": []}
    there.tell("x", "subscriber", group=groups, options=crossed)
    straight = {"interface": ["net0", "net1"], "request_servers": [at]}
    there.tell("s", "subscriber", group=groups, options=straight)
    assert there.tell("s", "joined", seconds=10)["joined"]
    here.tell("p", "publish", count=1000)
    assert there.tell("s", "follow", count=1000, seconds=20)["got"] == 1000
    assert there.tell("x", "follow", count=1, seconds=0.5)["packets"] == 0


class Switch:
    """A host that is nothing but a bridge between others, which have 10.78.0.N/24 and fd78::N/64 at `net0`."""

    def __init__(self, hosts: list[Host]) -> None:
        self.host = Host()
        self.hosts = hosts
        self.host.ip("link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        self.host.ip("link", "set", "br0", "up")

    def plug(self, number: int) -> None:
        """Make the interface of a host (again), and connect it."""
        host, port = self.hosts[number], f"port{number}"
        ends = [["name", "net0", "netns", str(host.pid)], ["name", port, "netns", str(self.host.pid)]]
        made = subprocess.run(
            ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"cannot make a network here: {made.stderr.strip()}")
        self.host.ip("link", "set", port, "master", "br0", "up")
        # The same hardware address as before: otherwise the neighbours' caches are wrong for some ten seconds.
        host.ip("link", "set", "net0", "address", f"02:00:00:00:78:0{number}")
        host.ip("addr", "add", f"10.78.0.{number + 1}/24", "dev", "net0")
        host.ip("addr", "add", f"fd78::{number + 1}/64", "dev", "net0", "nodad")
        host.ip("link", "set", "net0", "up")

    def unplug(self, number: int) -> None:
        """Delete the interface of a host."""
        self.hosts[number].ip("link", "del", "net0")


@pytest.fixture
def switch(until: Callable[..., None]) -> Iterator[Switch]:
    """Five hosts on one network."""
    everybody = [Host() for _ in range(5)]
    made: list[Host] = list(everybody)
    try:
        if not all(host.up for host in everybody):
            pytest.skip("cannot make network namespaces here")
        switch = Switch(everybody)
        made.append(switch.host)
        for number in range(5):
            switch.plug(number)
        until(lambda: all(host.reaches("ff35::7:7", "net0") for host in everybody), 20, "the network is up")
        yield switch
    finally:
        for host in made:
            host.end()


FAMILIES = pytest.mark.parametrize(
    ("group", "requests"),
    [("239.255.7.9:30001", "10.78.0.1:30002"), ("[ff12::7:9]:30001", "[fd78::1]:30002")],
)


def five(switch: Switch, group: str, requests: str) -> list[Host]:
    """A publisher on the first host, a subscriber on each of the others, all joined."""
    first, *others = switch.hosts
    first.tell("p", "publisher", group=group, options={"interface": "net0", "ttl": 1, "requests": requests})
    for host in others:
        options = {"interface": "net0", "request_servers": [requests]}
        host.tell("s", "subscriber", group=group, options=options)
    for host in others:
        assert host.tell("s", "joined", seconds=20)["joined"]
    return others


@FAMILIES
def test_an_interface_that_is_made_anew_loses_nothing(
    switch: Switch, until: Callable[..., None], group: str, requests: str
) -> None:
    """Deleted and made again, first at a subscriber and then at the publisher: said, joined again, all delivered."""
    others = five(switch, group, requests)
    first = switch.hosts[0]
    first.tell("p", "publish", count=100)
    for host in others:
        assert host.tell("s", "follow", count=100, seconds=20)["got"] == 100
    switch.unplug(4)
    first.tell("p", "publish", count=2000)
    switch.plug(4)
    until(lambda: others[3].tell("s", "counters")["rejoins"] >= 1, 30, "joined again")
    first.tell("p", "publish", count=1000)
    for host in others:
        said = host.tell("s", "follow", count=3000, seconds=30)
        assert (said["got"], said["in_order"], said["lost"]) == (3000, True, 0)
    switch.unplug(0)
    first.tell("p", "publish", count=500)
    switch.plug(0)
    until(lambda: first.tell("p", "counters")["reopened"] >= 1, 30, "opened again")
    first.tell("p", "publish", count=500)
    for host in others:
        said = host.tell("s", "follow", count=1000, seconds=30)
        assert (said["got"], said["in_order"], said["lost"]) == (1000, True, 0)


@FAMILIES
def test_a_membership_that_is_filtered_away_is_noticed(
    switch: Switch, until: Callable[..., None], group: str, requests: str
) -> None:
    """Multicast does not come to one of four: it says so, and gets everything from the request server."""
    others = five(switch, group, requests)
    first, cut_off = switch.hosts[0], others[0]
    family, host = ("ip6", group[1:].partition("]")[0]) if "[" in group else ("ip", group.partition(":")[0])
    cut_off.nft("add", "table", family, "filter")
    cut_off.nft("add", "chain", family, "filter", "input", "{ type filter hook input priority 0 ; }")
    cut_off.nft("add", "rule", family, "filter", "input", family, "daddr", host, "drop")
    first.tell("p", "publish", count=20_000)
    said = cut_off.tell("s", "follow", count=20_000, seconds=60)
    assert (said["got"], said["in_order"], said["lost"]) == (20_000, True, 0)
    assert (said["stale"], said["stales"]) == (True, 1)
    assert said["rejoins"] >= 1
    for host in others[1:]:
        said = host.tell("s", "follow", count=20_000, seconds=60)
        assert (said["got"], said["lost"], said["stales"]) == (20_000, 0, 0)
    cut_off.nft("delete", "table", family, "filter")
    until(lambda: not cut_off.tell("s", "counters")["stale"], 20, "heard again")


def test_one_of_two_lines_is_joined_again_when_its_interface_is_made_anew(
    hosts: tuple[Host, Host], until: Callable[..., None]
) -> None:
    """Lines A and B on separate interfaces; B's is deleted and made again: nothing is missing, and B is heard again."""
    here, there = hosts
    groups = ["239.255.7.1:30001", "239.255.7.2:30001"]
    named = {"interface": ["net0", "net1"], "ttl": 1}
    at = here.tell("p", "publisher", group=groups, options=named)["requests"]
    there.tell(
        "s", "subscriber", group=groups, options={"interface": ["net0", "net1"], "request_servers": [at]}
    )
    assert there.tell("s", "joined", seconds=20)["joined"]
    there.ip("link", "del", "net1")  # both ends of it
    here.tell("p", "publish", count=500)
    said = there.tell("s", "follow", count=500, seconds=20)
    assert (said["got"], said["in_order"], said["lost"]) == (500, True, 0)
    connect(hosts, 1)
    until(
        lambda: here.tell("p", "counters")["reopened"] >= 1 and there.tell("s", "counters")["rejoins"] >= 1,
        60,
        "both sides have B again",
    )
    before = there.tell("s", "counters")["duplicates"]

    def comes_twice() -> bool:
        here.tell("p", "publish", count=100)
        said = there.tell("s", "follow", count=100, seconds=20)
        assert (said["got"], said["in_order"], said["lost"], said["stales"]) == (100, True, 0, 0)
        return bool(said["duplicates"] > before)

    until(comes_twice, 60, "line B is heard again")
