"""metrics/client/client.py, api.py, totals.py and transport.py, over real sockets."""

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import statsd

from brokerless.core.errors import ConfigError
from brokerless.metrics import StatsClient
from brokerless.metrics.client.totals import Totals, counter_line
from tests.conftest import Until

Make = Callable[..., StatsClient]


class Sink:
    """A UDP socket that keeps what it gets."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.sock.bind(("127.0.0.1", 0))
        self.port: int = self.sock.getsockname()[1]

    def datagrams(self, timeout: float = 0.3) -> list[bytes]:
        self.sock.settimeout(timeout)
        found = []
        try:
            while True:
                found.append(self.sock.recv(65536))
                self.sock.settimeout(0.05)
        except TimeoutError:
            return found

    def lines(self, timeout: float = 0.3) -> list[str]:
        """All lines that are not ours."""
        text = b"\n".join(self.datagrams(timeout)).decode()
        return [line for line in text.split("\n") if line and not line.startswith("_bl.")]


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    yield made
    made.sock.close()


@pytest.fixture
def make(sink: Sink) -> Iterator[Make]:
    made: list[StatsClient] = []

    def build(**settings: object) -> StatsClient:
        client = StatsClient("127.0.0.1", sink.port, **settings)  # type: ignore[arg-type]
        made.append(client)
        return client

    yield build
    for client in made:
        client.close()


def exercise(client: object) -> None:
    """The package's whole API, with fixed values."""
    c: statsd.StatsClient = client  # type: ignore[no-any-unimported]
    c.incr("a")
    c.incr("a", 5)
    c.decr("a", 2)
    c.incr("b", rate=1)
    c.gauge("g", 7)
    c.gauge("g", -3)
    c.gauge("g", 2, delta=True)
    c.gauge("g", -2, delta=True)
    c.timing("t", 12.5)
    c.timing("t", timedelta(seconds=1.5))
    c.set("s", "user")
    with c.pipeline() as pipe:
        pipe.incr("p")
        pipe.gauge("pg", -1)
        pipe.timing("pt", 1)


def test_the_lines_are_those_of_the_plain_package(sink: Sink, make: Make) -> None:
    """Every method of the PyPI client, called in the same way, sends the same lines in the same order."""
    plain = statsd.StatsClient("127.0.0.1", sink.port, prefix="x")
    exercise(plain)
    wanted = sink.lines()
    plain.close()
    client = make(prefix="x")
    exercise(client)
    client.flush()
    assert sink.lines() == wanted


def test_timers_work_as_decorator_context_manager_and_coroutine(sink: Sink, make: Make) -> None:
    """The package's timer: `with`, decorator, started and stopped by hand, and around a coroutine function."""
    client = make()

    @client.timer("decorated")
    def work() -> int:
        return 4

    @client.timer("awaited")
    async def wait() -> int:
        await asyncio.sleep(0.002)
        return 5

    with client.timer("block"):
        pass
    timer = client.timer("manual").start()
    timer.stop()
    assert (work(), asyncio.run(wait())) == (4, 5)
    client.flush()
    lines = sink.lines()
    assert [line.split(":")[0] for line in lines] == ["block", "manual", "decorated", "awaited"]
    assert float(lines[3].split(":")[1].split("|")[0]) >= 2


def test_tags_come_from_the_client_and_from_the_call(sink: Sink, make: Make) -> None:
    """Constant and own tags are joined; what would end a tag is replaced; histograms and distributions too."""
    client = make(tags={"env": "prod"})
    client.incr("a", tags=["b:1", "bad,|\ntag"])
    client.distribution("d", 1.5)
    client.histogram("h", 2, rate=1, tags={"k": "v"})
    client.flush()
    assert sink.lines() == [
        "a:1|c|#env:prod,b:1,bad___tag",
        "d:1.5|d|#env:prod",
        "h:2|h|#env:prod,k:v",
    ]


def test_counting_one_in_any_way_sends_what_was_meant(sink: Sink, make: Make) -> None:
    """Lines that are remembered by name are not mixed up with other counts, types of one, tags, rates or prefixes."""
    client, other = make(audit=False, prefix="p"), make(audit=False)
    for count in (True, 1, 1.0, 2, 1, -1):
        client.incr("a", count)
    client.incr("a", tags=["t:1"])
    client.incr("ä")
    client.incr("ä")
    client.flush()
    other.incr("a")
    other.flush()
    assert sink.lines() == [
        *("p.a:1|c", "p.a:1|c", "p.a:1|c", "p.a:2|c", "p.a:1|c", "p.a:-1|c"),
        *("p.a:1|c|#t:1", "p.ä:1|c", "p.ä:1|c", "a:1|c"),
    ]
    bounded = make(audit=False, max_counters=10)
    for i in range(30):
        bounded.incr(f"n{i}")
        bounded.incr(f"n{i}")
    bounded.flush()
    assert sink.lines() == [f"n{i // 2}:1|c" for i in range(60)]
    assert len(bounded._ones) == 10


def test_sampling_sends_a_share_and_says_so(sink: Sink, make: Make) -> None:
    """A rate of 0.2 sends about a fifth, each with `@0.2`."""
    random.seed(5)
    client = make(audit=False)
    for _ in range(2000):
        client.incr("a", rate=0.2)
    client.flush()
    lines = sink.lines()
    assert 300 < len(lines) < 500
    assert set(lines) == {"a:1|c|@0.2"}


def test_datagrams_are_numbered_and_never_larger_than_asked(sink: Sink, make: Make) -> None:
    """Each datagram begins with the client's id and the next number, fits maxudpsize, and nothing is missing."""
    client = make(maxudpsize=300)
    for i in range(500):
        client.incr(f"counter.{i}")
    client.incr("ä" * 100)
    client.flush()
    datagrams = sink.datagrams()
    heads = [d.split(b"\n")[0] for d in datagrams]
    assert heads == [b"_bl.%s:%d|g" % (client.id.encode(), n + 1) for n in range(len(datagrams))]
    assert max(map(len, datagrams)) <= 300
    assert sum(len(d.split(b"\n")) - 1 for d in datagrams) == 501 == client.counters.lines
    client.incr("x" * 400)
    assert client.counters.oversized == 1


def test_lines_wait_no_longer_than_the_time_limit(sink: Sink, make: Make) -> None:
    """One line in an otherwise idle client leaves by itself, and so does the next."""
    client = make(flush_s=0.02)
    client.incr("a")
    assert sink.lines(timeout=10) == ["a:1|c"]
    client.incr("b")
    assert sink.lines(timeout=10) == ["b:1|c"]


def test_heartbeats_tell_totals_that_add_up(sink: Sink, make: Make) -> None:
    """Totals per counter and tags, lines, start; again with the next heartbeat; all of them at the end."""
    client = make(heartbeat_s=0.05)
    for _ in range(100):
        client.incr("a")
        client.incr("b", 0.5, tags=["t:1"])
    client.decr("a", 40)
    deadline = time.monotonic() + 10
    seen = b""
    while b".t.a:60|g" not in seen and time.monotonic() < deadline:
        seen += b"\n".join(sink.datagrams(0.1)) + b"\n"
    assert b"_bl.%s.t.a:60|g\n" % client.id.encode() in seen
    assert b".t.b:50.0|g|#t:1" in seen
    assert b".lines:201|g" in seen
    client.incr("a")
    client.close()
    last = sink.datagrams()[-1]
    assert b".t.a:61|g" in last
    assert b".end:1|g" in last


def test_the_first_heartbeat_does_not_wait_for_a_long_interval(
    sink: Sink, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then a daemon cannot tell what was lost before: it comes after five seconds at the latest."""
    monkeypatch.setattr("brokerless.metrics.client.client.HEARTBEAT_S", 0.05)
    client = make(heartbeat_s=3600)
    client.incr("a")
    deadline = time.monotonic() + 30
    seen = b""
    while b".t.a:1|g" not in seen and time.monotonic() < deadline:
        seen += b"\n".join(sink.datagrams(0.1)) + b"\n"
    assert b".every:3600000|g" in seen
    assert b".t.a:1|g" in seen


def test_nothing_raises_when_nobody_listens() -> None:
    """A closed port, an unknown host, a missing Unix socket: counted, never raised."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    client = StatsClient("127.0.0.1", port, maxudpsize=100)
    for _ in range(200):
        client.incr("some.counter.name")
        client.flush()
    assert client.counters.unreachable > 0
    client.close()
    for host in ("no-such-host.invalid", "/nonexistent/statsd.sock"):
        client = StatsClient(host)
        client.incr("a")
        client.flush()
        assert (client.counters.failed, client.counters.failed_lines) == (1, 1)
        client.close()
        client.incr("after")
        client.flush()
        assert client.counters.failed_lines >= 2


def test_a_unix_datagram_socket_is_a_path(tmp_path: Path) -> None:
    """With a path as host, lines go to a Unix datagram socket, also to one that is made later."""
    path = str(tmp_path / "statsd.sock")
    client = StatsClient(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        server.settimeout(10)
        client.incr("a")
        client.flush()
        assert server.recv(1000).endswith(b"\na:1|c")
        client.close()


def test_many_threads_lose_nothing(sink: Sink, make: Make) -> None:
    """Four threads at once: every line arrives once, numbers are gapless, totals are right."""
    client = make(heartbeat_s=30)

    def work() -> None:
        for _ in range(500):
            client.incr("a")
            client.timing("t", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    datagrams = sink.datagrams()
    lines = b"\n".join(datagrams).split(b"\n")
    assert (lines.count(b"a:1|c"), lines.count(b"t:1.000000|ms")) == (2000, 2000)
    numbers = [int(d[13:].split(b"|")[0].split(b".")[0]) for d in datagrams]
    assert numbers == list(range(1, len(datagrams) + 1))
    assert b"_bl.%s.t.a:2000|g" % client.id.encode() in lines


def test_a_forked_child_is_a_client_of_its_own(sink: Sink, make: Make) -> None:
    """The child has another id and port and numbers from 1; what was buffered is sent once, by the parent."""
    client = make(flush_s=5)
    client.incr("before")
    pid = os.fork()
    if not pid:
        try:
            client.incr("child")
            client.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    client.incr("parent")
    client.close()
    datagrams = sink.datagrams()
    ids = {d[4:12] for d in datagrams}
    assert len(ids) == 2
    lines = b"\n".join(datagrams).split(b"\n")
    assert [lines.count(name) for name in (b"before:1|c", b"child:1|c", b"parent:1|c")] == [1, 1, 1]
    for client_id in ids:
        mine = [d for d in datagrams if d[4:12] == client_id]
        numbers = [int(d[13:].split(b"|")[0].split(b".")[0]) for d in mine]
        assert numbers == list(range(1, len(numbers) + 1))


def test_the_address_is_looked_up_again(sink: Sink, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the name points elsewhere, the client follows without a restart."""
    other = Sink()
    ports = {"now": sink.port}
    real = socket.getaddrinfo

    def lookup(host: str, port: int, *rest: object) -> object:
        return real("127.0.0.1", ports["now"] if host == "moving.test" else port, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    client = StatsClient("moving.test", 8125, resolve_s=0.01, audit=False)
    client.incr("a")
    client.flush()
    assert sink.lines() == ["a:1|c"]
    ports["now"] = other.port

    def moved() -> bool:
        client.incr("b")
        client.flush()
        return "b:1|c" in other.lines(0.05)

    until(moved)
    client.close()
    other.sock.close()


def test_settings_that_make_no_sense_are_refused() -> None:
    """The only errors are at construction, and name the setting."""
    for settings in ({"maxudpsize": 10}, {"flush_s": 0}, {"heartbeat_s": -1}):
        with pytest.raises(ConfigError):
            StatsClient("127.0.0.1", 1, **settings)  # type: ignore[arg-type]


def test_what_has_changed_is_told_first_and_three_times() -> None:
    """A changed counter waits its turn and is told three times, ahead of those that are told in turn."""
    totals = Totals(3)
    totals.add(["a:1|c", "a:1|c", "b:2|c|@0.5|#x:y", "zz"])
    told = [totals.report("id", 1000, changed=5, in_turn=0) for _ in range(4)]
    assert told[0] == [["_bl.id.t.a:2|g", "_bl.id.t.b:4.0|g|#x:y"]] == told[1] == told[2]
    assert told[3] == []
    totals.add(["a:-1|c", "c:1|c", "d:1|c"])
    assert totals.report("id", 20, changed=1, in_turn=0) == [["_bl.id.t.a:1|g"]]
    assert totals.report("id", 20, changed=1, in_turn=0) == [["_bl.id.t.c:1|g"]]
    assert totals.unreported == 1
    # Somebody who has heard of all three must not think that these are all.
    assert totals.known == 4
    assert sum(len(chunk) for chunk in totals.report_all("id", 1000)) == 3


def test_all_totals_are_told_again_in_turn() -> None:
    """Quiet counters, too: as many datagrams each time as were allowed, all within the time that follows from it."""
    totals = Totals(1000)
    totals.add([f"k{i:03}:1|c" for i in range(100)])
    line = len("_bl.id.t.k000:1|g") + 1
    for _ in range(3):
        totals.report("id", 100 * line, changed=100, in_turn=0)
    told: list[str] = []
    for _ in range(-(-100 // (2 * 10))):
        chunks = totals.report("id", 10 * line, changed=3, in_turn=2)
        assert [len(chunk) for chunk in chunks] == [10, 10]
        told += [text for chunk in chunks for text in chunk]
    assert sorted(told) == [f"_bl.id.t.k{i:03}:1|g" for i in range(100)]
    totals.add(["k007:1|c"])
    first, *others = totals.report("id", 10 * line, changed=3, in_turn=2)
    assert first[0] == "_bl.id.t.k007:2|g"
    assert sum(text.startswith("_bl.id.t.k007:") for chunk in [first, *others] for text in chunk) == 1


def test_names_that_mean_the_same_counter_have_one_total() -> None:
    """Tags in another order, names that are cleaned to the same, newlines: the daemon sees one counter, so do we."""
    totals = Totals(10)
    totals.add(["r:1|c|#a:1,b:2", "r:2|c|#b:2,a:1", "x y:1|c", "x_y:1|c", "zz\nq:5|c"])
    assert totals.report_all("id", 1000) == [
        ["_bl.id.t.r:3|g|#a:1,b:2", "_bl.id.t.x y:2|g", "_bl.id.t.q:5|g"]
    ]


@pytest.mark.parametrize("line", ["a", "a:b:1|c", "a:x|c", "a:1|c|@x", "a:1|c|@0"])
def test_lines_that_no_daemon_would_count_are_not_told(line: str) -> None:
    """A name with a colon, or a count that is none, must not end up in the totals, nor raise."""
    assert counter_line(line) is None


def test_its_attributes_are_few_enough_to_be_read_fast() -> None:
    """CPython keeps up to 29 attributes in a place known beforehand; one more costs `incr` a twentieth."""
    with StatsClient("127.0.0.1", 9, prefix="p", tags={"a": "b"}, name="n", auth_key=b"k" * 32) as client:
        client.incr("x")
        client.heartbeat()
        assert len(vars(client)) < 30
