"""Small parts of the harness: frames on a stream, HTTP, clock, registry, scenarios, plan."""

import datetime
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.losstest import Options, Traits, resolve, transport_names
from brokerless.losstest.adapters.framing import Deframer, frame
from brokerless.losstest.adapters.http_server import parse_request
from brokerless.losstest.matrix import plan
from brokerless.losstest.scenarios import CONTROLS, MAIN, SCENARIOS


@given(bodies=st.lists(st.binary(max_size=50), max_size=8), noise=st.binary(max_size=20), cuts=st.data())
def test_frames_survive_any_cutting(bodies: list[bytes], noise: bytes, cuts: st.DataObject) -> None:
    """However the stream is cut into pieces, the same bodies come out, after noise without a marker too."""
    stream = noise.replace(b"\xf5", b"") + b"".join(frame(body) for body in bodies)
    deframer = Deframer()
    found = []
    while stream:
        size = cuts.draw(st.integers(1, len(stream)))
        found += deframer.feed(stream[:size])
        stream = stream[size:]
    assert found == bodies


def test_a_torn_frame_costs_only_itself() -> None:
    """The rest of a frame whose reader died is skipped, and the next one is found."""
    deframer = Deframer()
    assert deframer.feed(frame(b"first")[7:] + frame(b"second")) == [b"second"]


@given(st.binary(max_size=80))
def test_http_parser_never_crashes(data: bytes) -> None:
    """Any bytes are a request, not complete yet, or a ValueError."""
    try:
        request, used = parse_request(data)
    except ValueError:
        return
    assert (request is None) == (used == 0)


def test_http_parser() -> None:
    """Requests in one buffer are taken one after the other, with their bodies."""
    one = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nX-Y: z\r\n\r\nabc"
    request, used = parse_request(one + one)
    assert request is not None
    assert (request.method, request.headers["x-y"], request.body, used) == ("POST", "z", b"abc", len(one))
    assert parse_request(one[:-1]) == (None, 0)


def test_the_wall_clock_jumps_and_the_monotonic_does_not() -> None:
    """All ways of asking for the time of day jump together, also those imported before; and back again."""
    code = (
        "import time, datetime\nfrom time import time as early\nfrom datetime import datetime as d\n"
        "from brokerless.losstest.clock import shift_wall_clock\n"
        "real, mono = time.time(), time.monotonic()\nshift_wall_clock(3600)\n"
        "assert 3599 < time.time() - real < 3700 and 3599 < early() - real < 3700\n"
        "assert 3599 < time.time_ns() / 1e9 - real < 3700\n"
        "assert 3599 < d.now().timestamp() - real < 3700\n"
        "assert 3599 < datetime.datetime.now(datetime.UTC).timestamp() - real < 3700\n"
        "assert time.monotonic() - mono < 100\nshift_wall_clock(0)\nassert abs(time.time() - real) < 100\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert abs(time.time() - datetime.datetime.now(datetime.UTC).timestamp()) < 10


def test_every_transport_resolves_and_promises_only_what_exists() -> None:
    """Names are unique, promises are about real scenarios and real reasons, and every one has a summary."""
    names = transport_names()
    assert len(names) == len(set(names))
    for name in names:
        traits = resolve(name).traits
        assert set(traits.promises) <= set(SCENARIOS), name
        assert traits.summary, name
        assert set(traits.without) <= set(SCENARIOS), name


def test_scenarios_fit_where_they_mean_something() -> None:
    """Packet loss is for datagrams, 500 for HTTP, retention for journals; controls are for all."""
    tcp = Traits(family="f", link="tcp")
    assert not SCENARIOS["loss"].fits(tcp)
    assert SCENARIOS["loss"].fits(Traits(family="f", link="udp"))
    assert not SCENARIOS["answer-500"].fits(tcp)
    assert SCENARIOS["answer-500"].fits(Traits(family="f", http=True))
    assert not SCENARIOS["beyond-retention"].fits(tcp)
    assert SCENARIOS["beyond-retention"].fits(Traits(family="f", journal="memory"))
    assert not SCENARIOS["kill"].fits(Traits(family="f", without=("kill",)))
    assert all(SCENARIOS[name].fits(Traits(family="f", only=("kill",))) for name in CONTROLS)
    assert not SCENARIOS["broker-kill"].fits(tcp)
    assert SCENARIOS["broker-kill"].fits(Traits(family="f", journal="broker"))
    assert len(MAIN) == 7


def test_plan_has_controls_first_and_once() -> None:
    """Controls come before everything else, are not repeated, and cannot be left out."""
    chosen = {"udp": resolve("udp")}
    cells = plan(Options(transports=("udp",), scenarios=("kill",), repeat=3), chosen)
    assert [cell.scenario for cell in cells] == ["none", "seeded", "kill", "kill", "kill"]
    assert [cell.seed for cell in cells[2:]] == [1, 2, 3]
    assert len({cell.run for cell in cells}) == 5


@pytest.mark.parametrize("name", ["missing:", ":x", "json:nothing", "json:loads", "/nowhere/x.py:t"])
def test_bad_plugins_are_named(name: str) -> None:
    """What is not a transport is refused with its name."""
    with pytest.raises(ConfigError, match=name.partition(":")[0] or "x"):
        resolve(name)
