"""The console's HTTP side: read-only, with a token if asked for, from this host alone."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from brokerless.console import console_app


def test_the_page_names_no_foreign_host(tmp_path: Path) -> None:
    """Everything comes from this server, and the browser is told to hold to that."""
    with TestClient(console_app(tmp_path)) as client:
        for path in ("/", "/console.js", "/console.css"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "https://" not in answer.text
        assert client.get("/data").json()["components"] == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_is_read_only(tmp_path: Path, method: str) -> None:
    """Nothing can be changed."""
    with TestClient(console_app(tmp_path)) as client:
        for path in ("/", "/data", "/events"):
            assert client.request(method, path).status_code == 405


def test_a_token_guards_the_data(tmp_path: Path) -> None:
    """Without it, or with a wrong one, there is nothing to read."""
    with TestClient(console_app(tmp_path, token="secret")) as client:
        for path in ("/data", "/events", "/data?token=wrong", "/data?token=%C3%A9"):
            assert client.get(path).status_code == 401
        assert client.get("/data?token=secret").status_code == 200
        assert client.get("/data", headers={"authorization": "Bearer secret"}).status_code == 200
