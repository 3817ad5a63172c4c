"""The accounting of a subscriber that was away for longer than the journal holds: what it missed, of whatever topic."""

import time
from pathlib import Path
from typing import Any

import pytest

from brokerless.core import Account, MemoryJournal, Retention
from brokerless.core.errors import ConfigError
from brokerless.direct import Publisher, Subscriber

KEPT = 200


@pytest.fixture
def pub() -> Any:
    journal = MemoryJournal(retention=Retention(max_events=KEPT))
    with Publisher("tcp://127.0.0.1:*", source="p", journal=journal) as publisher:
        yield publisher


def publish(pub: Publisher, n: int, *topics: str) -> int:
    """Publish so many, the topics in turn, in frames of ten; the journal's end."""
    for i in range(n):
        pub.publish(topics[i % len(topics)], b"x")
        if i % 10 == 9:
            pub.flush()
    pub.flush()
    return pub.journal.next


def follow(sub: Subscriber, end: int) -> tuple[int, Account]:
    """Receive up to the journal's end and compare with what was sent: how many events came, and the account."""
    got, deadline = 0, time.monotonic() + 20
    while sub.positions.get("p") is None or sub.positions["p"].offset < end:
        assert time.monotonic() < deadline
        for batch in sub.batches(0.1):  # the last frames may have nothing for it
            got += len(batch)
            sub.commit()
            if batch.next_offset == end:
                break
    assert sub.reconcile(10)
    return got, sub.ledger.account()


def check(account: Account, delivered: int, lost: int) -> None:
    assert (account.delivered, account.lost, account.pending) == (delivered, lost, 0)
    assert account.lost_by_reason == {"evicted": lost}
    assert account.balanced


@pytest.mark.parametrize("topics", [["a."], []], ids=["some topics", "all topics"])
@pytest.mark.parametrize("new", ["a.2", "a.1"])
def test_topics_that_were_new_while_it_was_away(
    pub: Publisher, tmp_path: Path, topics: list[str], new: str
) -> None:
    """A cursor knows which topics there were, so of one that is new all that was evicted is lost."""
    end = publish(pub, 50, "a.1")
    with Subscriber(pub.address, topics=topics, cursor=tmp_path / "cursor") as sub:
        assert follow(sub, end)[0] == 50
    publish(pub, 300, new)  # nothing of these is left
    end = publish(pub, 1000, "a.1", new)
    with Subscriber(pub.address, topics=topics, cursor=tmp_path / "cursor") as sub:
        got, account = follow(sub, end)
    assert 0 < got <= KEPT
    check(account, 50 + got, end - 50 - got)


def test_only_some_topics(pub: Publisher, tmp_path: Path) -> None:
    """Of a range that was evicted, exactly the events of the subscriber's topics are lost to it."""
    end = publish(pub, 100, "a.1", "b.1")
    with Subscriber(pub.address, topics=["a."], cursor=tmp_path / "cursor") as sub:
        assert follow(sub, end)[0] == 50
    end = publish(pub, 1200, "a.1", "b.1", "a.2", "b.2")
    with Subscriber(pub.address, topics=["a."], cursor=tmp_path / "cursor") as sub:
        got, account = follow(sub, end)
    check(account, 50 + got, 600 - got)


@pytest.mark.parametrize("how", ["a name", "an offset"])
def test_without_a_file(pub: Publisher, how: str) -> None:
    """Whoever keeps no accounting from one start to the next knows of the topics too late, but how many it missed."""
    end = publish(pub, 50, "t", "u")
    options: dict[str, Any] = {"durable": "d"} if how == "a name" else {"start": 50}
    if how == "a name":
        with Subscriber(pub.address, **options) as sub:
            assert follow(sub, end)[0] == 50
    end = publish(pub, 1000, "t", "new")
    with Subscriber(pub.address, **options) as sub:
        got, account = follow(sub, end)
        assert sum(lost.count for lost in sub.losses) == 1000 - got
    check(account, got, 1000 - got)


def test_what_was_lost_is_kept_with_the_cursor(pub: Publisher, tmp_path: Path) -> None:
    """Losses of topics that nobody has named are in the accounting of the next start, too, and counted once."""
    cursor = tmp_path / "cursor"
    publish(pub, 500, "t")
    with Subscriber(pub.address, start=100, cursor=cursor) as sub:
        lost = pub.journal.oldest - 100
        batch = next(iter(sub.batches(10)))
        got = len(batch)
        sub.commit()
        check(sub.ledger.account(), got, lost)
    end = publish(pub, 10, "t")
    with Subscriber(pub.address, cursor=cursor) as sub:
        more, account = follow(sub, end)
    check(account, got + more, end - 100 - got - more)


def test_two_subscribers_cannot_share_a_cursor(pub: Publisher, tmp_path: Path) -> None:
    """Each would skip what the other had: the second is refused until the first is closed, whatever ended it."""
    cursor = tmp_path / "cursor"
    with Subscriber(pub.address, cursor=cursor), pytest.raises(ConfigError, match="in use by another"):
        Subscriber(pub.address, cursor=cursor)
    with pytest.raises(ConfigError, match="nonsense"):
        Subscriber([pub.address, "nonsense"], cursor=cursor)
    Subscriber(pub.address, cursor=cursor).close()


def test_a_cursor_whose_marks_cannot_be_used(pub: Publisher, tmp_path: Path) -> None:
    """It says which file, and why."""
    (tmp_path / "cursor.marks").mkdir()
    with pytest.raises(ConfigError, match=r"cursor\.marks"):
        Subscriber(pub.address, cursor=tmp_path / "cursor")
