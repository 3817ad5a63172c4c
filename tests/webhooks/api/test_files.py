"""Tokens and limits in files: read again when they change, and a mistake changes nothing."""

import os
from pathlib import Path

import pytest
from starlette.requests import Request

from brokerless.core.errors import ConfigError
from brokerless.webhooks.api import files
from brokerless.webhooks.api.files import limits_file, read_tokens, token_file

ONE, TWO = "one-token-0123456789", "two-token-0123456789"


def asking(token: str) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", f"Bearer {token}".encode())]})


@pytest.fixture(autouse=True)
def _always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOOK_S", 0.0)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(path.stat().st_mtime_ns + 10**9,) * 2)


def test_tokens_follow_their_file(tmp_path: Path) -> None:
    """A new tenant is let in and a removed one is not, without a restart; a broken file changes nothing."""
    path = tmp_path / "tokens"
    path.write_text(f"acme {ONE}\n")
    tenant = token_file(path)
    assert (tenant(asking(ONE)), tenant(asking(TWO))) == ("acme", None)
    write(path, f"# new\nother {TWO}\n")
    assert (tenant(asking(ONE)), tenant(asking(TWO))) == (None, "other")
    write(path, "one two three\n")
    assert tenant(asking(TWO)) == "other"
    path.unlink()
    assert tenant(asking(TWO)) == "other"


def test_limits_follow_their_file(tmp_path: Path) -> None:
    """Limits by tenant, with a table for all others."""
    path = tmp_path / "limits.toml"
    path.write_text('[tenant.acme]\nmax_endpoints = 3\n[tenant."*"]\nmax_endpoints = 7\n')
    limits = limits_file(path)
    assert (limits("acme").max_endpoints, limits("other").max_endpoints) == (3, 7)
    write(path, "[tenant.acme]\nmax_endpoints = 4\n")
    assert (limits("acme").max_endpoints, limits("other").max_endpoints) == (4, 100)
    write(path, "[tenant.acme]\nnonsense = 4\n")
    assert limits("acme").max_endpoints == 4


@pytest.mark.parametrize(("text", "problem"), [("", "no tokens"), ("a b c\n", "TENANT TOKEN")])
def test_mistakes_are_told(tmp_path: Path, text: str, problem: str) -> None:
    """An empty file or a line of three words: ConfigError that says what is wanted."""
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_tokens(path)
