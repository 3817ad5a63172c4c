"""Rules for endpoints: what may be registered or changed. Pure, apart from randomness that is given."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.webhooks.addresses import AddressGuard
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.message import FORBIDDEN_HEADERS
from brokerless.webhooks.models import Endpoint, Secret
from brokerless.webhooks.signing import make_secret
from brokerless.webhooks.topics import TopicFilter

US = 1_000_000
MAX_DESCRIPTION = 500
MAX_HEADERS = 20
MAX_HEADER_VALUE = 1024
# One endpoint may use at most this share of the connections of a dispatcher.
MAX_CONCURRENCY = 256
MAX_RATE = 100_000.0
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_VALUE = re.compile(r"[\x20-\x7e]*")
# What a caller may set; everything else belongs to the dispatcher.
SETTABLE = (
    "url",
    "topics",
    "description",
    "rate",
    "concurrency",
    "fifo",
    "headers",
    "mode",
    "signature",
    "verification",
)


def check_endpoint(endpoint: Endpoint, guard: AddressGuard) -> Endpoint:
    """Return the endpoint, or raise ConfigError that names the field."""
    guard.check_url(endpoint.url)
    TopicFilter(endpoint.topics)
    if len(endpoint.description) > MAX_DESCRIPTION:
        raise ConfigError("description", f"has more than {MAX_DESCRIPTION} characters")
    if not 0 <= endpoint.rate <= MAX_RATE:
        raise ConfigError("rate", f"must be between 0 (no limit) and {MAX_RATE:g} per second")
    if not 1 <= endpoint.concurrency <= MAX_CONCURRENCY:
        raise ConfigError("concurrency", f"must be between 1 and {MAX_CONCURRENCY}")
    _check_headers(endpoint.headers)
    return endpoint


def _check_headers(headers: Mapping[str, str]) -> None:
    if len(headers) > MAX_HEADERS:
        raise ConfigError("headers", f"has {len(headers)} entries, the limit is {MAX_HEADERS}")
    seen = set()
    for name, value in headers.items():
        lower = name.lower()
        if not _TOKEN.fullmatch(name):
            raise ConfigError("headers", f"{name!r} is not a header name")
        if lower in FORBIDDEN_HEADERS or lower.startswith("ce-"):
            raise ConfigError("headers", f"{name!r} is set by the sender")
        if lower in seen:
            raise ConfigError("headers", f"{name!r} is there twice")
        if len(value) > MAX_HEADER_VALUE or not _VALUE.fullmatch(value):
            raise ConfigError(
                "headers", f"the value of {name!r} must be printable ASCII, at most 1024 characters"
            )
        seen.add(lower)


def new_endpoint(
    fields: Mapping[str, Any],
    *,
    endpoint_id: str,
    tenant: str,
    config: DispatcherConfig,
    random: bytes,
    now: int,
) -> Endpoint:
    """A fresh endpoint with its first secret, pending unless the operator switched verification off."""
    unknown = set(fields) - set(SETTABLE)
    if unknown:
        raise ConfigError(min(unknown), "is not a field of endpoints")
    chosen = {"verification": config.verification, **fields}
    if config.verification == "none":
        chosen["verification"] = "none"
    elif chosen["verification"] == "none":
        raise ConfigError("verification", "only the operator can switch it off")
    endpoint = _convert(
        {"id": endpoint_id, "tenant": tenant, "created": now, "updated": now, **chosen},
    )
    secret = Secret(make_secret(endpoint.signature, random), now)
    state = "active" if endpoint.verification == "none" else "pending"
    return msgspec.structs.replace(endpoint, secrets=[secret], state=state)


def changed_endpoint(
    endpoint: Endpoint, fields: Mapping[str, Any], *, config: DispatcherConfig, random: bytes, now: int
) -> Endpoint:
    """The endpoint with these fields changed; a new URL must agree again, a new signature kind gets a key."""
    unknown = set(fields) - set(SETTABLE) - {"enabled"}
    if unknown:
        raise ConfigError(min(unknown), "is not a field of endpoints that can be changed")
    wanted = {name: value for name, value in fields.items() if name != "enabled"}
    if config.verification == "none":
        wanted.pop("verification", None)
    elif wanted.get("verification") == "none":
        raise ConfigError("verification", "only the operator can switch it off")
    changed = _convert({**msgspec.structs.asdict(endpoint), **wanted, "updated": now})
    if changed.signature != endpoint.signature:
        changed = rotated(changed, config.rotation_overlap_s, random=random, now=now)
    asked_again = changed.url != endpoint.url and changed.verification != "none"
    if asked_again:
        changed = msgspec.structs.replace(changed, state="pending", reason="", verify_tries=0, created=now)
    if "enabled" in fields:
        if not isinstance(fields["enabled"], bool):
            raise ConfigError("enabled", "must be true or false")
        if fields["enabled"] and changed.state == "disabled":
            changed = enabled(changed, now)
        elif not fields["enabled"]:
            changed = msgspec.structs.replace(changed, state="disabled", reason="disabled by request")
    return changed


def enabled(endpoint: Endpoint, now: int) -> Endpoint:
    """Active again, with a clean record."""
    return msgspec.structs.replace(endpoint, state="active", reason="", failing_since=None, updated=now)


def rotated(endpoint: Endpoint, overlap_s: float, *, random: bytes, now: int) -> Endpoint:
    """A new key first; older ones sign along until the overlap ends (or their own earlier end)."""
    until = now + int(overlap_s * US)
    old = [
        msgspec.structs.replace(secret, expires=min(until, secret.expires or until))
        for secret in endpoint.secrets
        if secret.expires is None or secret.expires > now
    ]
    # No more than three: who rotates faster than the overlap means to get rid of the old ones.
    fresh = Secret(make_secret(endpoint.signature, random), now)
    return msgspec.structs.replace(endpoint, secrets=[fresh, *old[:2]], updated=now)


def _convert(fields: Mapping[str, Any]) -> Endpoint:
    try:
        return msgspec.convert(dict(fields), Endpoint, from_attributes=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        field = path.strip("`").removeprefix("$.").partition("[")[0] or "endpoint"
        raise ConfigError(field, text[0].lower() + text[1:]) from None


def check_tenant(tenant: str) -> str:
    """Return the tenant's name, or raise ConfigError."""
    if not isinstance(tenant, str) or not re.fullmatch(r"[A-Za-z0-9_.@-]{1,100}", tenant):
        raise ConfigError("tenant", f"{tenant!r} must be 1 to 100 letters, digits or any of _ . @ -")
    return tenant


def expired(endpoint: Endpoint, now: int) -> Sequence[Secret]:
    """Keys that no longer sign and can be forgotten."""
    return [secret for secret in endpoint.secrets if secret.expires is not None and secret.expires < now]
