"""What is graded exact is exact, whatever happens; and everything becomes exact in the stated time. The real client."""

import os
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from brokerless.metrics.aggregate.flush import Flush
from brokerless.metrics.aggregate.grades import Grade
from brokerless.metrics.aggregate.rollup import INTRODUCTION_S, RollupConfig
from brokerless.metrics.client.client import IN_TURN_DATAGRAMS
from brokerless.metrics.sequence_lines import total_line
from brokerless.metrics.server.saved_state import save
from tests.metrics.captured import CapturedClient
from tests.metrics.simulation import SimulatedDaemon, points

# So many counters and so small datagrams that telling all of them takes several heartbeats.
KEYS = [f"counter{i:02}" for i in range(24)]
SIZE = 300


class Heard(msgspec.Struct):
    """What the daemon has heard of one client, and when: the ends of the first and the last such window."""

    newest: int = 0
    introduced: bool = False
    keys: set[str] = msgspec.field(default_factory=set)
    first_at: float = 0.0
    last_at: float = 0.0
    now: bool = False
    stranger: bool = False


class Traffic(RuleBasedStateMachine):
    """Clients count and tell; the link loses, repeats, delays or breaks; windows end at any time; clients are
    killed, closed, silent for so long that they are forgotten; datagrams come by any of two workers; the daemon is
    killed and goes on from its state file."""

    forgetful = True
    auth_key: bytes | None = None

    def __init__(self) -> None:
        super().__init__()
        self.ttl_s = 25 if self.forgetful else 1e9
        config = RollupConfig(client_ttl_s=self.ttl_s)
        self.receiver = SimulatedDaemon(2, config, auth_key=self.auth_key)
        self.clients = [self.new_client()]
        self.gone: list[CapturedClient] = []
        self.delayed: list[bytes] = []
        # What the daemon has heard of, and what of it it had written down.
        self.heard: dict[str, Heard] = {}
        self.written: dict[str, Heard] = {}
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "state"

    def new_client(self) -> CapturedClient:
        return CapturedClient(maxudpsize=SIZE, auth_key=self.auth_key)

    def teardown(self) -> None:
        for client in self.clients:
            client.close()
        self.folder.cleanup()

    def deliver(self, datagrams: list[bytes], worker: int = 0) -> None:
        for datagram in datagrams:
            head, *lines = datagram.split(b"\n")
            name, _, number = head.partition(b"|")[0][4:].partition(b":")
            heard = self.heard.setdefault(name.decode(), Heard())
            heard.newest = max(heard.newest, int(number.partition(b".")[0]))
            heard.now = True
            heard.introduced |= lines[0].startswith(b"_bl.")
            heard.keys |= {line.partition(b":")[0].decode() for line in lines if not line.startswith(b"_bl.")}
        self.receiver.receive(datagrams, worker)

    def send(self, datagrams: list[bytes], fate: str, worker: int) -> None:
        if fate == "lost":
            return
        if fate == "delayed":
            self.delayed += datagrams
            return
        if fate == "backwards":
            datagrams = datagrams[::-1]
        self.deliver(datagrams, worker)
        if fate == "repeated":
            self.delayed += datagrams

    @rule(
        which=st.integers(0, 2),
        lines=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-3, 9)), min_size=1, max_size=8),
        fate=st.sampled_from(["arrives", "arrives", "lost", "delayed", "repeated"]),
        times=st.sampled_from([1, 1, 3, 70]),
        worker=st.sampled_from([0, 0, 0, 1]),
    )
    def count(self, which: int, lines: list[tuple[str, int]], fate: str, times: int, worker: int) -> None:
        """Some datagrams of increments, with one fate."""
        client = self.clients[which % len(self.clients)]
        for _ in range(times):
            for key, amount in lines:
                client.incr(key, amount)
            self.send(client.flush(), fate, worker)

    @rule(
        which=st.integers(0, 2),
        fate=st.sampled_from(["arrives", "arrives", "lost", "delayed", "repeated", "backwards"]),
        part=st.integers(0, 8),
        worker=st.sampled_from([0, 0, 0, 1]),
    )
    def report_totals(self, which: int, fate: str, part: int, worker: int) -> None:
        """A heartbeat, of which the first datagrams have one fate and the others arrive."""
        client = self.clients[which % len(self.clients)]
        told = client.heartbeat()
        self.send(told[:part], fate, worker)
        self.deliver(told[part:], worker)

    @precondition(lambda self: self.delayed)
    @rule(data=st.data(), worker=st.sampled_from([0, 1]))
    def late(self, data: st.DataObject, worker: int) -> None:
        """Something that was held up arrives, in any order."""
        at = data.draw(st.integers(0, len(self.delayed) - 1))
        end = data.draw(st.integers(at, min(len(self.delayed), at + 80)))
        self.deliver(self.delayed[at : end + 1], worker)
        del self.delayed[at : end + 1]

    @precondition(lambda self: len(self.clients) < 3)
    @rule()
    def begin(self) -> None:
        """One more client: another process, or a fork."""
        self.clients.append(self.new_client())

    @precondition(lambda self: len(self.clients) > 1)
    @rule(killed=st.booleans(), fate=st.sampled_from(["arrives", "lost", "delayed", "repeated"]))
    def end(self, killed: bool, fate: str) -> None:
        """A client is killed, or says goodbye."""
        client = self.clients.pop()
        words = client.close()
        self.gone.append(client)
        if not self.forgetful:
            # What a client that is gone had not told, nobody will ever know: nor if the daemon forgets it.
            # Nor is a goodbye believed if what was sent before it arrives in two later windows.
            mark = f"_bl.{client.id}:".encode()
            self.delayed = [datagram for datagram in self.delayed if not datagram.startswith(mark)]
            self.deliver(words)
            # Heartbeats in two windows after a goodbye say that it was forged.
            beat, own = b"\n_bl.", f"_bl.{client.id}:".encode()
            self.delayed = [d for d in self.delayed if not (d.startswith(own) and beat in d)]
            self.window_ends(1)
        elif not killed:
            self.send(words, fate, 0)

    @rule(windows=st.sampled_from([1, 1, 1, 4]))
    def window_ends(self, windows: int) -> None:
        """The daemon publishes; four windows without a word and the client is forgotten."""
        for _ in range(windows):
            self.check(self.receiver.flush())

    @rule(away=st.sampled_from([0.0, 1.0, 60.0]))
    def daemon_killed(self, away: float) -> None:
        """kill -9 in the middle of a window, and a new daemon that reads what the old one wrote down."""
        self.receiver.now += away
        self.receiver.restart(self.path)
        self.heard = deepcopy(self.written)
        for heard in self.heard.values():
            heard.last_at = self.receiver.now

    def expected(self) -> dict[str, int]:
        truth: dict[str, int] = {}
        for client in [*self.clients, *self.gone]:
            heard = self.heard.get(client.id, Heard())
            for key, amount in client.truth_at[heard.newest].items():
                if key in heard.keys or not heard.stranger:
                    truth[key] = truth.get(key, 0) + amount
        return truth

    def is_stranger(self, heard: "Heard") -> bool:
        """Whether it had its minute to send a heartbeat and did not: then it counts with what arrived."""
        if heard.introduced or self.auth_key:
            return False
        now = self.receiver.now
        return heard.stranger or now - heard.first_at > INTRODUCTION_S or now - heard.last_at > self.ttl_s

    def check(self, flush: Flush) -> None:
        for heard in self.heard.values():
            if heard.now:
                heard.first_at = heard.first_at or self.receiver.now
                heard.last_at, heard.now = self.receiver.now, False
            heard.stranger = self.is_stranger(heard)
        save(self.receiver.rollup, self.path)
        self.written = deepcopy(self.heard)
        truth = self.expected()
        for series, point in points(flush).items():
            if point.total_grade is Grade.EXACT:
                assert (point.total, point.total_bound) == (truth.get(series, 0), 0.0), series
            if point.grade is Grade.EXACT:
                assert point.bound == 0.0

    @invariant()
    def balanced(self) -> None:
        """Nothing is counted as lost that was not sent."""
        for ledger in self.receiver.rollup.clients.values():
            assert 0 <= ledger.lost <= ledger.sent


class SignedTraffic(Traffic):
    """The same with a shared key: a number is proof of a client, and no client is ever left out of the truth."""

    auth_key = b"0123456789abcdef"


def heartbeats_to_tell_all(client: CapturedClient) -> int:
    """The stated time: so many heartbeats, with room for so many totals each."""
    longest = max(len(total_line(client.id, key, "", 10**6)) + 1 for key in KEYS)
    # What the heartbeat's own lines leave of a datagram.
    own = client.heartbeat()[0].split(b"\n")
    used = sum(len(line) + 1 for line in own if b".t." not in line) + 12
    each = IN_TURN_DATAGRAMS * max(1, (SIZE - used) // longest)
    return -(-len(KEYS) // each)


class Healing(Traffic):
    """The same, and at the end the link is good: all counters of all clients become exact in time."""

    forgetful = False

    def teardown(self) -> None:
        self.check(self.receiver.flush())
        alive = [client for client in self.clients if client.truth]
        rounds = max(map(heartbeats_to_tell_all, alive), default=0)
        assert rounds > 1 or not alive
        for _ in range(rounds):
            for client in alive:
                self.deliver(client.heartbeat())
        flush = self.receiver.flush()
        self.check(flush)
        found = points(flush)
        for key, amount in self.expected().items():
            if key not in found:
                assert amount == 0  # of a counter that is nothing and did not arrive, nothing is published
            else:
                assert (found[key].total, found[key].total_grade) == (amount, Grade.EXACT)
        super().teardown()


TestTraffic = Traffic.TestCase
TestSignedTraffic = SignedTraffic.TestCase
TestHealing = Healing.TestCase
# The same histories in every build, so that none fails for what it did not change; `make soak` looks further.
TestTraffic.settings = TestSignedTraffic.settings = TestHealing.settings = settings(
    derandomize=os.environ.get("HYPOTHESIS_PROFILE", "quick") == "quick"
)
# Two thousand histories, in `make soak`, take minutes.
TestTraffic.pytestmark = TestHealing.pytestmark = [pytest.mark.timeout(1800)]  # type: ignore[attr-defined]
