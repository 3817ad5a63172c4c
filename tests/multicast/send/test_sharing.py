"""Which answers go to the whole group."""

from brokerless.multicast.policy import AnswerPolicy
from brokerless.multicast.send.sharing import Decision, Sharing


def sharing(**policy: float) -> Sharing:
    return Sharing(AnswerPolicy(**policy), 0.0)  # type: ignore[arg-type]


def ask(subject: Sharing, requester: int, first: int, now: float, receivers: int = 16) -> Decision:
    return subject.decide(requester, first, 1000, receivers, now)


def test_a_lone_subscriber_is_answered_alone() -> None:
    """There is nobody to share with."""
    subject = sharing()
    assert {ask(subject, 1, i, 0.01 * i, receivers=1) for i in range(100)} == {"one"}


def test_the_second_that_asks_shows_that_the_loss_is_shared() -> None:
    """Then the group gets it; requests that crossed it get nothing, and one whose copy was lost is answered."""
    subject = sharing()
    assert ask(subject, 1, 5, 0.0) == "one"
    assert ask(subject, 2, 5, 0.001) == "group"
    assert ask(subject, 3, 5, 0.002) == "nobody"
    assert ask(subject, 3, 5, 0.08) == "one"


def test_whoever_asks_again_is_answered_alone() -> None:
    """Its answer was lost; that does not show that others lack it, too."""
    subject = sharing()
    assert ask(subject, 1, 5, 0.0) == "one"
    assert ask(subject, 1, 5, 0.1) == "one"


def test_what_is_usual_is_learned_both_ways() -> None:
    """Shared losses: the first request is answered to all. Single ones: to the one, after a few."""
    subject, now = sharing(), 0.0
    for first in range(100):
        decided = [ask(subject, 1, first, now)]
        if decided == ["one"]:
            decided.append(ask(subject, 2, first, now + 0.01))
        assert decided[-1] == "group"
        now += 0.02
    assert subject.waiting(16) == 16
    found = []
    for first in range(1000, 1100):
        found.append(ask(subject, first % 16, first, now))
        now += 0.3
    assert found[-50:] == ["one"] * 50
    assert subject.waiting(16) == 1, "nobody need wait for others"
    assert found.count("group") <= 40


def test_what_goes_to_the_group_is_capped() -> None:
    """Whoever pretends to be many gets a bounded number of bytes sent to all, and single answers beyond that."""
    subject = sharing(shared_bytes_s=100_000)
    decided = []
    for i in range(10_000):  # ten seconds
        now = i * 0.001
        decided.append(ask(subject, 1, i, now))
        decided.append(ask(subject, 2, i, now))
    assert 900 <= decided.count("group") <= 65 + 1000 + 1


def test_memory_is_bounded() -> None:
    """However many ranges are asked for at one time."""
    subject = sharing()
    for i in range(20_000):
        ask(subject, 1, i, 0.0)
    assert len(subject._asked) <= 4096
