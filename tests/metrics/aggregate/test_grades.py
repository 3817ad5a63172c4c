"""No grade is better than the truth: what each promises, whatever is lost, killed, broken or forged."""

import logging
import random
from pathlib import Path

import pytest

from brokerless.metrics.aggregate.aggregator import Aggregator
from brokerless.metrics.aggregate.collect import Collector
from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.rollup import RollupConfig
from brokerless.metrics.parser import ParserOptions
from brokerless.metrics.sequence_lines import mac_line, number_line
from brokerless.metrics.server.saved_state import save
from tests.metrics.simulation import SimulatedClient, SimulatedDaemon, points

KEY = b"0123456789abcdef"


def test_huge_increments_do_not_end_the_daemon() -> None:
    """10^100 beside 1, with datagrams missing: nothing is known of that counter, and all others go on."""
    daemon = SimulatedDaemon()
    lines = "x:1e100|c\nx:-1e100|c\nx:1|c\nok:1|c"
    daemon.receive([f"_bl.aaaaaaaa:{n}|g\n{lines}".encode() for n in (1, 2, 4)])
    flush = daemon.flush()
    assert points(flush)["ok"].raw == 3
    assert points(flush)["x"].grade is not Grade.EXACT
    daemon.receive([lines.encode()] * 3)
    assert points(daemon.flush(kernel_drops=5))["ok"].total_raw == 6


def test_a_fault_in_one_client_costs_that_client_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception while one client is accounted for is counted, logged once, and nobody else notices."""
    daemon, bad, good = SimulatedDaemon(), SimulatedClient("bbbbbbbb"), SimulatedClient("gggggggg")
    daemon.receive([bad.datagram([("a", 1)]), good.datagram([("b", 1)]), good.heartbeat()])
    daemon.flush()

    def broken(*_: object) -> None:
        raise OverflowError("made by the test")

    monkeypatch.setattr(daemon.rollup.clients["bbbbbbbb"], "fold", broken)
    daemon.receive([bad.datagram([("a", 1)]), good.datagram([("b", 1)]), good.heartbeat()])
    with caplog.at_level(logging.ERROR):
        flush = daemon.flush()
    assert (points(flush)["b"].total, points(flush)["b"].total_grade) == (2, Grade.EXACT)
    assert points(flush)["a"].total_grade is Grade.UNKNOWN
    assert flush.rollup["faults"] == 1
    assert "bbbbbbbb" in caplog.text


def test_a_fault_in_one_series_costs_that_series_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Figures that nothing can be added to, of a counter, a gauge and a timer: counted, logged once; others go on."""
    daemon = SimulatedDaemon()
    lines = b"bad:1|c\nok:1|c\nbad:5|g\nok:5|g\nbad:7|ms\nok:7|ms"
    daemon.receive([lines])
    daemon.flush()
    daemon.rollup.series["bad"].settled = "none"  # type: ignore[assignment]
    daemon.rollup._gauges["bad"] = "none"  # type: ignore[assignment]
    daemon.rollup.timer_totals["bad"] = None  # type: ignore[assignment]
    daemon.receive([lines.replace(b":5|g", b":+1|g")])
    with caplog.at_level(logging.ERROR):
        flush = daemon.flush(kernel_drops=1)
    assert {series: point.total_raw for series, point in points(flush).items()} == {"ok": 2}
    assert flush.gauges["ok"] == 6
    assert (flush.timers["ok"]["count"], flush.timer_totals["ok"].count) == (1, 2)
    assert flush.rollup["faults"] >= 3
    assert len(caplog.records) == 1
    assert "bad" in caplog.text


def test_a_counter_of_which_the_kernel_dropped_everything_is_not_exact() -> None:
    """All 1,000 increments dropped: neither ±0 nor exact, in the window and in the total."""
    daemon = SimulatedDaemon()
    daemon.receive([b"a:1|c"])
    assert points(daemon.flush())["a"].total_grade is Grade.SOCKET_ONLY
    point = points(daemon.flush(kernel_drops=1000))["a"]
    assert (point.grade, point.bound) == (Grade.UNKNOWN, None)
    assert point.total_grade is Grade.UNKNOWN
    # With other traffic at the same socket it is estimated, and the bound is not 0.
    daemon = SimulatedDaemon()
    daemon.receive([b"a:1|c"])
    daemon.flush()
    daemon.receive([b"b:1|c"] * 100)
    point = points(daemon.flush(kernel_drops=1000))["a"]
    assert point.grade is Grade.SOCKET_ONLY
    assert point.bound
    assert point.total_bound


def test_drops_that_no_numbers_explain_were_somebody_elses() -> None:
    """Numbered clients alone: their numbers explain drops, and heal; otherwise nothing stays exact."""
    daemon, client = SimulatedDaemon(), SimulatedClient("aaaaaaaa")
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    assert points(daemon.flush())["a"].total_grade is Grade.EXACT
    client.datagram([("a", 1)])  # dropped by the kernel
    assert points(daemon.flush(kernel_drops=1))["a"].total_grade is Grade.UNKNOWN
    daemon.receive([client.heartbeat()])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_grade) == (2, Grade.EXACT)
    for _ in range(6):
        daemon.receive([client.heartbeat()])
        flush = daemon.flush(kernel_drops=100 if _ == 0 else 0)
    assert points(flush)["a"].total_grade is Grade.UNKNOWN


def test_what_another_client_may_have_lost_gives_no_bound() -> None:
    """Nine datagrams of a counter are missing from a client that never told it: no ±0, no bound at all."""
    daemon = SimulatedDaemon()
    one, other = SimulatedClient("llllllll"), SimulatedClient("mmmmmmmm")
    daemon.receive([one.datagram([("a", 10)]), one.heartbeat(), other.datagram([("b", 1)])])
    for _ in range(9):
        other.datagram([("a", 100)])  # lost
    daemon.receive([other.datagram([("b", 1)])])
    point = points(daemon.flush())["a"]
    assert (point.total_grade, point.total_bound) == (Grade.UNKNOWN, None)
    beat = other.heartbeat().decode().replace(".start:", ".counters:2|g\n_bl.mmmmmmmm.start:")
    daemon.receive([beat.encode()])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_bound, point.total_grade) == (910, 0.0, Grade.EXACT)


def test_a_client_that_was_killed_had_something_in_its_buffer() -> None:
    """Silent for three heartbeats without a goodbye: neither exact nor ledger, with room for one datagram."""
    daemon, client = SimulatedDaemon(), SimulatedClient("kkkkkkkk")
    for _ in range(46):
        daemon.receive([client.datagram([("a", 37)])])
    daemon.receive([client.heartbeat(), client.datagram([("a", 39)])])
    assert points(daemon.flush())["a"].total_grade is Grade.EXACT
    for _ in range(3):
        point = points(daemon.flush())["a"]
    assert (point.total, point.grade, point.total_grade) == (1741, Grade.SOCKET_ONLY, Grade.SOCKET_ONLY)
    assert point.total_bound is not None
    assert abs(point.total - 1778) <= point.total_bound
    # It was not dead.
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_bound, point.total_grade) == (1742, 0.0, Grade.EXACT)


@pytest.mark.parametrize("by_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_makes_nobody_silent_and_hides_nobody(by_s: float) -> None:
    """Set by two hours when a window ends: who is heard stays exact, who is killed is not, rates are what they were."""
    daemon, client, other = SimulatedDaemon(), SimulatedClient("kkkkkkkk"), SimulatedClient("oooooooo")
    daemon.now = 1e6
    daemon.start_anew()
    for at in range(6):
        daemon.receive([other.datagram([("b", 1)]), other.heartbeat()] if at % 2 else [])
        if not at:
            daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        if at == 1:
            daemon.now += by_s
        flush = daemon.flush(elapsed_s=10.0)
        assert flush.window_s == pytest.approx(10.0)
    found = points(flush)
    assert (found["a"].total_grade, found["b"].total_grade) == (Grade.SOCKET_ONLY, Grade.EXACT)
    assert len(flush.clients) == 2


@pytest.mark.parametrize("how", ["remembered", "forgotten", "restarted"])
def test_a_client_that_is_cut_off_counts_on_and_nothing_better_is_claimed(how: str, tmp_path: Path) -> None:
    """Nobody can tell it from a killed one: no bound can hold what it counts meanwhile, so the grade is lower."""
    ttl_s = 25 if how == "forgotten" else 3600
    daemon, client = SimulatedDaemon(config=RollupConfig(client_ttl_s=ttl_s)), SimulatedClient("kkkkkkkk")
    other = SimulatedClient("oooooooo")
    daemon.receive([client.datagram([("a", 5)]), client.heartbeat()])
    for at in range(6):
        client.datagram([("a", 1000)])  # on a network that is gone
        daemon.receive([other.datagram([("a", 1), ("b", 1)]), other.heartbeat()])
        found = points(daemon.flush())
        if at == 3 and how == "restarted":
            save(daemon.rollup, tmp_path / "state", ended=True)
            daemon.restart(tmp_path / "state")
    assert len(daemon.rollup.clients) == (1 if how == "forgotten" else 2)
    assert found["a"].total_grade is Grade.SOCKET_ONLY
    if how == "forgotten":
        return
    assert found["a"].grade is Grade.SOCKET_ONLY
    assert (found["b"].total, found["b"].total_grade) == (6, Grade.EXACT)
    daemon.receive([client.heartbeat()])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_grade) == (6011, Grade.EXACT)


@pytest.mark.parametrize(
    "lines",
    [
        b"x:9007199254740993|c\nx:2|c",
        b"x:9007199254740992|c\nx:1|c",
        b"x:1e100|c\nx:-1e100|c\nx:1|c",
        b"x:9e15|c\n" * 3 + b"x:1|c",
    ],
)
def test_a_sum_that_a_float_cannot_hold_is_not_exact(lines: bytes) -> None:
    """Rounded, or rounded by whoever reads it: no promise, for good, and none less for the others."""
    daemon = SimulatedDaemon()
    daemon.collectors[0].lines(lines + b"\nok:9007199254740992|c", 0.0)
    found = points(daemon.flush())
    assert (found["x"].grade, found["x"].total_grade, found["x"].total_bound) == (
        *(Grade.UNKNOWN, Grade.UNKNOWN),
        None,
    )
    assert found["ok"].total_grade is Grade.EXACT
    daemon.collectors[0].lines(b"x:-18014398509481984|c\nx:1|c", 0.0)
    assert points(daemon.flush())["x"].total_grade is Grade.UNKNOWN


@pytest.mark.parametrize("workers", [1, 2])
def test_sums_of_fractions_are_as_exact_as_sums_of_whole_numbers(workers: int) -> None:
    """Floats added up in another order differ in the last digit: that is no line of anybody without a number."""
    daemon = SimulatedDaemon(workers)
    clients = [SimulatedClient("ffffffff"), SimulatedClient("gggggggg")]
    rnd = random.Random(3)
    for _ in range(4):
        for worker, client in enumerate(clients):
            for _ in range(5):
                lines = [b"a:%.3f|c" % rnd.uniform(0, 9), b"b:1|c|@0.3"]
                client.number += 1
                head = number_line(client.client, client.number, client.beats).encode()
                daemon.receive([b"\n".join([head, *lines])], worker % workers)
            daemon.collectors[worker % workers].lines(b"a:0.1|c\na:0.7|c", 0.0)
        found = points(daemon.flush())
        assert {(point.grade, point.total_grade) for point in found.values()} == {(Grade.EXACT, Grade.EXACT)}
        assert found["a"].total == pytest.approx(found["a"].total_raw)
    daemon.receive([b"a:1e-9|c"])
    assert points(daemon.flush())["a"].total_grade is Grade.SOCKET_ONLY


def test_a_told_sum_that_a_float_cannot_hold_is_not_exact() -> None:
    """A client's total counts like the lines."""
    daemon, client = SimulatedDaemon(), SimulatedClient("aaaaaaaa")
    client.datagram([("a", 2**53), ("b", 1)])
    client.datagram([("a", 1)])
    daemon.receive([client.heartbeat()])
    found = points(daemon.flush())
    assert (found["a"].total_grade, found["b"].total_grade) == (Grade.UNKNOWN, Grade.EXACT)


def test_a_client_that_says_goodbye_leaves_no_doubt() -> None:
    """Its last totals include all it had."""
    daemon, client = SimulatedDaemon(), SimulatedClient("eeeeeeee")
    daemon.receive([client.datagram([("a", 5)]), client.heartbeat() + b"\n_bl.eeeeeeee.end:1|g"])
    for _ in range(6):
        flush = daemon.flush()
    point = points(flush)["a"]
    assert (point.total, point.total_bound, point.total_grade) == (5, 0.0, Grade.EXACT)


def test_numbers_of_nobody_take_no_grade_away_for_good() -> None:
    """Forged ids with gaps and without a heartbeat: after a minute everything is exact again, totals included."""
    daemon, client = SimulatedDaemon(config=RollupConfig(client_ttl_s=100)), SimulatedClient("cccccccc")
    daemon.receive([f"_bl.forged{i:02}:{n}|g\nx:1|c".encode() for i in range(20) for n in (5, 9)])
    for _ in range(15):
        daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        flush = daemon.flush()
        daemon.receive([f"_bl.forged{i:02}:{20 + _ * 2}|g\nx:1|c".encode() for i in range(20)])
    point = points(flush)["a"]
    assert (point.total, point.grade, point.total_grade) == (15, Grade.EXACT, Grade.EXACT)


def test_a_forged_total_does_not_freeze_a_counter() -> None:
    """Somebody who saw the id sends a total far ahead: when the client goes on, nothing is claimed, and it counts."""
    daemon, client = SimulatedDaemon(), SimulatedClient("vvvvvvvv")
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    daemon.flush()
    forged = f"{number_line('vvvvvvvv', 1000, 998)}\n_bl.vvvvvvvv.t.a:1000000|g"
    daemon.receive([forged.encode()])
    daemon.flush()
    for _ in range(3):
        for _ in range(2):
            daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        flush = daemon.flush()
    assert points(flush)["a"].total_grade is Grade.UNKNOWN
    assert flush.rollup["conflicts"] >= 1
    before = points(flush)["a"].total
    for _ in range(2):
        daemon.receive([client.datagram([("a", 7)]), client.heartbeat()])
        flush = daemon.flush()
    assert points(flush)["a"].total == before + 14


@pytest.mark.parametrize("blank", [" ", "\u2028", "\t", "\xa0"])
def test_a_total_is_of_the_same_series_as_its_lines(blank: str) -> None:
    """A tag that ends in a blank: line and total are cut alike, so that what was lost is healed in one series."""
    daemon = SimulatedDaemon()
    lines = f"{number_line('qqqqqqqq', 1, 0)}\nhits:1|c|#path:/a{blank}"
    own = "_bl.qqqqqqqq"
    beat = f"{number_line('qqqqqqqq', 3, 1)}\n{own}.start:1|g\n{own}.counters:1|g\n{own}.t.hits:2|g|#path:/a{blank}"
    daemon.receive([lines.encode(), beat.encode()])
    found = points(daemon.flush())
    assert {series: point.total for series, point in found.items()} == {"hits;path=/a": 2}


@pytest.mark.parametrize("on", [True, False])
def test_lines_and_totals_are_read_by_the_same_rules(on: bool) -> None:
    """Styles of tags within names may be off: a total is of the series that its lines are of, then, too."""
    daemon, client = SimulatedDaemon(), SimulatedClient("tttttttt")
    daemon.aggregators = [
        Aggregator(options=ParserOptions(influx_tags=on, librato_tags=on, signalfx_tags=on))
    ]
    for name in ("hits,x=1", "hits#y=1", "hits[z=1]"):
        daemon.receive([client.datagram([(name, 1)])])
        client.datagram([(name, 1)])  # lost
    daemon.receive([client.heartbeat()])
    found = points(daemon.flush())
    names = {f"hits;{tag}=1" if on else f"hits{tag}=1" for tag in "xyz"}
    assert {
        series: (point.total_raw, point.total, point.total_grade) for series, point in found.items()
    } == dict.fromkeys(names, (1, 2, Grade.EXACT))


def test_refused_lines_are_no_contradiction() -> None:
    """A counter that was refused while others had taken all series: its total says more than what was counted."""
    daemon, client = SimulatedDaemon(), SimulatedClient("wwwwwwww")
    daemon.aggregators[0].max_series = 10
    daemon.receive([f"x{i}:1|c".encode() for i in range(10)])
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat(), client.datagram([("a", 2)])])
    daemon.flush()
    daemon.aggregators[0].retain([])
    for _ in range(3):
        daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        flush = daemon.flush()
    assert flush.rollup["conflicts"] == 0
    assert points(flush)["a"].total == 6


def test_a_window_that_makes_up_for_earlier_ones_is_not_exact() -> None:
    """What was lost of a new counter comes with its first total: the total is exact, this window's share is unknown."""
    daemon, client = SimulatedDaemon(), SimulatedClient("nnnnnnnn")
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    daemon.flush()
    client.datagram([("b", 1)])  # lost
    daemon.receive([client.datagram([("a", 1)])])
    daemon.flush()
    daemon.receive([client.heartbeat()])
    point = points(daemon.flush())["b"]
    assert (point.corrected, point.grade, point.bound) == (1, Grade.UNKNOWN, None)
    assert (point.total, point.total_grade) == (1, Grade.EXACT)
    daemon.receive([client.datagram([("b", 2), ("c", 1)]), client.heartbeat()])
    found = points(daemon.flush())
    assert [(found[name].corrected, found[name].grade) for name in "bc"] == [
        (2, Grade.EXACT),
        (1, Grade.EXACT),
    ]


def test_a_window_that_lacks_more_of_what_is_not_known_is_not_exact() -> None:
    """One client lost datagrams in two windows, and of the counter nothing moved there; another one counted exactly."""
    daemon, one, other = SimulatedDaemon(), SimulatedClient("nnnnnnnn"), SimulatedClient("oooooooo")
    daemon.receive([one.datagram([("a", 1)]), one.heartbeat(), other.datagram([("a", 1)]), other.heartbeat()])
    daemon.flush()
    for _ in range(2):
        one.datagram([("a", 1)])  # lost
        daemon.receive([one.datagram([("b", 1)])] if not _ else [one.heartbeat(tell=False)])
        daemon.receive([other.datagram([("a", 3)]), other.heartbeat()])
        point = points(daemon.flush())["a"]
        assert (point.corrected, point.grade, point.total_grade) == (3, Grade.UNKNOWN, Grade.UNKNOWN)


def test_a_series_that_was_refused_and_is_let_in_later_is_not_exact(tmp_path: Path) -> None:
    """What was counted of it while there were too many series is in no figure: nothing is claimed of it."""
    config = RollupConfig(max_series=2, series_ttl_s=15.0)
    daemon, one, other = (
        SimulatedDaemon(config=config),
        SimulatedClient("nnnnnnnn"),
        SimulatedClient("oooooooo"),
    )
    daemon.collectors[0].lines(b"x:1|c\ny:1|c", 0.0)
    daemon.flush()
    daemon.receive([one.datagram([("a", 5)]), one.heartbeat()])
    assert "a" not in points(daemon.flush())
    save(daemon.rollup, tmp_path / "state", ended=True)
    daemon.restart(tmp_path / "state")
    for _ in range(2):
        daemon.flush()
    for _ in range(2):
        daemon.receive([other.datagram([("a", 1)]), other.heartbeat()])
        point = points(daemon.flush())["a"]
        assert (point.grade, point.total_grade, point.total_bound) == (Grade.UNKNOWN, Grade.UNKNOWN, None)


def test_a_counter_that_was_not_remembered_is_exact_in_no_window() -> None:
    """With more counters of clients than are remembered: a total that comes later has all."""
    daemon = SimulatedDaemon(config=RollupConfig(max_series=1, client_ttl_s=15.0))
    one, other = SimulatedClient("nnnnnnnn"), SimulatedClient("oooooooo")
    daemon.receive([one.datagram([("a", 1)] + [(f"k{i}", 1) for i in range(9)]), one.heartbeat()])
    daemon.flush()
    for _ in range(4):
        daemon.receive([other.datagram([("a", 1)]), other.heartbeat()])
        point = points(daemon.flush())["a"]
        assert (point.grade, point.total_grade) == (Grade.UNKNOWN, Grade.UNKNOWN)


def test_a_series_that_one_worker_refused_is_not_exact() -> None:
    """Workers have a limit each: what one takes and the other refuses is no exact sum; what both take is."""
    daemon, one, other = SimulatedDaemon(workers=2), SimulatedClient("nnnnnnnn"), SimulatedClient("oooooooo")
    daemon.aggregators[1].max_series = 1
    for at in range(3):
        lines = [("b", 1), ("a", 1)][: 1 + at]
        for worker, client in enumerate((one, other)):
            daemon.receive([client.datagram(lines), client.heartbeat(), client.datagram(lines)], worker)
        found = points(daemon.flush())
    assert [found[name].total_grade for name in "ab"] == [Grade.UNKNOWN, Grade.EXACT]
    assert found["b"].total == 12


@pytest.mark.parametrize("restarted", [False, True])
def test_a_client_that_was_refused_is_not_counted_twice(tmp_path: Path, restarted: bool) -> None:
    """With too many clients it counted as unnumbered; when there is room, its totals do not count that again."""
    daemon, client = SimulatedDaemon(), SimulatedClient("rrrrrrrr")
    daemon.collectors = [Collector(max_clients=1)]
    daemon.receive([b"_bl.forged00:1|g\nx:1|c"])
    daemon.receive([client.datagram([("a", 5)]), client.heartbeat()])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_grade) == (5, Grade.SOCKET_ONLY)
    if restarted:
        save(daemon.rollup, tmp_path / "state", ended=True)
        daemon.restart(tmp_path / "state")
    daemon.collectors[0].forget(["forged00"])
    for _ in range(3):
        daemon.receive([client.datagram([("a", 1), ("new", 1)]), client.heartbeat()])
        found = points(daemon.flush())
    assert (found["a"].total, found["a"].corrected, found["a"].total_grade) == (8, 1, Grade.SOCKET_ONLY)
    assert (found["new"].total, found["new"].total_grade) == (3, Grade.SOCKET_ONLY)


def test_a_client_that_was_distrusted_is_not_counted_twice() -> None:
    """What had been published of it stays; its totals since the beginning are not added to that."""
    daemon, client = SimulatedDaemon(), SimulatedClient("eeeeeeee")
    for _ in range(3):
        daemon.receive([client.datagram([("a", 100)]), client.heartbeat()])
        daemon.flush()
    forged = SimulatedClient("eeeeeeee")
    forged.number, forged.beats, forged.truth = client.number, client.beats, {"a": 350}
    daemon.receive([forged.datagram([("a", 1)]), forged.heartbeat()])
    flush = daemon.flush()
    assert flush.rollup["conflicts"] == 1
    before = points(flush)["a"].total
    client.number, client.beats = forged.number, forged.beats
    for _ in range(3):
        daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        flush = daemon.flush()
    assert points(flush)["a"].total == before + 3


def forged_beat(client: SimulatedClient, number: int, **said: int) -> bytes:
    """A heartbeat in somebody's name; `said` are its fields, and `a` a total."""
    own = f"_bl.{client.client}"
    rows = [number_line(client.client, number, max(0, number - client.number + client.beats))]
    rows += [f"{own}.{'t.a' if name == 'a' else name}:{value}|g" for name, value in said.items()]
    return "\n".join(rows).encode()


@pytest.mark.parametrize("number", [3, 4, 1000])
@pytest.mark.parametrize("pause", [0, 1, 3])
def test_a_forged_goodbye_does_not_end_a_client(number: int, pause: int) -> None:
    """It goes on: within two more windows either all of it is counted, or nothing is claimed; and counting goes on."""
    daemon, client = SimulatedDaemon(), SimulatedClient("gggggggg")
    daemon.receive([client.datagram([("a", 1), ("quiet", 1)]), client.heartbeat()])
    daemon.flush()
    daemon.receive([forged_beat(client, number, start=1, counters=2, a=1, end=1)])
    for _ in range(1 + pause):
        daemon.flush()
    daemon.receive([client.datagram([("only_here", 7)])])
    for at in range(6):
        daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        found = points(daemon.flush())
        for name, sent in client.truth.items():
            bound = found[name].total_bound
            if at > 0 and bound is not None:
                assert abs(found[name].total - sent) <= bound, (at, name)
        if at > 1:
            assert found["a"].corrected == pytest.approx(1)


def test_late_words_after_a_goodbye_are_no_contradiction() -> None:
    """Datagrams that are delayed into two more windows: the goodbye was its own, and all it had is known."""
    daemon, client = SimulatedDaemon(), SimulatedClient("gggggggg")
    late = [client.datagram([("a", 1)]) for _ in range(3)]
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat() + b"\n_bl.gggggggg.end:1|g"])
    for datagram in [b"", b"", *late]:
        daemon.receive([datagram])
        flush = daemon.flush()
    point = points(flush)["a"]
    assert (point.total, point.total_grade, flush.rollup["conflicts"]) == (4, Grade.EXACT, 0)


def test_a_forged_beginning_does_not_add_what_was_counted_before() -> None:
    """A client that is older than the daemon, and a heartbeat in its name that makes it younger: a contradiction."""
    daemon, client = SimulatedDaemon(), SimulatedClient("oooooooo", start_ms=1)
    daemon.now = 1000.0
    daemon.start_anew()
    client.truth, client.number, client.beats = {"a": 1_000_000}, 500, 100
    daemon.receive([client.datagram([("a", 1)])])
    daemon.receive([forged_beat(client, 502, start=1_000_001, counters=1)])
    client.number = 502
    for _ in range(4):
        daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        flush = daemon.flush()
    assert flush.rollup["conflicts"] == 1
    assert points(flush)["a"].total_grade is Grade.UNKNOWN
    before = points(flush)["a"].total
    daemon.receive([client.datagram([("a", 3)]), client.heartbeat()])
    assert points(daemon.flush())["a"].total == before + 3


@pytest.mark.parametrize("lost", [0, 3])
def test_a_forged_number_swallows_a_datagram_until_the_next_heartbeat(lost: int) -> None:
    """Exact and wrong until the client tells its totals: they contradict what arrived, whatever was lost long ago."""
    daemon, client = SimulatedDaemon(), SimulatedClient("ssssssss")
    for _ in range(lost):
        client.datagram([("a", 1)])
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    daemon.flush()
    forged = number_line("ssssssss", client.number + 1, 1).encode() + b"\nx:1|c"
    daemon.receive([forged, client.datagram([("a", 5)])])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_grade) == (
        1 + lost,
        Grade.EXACT,
    )  # as the documentation says: without a key
    daemon.receive([client.heartbeat()])
    assert points(daemon.flush())["a"].total_grade is Grade.UNKNOWN


def test_a_number_far_ahead_leaves_an_estimate_of_which_nothing_is_claimed() -> None:
    """What was added for datagrams that nobody sent stays in the total, and that is unknown for good."""
    daemon, client = SimulatedDaemon(), SimulatedClient("ffffffff")
    for _ in range(4):
        daemon.receive([client.datagram([("a", 1)]) for _ in range(5)] + [client.heartbeat()])
        daemon.flush()
    daemon.receive([client.datagram([("a", 1)]), number_line("ffffffff", 10_000, 4).encode() + b"\na:1|c"])
    point = points(daemon.flush())["a"]
    assert point.total_grade is Grade.UNKNOWN
    for _ in range(5):
        daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
        flush = daemon.flush()
    assert points(flush)["a"].total_grade is Grade.UNKNOWN
    assert points(flush)["a"].corrected == 1


def test_who_sees_an_id_harms_no_counter_that_its_client_does_not_count() -> None:
    """Anything in one client's name, seeded: of another one's counter nothing wrong is claimed."""
    exact = 0
    for seed in range(60):
        rnd = random.Random(seed)
        daemon, seen, other = SimulatedDaemon(), SimulatedClient("ssssssss"), SimulatedClient("oooooooo")
        for _ in range(8):
            daemon.receive([seen.datagram([("a", 1)]), seen.heartbeat()])
            fields = rnd.sample(
                ["start", "lines", "failed", "counters", "every", "end", "a"], k=rnd.randint(0, 5)
            )
            said = {name: rnd.choice([0, 1, 7, 10**6, 10**15]) for name in fields}
            number = max(1, seen.number + rnd.choice([-3, 0, 1, 2, 50, 10**5]))
            forged = [
                forged_beat(seen, number, **said),
                number_line("ssssssss", number).encode() + b"\na:1|c",
            ]
            daemon.receive(rnd.sample(forged, k=rnd.randint(0, 2)))
            daemon.receive([other.datagram([("b", rnd.randint(1, 9))]), other.heartbeat()])
            point = points(daemon.flush())["b"]
            if point.total_grade <= Grade.LEDGER:
                assert point.total == other.truth["b"], seed
                exact += 1
    assert exact > 100


def test_a_stranger_can_count_as_a_client_of_its_own() -> None:
    """A made-up client counts like any other: the figure is what all of them said, and stays exact."""
    daemon, client, made_up = SimulatedDaemon(), SimulatedClient("cccccccc"), SimulatedClient("mmmmmmmm")
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    daemon.receive([made_up.datagram([("a", 1000)]), made_up.heartbeat()])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_grade) == (1001, Grade.EXACT)


def test_two_senders_with_one_id_are_noticed() -> None:
    """A copy of a client: its datagrams are taken for repeats, so totals and arrivals contradict each other."""
    daemon, client, copy = SimulatedDaemon(), SimulatedClient("dddddddd"), SimulatedClient("dddddddd")
    for _ in range(3):
        for sender in (client, copy):
            daemon.receive([sender.datagram([("a", 1 if sender is client else 10)])])
        daemon.receive([client.heartbeat() if _ % 2 else copy.heartbeat()])
        copy.number, client.number = max(copy.number, client.number), max(copy.number, client.number)
        flush = daemon.flush()
    assert points(flush)["a"].total_grade is Grade.UNKNOWN
    assert flush.rollup["conflicts"]


def test_with_a_key_only_who_holds_it_is_a_numbered_client() -> None:
    """Forged numbers and totals count as unnumbered lines; signed ones are exact, and altered ones are not taken."""
    daemon, client = SimulatedDaemon(), SimulatedClient("wwwwwwww")
    daemon.collectors = [Collector(auth_keys=[b"another key 1234", KEY])]

    def signed(datagram: bytes) -> bytes:
        return datagram + b"\n" + mac_line("wwwwwwww", datagram, KEY, 0)

    good = [signed(client.datagram([("a", 1)])), signed(client.heartbeat())]
    forged = f"{number_line('wwwwwwww', 1000, 998)}\n_bl.wwwwwwww.t.a:1000000|g".encode()
    altered = signed(client.datagram([("a", 1)])).replace(b"a:1|c", b"a:9|c")
    daemon.receive([*good, forged, signed(forged)[:-3] + b"1|g", altered, b"_bl.xxxxxxxx:7|g\nb:2|c"])
    flush = daemon.flush()
    assert daemon.collectors[0].counters.unauthenticated == 4
    assert [report.client for report in flush.clients] == ["wwwwwwww"]
    assert points(flush)["b"].grade is Grade.SOCKET_ONLY
    assert points(flush)["a"].total == 10  # 9 of it unnumbered: whoever can send can count
    # A daemon without a key takes the line for what it is.
    plain = SimulatedDaemon()
    plain.receive(good)
    flush = plain.flush()
    assert (points(flush)["a"].total, points(flush)["a"].total_grade, flush.rollup["misplaced"]) == (
        1,
        Grade.EXACT,
        0,
    )


def test_a_recording_is_not_believed_by_a_daemon_that_began_after_it() -> None:
    """Signed as it was, before this daemon began or long ago: its lines count as anybody's, and nothing is exact."""
    old, client = SimulatedDaemon(auth_key=KEY), SimulatedClient("rrrrrrrr")

    def signed(datagram: bytes, at_s: float) -> bytes:
        return datagram + b"\n" + mac_line("rrrrrrrr", datagram, KEY, int(at_s * 1000))

    recording = [signed(client.datagram([("a", 1)]), 1), signed(client.heartbeat(), 2)]
    old.receive(recording)
    assert points(old.flush())["a"].total_grade is Grade.EXACT
    old.receive(recording)
    assert points(old.flush())["a"].total == 1  # of a client that is known: repeats
    old.start_anew()
    old.receive(recording)
    flush = old.flush()
    assert (flush.clients, points(flush)["a"].total_grade) == ([], Grade.SOCKET_ONLY)
    assert old.collectors[0].counters.unauthenticated == 2
    # A daemon that began before the recording, and has forgotten the client since.
    late = SimulatedDaemon(auth_key=KEY)
    late.now = 1000.0
    late.receive(recording)
    assert late.flush().clients == []
    # The client itself goes on.
    old.receive([signed(client.datagram([("b", 1)]), old.now), signed(client.heartbeat(), old.now)])
    flush = old.flush()
    assert points(flush)["b"].total_grade is Grade.EXACT
    # An altered time is an altered datagram.
    fresh = signed(client.datagram([("c", 1)]), 1)[:-15] + b"%013d|g" % (old.now * 1000)
    old.start_anew()
    old.receive([fresh])
    assert old.flush().clients == []
