"""Addresses of databases: the password is never shown, however it is written."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.webhooks import OutboxError
from brokerless.webhooks.outbox.database import connect, display_name, redact

PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=20).filter(
    lambda text: text not in "postgresql://host/db"
)


@given(PASSWORDS)
def test_the_password_is_in_no_text(password: str) -> None:
    """Neither in the display name nor in an error that repeats the whole address."""
    encoded = quote(password, safe="")
    for target in (
        f"postgresql://user:{encoded}@host:5432/db",
        f"postgresql://host/db?user=me&password={encoded}",
        f"postgres://user:{encoded}@/db?host=/var/run",
    ):
        for text in (display_name(target), redact(f'could not connect to "{target}" as {password}', target)):
            assert encoded not in text, text
            assert password not in text, text


@pytest.mark.parametrize(
    "target",
    [
        "postgresql://user:topsecret@127.0.0.1:1/none",
        "postgresql://127.0.0.1:1/none?user=x&password=topsecret",
        "postgresql://user:topsecret@127.0.0.1:nonsense/none",
        "postgresql://user:topsecret@127.0.0.1:1/none?nonsense=1",
    ],
)
def test_errors_do_not_contain_the_password(target: str) -> None:
    """A server that is away, a wrong port, an unknown option: OutboxError without the password."""
    with pytest.raises(OutboxError) as caught:
        connect(target)
    assert "topsecret" not in str(caught.value)
    assert caught.value.__cause__ is None
