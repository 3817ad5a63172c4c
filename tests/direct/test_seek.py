"""Starting at a time, and going on elsewhere."""

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import Journal, Ledger, MemoryJournal, Reason, Retention
from brokerless.core.errors import ConfigError, PeerError, UsageError
from brokerless.direct import Publisher, Subscriber, Worker
from brokerless.direct.protocol import messages

from .conftest import eventually

DEADLINE = 30.0
BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def publish(pub: Publisher, n: int = 100) -> None:
    """Events a second apart, of two topics."""
    for i in range(n):
        time = int((BEGUN + timedelta(seconds=i)).timestamp() * 1e6)
        pub.journal.append(f"t{i % 2}", b"%d" % i, time=time)


def offsets(sub: Subscriber, n: int) -> list[int]:
    return [event.offset for event in itertools.islice(sub.events(DEADLINE), n)]


def test_a_subscriber_starts_at_a_time(address: str, journal: Journal) -> None:
    """At the first event at or after it, and the ledger has no gap before it."""
    with Publisher(address, source="p", journal=journal) as pub:
        publish(pub)
        with Subscriber(pub.address, start=BEGUN + timedelta(seconds=39.5)) as sub:
            assert offsets(sub, 60) == list(range(40, 100))
            assert sub.reconcile(DEADLINE)
            account = sub.ledger.account()
            assert (account.delivered, account.lost, account.pending) == (60, 0, 0)
        with Subscriber(pub.address, start=BEGUN + timedelta(days=1), durable="d") as sub:
            assert sub.wait_joined(DEADLINE)
            pub.publish("t0", b"new")
            assert offsets(sub, 1) == [100]


def test_a_new_group_starts_at_a_time(address: str) -> None:
    """And one that is known goes on where it was."""
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        publish(pub)
        for wanted, expected in ((98, 98), (10, 99)):
            with Worker(pub.address, group="g", start=BEGUN + timedelta(seconds=wanted)) as worker:
                delivery = worker.receive(DEADLINE)
                assert delivery is not None
                assert delivery.event.offset == expected
                delivery.ack()
        eventually(lambda: pub.groups()["g"].pending == 0)
        assert pub.groups()["g"].balanced


def test_a_time_that_the_journal_no_longer_reaches(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """It begins at the oldest event, and says that some may be missing."""
    with Publisher(address, source="p", journal=MemoryJournal(retention=Retention(max_events=32))) as pub:
        publish(pub)
        oldest = pub.journal.oldest
        with Subscriber(pub.address, start=BEGUN) as sub:
            assert offsets(sub, 1) == [oldest]
    assert f"begins at offset {oldest}" in caplog.text


def test_seeking_back_and_forth(address: str, journal: Journal) -> None:
    """Whatever was under way, the next event is the one that was asked for, and the ledger counts no loss for it."""
    with Publisher(address, source="p", journal=journal) as pub:
        publish(pub)
        with Subscriber(pub.address, start="oldest") as sub:
            seen = []
            steps = iter([90, BEGUN + timedelta(seconds=20), "oldest", 99])
            for event in sub.events(DEADLINE):
                seen.append(event.offset)
                if len(seen) % 5 == 0:
                    where = next(steps, None)
                    if where is None:
                        break
                    sub.seek(where)  # type: ignore[arg-type]
                if event.offset == 99:
                    break
            expected = [*range(5), *range(90, 95), *range(20, 25), *range(5), 99]
            assert seen == expected
            account = sub.ledger.account()
            assert (account.delivered, account.lost, account.pending) == (len(expected), 0, 0)
            assert account.balanced
            sub.seek("live")
            assert sub.wait_joined(DEADLINE)
            pub.publish("t1", b"new")
            assert offsets(sub, 1) == [100]
            assert sub.counters.events == len(expected)


def test_a_seek_moves_the_cursor(address: str, tmp_path: Path) -> None:
    """Also if nothing was received after it."""
    cursor = tmp_path / "cursor"
    with Publisher(address, source="p", journal=MemoryJournal()) as pub:
        publish(pub)
        with Subscriber(pub.address, cursor=cursor) as sub:
            assert offsets(sub, 50) == list(range(50))
            sub.seek(10, source="p")
            eventually(lambda: sub.receive(0.01) is not None)
        with Subscriber(pub.address, cursor=cursor) as sub:
            assert offsets(sub, 89) == list(range(11, 100))
            sub.seek(70)
            assert sub.wait_joined(DEADLINE)
        with Subscriber(pub.address, cursor=cursor) as sub:
            assert offsets(sub, 30) == list(range(70, 100))
            sub.seek(5, source="another")  # nobody's
            assert sub.receive(0.1) is None


def test_one_of_two_publishers(new_address: object) -> None:
    """Only the named source is sought; the other goes on."""
    address = new_address("tcp")  # type: ignore[operator]
    with (
        Publisher(address, source="a", journal=MemoryJournal()) as a,
        Publisher(new_address("tcp"), source="b", journal=MemoryJournal()) as b,  # type: ignore[operator]
        Subscriber([a.address, b.address], start="oldest") as sub,
    ):
        publish(a, 10)
        publish(b, 10)
        first = [(e.source, e.offset) for e in itertools.islice(sub.events(DEADLINE), 20)]
        assert sorted(first) == [(s, i) for s in "ab" for i in range(10)]
        sub.seek(7, source="b")
        assert [(e.source, e.offset) for e in itertools.islice(sub.events(DEADLINE), 3)] == [
            ("b", i) for i in (7, 8, 9)
        ]


def test_what_is_no_place_to_go() -> None:
    """Refused before anything changes."""
    address = "inproc://nobody"
    with Subscriber(address) as sub:
        for wrong in ("cursor", None, -1, datetime(2026, 1, 1)):  # noqa: DTZ001 - that is what is refused
            with pytest.raises(ConfigError):
                sub.seek(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            Subscriber(address, start=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(UsageError):
        Worker(address, group="g", start=datetime(2026, 1, 1))  # noqa: DTZ001


@given(st.text(max_size=24) | st.integers().map(lambda n: f"@{n}"))
def test_no_start_of_a_client_raises_anything_else(start: str) -> None:
    """A time is understood or refused."""
    try:
        time = messages.start_time(start)
    except PeerError:
        assert start.startswith("@")
    else:
        assert time is None or start == messages.start_at(time) or start.lstrip("@-0") in (str(abs(time)), "")


@given(st.lists(st.tuples(st.sampled_from("st"), st.integers(0, 30), st.integers(1, 5)), max_size=20))
def test_a_ledger_that_starts_over_keeps_its_sums(observed: list[tuple[str, int, int]]) -> None:
    """What was delivered and lost stays; nothing is pending; the other source is untouched."""
    ledger = Ledger()
    for source, first, count in observed:
        ledger.observe(source, 1, "t", first, count)
        ledger.declare(source, 1, "t", first - 3, first, Reason.EVICTED) if first >= 3 else None
        ledger.lose(source, 1, 1, Reason.EVICTED)
    before, other = ledger.account(), ledger.account("t")
    left = ledger.account("s").pending
    ledger.restart("s")
    after = ledger.account()
    assert after.balanced
    assert (after.delivered, after.lost) == (before.delivered, before.lost)
    assert after.pending == before.pending - left
    assert ledger.account("t") == other
    ledger.observe("s", 1, "t", 1000)
    assert ledger.account("s").delivered == 1
    assert ledger.account("s").pending == 0
