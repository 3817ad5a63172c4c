"""Standard Webhooks signatures: `v1` (HMAC-SHA256) and `v1a` (ed25519). No randomness and no I/O; only
`verify` reads the clock.

The signed content is `{webhook-id}.{webhook-timestamp}.{body}`; the header `webhook-signature` is a list of
`version,base64` separated by spaces, so that an old and a new key can both sign while a secret is rotated.

Secrets as text: `whsec_` + base64 for v1, `whsk_` (private) and `whpk_` (public) + base64 for v1a. Text without a
prefix is taken as the base64 of a v1 key, as the reference libraries do.
"""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from brokerless.core.errors import ConfigError, MissingDependency
from brokerless.webhooks.errors import VerificationError

# Standard Webhooks: 24 to 64 bytes. We make 32 (the block the hash works with) and accept what others made.
SECRET_BYTES = 32
MIN_SECRET_BYTES = 16
# The reference libraries allow five minutes for clocks that differ and for slow delivery.
TOLERANCE_S = 300.0
# No sender rotates more keys than this at once; bounds the work that an attacker's header can cause.
MAX_SIGNATURES = 16


class Key(Protocol):
    """Something that signs, or only checks."""

    version: str

    def sign(self, content: bytes) -> str:
        """`version,base64` of the content."""

    def check(self, content: bytes, signature: bytes) -> bool:
        """Whether this key made the signature; in constant time where that matters."""


class HmacKey:
    """A shared secret: version v1.

    Both halves of the HMAC are hashed once and copied per message. The one-shot `hmac.digest` gives up the interpreter
    lock, also for small messages; getting it back from the outbox's thread cost 50 µs per signature.
    """

    __slots__ = ("_inner", "_outer")
    version = "v1"

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_SECRET_BYTES:
            raise ConfigError("secret", f"has {len(key)} bytes, at least {MIN_SECRET_BYTES} are needed")
        block = (key if len(key) <= 64 else hashlib.sha256(key).digest()).ljust(64, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER))
        self._outer = hashlib.sha256(block.translate(_OUTER))

    def _digest(self, content: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(content)
        outer.update(inner.digest())
        return outer.digest()

    def sign(self, content: bytes) -> str:
        """HMAC, then base64: a few microseconds."""
        return "v1," + binascii.b2a_base64(self._digest(content), newline=False).decode()

    def check(self, content: bytes, signature: bytes) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._digest(content), signature)


# RFC 2104: the key is XORed with these two bytes.
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


class Ed25519Key:
    """A key pair, or only its public half: version v1a."""

    __slots__ = ("_private", "_public")
    version = "v1a"

    def __init__(self, *, private: bytes | None = None, public: bytes | None = None) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ed25519
        except ImportError:
            raise MissingDependency("cryptography", "webhooks", "signing with ed25519 (v1a)") from None
        self._private: ed25519.Ed25519PrivateKey | None = None
        try:
            if private is not None:
                # Some libraries write seed + public key (64 bytes), others the seed alone.
                self._private = ed25519.Ed25519PrivateKey.from_private_bytes(private[:32])
                self._public = self._private.public_key()
            else:
                self._public = ed25519.Ed25519PublicKey.from_public_bytes(public or b"")
        except ValueError as error:
            raise ConfigError("secret", f"is not an ed25519 key: {error}") from None

    @property
    def public(self) -> str:
        """The public half as text, for the receiver."""
        return "whpk_" + base64.b64encode(self._public.public_bytes_raw()).decode()

    def sign(self, content: bytes) -> str:
        """Needs the private half."""
        if self._private is None:
            raise ConfigError("secret", "a public key cannot sign")
        return "v1a," + base64.b64encode(self._private.sign(content)).decode()

    def check(self, content: bytes, signature: bytes) -> bool:
        """Whether the private half made the signature."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature, content)
        except InvalidSignature:
            return False
        return True


def parse_secret(secret: str | bytes) -> Key:
    """A key from its text (or the raw bytes of a v1 key); ConfigError if it is none."""
    if isinstance(secret, bytes):
        return HmacKey(secret)
    for prefix in ("whsec_", "whsk_", "whpk_", ""):
        if secret.startswith(prefix):
            break
    raw = _decode(secret.removeprefix(prefix))
    if raw is None:
        raise ConfigError("secret", "is not base64")
    if prefix == "whsk_":
        return Ed25519Key(private=raw)
    if prefix == "whpk_":
        return Ed25519Key(public=raw)
    return HmacKey(raw)


def make_secret(version: str, random: bytes) -> str:
    """The text of a new secret from `SECRET_BYTES` random bytes."""
    prefix = {"v1": "whsec_", "v1a": "whsk_"}[version]
    return prefix + base64.b64encode(random[:SECRET_BYTES]).decode()


def shown_secret(secret: str) -> str:
    """What the receiver needs: the shared secret itself, or the public half of a pair."""
    key = parse_secret(secret)
    return key.public if isinstance(key, Ed25519Key) else secret


def signed_content(message_id: str, timestamp: int, body: bytes) -> bytes:
    """The bytes that are signed."""
    return b"%b.%d.%b" % (message_id.encode(), timestamp, body)


def signature_header(keys: Iterable[Key], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature per key."""
    content = signed_content(message_id, timestamp, body)
    return " ".join([key.sign(content) for key in keys])


class Verified(msgspec.Struct, frozen=True):
    """A webhook that may be trusted: its id (the same in every repetition) and when it was sent (seconds)."""

    id: str
    timestamp: int


class Verifier:
    """Keys parsed once, for receivers that verify often."""

    def __init__(
        self, secrets: str | bytes | Sequence[str | bytes], *, tolerance_s: float = TOLERANCE_S
    ) -> None:
        listed = [secrets] if isinstance(secrets, (str, bytes)) else list(secrets)
        if not listed:
            raise ConfigError("secrets", "is empty: at least one is needed")
        self.keys = [parse_secret(secret) for secret in listed]
        self.tolerance_s = tolerance_s

    def verify(
        self, headers: Mapping[str, str] | Iterable[tuple[str, str]], body: bytes | str, now: float
    ) -> Verified:
        """Check one request; VerificationError and nothing else, whatever arrives."""
        found = _pick(headers)
        message_id = found["webhook-id"]
        timestamp = _timestamp(found["webhook-timestamp"], now, self.tolerance_s)
        try:
            raw = body.encode() if isinstance(body, str) else bytes(body)
            content = signed_content(message_id, timestamp, raw)
        except (UnicodeError, TypeError, ValueError):
            raise VerificationError("the body or the id is not encodable") from None
        for version, signature in _signatures(found["webhook-signature"]):
            for key in self.keys:
                if key.version == version and key.check(content, signature):
                    return Verified(message_id, timestamp)
        raise VerificationError("no signature matches")


def _pick(headers: Any) -> dict[str, str]:
    """The three headers, whatever the mapping's case rules and value types; each exactly once."""
    wanted: dict[str, str] = {}
    try:
        pairs: Iterable[tuple[object, object]] = headers.items() if isinstance(headers, Mapping) else headers
        for name, value in pairs:
            key = _text(name).lower()
            if key in _NAMES or key in _SVIX_NAMES:
                if key in wanted:
                    raise VerificationError(f"{key} is there twice")
                wanted[key] = _text(value)
    except (TypeError, ValueError):
        raise VerificationError("the headers are not pairs of text") from None
    if not any(name in wanted for name in _NAMES) and "svix-id" in wanted:
        # The names from before the standard; never mixed with the standard ones.
        wanted = {_SVIX_NAMES[name]: value for name, value in wanted.items()}
    for name in _NAMES:
        if not wanted.get(name):
            raise VerificationError(f"{name} is missing")
    return wanted


_NAMES = ("webhook-id", "webhook-timestamp", "webhook-signature")
_SVIX_NAMES = {name.replace("webhook", "svix"): name for name in _NAMES}


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("latin-1")
    raise TypeError


def _timestamp(value: str, now: float, tolerance_s: float) -> int:
    # int() would also take "1_000", " 5" and digits of other scripts.
    if not (value.isascii() and value.isdigit() and len(value) <= 12):
        raise VerificationError("webhook-timestamp is not a number of seconds")
    timestamp = int(value)
    if timestamp < now - tolerance_s:
        raise VerificationError("webhook-timestamp is too old")
    if timestamp > now + tolerance_s:
        raise VerificationError("webhook-timestamp is in the future")
    return timestamp


def _signatures(value: str) -> list[tuple[str, bytes]]:
    """Those that can be read; unknown versions and garbage are skipped, as the standard demands."""
    found = []
    for part in value.split(" ")[:MAX_SIGNATURES]:
        version, _, text = part.partition(",")
        raw = _decode(text)
        if raw:
            found.append((version, raw))
    return found


def _decode(text: str) -> bytes | None:
    """Base64, padded or not; None if it is none."""
    try:
        return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def verify(
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
    body: bytes | str,
    secrets: str | bytes | Sequence[str | bytes],
    *,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> Verified:
    """Check one webhook against one or several secrets; VerificationError whatever else arrives.

    `body` must be the raw bytes of the request. `now` (seconds since 1970) is the current time unless given.
    """
    moment = time.time() if now is None else now
    return Verifier(secrets, tolerance_s=tolerance_s).verify(headers, body, moment)
