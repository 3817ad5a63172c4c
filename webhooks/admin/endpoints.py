"""Rules for endpoints: what may be registered or changed. Pure, apart from randomness that is given."""

import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from brokerless.core.errors import ConfigError
from brokerless.webhooks.admin.states import Action, step
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.delivery.request import FORBIDDEN_HEADERS
from brokerless.webhooks.delivery.ssrf import AddressGuard
from brokerless.webhooks.filters import check_filter
from brokerless.webhooks.models import Endpoint, EndpointChanges, EndpointSettings, Secret
from brokerless.webhooks.rules import MAX_GLOBS, MAX_HEADER_VALUE, MAX_HEADERS, US, Verification
from brokerless.webhooks.signing import make_secret
from brokerless.webhooks.topics import TopicFilter

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_VALUE = re.compile(r"[\x20-\x7e]*")


def check_endpoint(endpoint: Endpoint, guard: AddressGuard) -> Endpoint:
    """Return the endpoint, or raise ConfigError that names the field: what the types of its settings cannot say."""
    guard.check_url(endpoint.url)
    TopicFilter(endpoint.topics)
    globs = {
        word for pattern in endpoint.topics for word in pattern.split(".") if word.strip("*") and "*" in word
    }
    if len(globs) > MAX_GLOBS:
        raise ConfigError(
            "topics", f"has {len(globs)} words with text around a '*', the limit is {MAX_GLOBS}"
        )
    for condition in endpoint.filters:
        check_filter(condition)
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
        if lower in FORBIDDEN_HEADERS or lower.startswith(("ce-", "svix-")):
            raise ConfigError("headers", f"{name!r} is set by the sender")
        if lower in seen:
            raise ConfigError("headers", f"{name!r} is there twice")
        if len(value) > MAX_HEADER_VALUE or not _VALUE.fullmatch(value):
            raise ConfigError(
                "headers",
                f"the value of {name!r} must be printable ASCII, at most {MAX_HEADER_VALUE} characters",
            )
        seen.add(lower)


def new_endpoint(
    settings: EndpointSettings,
    *,
    endpoint_id: str,
    tenant: str,
    config: DispatcherConfig,
    random: bytes,
    now: int,
) -> Endpoint:
    """A fresh endpoint with its first secret, pending unless the operator switched verification off."""
    fields = msgspec.structs.asdict(settings)
    own_secret = fields.pop("secret")
    verification = _verification(fields.pop("verification"), config)
    if own_secret is not UNSET and settings.signature != "v1":
        raise ConfigError("secret", "a secret of your own is for v1 signatures")
    key = make_secret(settings.signature, random) if own_secret is UNSET else own_secret
    fields["concurrency"] = int(settings.concurrency)
    return Endpoint(
        id=endpoint_id,
        tenant=tenant,
        created=now,
        updated=now,
        asked_since=now,
        verification=verification,
        secrets=[Secret(key, now)],
        state="active" if verification == "none" else "pending",
        **fields,
    )


def _verification(chosen: Verification | msgspec.UnsetType, config: DispatcherConfig) -> Verification:
    if config.verification == "none" or chosen is UNSET:
        return config.verification
    if chosen == "none":
        raise ConfigError("verification", "only the operator can switch it off")
    return chosen


def changed_endpoint(
    endpoint: Endpoint, changes: EndpointChanges, *, config: DispatcherConfig, random: bytes, now: int
) -> Endpoint:
    """The endpoint with these changes; a new URL must agree again, a new signature version gets a new key."""
    wanted = changes.given()
    enabled = wanted.pop("enabled", None)
    if "verification" in wanted:
        wanted["verification"] = _verification(wanted["verification"], config)
    if "concurrency" in wanted:
        wanted["concurrency"] = int(wanted["concurrency"])
    changed = msgspec.structs.replace(endpoint, **wanted, updated=now)
    if changed.signature != endpoint.signature:
        changed = rotated(changed, config.rotation_overlap_s, random=random, now=now)
    if changed.url != endpoint.url and changed.verification != "none":
        state = step(changed.state, Action.MOVE)
        changed = msgspec.structs.replace(
            changed, state=state, reason="", verify_tries=0, allowed_rate=0.0, asked_since=now
        )
    if enabled is not None:
        changed = switched(changed, on=enabled, now=now)
    return changed


def switched(endpoint: Endpoint, *, on: bool, now: int) -> Endpoint:
    """Enabled (with a clean record) or disabled by request."""
    state = step(endpoint.state, Action.ENABLE if on else Action.DISABLE)
    if not on:
        return msgspec.structs.replace(endpoint, state=state, reason="disabled by request", updated=now)
    return msgspec.structs.replace(
        endpoint, state=state, reason="", failing_since=None, verify_tries=0, asked_since=now, updated=now
    )


def rotated(
    endpoint: Endpoint, overlap_s: float, *, random: bytes, now: int, secret: str | None = None
) -> Endpoint:
    """A new key first; older ones sign along until the overlap ends (or their own earlier end)."""
    if secret is not None and endpoint.signature != "v1":
        raise ConfigError("secret", "a secret of your own is for v1 signatures")
    until = now + int(overlap_s * US)
    old = [
        msgspec.structs.replace(known, expires=min(until, known.expires or until))
        for known in endpoint.secrets
        if known.expires is None or known.expires > now
    ]
    # No more than three: who rotates faster than the overlap means to get rid of the old ones.
    fresh = Secret(secret or make_secret(endpoint.signature, random), now)
    return msgspec.structs.replace(endpoint, secrets=[fresh, *old[:2]], updated=now)


def expired(endpoint: Endpoint, now: int) -> Sequence[Secret]:
    """Keys that no longer sign and can be forgotten."""
    return [secret for secret in endpoint.secrets if secret.expires is not None and secret.expires < now]
