"""Loss-aware counters against the truth: numbers exact, bounds that cover, healing that is exact."""

import random
from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.reorder import HOLD
from brokerless.metrics.aggregate.rollup import RollupConfig
from tests.metrics.captured import CapturedClient
from tests.metrics.simulation import Channel, SimulatedClient, SimulatedDaemon, points

KEYS = [f"k{i}" for i in range(8)]


def some_lines(rnd: random.Random) -> list[tuple[str, int]]:
    """A datagram: frequent and rarer counters, several of one in a datagram, byte counts among them."""
    lines = [(KEYS[min(int(rnd.expovariate(0.5)), 6)], 1) for _ in range(rnd.randint(4, 20))]
    return [*lines, *(("k7", rnd.randint(1, 1500)) for _ in range(rnd.randint(0, 3)))]


@pytest.mark.parametrize(
    ("loss", "datagrams", "runs"),
    [
        (0.001, 5000, 60),
        (0.05, 700, 60),
        (0.2, 300, 120),
        (0.6, 250, 120),
        pytest.param(0.001, 5000, 250, marks=pytest.mark.slow),
        pytest.param(0.05, 700, 1000, marks=pytest.mark.slow),
        pytest.param(0.2, 300, 1000, marks=pytest.mark.slow),
        pytest.param(0.6, 250, 1000, marks=pytest.mark.slow),
    ],
)
def test_the_bound_covers_the_truth_and_the_heartbeat_makes_it_exact(
    loss: float, datagrams: int, runs: int
) -> None:
    """Seeded runs of the real client with loss, 3 % repeats, reordering: 93 to 97 % in the bound, exact once told."""
    inside = trials = 0
    for seed in range(runs):
        rnd = random.Random(f"{loss} {seed}")
        receiver, client = SimulatedDaemon(), CapturedClient()
        channel = Channel(rnd, loss=loss, repeat=0.03, reorder=0.05)

        def wire(lines: list[tuple[str, int]], client: CapturedClient = client) -> bytes:
            for key, amount in lines:
                client.incr(key, amount)
            return client.flush()[0]

        # The client is known from its first heartbeat on; the channel then loses.
        receiver.receive([wire([("begin", 1)]), *client.heartbeat()])
        receiver.receive(channel.carry([wire(some_lines(rnd)) for _ in range(datagrams)]))
        # This arrives: it ends the uncertainty about how many datagrams there were. It is like the others, because
        # the bound assumes that what arrives does not depend on what is in it.
        receiver.receive([wire(some_lines(rnd))])
        flush = receiver.flush()
        assert flush.clients[0].lost == channel.lost
        assert flush.clients[0].sent == client.stats.counters.datagrams
        found = points(flush)
        for key in KEYS:
            if key not in found:
                continue  # never arrived: nobody can know of it yet
            point, truth = found[key], client.truth[key]
            if channel.lost:
                assert point.bound is not None
                trials += 1
                inside += abs(point.corrected - truth) <= point.bound
                assert point.grade is Grade.LEDGER
            else:
                assert (point.corrected, point.bound) == (truth, 0.0)
        receiver.receive(client.close())
        healed = points(receiver.flush())
        assert {key: healed[key].total for key in client.truth} == client.truth
        assert {healed[key].total_grade for key in client.truth} == {Grade.EXACT}
    assert 0.93 <= inside / trials <= 0.97, f"{inside} of {trials}"


@pytest.mark.parametrize("tell", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("loss", "datagrams", "runs"),
    [
        (0.05, 200, 80),
        (0.2, 60, 120),
        (0.6, 60, 120),
        pytest.param(0.05, 200, 1000, marks=pytest.mark.slow),
        pytest.param(0.2, 60, 2000, marks=pytest.mark.slow),
        pytest.param(0.6, 60, 2000, marks=pytest.mark.slow),
    ],
)
def test_the_bound_covers_with_heartbeats_lost_and_received(
    loss: float, datagrams: int, runs: int, tell: float
) -> None:
    """One after each twenty datagrams, lost as they are, and one at the end that arrives and tells no counter."""
    inside = trials = 0
    for seed in range(runs):
        rnd = random.Random(f"{loss} {tell} {seed}")
        receiver, client = SimulatedDaemon(), SimulatedClient("wwwwwwww")
        channel = Channel(rnd, loss=loss, repeat=0.03, reorder=0.05)
        receiver.receive([client.heartbeat()])
        wire = []
        for number in range(1, datagrams + 1):
            wire.append(client.datagram(some_lines(rnd)))
            if not number % 20:
                wire.append(client.heartbeat(tell=number < datagrams and rnd.random() < tell))
        receiver.receive(channel.carry(wire))
        receiver.receive([client.heartbeat(tell=False)])
        flush = receiver.flush()
        assert flush.clients[0].lost == channel.lost
        for key, point in points(flush).items():
            if point.total_grade is Grade.EXACT:
                assert point.total == client.truth[key]
            elif point.total_bound is not None:
                trials += 1
                inside += abs(point.total - client.truth[key]) <= point.total_bound
    assert 0.93 <= inside / trials <= 0.97, f"{inside} of {trials}"


@given(
    st.integers(),
    st.sampled_from([0.0, 0.001, 0.05, 0.2, 0.6]),
    st.sampled_from([0.0, 0.03]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.integers(1, 3),
)
def test_after_the_last_totals_every_counter_is_what_was_sent(
    seed: int, loss: float, repeat: float, reorder: float, workers: int
) -> None:
    """Clients that restart, any channel, windows and heartbeats anywhere, datagrams over several workers: exact."""
    rnd = random.Random(seed)
    receiver = SimulatedDaemon(workers)
    channel = Channel(rnd, loss=loss, repeat=repeat, reorder=reorder)
    clients: list[SimulatedClient] = []
    expected: dict[str, int] = {}
    sent = 0
    for _ in range(rnd.randint(1, 4)):
        client = SimulatedClient("".join(rnd.choices("abc123", k=8)))
        clients.append(client)
        wire = []
        for _ in range(rnd.randint(1, 120)):
            wire.append(client.datagram(some_lines(rnd)))
            if rnd.random() < 0.05:
                wire.append(client.heartbeat())
        arrived = channel.carry(wire)
        while arrived:
            n = rnd.randint(1, 80)
            worker = rnd.randrange(workers)  # its source port changed, and no steering helped
            receiver.receive(arrived[:n], worker)
            del arrived[:n]
            if rnd.random() < 0.2:
                receiver.flush()
        for key, amount in client.truth.items():
            expected[key] = expected.get(key, 0) + amount
    for client in clients:
        receiver.receive([client.heartbeat()], rnd.randrange(workers))
        sent += client.number
    flush = receiver.flush()
    found = points(flush)
    assert {key: found[key].total for key in expected} == expected
    assert all(found[key].total_bound == 0 for key in expected)
    assert sum(client.lost for client in flush.clients) == channel.lost
    assert sum(client.sent for client in flush.clients) == sent
    assert flush.rollup["lost_datagrams"] == channel.lost


@given(st.integers(), st.sampled_from([0.05, 0.3]))
def test_the_windows_add_up_to_the_total(seed: int, loss: float) -> None:
    """Corrected values of all windows sum to the published total, healing included."""
    rnd = random.Random(seed)
    receiver, client = SimulatedDaemon(), SimulatedClient("bbbbbbbb")
    channel = Channel(rnd, loss=loss)
    sums: dict[str, float] = {}
    flushes = []
    for _ in range(6):
        wire = [client.datagram(some_lines(rnd)) for _ in range(rnd.randint(0, 40))]
        if rnd.random() < 0.5:
            wire.append(client.heartbeat())
        receiver.receive(channel.carry(wire))
        flushes.append(receiver.flush())
    for flush in flushes:
        for point in flush.counters:
            sums[point.series] = sums.get(point.series, 0) + point.corrected
    for point in flushes[-1].counters:
        assert sums[point.series] == pytest.approx(point.total)


def test_a_client_older_than_the_daemon_is_counted_from_when_the_daemon_began() -> None:
    """After a restart of the daemon, earlier totals of a client are somebody else's; later ones heal."""
    rnd = random.Random(7)
    receiver, client = SimulatedDaemon(), SimulatedClient("cccccccc", start_ms=-5000)
    for _ in range(50):
        client.datagram(some_lines(rnd))  # to the daemon before
    before = dict(client.truth)
    receiver.receive([client.datagram(some_lines(rnd)), client.heartbeat()])
    flush = receiver.flush()
    assert flush.clients[0].lost == 0
    for _ in range(3):
        client.datagram(some_lines(rnd))  # lost
    receiver.receive([client.heartbeat()])
    flush = receiver.flush()
    assert flush.clients[0].lost == 3
    found = points(flush)
    for key, total in client.truth.items():
        now = found[key].total if key in found else 0
        assert now == total - before.get(key, 0)


def test_an_older_client_whose_first_datagram_came_here_is_counted_whole() -> None:
    """It was made before the daemon and counted after: its first total, though told after a loss, is all ours."""
    receiver, client = SimulatedDaemon(), SimulatedClient("xxxxxxxx", start_ms=-5000)
    receiver.receive([client.datagram([("a", 5)])])
    point = points(receiver.flush())["a"]
    assert (point.total, point.total_grade) == (5, Grade.EXACT)
    client.datagram([("a", 10)])  # lost
    client.datagram([("a", 100)])  # lost
    receiver.receive([client.heartbeat()])
    point = points(receiver.flush())["a"]
    assert (point.total, point.total_bound, point.total_grade) == (115, 0.0, Grade.EXACT)


def test_a_client_that_began_while_the_daemon_listened_is_counted_from_its_first_number() -> None:
    """The first datagrams lost are noticed too, as soon as a heartbeat says when the client began."""
    rnd = random.Random(8)
    receiver, client = SimulatedDaemon(), SimulatedClient("dddddddd", start_ms=1)
    for _ in range(5):
        client.datagram(some_lines(rnd))  # lost
    receiver.receive([client.datagram(some_lines(rnd))])
    assert receiver.flush().clients[0].lost == 0
    receiver.receive([client.heartbeat()])
    flush = receiver.flush()
    assert flush.clients[0].lost == 5
    assert {key: points(flush)[key].total for key in client.truth} == client.truth


def test_a_late_datagram_does_not_count_twice() -> None:
    """What arrives after the totals that include it changes raw figures and nothing else."""
    receiver, client = SimulatedDaemon(), SimulatedClient("eeeeeeee")
    first = client.datagram([("a", 1)])
    held = client.datagram([("a", 10), ("b", 5)])
    receiver.receive([first, client.heartbeat()])
    flush = receiver.flush()
    assert (points(flush)["a"].total, flush.clients[0].lost) == (11, 1)
    receiver.receive([held])
    flush = receiver.flush()
    assert (points(flush)["a"].total, points(flush)["a"].total_raw) == (11, 11)
    assert (points(flush)["b"].total, flush.clients[0].lost, flush.clients[0].late) == (5, 0, 1)


def test_a_loss_of_everything_since_the_totals_is_graded_unknown() -> None:
    """One datagram of twenty says nothing about how they differ: no bound is claimed, until totals come."""
    receiver, client = SimulatedDaemon(), SimulatedClient("ffffffff")
    receiver.receive([client.heartbeat()])
    for _ in range(20):
        last = client.datagram([("b", 1)])
    receiver.receive([last])
    point = points(receiver.flush())["b"]
    assert (point.grade, point.bound) == (Grade.UNKNOWN, None)
    receiver.receive([client.heartbeat()])
    point = points(receiver.flush())["b"]
    assert (point.total, point.total_bound, point.total_grade) == (20, 0.0, Grade.EXACT)


def test_unnumbered_traffic_is_corrected_by_what_the_socket_dropped() -> None:
    """Foreign datagrams: raw without drops, scaled up and graded socket-only with them; the bound covers."""
    inside = trials = 0
    for seed in range(150):
        rnd = random.Random(seed)
        receiver = SimulatedDaemon()
        truth: dict[str, int] = {}
        kept, dropped = [], 0
        for _ in range(400):
            lines = some_lines(rnd)
            for key, amount in lines:
                truth[key] = truth.get(key, 0) + amount
            if rnd.random() < 0.2:
                dropped += 1
            else:
                kept.append("\n".join(f"{key}:{amount}|c" for key, amount in lines).encode())
        receiver.receive(kept)
        flush = receiver.flush(kernel_drops=dropped)
        for point in flush.counters:
            assert point.grade is Grade.SOCKET_ONLY
            assert point.bound is not None
            trials += 1
            inside += abs(point.corrected - truth[point.series]) <= point.bound
    assert 0.93 <= inside / trials <= 0.97, f"{inside} of {trials}"
    calm = SimulatedDaemon()
    calm.receive([b"a:5|c"])
    point = points(calm.flush())["a"]
    assert (point.corrected, point.bound, point.grade) == (5, 0.0, Grade.SOCKET_ONLY)


def test_idle_clients_expire_and_their_counters_stay() -> None:
    """A client that says nothing for client_ttl_s is forgotten; totals and losses stay in the rollup."""
    receiver, client = SimulatedDaemon(config=RollupConfig(client_ttl_s=25)), SimulatedClient("gggggggg")
    rnd = random.Random(1)
    receiver.receive([client.datagram(some_lines(rnd))])
    client.datagram(some_lines(rnd))  # lost
    receiver.receive([client.heartbeat()])
    assert receiver.flush().clients[0].lost == 1
    flush = receiver.flush()
    for _ in range(3):
        flush = receiver.flush()
    assert flush.clients == []
    assert flush.rollup["clients_expired"] == 1
    assert flush.rollup["lost_datagrams"] == 1
    assert {key: points(flush)[key].total for key in client.truth} == client.truth


def test_lines_reported_and_received_agree_when_nothing_is_lost() -> None:
    """The rollup of lines balance: what the client says it sent is what was received."""
    rnd = random.Random(3)
    receiver, client = SimulatedDaemon(), SimulatedClient("hhhhhhhh")
    receiver.receive(
        [client.datagram([*some_lines(rnd), ("g", 1)]) for _ in range(100)] + [client.heartbeat()]
    )
    report = receiver.flush().clients[0]
    assert report.lines == report.lines_reported == client.lines


@given(st.integers(), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.3]))
def test_gauges_of_a_client_end_as_it_set_them_last(seed: int, loss: float, reorder: float) -> None:
    """Whatever is lost or reordered (by less than the hold), the newest datagram that arrived has the last word."""
    rnd = random.Random(seed)
    receiver = SimulatedDaemon()
    datagrams = [b"_bl.gauges00:%d|g\ng:%d|g\ng:+1|g" % (n, n) for n in range(1, rnd.randint(2, 300))]
    arrived = Channel(rnd, loss=loss, reorder=reorder).carry(datagrams)
    if not arrived:
        return
    receiver.receive(arrived)
    numbers = [int(d.split(b"|")[0].split(b":")[1]) for d in arrived]
    # The channel may move one datagram several times.
    assume(all(newest - n < HOLD for newest, n in zip(accumulate(numbers, max), numbers, strict=True)))
    assert receiver.flush().gauges == {"g": max(numbers) + 1}


def test_forged_numbers_and_totals_cannot_fill_the_memory() -> None:
    """An absurd jump is not believed; totals of ever new names stop being remembered, counted; the rest goes on."""
    receiver, client = SimulatedDaemon(config=RollupConfig(max_series=20)), SimulatedClient("iiiiiiii")
    receiver.receive(
        [client.datagram([("a", 1)]), b"_bl.iiiiiiii:900000000|g\na:5|c", client.datagram([("a", 1)])]
    )
    flush = receiver.flush()
    assert (points(flush)["a"].corrected, flush.clients[0].lost) == (2, 0)
    assert receiver.collectors[0].counters.implausible == 1
    forged = "\n".join(f"_bl.jjjjjjjj.t.name{i}:1|g" for i in range(500))
    receiver.receive([f"_bl.jjjjjjjj:1|g\n{forged}".encode(), client.heartbeat()])
    flush = receiver.flush()
    assert sum(report.counters for report in flush.clients) <= 100
    assert flush.rollup["keys_refused"] >= 400
    assert len(flush.counters) <= 20
    assert points(flush)["a"].total == 2


def test_set_members_and_exact_timer_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limits set members are refused by reason and timers go on as sketches."""
    monkeypatch.setattr("brokerless.metrics.aggregate.aggregator.MAX_MEMBERS", 10)
    monkeypatch.setattr("brokerless.metrics.aggregate.aggregator.MAX_EXACT", 10)
    receiver = SimulatedDaemon()
    receiver.receive([b"s:%d|s\nt%d:1.5|ms" % (i, i % 4) for i in range(40)])
    receiver.receive([b"s:1|s"])
    flush = receiver.flush()
    assert flush.sets == {"s": 10}
    assert flush.refused == {"set_limit": 30}
    assert sum(figures["count"] for figures in flush.timers.values()) == 40  # type: ignore[misc]
    assert flush.sketches


def test_a_quiet_counter_is_not_exact_while_later_datagrams_are_missing() -> None:
    """Told, then quiet, then an outage in which it may have been counted: open until it is told again."""
    receiver, client = SimulatedDaemon(), SimulatedClient("kkkkkkkk")
    receiver.receive([client.datagram([("quiet", 3), ("busy", 1)]), client.heartbeat()])
    assert points(receiver.flush())["quiet"].total_grade is Grade.EXACT
    for _ in range(20):
        client.datagram([("quiet", 1)])  # lost
    receiver.receive([client.datagram([("busy", 1)]) for _ in range(5)])
    point = points(receiver.flush())["quiet"]
    assert (point.grade, point.total_grade, point.total) == (Grade.LEDGER, Grade.LEDGER, 3)
    assert point.total_bound is not None
    assert point.total_bound > 0
    receiver.receive([client.heartbeat()])
    point = points(receiver.flush())["quiet"]
    assert (point.total, point.total_bound, point.total_grade) == (23, 0.0, Grade.EXACT)


def test_a_loss_that_may_hide_any_counter_opens_all_of_them() -> None:
    """Another client's missing datagrams may hold a counter it never told: not exact until it has told all."""
    receiver = SimulatedDaemon()
    one, other = SimulatedClient("llllllll"), SimulatedClient("mmmmmmmm")
    receiver.receive([one.datagram([("a", 1)]), one.heartbeat()])
    other.datagram([("a", 5)])  # lost
    receiver.receive([other.datagram([("b", 1)])])
    assert points(receiver.flush())["a"].total_grade is Grade.UNKNOWN
    beat = other.heartbeat().decode().replace(".start:", ".counters:2|g\n_bl.mmmmmmmm.start:")
    receiver.receive([beat.encode()])
    point = points(receiver.flush())["a"]
    assert (point.total, point.total_grade) == (6, Grade.EXACT)


def test_a_client_that_was_forgotten_and_comes_back_does_not_count_twice() -> None:
    """Its totals are of its whole life; only what is new since then is added, and the outage stays in doubt."""
    receiver, client = SimulatedDaemon(config=RollupConfig(client_ttl_s=25)), SimulatedClient("nnnnnnnn")
    receiver.receive([late := client.datagram([("a", 7)]), client.heartbeat()])
    for _ in range(4):
        flush = receiver.flush()
    assert (flush.clients, flush.rollup["clients_expired"]) == ([], 1)
    receiver.receive([late])
    flush = receiver.flush()
    assert (flush.clients, flush.rollup["after_end"], points(flush)["a"].total) == ([], 1, 7)
    client.datagram([("a", 100)])  # lost
    receiver.receive([client.datagram([("a", 1)]), client.heartbeat(), client.datagram([("a", 1)])])
    flush = receiver.flush()
    point = points(flush)["a"]
    assert (flush.clients[0].sent, flush.clients[0].lost) == (4, 1)
    assert 8 <= point.total < 109
    assert point.total_grade is not Grade.EXACT


def test_of_a_client_that_comes_back_no_missing_datagram_is_taken_for_a_heartbeat() -> None:
    """Forgotten, then one of its first datagrams comes late, and a heartbeat: what was lost between is not exact."""
    receiver, client = SimulatedDaemon(config=RollupConfig(client_ttl_s=25)), SimulatedClient("vvvvvvvv")
    late = client.datagram([("a", 1)])
    receiver.receive([client.heartbeat()])
    for _ in range(4):
        flush = receiver.flush()
    assert flush.clients == []
    client.datagram([("a", 5)])  # lost
    receiver.receive([late, client.heartbeat()])
    assert points(receiver.flush())["a"].total_grade is not Grade.EXACT


def test_missing_heartbeats_do_not_make_a_counter_inexact() -> None:
    """They hold no lines of it, and it is known that they were heartbeats; where a line is missing, too, it is open."""
    receiver, client = SimulatedDaemon(), SimulatedClient("tttttttt")
    receiver.receive([client.datagram([("a", 1)]), client.heartbeat(), client.datagram([("a", 2)])])
    client.heartbeat()  # lost
    client.heartbeat()  # lost
    receiver.receive([client.datagram([("a", 4)])])
    flush = receiver.flush()
    point = points(flush)["a"]
    assert (point.total, point.total_bound, point.total_grade) == (7, 0.0, Grade.EXACT)
    assert flush.clients[0].lost == 2
    client.heartbeat()  # lost
    client.datagram([("a", 8)])  # lost
    receiver.receive([client.datagram([("a", 4)]) for _ in range(4)])
    point = points(receiver.flush())["a"]
    # The newest, which holds 4, is no sample of what may be missing.
    assert (point.total, point.total_grade) == (pytest.approx(1 + 4 + 18 * 6 / 5), Grade.LEDGER)


def test_a_client_that_does_not_say_how_many_heartbeats_there_were_is_counted_carefully() -> None:
    """Numbers without a point: whatever is missing may have held a counter."""
    receiver = SimulatedDaemon()
    receiver.receive(
        [b"_bl.uuuuuuuu:1|g\na:1|c", b"_bl.uuuuuuuu:2|g\n_bl.uuuuuuuu.start:1|g\n_bl.uuuuuuuu.t.a:1|g"]
    )
    receiver.receive([b"_bl.uuuuuuuu:%d|g\na:1|c" % number for number in (4, 5, 6)])
    point = points(receiver.flush())["a"]
    assert (point.total, point.total_grade) == (pytest.approx(5), Grade.LEDGER)


def test_a_deleted_counter_counts_from_zero_again() -> None:
    """Deleting is not undone by the client's next total."""
    receiver, client = SimulatedDaemon(), SimulatedClient("oooooooo")
    receiver.receive([client.datagram([("a", 7)]), client.heartbeat()])
    assert points(receiver.flush())["a"].total == 7
    receiver.rollup.delete("counters", ["a"])
    assert "a" not in points(receiver.flush())
    receiver.receive([client.datagram([("a", 2)]), client.heartbeat()])
    point = points(receiver.flush())["a"]
    assert (point.corrected, point.total, point.total_grade) == (2, 2, Grade.EXACT)


def test_more_lossy_series_than_allowed_do_not_stop_the_daemon() -> None:
    """Beyond max_series a client's counters are refused, with datagrams missing, too."""
    receiver, client = SimulatedDaemon(config=RollupConfig(max_series=3)), SimulatedClient("pppppppp")
    receiver.receive([client.datagram([(f"k{i}", 1)]) for i in range(10)])
    client.datagram([("k0", 1)])  # lost
    receiver.receive([client.datagram([(f"k{i}", 1) for i in range(10)])])
    flush = receiver.flush()
    assert len(flush.counters) == 3
    assert flush.rollup["series_dropped"] > 0
    receiver.receive([client.heartbeat()])
    flush = receiver.flush()
    assert {point.series: point.total for point in flush.counters} == {"k0": 3, "k1": 2, "k2": 2}


def test_many_silent_clients_make_room_earlier() -> None:
    """With half of max_clients there, who is silent for five minutes is forgotten; otherwise for an hour."""
    for clients, left in ((3, 3), (6, 0)):
        receiver = SimulatedDaemon(config=RollupConfig(max_clients=10))
        receiver.receive([SimulatedClient(f"qqqqqqq{i}").datagram([("a", 1)]) for i in range(clients)])
        for _ in range(32):
            flush = receiver.flush()
        assert len(flush.clients) == left
        assert points(flush)["a"].total == clients


def test_a_client_that_dies_with_datagrams_missing_leaves_a_doubt_in_the_totals_only() -> None:
    """What it had not told may have been any counter: totals stay ledger, and a counter says why; windows recover."""
    receiver = SimulatedDaemon(config=RollupConfig(client_ttl_s=25))
    one, dead = SimulatedClient("rrrrrrrr"), SimulatedClient("ssssssss")
    receiver.receive([dead.datagram([("b", 1)]), dead.heartbeat()])
    dead.datagram([("a", 1)])  # lost
    receiver.receive([dead.datagram([("b", 1)])])
    for _ in range(5):
        receiver.receive([one.datagram([("a", 1)]), one.heartbeat()])
        flush = receiver.flush()
    assert flush.rollup["clients_unresolved"] == 1
    point = points(flush)["a"]
    assert (point.grade, point.total_grade, point.total) == (Grade.EXACT, Grade.UNKNOWN, 5)
