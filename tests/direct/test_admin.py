"""Administration from outside: what a publisher tells, and what it does for whom."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import DiskJournal, Journal, MemoryJournal
from brokerless.core.errors import ConfigError, PeerError, UsageError
from brokerless.direct import (
    AdminClient,
    ClientKeys,
    KeyPair,
    Publisher,
    ServerKeys,
    Subscriber,
    Worker,
    read_dead_letters,
)
from brokerless.direct.groups.group import Group
from brokerless.direct.groups.members import GroupState
from brokerless.direct.io.zmq import _Router
from brokerless.direct.protocol import messages
from tests.command import run_here

from .conftest import eventually

DEADLINE = 30.0


def give_up(pub: Publisher, n: int, *, keys: bool = False) -> None:
    """Let a worker of group g fail with `n` events, whose deliveries are limited to one."""
    with Worker(pub.address, group="g", max_deliver=1, key_affinity=keys) as worker:
        for _ in range(n):
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            delivery.nack()
        eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].dead_lettered == n)


def test_status_tells_positions_lag_and_leases(address: str, journal: Journal) -> None:
    """Of subscribers, durable names that are away, groups and their workers."""
    with Publisher(address, source="p", journal=journal) as pub, AdminClient(pub.address) as admin:
        with Subscriber(pub.address, durable="d", start="live") as sub:
            assert sub.wait_joined(DEADLINE)
        with (
            Subscriber(pub.address, start="live") as sub,
            Worker(pub.address, group="g", prefetch=2) as worker,
        ):
            assert sub.wait_joined(DEADLINE)
            for i in range(10):
                pub.publish("t", b"%d" % i)
            assert worker.receive(DEADLINE) is not None
            assert len([sub.receive(DEADLINE) for _ in range(10)]) == 10

            def known() -> bool:
                sub.receive(0.01)
                return any(row["position"] == 10 for row in admin.status()["subscribers"])

            eventually(known)
            status = admin.status()
            assert (status["source"], status["next"]) == ("p", 10)
            (durable,) = status["durable"]
            assert (durable["name"], durable["lag"], durable["connected"]) == ("d", 10, False)
            assert durable["lag_s"] >= 0
            (group,) = status["groups"]
            assert (group["name"], group["workers"], group["lag"], group["balanced"]) == ("g", 1, 10, True)
            (member,) = group["members"]
            assert member["held"] == 2
            assert 0 < member["lease_ends_s"][0] <= 30
            (row,) = [row for row in status["subscribers"] if not row["durable"]]
            assert row["lag"] == 0
        admin.forget_subscriber("d")
        admin.forget_group("g")
        status = admin.status()
        assert not status["durable"]
        assert not status["groups"]
        with pytest.raises(UsageError, match="no group"):
            admin.forget_group("g")
        with pytest.raises(UsageError, match="no durable"):
            admin.forget_subscriber("d")
        with pytest.raises(UsageError, match="not a command"):
            admin._ask("dance")


@pytest.mark.parametrize("keys", [False, True])
def test_dead_letters_are_listed_retried_and_dropped(journal: Journal, keys: bool) -> None:
    """A retried event comes to its group again as a first attempt, and to nobody else; the accounting balances."""
    with (
        Publisher("tcp://127.0.0.1:*", source="p", journal=journal) as pub,
        AdminClient(pub.address) as admin,
    ):
        for i in range(5):
            pub.publish("t", b"%d" % i, key=f"k{i % 2}")
        give_up(pub, 5, keys=keys)
        listed = list(admin.dead_letters("g"))
        assert [row["number"] for row in listed] == list(range(5))
        assert {row["attempts"] for row in listed} == {1}
        assert not list(admin.dead_letters("another"))
        assert admin.show([3])[0]["data"] == b"3"
        admin.drop([0])
        assert admin.retry([1, 3]) == {"retried": [1, 3], "refused": {}}
        assert [row["number"] for row in admin.dead_letters()] == [2, 4]
        assert [letter.event.data for letter in read_dead_letters(pub.dead_letters)] == [b"2", b"4"]
        assert pub.groups()["g"].balanced
        for wrong in ([0], [1], [5]):
            with pytest.raises(UsageError, match="no dead letter"):
                admin.retry(wrong)
        with Worker(pub.address, group="g", key_affinity=keys) as worker:
            got = {}
            for _ in range(2):
                delivery = worker.receive(DEADLINE)
                assert delivery is not None
                got[delivery.event.data] = delivery.attempt
                delivery.ack()
            assert got == {b"1": 1, b"3": 1}
            eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].pending == 0)
        status = pub.groups()["g"]
        assert (status.acked, status.dead_lettered, status.balanced) == (2, 3, True)
        assert admin.status()["dead_letters"] == 2
        pub._server.ask(lambda: pub._control_server.forget_group("g"))
        assert "no group" in admin.retry([2])["refused"]["2"]


def test_what_was_retried_and_dropped_is_kept(tmp_path: Path) -> None:
    """A restarted publisher delivers what was retried, and lists the rest."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=DiskJournal(tmp_path / "j")) as pub:
        pub.publish_many("t", [b"0", b"1", b"2"])
        give_up(pub, 3)
        with AdminClient(pub.address) as admin:
            admin.drop([1])
            assert admin.retry([0])["retried"] == [0]
    with Publisher("tcp://127.0.0.1:*", source="p", journal=DiskJournal(tmp_path / "j")) as pub:
        with AdminClient(pub.address) as admin:
            assert [row["number"] for row in admin.dead_letters()] == [2]
        with Worker(pub.address, group="g") as worker:
            delivery = worker.receive(DEADLINE)
            assert delivery is not None
            assert (delivery.event.data, delivery.attempt) == (b"0", 1)
            delivery.ack()
            eventually(lambda: worker.receive(0.01) is None and pub.groups()["g"].pending == 0)
        assert pub.groups()["g"].balanced


def test_a_repeated_request_is_executed_once() -> None:
    """An answer that was late or lost is given again."""
    with (
        Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub,
        Subscriber(pub.address, durable="d") as sub,
        AdminClient(pub.address) as admin,
    ):
        assert sub.wait_joined(DEADLINE)
        request = messages.Admin(77, "forget-subscriber", "d")
        first = admin._client.administer(request, DEADLINE)
        assert first is not None
        assert first.done
        assert admin._client.administer(request, DEADLINE) == first


def test_strangers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not come from this machine may not even look, and is counted."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal()) as pub:
        with AdminClient(pub.address) as admin:
            assert admin.status()["source"] == "p"
            monkeypatch.setattr(_Router, "_property", lambda self, name: "192.0.2.1")
            with pytest.raises(UsageError, match="allowed"):
                admin.status()
        assert pub._control_server.counters.unauthorised == 1
    with pytest.raises(ConfigError):
        Publisher("tcp://127.0.0.1:*", source="p", admin=[KeyPair.new().public])
    with (
        Publisher("tcp://127.0.0.1:*", source="p", admin=[]) as pub,
        AdminClient(pub.address) as admin,
        pytest.raises(UsageError, match="allowed"),
    ):
        admin.status()


def test_keys_of_administrators(tmp_path: Path) -> None:
    """With keys given, those may, and other clients that may connect may not."""
    server, boss, other = KeyPair.new(), KeyPair.new(), KeyPair.new()
    with Publisher(
        "tcp://127.0.0.1:*",
        source="p",
        curve=ServerKeys(server),
        allow=[boss.public, other.public],
        admin=[boss.public],
    ) as pub:
        with AdminClient(pub.address, curve=ClientKeys(boss, server.public)) as admin:
            assert admin.status()["source"] == "p"
        with (
            AdminClient(pub.address, curve=ClientKeys(other, server.public)) as admin,
            pytest.raises(UsageError, match="allowed"),
        ):
            admin.status()


def test_nobody_there() -> None:
    """An error after the timeout, not a wait for ever; and why nobody answers."""
    with (
        AdminClient("tcp://127.0.0.1:1", timeout=0.2) as admin,
        pytest.raises(PeerError, match="nobody listens"),
    ):
        admin.status()
    with (
        Publisher("tcp://127.0.0.1:*", source="p", curve=ServerKeys(KeyPair.new())) as pub,
        AdminClient(pub.address, timeout=0.2) as admin,
        pytest.raises(PeerError, match="needs CURVE keys"),
    ):
        admin.status()


@given(st.sets(st.integers(0, 30), min_size=1), st.data())
def test_retrying_keeps_the_accounting(dead: set[int], data: st.DataObject) -> None:
    """Whatever is dead and retried in whatever order, every event is settled once or pending."""
    group = Group("g", GroupState(0, 0))
    group.join("w", 100)
    group.lease_new("w", [(0, 30)], 31, 0.0)
    group.ack_all("w", [(i, i) for i in range(31) if i not in dead])
    for offset in sorted(dead):
        group.nack("w", offset, offset, 0.0, 0.0)
        group.returned.remove(offset, offset)
        group.dead_letter_written(offset)
    retried = data.draw(st.lists(st.sampled_from(sorted(dead)), unique=True))
    for offset in retried:
        assert group.retry(offset, "") == ""
        assert group.retry(offset, "") != ""
    pending = 31 - group.cursor - group.settled.total
    assert pending == len(retried)
    assert group.acked + group.dead_lettered + pending == 31
    again = group.lease_from_returned("w", 100, 1.0)
    assert sorted(o for lease in again for o in range(lease.first, lease.last + 1)) == sorted(retried)
    assert {lease.attempt for lease in again} <= {1}


def brokerless(*arguments: str, code: int = 0) -> str:
    done = run_here(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_the_command_line(tmp_path: Path) -> None:
    """top, lag, groups, dead-letters, forget, and what `journal info` says of the same publisher's journal."""
    with Publisher("tcp://127.0.0.1:*", source="p", journal=DiskJournal(tmp_path / "j")) as pub:
        pub.publish_many("t", [b"0", b"1"])
        give_up(pub, 2)
        at = pub.address
        assert json.loads(brokerless("top", at, "--count", "1", "--json"))["dead_letters"] == 2
        assert "dead letters 2" in brokerless("top", at, "--count", "2", "--interval", "0.1")
        assert json.loads(brokerless("lag", at, "--json"))["kind"] == "group"
        assert brokerless("groups", "list", at).splitlines()[2].split()[:2] == ["g", "0"]
        assert "max_deliver: 1" in brokerless("groups", "show", at, "g")
        assert (
            len(brokerless("dead-letters", "list", at).splitlines()) == 2 + 2
        )  # the header, and a line below it
        assert json.loads(brokerless("dead-letters", "show", at, "1", "--json"))["data"] == "1"
        assert "1 retried" in brokerless("dead-letters", "retry", at, "0")
        assert "1 dropped" in brokerless("dead-letters", "drop", at, "--all")
        brokerless("dead-letters", "drop", at, "1", code=2)
        facts = json.loads(brokerless("journal", "info", str(tmp_path / "j"), "--json"))
        assert facts["groups"]["g"] == {
            "cursor": 0,
            "pending": 1,
            "acked": 0,
            "dead_lettered": 1,
            "lost": 0,
            "topics": [],
        }
        assert facts["cursors"]["group.g"]["lag"] == 2
        assert "forgotten" in brokerless("forget", at, "--group", "g")
        assert not pub.groups()
