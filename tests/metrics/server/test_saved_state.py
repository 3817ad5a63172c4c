"""metrics/server/saved_state.py: a daemon goes on where the one before ended, and publishes what was sent meanwhile."""

from pathlib import Path

import pytest

from brokerless.core.errors import ConfigError
from brokerless.metrics.aggregate.collect import Collector
from brokerless.metrics.aggregate.flush import CounterPoint
from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.rollup import Rollup, RollupConfig
from brokerless.metrics.server.saved_state import StateFile, restore, save
from tests.metrics.simulation import SimulatedClient, SimulatedDaemon, points


def test_what_was_sent_while_the_daemon_was_away_is_published_when_it_is_back(tmp_path: Path) -> None:
    """The window after a restart has the outage in it, and the window that the old daemon never published."""
    path = tmp_path / "state"
    receiver = SimulatedDaemon()
    known, fresh = SimulatedClient("aaaaaaaa"), SimulatedClient("bbbbbbbb")
    receiver.receive([known.datagram([("a", 5)]), known.heartbeat(), b"unnumbered:2|c\ng:7|g"])
    receiver.flush()
    save(receiver.rollup, path)
    receiver.receive([known.datagram([("a", 10)])])  # dies with the daemon
    receiver.restart(path)
    known.datagram([("a", 100)])  # nobody there
    fresh.datagram([("a", 1000)])
    receiver.receive([known.heartbeat(), fresh.heartbeat()])
    flush = receiver.flush()
    point = points(flush)["a"]
    assert (point.raw, point.corrected, point.total, point.total_grade) == (0, 1110, 1115, Grade.EXACT)
    assert {client.client: client.lost for client in flush.clients} == {"aaaaaaaa": 2, "bbbbbbbb": 1}
    assert (points(flush)["unnumbered"].total, points(flush)["unnumbered"].total_grade) == (
        2,
        Grade.SOCKET_ONLY,
    )
    assert flush.gauges == {"g": 7}


def test_without_a_file_a_new_daemon_counts_from_its_own_start_on(tmp_path: Path) -> None:
    """What an older client had counted before is not ours, and the first total says how much that is."""
    client = SimulatedClient("aaaaaaaa", start_ms=-1)
    client.datagram([("a", 5)])  # to the daemon before
    receiver = SimulatedDaemon()
    assert not restore(receiver.rollup, tmp_path / "none")
    receiver.receive([client.datagram([("a", 1)]), client.heartbeat()])
    point = points(receiver.flush())["a"]
    assert (point.total, point.total_grade) == (1, Grade.EXACT)


def test_sums_beyond_64_bits_can_be_written_down(tmp_path: Path) -> None:
    """Whoever sends absurd numbers must not be able to stop it."""
    path = tmp_path / "state"
    receiver, client = SimulatedDaemon(), SimulatedClient("aaaaaaaa")
    receiver.receive([client.datagram([("a", 10**17)] * 40) for _ in range(40)])
    receiver.receive(
        [b"b:999999999999999999|c\n" * 50 + b"g:999999999999999999|g\n" + b"g:+999999999999999999|g\n" * 50]
    )
    receiver.flush()
    save(receiver.rollup, path)
    receiver.restart(path)
    flush = receiver.flush()
    assert points(flush)["a"].total == pytest.approx(1600 * 10**17)
    assert flush.gauges["g"] == pytest.approx(51e18)


def test_many_series_and_clients_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one portion of series, several clients: every figure as before."""
    monkeypatch.setattr("brokerless.metrics.server.saved_state.PORTION", 7)
    path = tmp_path / "state"
    receiver = SimulatedDaemon()
    clients = [SimulatedClient(f"aaaaaaa{i}") for i in range(5)]
    for client in clients:
        receiver.receive([client.datagram([(f"k{i}", i)]) for i in range(40)])
        client.datagram([("k1", 1)])  # lost
        receiver.receive([client.datagram([("k2", 1)])])
    before = receiver.flush()
    save(receiver.rollup, path)
    receiver.restart(path)
    after = receiver.flush()
    assert [(p.series, p.total, p.total_bound, p.total_grade) for p in after.counters] == [
        (p.series, p.total, p.total_bound, p.total_grade) for p in before.counters
    ]
    assert [(c.client, c.sent, c.lost) for c in after.clients] == [
        (c.client, c.sent, c.lost) for c in before.clients
    ]


def test_a_file_that_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Cut short, of another version, or something else altogether: nothing is half taken over."""
    path = tmp_path / "state"
    receiver = SimulatedDaemon()
    receiver.receive([b"a:1|c"])
    receiver.flush()
    save(receiver.rollup, path)
    whole = path.read_bytes()
    for data in (b"", whole[:-1], whole[:20], b"\x00\x00\x00\x02{}", b"garbage that is no such file"):
        path.write_bytes(data)
        rollup = Rollup(RollupConfig(), start=0.0)
        with pytest.raises(ConfigError, match="remove it"):
            restore(rollup, path)
        assert not rollup.series


def test_one_damaged_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    """A total that a disk or an editor changed is no total."""
    path = tmp_path / "state"
    receiver, client = SimulatedDaemon(), SimulatedClient("aaaaaaaa")
    receiver.receive([client.datagram([("a", 5)]), client.heartbeat()])
    receiver.flush()
    save(receiver.rollup, path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match="remove it"):
            restore(Rollup(RollupConfig(), start=0.0), path)


def test_a_state_file_has_one_daemon(tmp_path: Path) -> None:
    """The second one is refused while the first lives, and may have it afterwards."""
    first = StateFile(tmp_path / "state")
    with pytest.raises(ConfigError, match="another daemon is using it"):
        StateFile(tmp_path / "state")
    first.close()
    first.close()
    StateFile(tmp_path / "state").close()
    with pytest.raises(ConfigError, match="cannot write"):
        StateFile(tmp_path / "none" / "state")


class KilledDaemon:
    """A daemon with a state file; `kill` loses its open window and starts the next one, as kill -9 does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.daemon = SimulatedDaemon()
        self._begin()

    def _begin(self) -> None:
        self.state = StateFile(self._path)
        self.state.begin(self.daemon.rollup)
        self.daemon.collectors = [Collector(heard=self.state.heard.note)]
        self._upto = 0

    def flush(self, *, ended: bool = False) -> dict[str, CounterPoint]:
        start, self._upto = self._upto, self.state.heard.end
        flush = self.daemon.flush(heard=self.state.heard.between(start, self._upto))
        save(self.daemon.rollup, self._path, heard=self._upto, ended=ended)
        return points(flush)

    def kill(self) -> None:
        self.state.close()
        self.daemon.start_anew()
        self._begin()


def test_a_client_that_died_with_a_killed_daemons_window_is_missed(tmp_path: Path) -> None:
    """It was in no published window and is never heard again: no total is exact, in no later daemon either."""
    killed = KilledDaemon(tmp_path / "state")
    known, lost = SimulatedClient("aaaaaaaa"), SimulatedClient("llllllll")
    killed.daemon.receive([known.datagram([("a", 5)]), known.heartbeat()])
    assert killed.flush()["a"].total_grade is Grade.EXACT
    killed.daemon.receive([lost.datagram([("a", 1000)]), lost.heartbeat()])
    killed.kill()
    for restart in range(2):
        killed.daemon.receive([known.datagram([("a", 5)]), known.heartbeat()])
        point = killed.flush()["a"]
        assert (point.total, point.total_grade) == (10 + 5 * restart, Grade.UNKNOWN)
        killed.kill()
    for _ in range(8):
        killed.daemon.receive([known.datagram([("a", 5)]), known.heartbeat()])
        point = killed.flush()["a"]
    # What it had counted is lost for good, and what comes now is not in doubt any more.
    assert (point.grade, point.total_grade) == (Grade.EXACT, Grade.UNKNOWN)


def test_a_client_that_is_heard_again_after_a_kill_heals_everything(tmp_path: Path) -> None:
    """Its totals have what the killed daemon had received of it."""
    killed = KilledDaemon(tmp_path / "state")
    killed.flush()
    client = SimulatedClient("aaaaaaaa")
    killed.daemon.receive([client.datagram([("a", 1000)])])
    killed.kill()
    client.datagram([("a", 10)])
    assert killed.flush() == {}
    killed.daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    point = killed.flush()["a"]
    assert (point.total, point.total_grade) == (1011, Grade.EXACT)


@pytest.mark.parametrize("ended", [True, False])
def test_what_a_killed_daemon_had_read_from_streams_is_not_claimed(tmp_path: Path, ended: bool) -> None:
    """Streams do not lose, killed daemons do: their counters are exact only if the daemon ended by itself."""
    killed = KilledDaemon(tmp_path / "state")
    killed.daemon.collectors[0].lines(b"a:1|c", 0.0)
    assert killed.flush(ended=ended)["a"].total_grade is Grade.EXACT
    killed.kill()
    killed.daemon.collectors[0].lines(b"a:1|c", 0.0)
    point = killed.flush()["a"]
    assert (point.grade, point.total) == (Grade.EXACT, 2)
    assert point.total_grade is (Grade.EXACT if ended else Grade.SOCKET_ONLY)


def test_without_the_list_of_clients_nothing_is_claimed_after_a_kill(tmp_path: Path) -> None:
    """Somebody copied the state alone: who was heard in the lost window is not known."""
    killed = KilledDaemon(tmp_path / "state")
    client = SimulatedClient("aaaaaaaa")
    killed.daemon.receive([client.datagram([("a", 1)]), client.heartbeat()])
    killed.flush()
    (tmp_path / "state.heard").unlink()
    killed.kill()
    assert killed.flush()["a"].total_grade is Grade.UNKNOWN
