"""Tokens of portal links: one tenant, for a while, and no other token."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.webhooks.portal_token import make_token, read_token

KEY, OTHER = b"k" * 32, b"o" * 32


@given(st.from_regex(r"[A-Za-z0-9_.@-]{1,100}", fullmatch=True), st.integers(1, 2**40))
def test_a_token_is_its_tenants_until_it_expires(tenant: str, expires: int) -> None:
    """It names its tenant before the time, nobody after it, and nobody to another outbox."""
    token = make_token(KEY, tenant, expires)
    assert read_token(KEY, token, expires - 1) == tenant
    assert read_token(KEY, token, expires) is None
    assert read_token(OTHER, token, expires - 1) is None


@given(st.one_of(st.text(max_size=200), st.text(max_size=200).map(lambda text: "portal_" + text)))
def test_anything_else_is_nobodys(token: str) -> None:
    """Whatever is sent as a token, the answer is None and not an error."""
    assert read_token(KEY, token, 0) is None


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_changed_token_is_nobodys(position: int, change: int) -> None:
    """One changed character is enough."""
    token = make_token(KEY, "acme", 10**9)
    at = len("portal_") + position % (len(token) - len("portal_") - 1)
    changed = token[:at] + chr(33 + (ord(token[at]) + change) % 90) + token[at + 1 :]
    if changed != token:
        assert read_token(KEY, changed, 0) is None
