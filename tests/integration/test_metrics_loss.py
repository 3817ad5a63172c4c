"""Loss truth on real sockets: a relay loses with a seed; clients restart and fork; totals make all exact."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from functools import partial
from math import inf
from pathlib import Path

import pytest

from brokerless.metrics import Flush, Grade, MetricsServer, StatsClient
from brokerless.metrics.aggregate.flush import CounterPoint
from tests.conftest import Until
from tests.metrics.relay import Relay
from tests.metrics.windows import NEVER_S

SETTLED = {"loss": 0.0, "repeat": 0.0, "reorder": 0.0}
# One run of an application: counts, forks a child that counts too, and reports what it sent.
APPLICATION = """
import json, os, random, sys
from brokerless.metrics import StatsClient
port, seed, steps = map(int, sys.argv[1:])
client = StatsClient("127.0.0.1", port, maxudpsize=400, heartbeat_s=0.05, flush_s=0.01)
def work(seed):
    rnd = random.Random(seed)
    truth = {}
    for _ in range(steps):
        key, amount = f"k{rnd.randrange(6)}", rnd.randint(1, 9)
        client.incr(key, amount)
        client.timing("t", amount)
        truth[key] = truth.get(key, 0) + amount
    return truth
truth = work(seed)
read, write = os.pipe()
pid = os.fork()
if not pid:
    child = work(seed + 1)
    client.heartbeat()
    os.write(write, json.dumps([child, client.counters.datagrams]).encode())
    sys.stdin.buffer.raw.read(1)
    client.close()
    os._exit(0)
child, sent = json.loads(os.read(read, 65536))
for key, amount in child.items():
    truth[key] = truth.get(key, 0) + amount
client.heartbeat()
print(json.dumps(truth), flush=True)
os.waitpid(pid, 0)
sys.stdin.buffer.raw.read(1)
client.close()
"""


def points(flush: Flush) -> dict[str, CounterPoint]:
    return {point.series: point for point in flush.counters}


@pytest.mark.parametrize("loss", [0.001, 0.05, 0.2, 0.6])
def test_counters_are_exact_after_loss_repeats_reordering_restarts_and_forks(
    loss: float, until: Until, tmp_path: Path
) -> None:
    """Real processes behind a lossy relay: lost datagrams are known exactly, counters end as what was sent."""
    script = tmp_path / "application.py"
    script.write_text(APPLICATION)
    truth: dict[str, int] = {}
    with (
        MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S) as server,
        Relay(server.addresses["udp"][0], int(loss * 1000), loss=loss, repeat=0.03, reorder=0.05) as relay,
    ):
        seen: set[str] = set()

        def heard(clients: int) -> bool:
            seen.update(client.client for client in server.flush_now().clients)
            return len(seen) == clients

        for run in range(2):  # the second is a restart: another process, another client
            relay.rates(loss=loss, repeat=0.03, reorder=0.05)
            process = subprocess.Popen(
                [sys.executable, str(script), str(relay.port), str(run * 10), "1500"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                for key, amount in json.loads(process.stdout.readline()).items():
                    truth[key] = truth.get(key, 0) + amount
                server.flush_now()
                relay.rates(**SETTLED)  # the last messages arrive
                process.stdin.write(b"xx")
                process.stdin.close()
                assert process.wait(30) == 0
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
            until(partial(heard, 2 * run + 2), what="both clients of this run heard of")
        lost = 0

        def settled() -> bool:
            nonlocal lost
            flush = server.flush_now()
            lost = flush.rollup["lost_datagrams"]
            return lost == relay.lost and {k: p.total for k, p in points(flush).items()} == truth

        until(settled, what="counters equal what was sent")
        assert lost == relay.lost
        assert len(seen) == 4
        final = points(server.flush_now())
        assert {p.total_grade for p in final.values()} == {Grade.EXACT}
        assert all(p.total_bound == 0 for p in final.values())


@pytest.mark.parametrize("times", [1, pytest.param(12, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("ending", ["counters", "another counter", "heartbeat"])
def test_the_bound_covers_on_real_sockets_too(ending: str, times: int, until: Until) -> None:
    """Real clients, relay and daemon at four rates, seeded: 93 to 97 % of the counters lie within their bound.

    The last datagram arrives, so that it is known how many there were: one like all others, one that holds
    another counter, or a heartbeat that tells none of them.
    """
    inside = trials = 0
    # A client that may tell one counter tells "begin" and never the others.
    told = 1 if ending == "heartbeat" else 10_000
    for loss, runs, lines in ((0.001, 6, 20_000), (0.05, 72, 3000), (0.2, 72, 3000), (0.6, 72, 3000)):
        rnd = random.Random(f"lines {loss}")
        with (
            MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S) as server,
            Relay(server.addresses["udp"][0], int(loss * 1000)) as relay,
        ):
            sent = 0
            for run in range(runs * times):
                client = StatsClient(
                    "127.0.0.1", relay.port, maxudpsize=300, heartbeat_s=inf, flush_s=60, max_counters=told
                )

                def passed(client: StatsClient = client, before: int = sent) -> bool:
                    """Everything sent has reached the relay, and what it let through the daemon."""
                    return (
                        relay.received == before + client.counters.datagrams
                        and relay.idle
                        and server.receive_counters()["datagrams"] == relay.sent
                    )

                client.incr("begin")
                client.heartbeat()  # from here on the daemon knows the client
                until(passed)
                server.flush_now()
                lost = relay.lost
                truth: dict[str, int] = {}
                relay.rates(loss=loss, reorder=0.05, repeat=0.03)
                for at in range(lines):
                    key = f"run{run}.k{min(int(rnd.expovariate(0.6)), 5)}"
                    client.incr(key)
                    truth[key] = truth.get(key, 0) + 1
                    if at % 2000 == 0:
                        until(passed)  # no buffer may run over
                    if at == lines - 20 and ending == "counters":
                        until(passed)
                        relay.rates()
                client.flush()
                until(passed)
                relay.rates()
                if ending == "another counter":
                    client.incr("end")
                    client.flush()
                elif ending == "heartbeat":
                    client.heartbeat()
                until(passed)
                flush = server.flush_now()
                lost = relay.lost - lost
                assert next(c for c in flush.clients if c.client == client.id).lost == lost
                for key, amount in truth.items() if lost else ():
                    point = points(flush)[key]
                    assert point.grade is Grade.LEDGER
                    assert point.bound is not None
                    trials += 1
                    inside += abs(point.corrected - amount) <= point.bound
                client.close()
                until(passed)
                healed = points(server.flush_now())
                if told > 1:
                    assert {key: healed[key].total for key in truth} == truth
                    assert {healed[key].total_grade for key in truth} == {Grade.EXACT}
                sent += client.counters.datagrams
    assert 0.93 <= inside / trials <= 0.97, f"{inside} of {trials}"


def test_a_daemon_that_was_away_is_healed_by_the_totals(until: Until) -> None:
    """Everything is lost for a while; when datagrams arrive again, the counters become what was sent."""
    with (
        MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S) as server,
        Relay(server.addresses["udp"][0], 1) as relay,
        StatsClient("127.0.0.1", relay.port, heartbeat_s=0.05, flush_s=0.01) as client,
    ):
        client.incr("a", 100)
        client.heartbeat()
        until(lambda: points(server.flush_now()).get("a") is not None)
        relay.open = False
        client.incr("a", 1000)
        client.incr("only.then", 7)
        client.heartbeat()
        until(lambda: relay.received == client.counters.datagrams)
        relay.open = True

        def healed() -> bool:
            found = points(server.flush_now())
            return "only.then" in found and (found["a"].total, found["only.then"].total) == (1100, 7)

        until(healed)
        assert server.flush_now().rollup["lost_datagrams"] == relay.lost


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs SO_REUSEPORT")
def test_workers_share_a_port_and_give_one_result(until: Until) -> None:
    """A client whose source port changes all the time, repeats included: one ledger, exact; others spread out."""
    with MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S, workers=3) as server:
        assert server.pool is not None
        assert len(set(server.pool.pids)) == 3
        host, _, port = server.addresses["udp"][0].rpartition(":")
        target = (host, int(port))
        sent = 0
        rnd = random.Random(4)
        missing = 0
        for number in range(1, 301):
            payload = b"_bl.steerme1:%d|g\na:1|c\ng:%d|g\nt:%d|ms" % (number, number, number)
            if number % 10 == 0:
                missing += 1
                continue
            for _ in range(1 + (rnd.random() < 0.1)):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                    sock.sendto(payload, target)
                    sent += 1
        for i in range(200):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"unnumbered:2|c\nu:%d|s" % (i % 50), target)
                sent += 1
        last = b"_bl.steerme1:301|g\n_bl.steerme1.start:%d|g\n_bl.steerme1.t.a:300|g"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(last % int(server.started_at * 1000 + 1000), target)
            sent += 1
        total = {"lines": 0}

        def all_read() -> bool:
            flush = server.flush_now()
            total["lines"] += flush.lines
            return flush.receive["datagrams"] == sent

        until(all_read)
        flush = server.flush_now()
        found = points(flush)
        assert (found["a"].total, found["a"].total_grade) == (300, Grade.EXACT)
        assert found["unnumbered"].total == 400
        assert flush.clients[0].lost == missing
        assert flush.receive["duplicates"] == sent - 200 - 1 - (300 - missing)
        assert flush.gauges["g"] == 299


def test_workers_unite_the_ledgers_of_many_clients_behind_lossy_links(until: Until) -> None:
    """Six clients over three workers, each through a link of its own: one result, exact, every loss known."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S, workers=3))
        relays, clients = [], []
        for seed in range(6):
            relay = Relay(server.addresses["udp"][0], seed, loss=0.2, repeat=0.05, reorder=0.1)
            relays.append(stack.enter_context(relay))
            client = StatsClient("127.0.0.1", relay.port, maxudpsize=300, heartbeat_s=0.05, flush_s=0.01)
            clients.append(stack.enter_context(client))
        rnd = random.Random(6)
        truth: dict[str, int] = {}
        for _ in range(6000):
            key, amount = f"k{rnd.randrange(20)}", rnd.randint(1, 9)
            rnd.choice(clients).incr(key, amount)
            truth[key] = truth.get(key, 0) + amount
        for relay in relays:
            until(lambda relay=relay: relay.lost)
            relay.rates()

        def settled() -> bool:
            flush = server.flush_now()
            found = points(flush)
            grades = {point.total_grade for point in found.values()}
            # A datagram that a relay still holds back counts as lost until it comes, which may be after the totals.
            lost = flush.rollup["lost_datagrams"] == sum(relay.lost for relay in relays)
            return lost and {key: p.total for key, p in found.items()} == truth and grades == {Grade.EXACT}

        until(settled, 60, what="counters equal what was sent, and the losses are known")


def test_a_sum_beyond_64_bits_does_not_stop_a_worker(until: Until) -> None:
    """What no message between processes can hold becomes a float, and the worker lives on."""
    with MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S, workers=2) as server:
        target = ("127.0.0.1", int(server.addresses["udp"][0].rpartition(":")[2]))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"_bl.absurd00:1|g\n" + b"a:999999999999999999|c\n" * 40, target)
            sock.sendto(b"g:999999999999999999|g\n" + b"g:+999999999999999999|g\n" * 40, target)
        until(lambda: "a" in points(server.flush_now()))
        until(lambda: server.flush_now().gauges.get("g", 0) > 4e19)
        assert points(server.flush_now())["a"].total == pytest.approx(4e19)
        assert server.flush_now().rollup["worker_crashes"] == 0


def test_a_killed_worker_is_replaced_and_its_loss_is_healed(until: Until) -> None:
    """kill -9 of a worker loses its part of the window; the socket goes on, the client's totals repair."""
    with (
        MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S, workers=2) as server,
        StatsClient(
            "127.0.0.1", int(server.addresses["udp"][0].rpartition(":")[2]), heartbeat_s=0.1, flush_s=0.01
        ) as client,
    ):
        assert server.pool is not None
        before = server.pool.pids
        for _ in range(500):
            client.incr("a")
        client.flush()
        for pid in before:
            os.kill(pid, 9)
        for _ in range(500):
            client.incr("a")
        until(lambda: getattr(points(server.flush_now()).get("a"), "total", 0) == 1000)
        assert not set(server.pool.pids) & set(before)
        assert server.flush_now().rollup["worker_crashes"] == 2


def test_a_client_that_died_with_a_workers_window_is_missed(until: Until) -> None:
    """It was heard by a worker that was killed, and never again: no total is exact."""
    with (
        MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S, workers=2) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        assert server.pool is not None
        assert server._heard is not None
        port = int(server.addresses["udp"][0].rpartition(":")[2])
        with StatsClient("127.0.0.1", port) as client:
            client.incr("a")
        until(lambda: getattr(points(server.flush_now()).get("a"), "total_grade", None) is Grade.EXACT)
        before, known = server.pool.pids, server._heard.end
        sock.sendto(b"_bl.zzzzzzzz:1|g\na:1000|c", ("127.0.0.1", port))
        until(lambda: server._heard is not None and server._heard.end > known)
        for pid in before:
            os.kill(pid, 9)
        point = points(server.flush_now())["a"]
        assert (point.total, point.total_grade) == (1, Grade.UNKNOWN)


def test_workers_make_room_when_series_expire(until: Until) -> None:
    """New names in every hour: a worker that knows as many as are allowed forgets those that have expired."""
    with (
        MetricsServer(
            udp=["127.0.0.1:0"], flush_s=NEVER_S, workers=2, max_series=40, series_ttl_s=0.05
        ) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        sock.connect(("127.0.0.1", int(server.addresses["udp"][0].rpartition(":")[2])))
        for name in ("first", "second", "third"):
            sock.send("\n".join(f"{name}{i}:1|c" for i in range(35)).encode())
            until(lambda name=name: f"{name}34" in points(server.flush_now()))  # type: ignore[misc]
            until(lambda: not server.flush_now().counters)
        assert server.flush_now().refused == {}


def test_kernel_drops_of_workers_add_up_and_survive_their_death(until: Until) -> None:
    """Received and dropped are together what was sent, over all workers; a replaced worker reports nothing twice."""
    with MetricsServer(udp=["127.0.0.1:0"], flush_s=NEVER_S, workers=2, receive_buffer=4096) as server:
        assert server.pool is not None
        target = ("127.0.0.1", int(server.addresses["udp"][0].rpartition(":")[2]))
        sent = 0
        for _ in range(40):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                for _ in range(50):
                    sock.sendto(b"a:1|c", target)
                    sent += 1

        def counted() -> int:
            receive = server.flush_now().receive
            return receive["datagrams"] + receive["kernel_drops"]

        until(lambda: counted() == sent)
        drops = server.flush_now().receive["kernel_drops"]
        before = server.pool.pids
        for pid in before:
            os.kill(pid, 9)
        until(lambda: server.flush_now().rollup["worker_crashes"] == 2)
        until(lambda: server.pool is not None and not set(server.pool.pids) & set(before))
        assert server.flush_now().receive["kernel_drops"] == drops
