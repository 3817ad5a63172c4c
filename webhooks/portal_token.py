"""Tokens of portal links: an application lets a tenant in for a while. Pure.

A token names one tenant and a time, signed with a key that is kept in the outbox. It can do what the tenant's own token
can, until it expires.
"""

import base64
import hashlib
import hmac

_PREFIX = "portal_"


def make_token(key: bytes, tenant: str, expires: int) -> str:
    """A token for one tenant that is valid until `expires` (seconds since 1970)."""
    content = f"{expires}.{tenant}".encode()
    signature = hmac.digest(key, content, hashlib.sha256)
    return _PREFIX + base64.urlsafe_b64encode(signature + content).decode().rstrip("=")


def read_token(key: bytes, token: str, now: float) -> str | None:
    """The tenant of a portal token; None if it is none, was changed, or has expired."""
    if not token.startswith(_PREFIX):
        return None
    text = token.removeprefix(_PREFIX)
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return None
    signature, content = raw[:32], raw[32:]
    if not hmac.compare_digest(signature, hmac.digest(key, content, hashlib.sha256)):
        return None
    expires, _, tenant = content.decode().partition(".")
    return tenant if now < int(expires) else None
