"""The receiver kit: verifies raw bodies, drops duplicates over crashes, stores before it answers."""

import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import DiskJournal, Journal, MemoryJournal, Retention
from brokerless.core.errors import ConfigError
from brokerless.webhooks import CloudEvent, Receiver, receiver_app
from brokerless.webhooks.cloudevents import BATCH, STRUCTURED, to_headers, to_json, to_json_batch
from brokerless.webhooks.receiver.dedup import IdIndex
from brokerless.webhooks.receiver.inbound import key_of, read_request
from brokerless.webhooks.signing import make_secret, parse_secret, signature_header

pytestmark = pytest.mark.anyio
SECRET = make_secret("v1", b"s" * 32)


def signed(
    message_id: str, body: bytes, headers: dict[str, str] | None = None, secret: str = SECRET
) -> dict[str, str]:
    now = int(time.time())
    return {
        **(headers or {}),
        "webhook-id": message_id,
        "webhook-timestamp": str(now),
        "webhook-signature": signature_header([parse_secret(secret)], message_id, now, body),
    }


def event(number: int, **fields: Any) -> CloudEvent:
    return CloudEvent(id=f"m{number}", source="/s", type="order.paid", data=b"%d" % number, **fields)


def memory() -> MemoryJournal:
    journal = MemoryJournal(retention=Retention(max_bytes=10**7))
    journal.bind("receiver")
    return journal


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://receiver")


def stored(journal: Journal) -> list[tuple[str, str, bytes, str]]:
    frames = journal.read(journal.oldest).frames if journal.next > journal.oldest else []
    return [(e.topic, e.key, e.data, e.content_type) for frame in frames for e in frame.events()]


async def test_stores_every_form_once() -> None:
    """Binary, structured, batch and plain requests are stored with their type, id and data; repetitions are not."""
    journal = memory()
    app = receiver_app(SECRET, journal=journal)
    binary, structured = event(1, datacontenttype="text/plain"), event(2, datacontenttype="application/json")
    batch = to_json_batch([event(2), event(3)])
    async with client(app) as http:
        for _ in range(2):
            answers = [
                await http.post("/a", content=b"1", headers=signed("m1", b"1", to_headers(binary))),
                await http.post(
                    "/b",
                    content=to_json(structured),
                    headers=signed("m2", to_json(structured), {"content-type": STRUCTURED}),
                ),
                await http.post(
                    "/c", content=batch, headers=signed("batch_x", batch, {"content-type": BATCH})
                ),
                await http.post(
                    "/d", content=b'{"type":"plain.type"}', headers=signed("m4", b'{"type":"plain.type"}')
                ),
                await http.post(
                    "/e",
                    content=b"\x00\xff",
                    headers=signed("m5", b"\x00\xff", {"content-type": "image/png"}),
                ),
            ]
            assert [answer.status_code for answer in answers] == [200] * 5, answers[0].text
    assert stored(journal) == [
        ("order.paid", "/s#m1", b"1", "text/plain"),
        ("order.paid", "/s#m2", b"2", "application/json"),
        ("order.paid", "/s#m3", b"3", ""),
        ("plain.type", "m4", b'{"type":"plain.type"}', ""),
        ("webhook", "m5", b"\x00\xff", "image/png"),
    ]
    counters = app.state.receiver.counters
    assert (counters.accepted, counters.duplicates) == (5, 7)


async def test_sources_have_ids_of_their_own() -> None:
    """Two events of the same id and different sources are two events, in a batch and alone."""
    journal = memory()
    app = receiver_app(SECRET, journal=journal)
    one, two = event(1), msgspec.structs.replace(event(1), source="elsewhere")
    batch = to_json_batch([one, two])
    async with client(app) as http:
        await http.post("/", content=batch, headers=signed("b1", batch, {"content-type": BATCH}))
        for repeated in (one, two):
            body = to_json(repeated)
            await http.post("/", content=body, headers=signed("m1", body, {"content-type": STRUCTURED}))
    assert len(stored(journal)) == 2
    assert app.state.receiver.counters.duplicates == 2


async def test_text_that_is_not_utf8_is_refused() -> None:
    """A structured event whose data is not UTF-8 is answered 400, and nothing is stored."""
    journal = memory()
    app = receiver_app(SECRET, journal=journal)
    body = to_json(event(1, datacontenttype="application/json")).replace(b'"data":1', b'"data":"\xff"')
    assert b"\xff" in body
    async with client(app) as http:
        answer = await http.post("/", content=body, headers=signed("m1", body, {"content-type": STRUCTURED}))
    assert (answer.status_code, stored(journal)) == (400, [])


async def test_refuses_what_is_not_signed() -> None:
    """A wrong secret, a changed body, an old time or no headers: 401, and nothing is stored."""
    journal = memory()
    app = receiver_app(SECRET, journal=journal)
    good = signed("m1", b"1")
    attempts = [
        (b"1", {}),
        (b"2", good),
        (b"1", signed("m1", b"1", secret=make_secret("v1", b"o" * 32))),
        (b"1", good | {"webhook-id": "m2"}),
        (b"1", good | {"webhook-timestamp": "1000"}),
    ]
    async with client(app) as http:
        for body, headers in attempts:
            assert (await http.post("/", content=body, headers=headers)).status_code == 401
        assert (await http.get("/")).status_code == 405
    assert (journal.next, app.state.receiver.counters.unverified) == (0, 5)


async def test_malformed_cloud_events_are_400() -> None:
    """Signed, but not a CloudEvent although it claims to be one."""
    journal = memory()
    async with client(receiver_app(SECRET, journal=journal)) as http:
        for kind in (STRUCTURED, BATCH):
            headers = signed("m1", b"{}", {"content-type": kind})
            assert (await http.post("/", content=b"{}", headers=headers)).status_code == 400
        headers = signed("m1", b"{}", {"ce-specversion": "1.0", "ce-id": "m1"})
        assert (await http.post("/", content=b"{}", headers=headers)).status_code == 400
    assert journal.next == 0


async def test_handshake_and_challenge() -> None:
    """OPTIONS is answered for allowed origins only; a signed challenge comes back, and is not stored."""
    journal = memory()
    app = receiver_app(SECRET, journal=journal, origins=("good.example",), allowed_rate=120)
    async with client(app) as http:
        good = await http.options("/", headers={"WebHook-Request-Origin": "good.example"})
        assert (good.headers["webhook-allowed-origin"], good.headers["webhook-allowed-rate"]) == (
            "good.example",
            "120",
        )
        bad = await http.options("/", headers={"WebHook-Request-Origin": "bad.example"})
        assert "webhook-allowed-origin" not in bad.headers
        ask = CloudEvent(id="c", source="/s", type="brokerless.challenge", data=b'{"challenge":"abc"}')
        answer = await http.post(
            "/", content=to_json(ask), headers=signed("c", to_json(ask), {"content-type": STRUCTURED})
        )
        assert answer.json() == {"challenge": "abc"}
    assert journal.next == 0


async def test_too_large_is_413() -> None:
    """A body above the limit is refused before it is all read."""
    async with client(receiver_app(SECRET, journal=memory(), max_body=1000)) as http:
        assert (
            await http.post("/", content=b"x" * 1001, headers=signed("m", b"x" * 1001))
        ).status_code == 413


async def test_duplicates_are_known_after_a_restart(tmp_path: Path) -> None:
    """A new process over the same journal drops what the old one stored, also if the index was lost or is behind."""
    path = tmp_path / "journal"
    for run, count in enumerate([10, 20, 30, 50]):
        with DiskJournal(path, source="receiver") as journal:
            receiver = Receiver(SECRET, journal=journal)
            for number in range(count):
                body = b"%d" % number
                await receiver.accept(list(signed(f"m{number}", body).items()), body)
            assert receiver.counters.accepted == 10
            assert receiver.counters.duplicates == count - 10
            await receiver.close()
        if run == 1:
            for name in tmp_path.glob("journal.ids.sqlite*"):
                name.unlink()
        if run == 2:
            # As after a crash between the journal's write and the index's.
            with DiskJournal(path, source="receiver") as journal:
                for number in range(30, 40):
                    journal.append("webhook", b"%d" % number, key=f"m{number}")
    with DiskJournal(path, source="receiver") as journal:
        keys = [key for _, key, _, _ in stored(journal)]
    assert sorted(keys) == sorted(f"m{number}" for number in range(50))


async def test_full_journal_is_503_and_nothing_is_lost(tmp_path: Path) -> None:
    """A journal that may not evict answers 503 with Retry-After; when there is room the repetition is stored."""
    journal = MemoryJournal(retention=Retention(max_events=2), on_full="reject")
    journal.bind("receiver")
    journal.register("collector", 0)
    async with client(receiver_app(SECRET, journal=journal)) as http:
        codes = [
            (await http.post("/", content=b"x", headers=signed(f"m{n}", b"x"))).status_code for n in range(4)
        ]
        assert codes[:2] == [200, 200]
        assert codes[-1] == 503
        refused = codes.index(503)
        journal.advance("collector", journal.next)
        again = await http.post("/", content=b"x", headers=signed(f"m{refused}", b"x"))
        assert again.status_code == 200


async def test_handler(tmp_path: Path) -> None:
    """With a handler the event is handed over; if it fails the sender gets 500 and the id is not remembered."""
    taken: list[str] = []
    broken = True

    async def handle(event: CloudEvent) -> None:
        if broken:
            raise RuntimeError("not now")
        taken.append(event.id)

    app = receiver_app(SECRET, handler=handle, ids=tmp_path / "ids.sqlite")
    async with client(app) as http:
        assert (await http.post("/", content=b"1", headers=signed("m1", b"1"))).status_code == 500
        broken = False
        for _ in range(3):
            assert (await http.post("/", content=b"1", headers=signed("m1", b"1"))).status_code == 200
    assert taken == ["m1"]
    again = receiver_app(SECRET, handler=handle, ids=tmp_path / "ids.sqlite")
    async with client(again) as http:
        await http.post("/", content=b"1", headers=signed("m1", b"1"))
    assert taken == ["m1"]


def test_misuse() -> None:
    """A receiver needs exactly one of journal and handler, a journal that can take events, and a secret that is one."""
    with pytest.raises(ConfigError):
        receiver_app(SECRET)
    with pytest.raises(ConfigError, match="a journal with a source"):
        receiver_app(SECRET, journal=MemoryJournal())
    with pytest.raises(ConfigError, match="a journal with a source"):
        receiver_app(SECRET, journal="var/billing")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        receiver_app("nonsense", journal=memory())


def test_index_forgets_old_ids(tmp_path: Path) -> None:
    """Ids older than the window are forgotten, so the index does not grow for ever."""
    index = IdIndex(str(tmp_path / "ids.sqlite"), keep_s=-10)
    index.add(["a", "b"])
    assert index.known(["a", "b", "c"]) == set()
    index.close()
    kept = IdIndex(str(tmp_path / "ids.sqlite"))
    kept.add(["a"])
    assert kept.known(["a", "b"]) == {"a"}
    kept.close()


@given(st.text(), st.text())
def test_keys_are_short_and_distinct(one: str, other: str) -> None:
    """Any id gives a key that a journal takes, and different ids give different keys."""
    assert len(key_of(one)) <= 200
    assert key_of(one).isprintable()
    assert (key_of(one) == key_of(other)) == (one == other)


@given(st.binary(max_size=200), st.sampled_from(["", "application/json", "text/plain", "x/y;charset=z"]))
def test_plain_senders_are_read(body: bytes, content_type: str) -> None:
    """Whatever a sender without CloudEvents sends becomes one event with the same data."""
    (found,) = read_request([("Content-Type", content_type)] if content_type else [], body, "m")
    assert (found.data, found.key) == (body, "m")
    assert found.topic
