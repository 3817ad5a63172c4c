"""The console's HTTP side: read-only, with a token if asked for, from this host alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from brokerless.console import console_app
from brokerless.direct import Publisher, Worker


def reader(directory: Path, **options: str) -> TestClient:
    """A browser on this machine."""
    return TestClient(console_app(directory, **options), base_url="http://127.0.0.1")


def test_the_page_names_no_foreign_host(tmp_path: Path) -> None:
    """Everything comes from this server, and the browser is told to hold to that."""
    with reader(tmp_path) as client:
        for path in ("/", "/console.js", "/console.css"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "https://" not in answer.text
        assert client.get("/data").json()["components"] == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_is_read_only(tmp_path: Path, method: str) -> None:
    """Nothing can be changed."""
    with reader(tmp_path) as client:
        for path in ("/", "/data", "/events", "/history"):
            assert client.request(method, path).status_code == 405
        assert client.request(method, "/dead-letters").status_code in (403, 405)


def test_a_token_guards_the_data(tmp_path: Path) -> None:
    """Without it, or with a wrong one, there is nothing to read."""
    with reader(tmp_path, token="secret") as client:
        for path in (
            "/data",
            "/events",
            "/metrics",
            "/settings",
            "/dead-letters",
            "/data?token=wrong",
            "/data?token=%C3%A9",
        ):
            assert client.get(path).status_code == 401
        assert client.get("/data?token=secret").status_code == 200
        assert client.get("/data", headers={"authorization": "Bearer secret"}).status_code == 200


def test_another_host_name_is_refused(tmp_path: Path) -> None:
    """A web page whose name was pointed at this machine cannot read the console through a browser here."""
    with TestClient(console_app(tmp_path), base_url="http://evil.example") as client:
        assert client.get("/data").status_code == 400
    with TestClient(console_app(tmp_path, token="secret"), base_url="http://console.example") as client:
        assert client.get("/data?token=secret").status_code == 200


def test_dead_letters_need_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """They hold data of events: nothing without a token; with one, a look, and another delivery to their group."""
    presence = tmp_path / "presence"
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(presence))
    with (
        Publisher("tcp://127.0.0.1:*", source="shop", journal=str(tmp_path / "journal")) as publisher,
        Worker(publisher.address, group="mailer", max_deliver=1) as worker,
    ):
        for data in (b'{"order": 17}', b"\xff\xfe"):
            publisher.publish("orders.eu", data, key="k")
            delivery = worker.receive(timeout=30)
            assert delivery is not None
            delivery.nack()
        until(lambda: publisher.groups()["mailer"].dead_lettered == 2, timeout=30)
        where = "/dead-letters?source=shop&group=mailer"
        with reader(presence) as client:
            assert client.get(where).status_code == 403
            assert client.post(f"{where}&number=0").status_code == 403
            assert client.get("/settings").json() == {"dead_letters": False, "history": False}
        with reader(presence, token="secret") as client:
            assert client.post(f"{where}&number=0").status_code == 401
            until(lambda: client.get(f"{where}&token=secret").status_code == 200, timeout=30)
            newest, oldest = client.get(f"{where}&token=secret").json()
            assert (oldest["data"], oldest["encoding"], oldest["key"]) == ('{"order": 17}', "text", "k")
            assert (oldest["topic"], oldest["attempts"]) == ("orders.eu", 1)
            assert (newest["data"], newest["encoding"]) == ("//4=", "base64")
            left = client.post(f"{where}&token=secret&number={oldest['number']}")
            assert left.status_code == 200, left.text
            again = worker.receive(timeout=30)
            assert again is not None
            assert again.event.data == b'{"order": 17}'
            again.ack()
            assert client.post(f"{where}&token=secret&number=99").status_code == 502
            assert client.post(f"{where}&token=secret&number=x").status_code == 502
            assert client.get("/dead-letters?source=nobody&group=g&token=secret").status_code == 502


def test_history_needs_prometheus(tmp_path: Path) -> None:
    """Without one there is none; one that does not answer, or answers something else, is said."""
    with reader(tmp_path) as client:
        assert client.get("/history?hours=1").status_code == 404
    with reader(tmp_path, prometheus="http://127.0.0.1:1") as client:
        for words in ("hours=1", "hours=0", "hours=x", "hours=nan"):
            assert client.get(f"/history?{words}").status_code == 502
