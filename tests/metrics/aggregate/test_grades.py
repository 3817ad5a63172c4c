"""No grade is better than the truth: what each promises, whatever is lost, killed, broken or forged."""

import logging

import pytest

from brokerless.metrics.aggregate.collect import Collector
from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.rollup import RollupConfig
from brokerless.metrics.sequence_lines import mac_line, number_line
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
    """Silent for three heartbeats without a goodbye: a bound that covers one datagram more, for good."""
    daemon, client = SimulatedDaemon(), SimulatedClient("kkkkkkkk")
    for _ in range(46):
        daemon.receive([client.datagram([("a", 37)])])
    daemon.receive([client.heartbeat(), client.datagram([("a", 39)])])
    assert points(daemon.flush())["a"].total_grade is Grade.EXACT
    for _ in range(3):
        point = points(daemon.flush())["a"]
    assert (point.total, point.total_grade) == (1741, Grade.LEDGER)
    assert point.total_bound is not None
    assert abs(point.total - 1778) <= point.total_bound
    # It was not dead.
    daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    point = points(daemon.flush())["a"]
    assert (point.total, point.total_bound, point.total_grade) == (1742, 0.0, Grade.EXACT)
    quiet, gone = SimulatedDaemon(config=RollupConfig(client_ttl_s=25)), SimulatedClient("kkkkkkkk")
    quiet.receive([gone.datagram([("a", 5)]), gone.heartbeat()])
    for _ in range(6):
        flush = quiet.flush()
    assert flush.clients == []
    assert points(flush)["a"].total_grade is Grade.LEDGER


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
        return datagram + b"\n" + mac_line("wwwwwwww", datagram, KEY)

    good = [signed(client.datagram([("a", 1)])), signed(client.heartbeat())]
    forged = f"{number_line('wwwwwwww', 1000, 998)}\n_bl.wwwwwwww.t.a:1000000|g".encode()
    altered = signed(client.datagram([("a", 1)])).replace(b"a:1|c", b"a:9|c")
    daemon.receive([*good, forged, signed(forged)[:-3] + b"0|g", altered, b"_bl.xxxxxxxx:7|g\nb:2|c"])
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
