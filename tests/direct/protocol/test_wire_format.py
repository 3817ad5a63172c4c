"""The documented wire protocol: its tables name all messages and fields, and its vectors are what we send and read."""

import re
from pathlib import Path

import msgspec
import pytest

from brokerless.core.topics import TopicFilter
from brokerless.direct.protocol import messages

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGE = (REFERENCE / "wire-protocol.md").read_text()
BIG = (1 << 61) + 1
INSTANCE = 1 << 47
FRAME, BLOCK = (
    bytes.fromhex(
        re.findall(
            rf"```hex {name}\n(.*?)```", (REFERENCE / "journal-format.md").read_text(), flags=re.DOTALL
        )[0]
    )
    for name in ("frame-one", "state-block")
)
EXPECTED: dict[str, messages.Message] = {
    "hello": messages.Hello(2, "c1", policy=messages.Policy(topics=("orders.",))),
    "hello-worker": messages.Hello(2, "c2", "g", policy=messages.Policy(5.0, 3, True)),
    "ready": messages.Ready(7, 100),
    "replay": messages.Replay(1, 7, 100, 1 << 20),
    "replay-state": messages.Replay(2, 7, 0, 1 << 20, state=100),
    "key-state": messages.KeyState(2, 7, 100, 100, [BLOCK]),
    "sent-request": messages.SentRequest(),
    "advance": messages.Advance(7, 101),
    "credit": messages.Credit(512),
    "settle": messages.Settle(7, [(100, 102)], [(103, 103, 1.5)], [(104, 104)], [(105, 105)], 3),
    "bye": messages.Bye(settles=3),
    "pong": messages.Pong(BIG),
    "admin": messages.Admin(5, "letters", "g", 7),
    "answer": messages.Answer("r1", b"\x01"),
    "welcome": messages.Welcome(2, "src", INSTANCE, 7, 0, 100, 104, "5557", 0.5),
    "refused": messages.Refused("say hello first", again=True),
    "chunk": messages.Chunk(1, 7, 101, 104, [(90, 100, "evicted")], [FRAME]),
    "sent": messages.Sent(7, 104, {"a": 8, "b": 1}),
    "deliver": messages.Deliver(7, [FRAME], [(100, 100, 2)], 3),
    "gone": messages.Gone(7, [(90, 99)], "evicted"),
    "ping": messages.Ping(BIG),
    "report": messages.Report(5, True, b"[]"),
    "beat": messages.Beat(INSTANCE, 7, 104),
    "state-request": messages.StateRequest(5, 2),
    "fence": messages.Fence(1 << 42, "tcp://b:1"),
    "superseded": messages.Superseded(1 << 42),
    "challenge": messages.Challenge(5),
    "state": messages.State(5, {}, {"sub.x": 9}, [(7, 0)]),
    "fenced": messages.Fenced(7, 104),
}


def documented() -> dict[str, tuple[str, list[str]]]:
    """By message: its tag (or what stands in its place), and the fields of its table."""
    found = {}
    for name, tag, text in re.findall(
        r"^### (\w+): ([^,\n]+).*?\n(.*?)(?=^##)", PAGE, flags=re.DOTALL | re.MULTILINE
    ):
        found[name] = tag, re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    return found


def test_the_page_has_every_message_and_field() -> None:
    """Names, tags, fields and their order are those of the code."""
    kinds = [messages.Policy, *(kind for kind in messages.Message.__subclasses__())]
    assert {kind.__name__ for kind in kinds} == set(documented())
    for kind in kinds:
        tag = kind.__struct_config__.tag
        assert documented()[kind.__name__] == (
            str(tag) if tag is not None else "inside of Hello",
            list(kind.__struct_fields__),
        )


def test_the_version_of_the_page() -> None:
    """The number that both sides must have."""
    assert f"version number, now {messages.VERSION}," in PAGE


def test_vectors_are_complete() -> None:
    """There is one for every message."""
    assert set(re.findall(r"```hex (\S+)", PAGE)) == set(EXPECTED)
    assert {type(message) for message in EXPECTED.values()} == set(messages.Message.__subclasses__())


@pytest.mark.parametrize("name", list(EXPECTED))
def test_vectors(name: str) -> None:
    """Each vector is read as the message that the page describes. Newer fields may follow in what we write."""
    (text,) = re.findall(rf"```hex {name}\n(.*?)```", PAGE, flags=re.DOTALL)
    raw = bytes.fromhex(text)
    message = EXPECTED[name]
    assert msgspec.msgpack.decode(raw, type=type(message)) == message
    written, documented_values = (msgspec.msgpack.decode(data) for data in (messages.encode(message), raw))
    assert written[: len(documented_values)] == documented_values


@pytest.mark.parametrize("name", list(EXPECTED))
def test_fields_may_be_added(name: str) -> None:
    """What a newer release of the same version puts behind the known fields is ignored."""
    message = EXPECTED[name]
    raw = msgspec.msgpack.encode([*msgspec.msgpack.decode(messages.encode(message)), "newer", {"x": 1}])
    assert msgspec.msgpack.decode(raw, type=type(message)) == message


def topic_rows() -> list[tuple[str, list[str], list[str]]]:
    """Entry, topics that match and topics that do not, of the table in the chapter on topics."""
    chapter = PAGE.partition("## Topics\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in chapter.splitlines() if line.startswith("| `")]
    return [
        (entry.strip(" `"), re.findall(r"`([^`]+)`", yes), re.findall(r"`([^`]+)`", no))
        for entry, _, yes, no in rows
    ]


@pytest.mark.parametrize(("entry", "yes", "no"), topic_rows())
def test_topics(entry: str, yes: list[str], no: list[str]) -> None:
    """The table says what our filter does."""
    wanted = TopicFilter([entry])
    assert {topic: wanted(topic) for topic in [*yes, *no]} == {
        **dict.fromkeys(yes, True),
        **dict.fromkeys(no, False),
    }


def test_a_beat_is_told_apart_by_its_first_bytes() -> None:
    """As the page says, and as no frame begins."""
    assert messages.encode(EXPECTED["beat"])[:2] == bytes.fromhex("9460")
    assert FRAME[:2] == bytes.fromhex("b51e")
