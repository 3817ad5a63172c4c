"""Signatures agree with the published libraries, and `verify` raises one error type whatever arrives."""

import base64
import json
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from brokerless.core.errors import ConfigError
from brokerless.webhooks import VerificationError, verify
from brokerless.webhooks.signing import (
    SECRET_BYTES,
    Ed25519Key,
    HmacKey,
    Verifier,
    make_secret,
    parse_secret,
    shown_secret,
    signature_header,
)

SECRET = make_secret("v1", bytes(range(SECRET_BYTES)))
ids = st.from_regex(r"[A-Za-z0-9_.:-]{1,64}", fullmatch=True)


def signed(secret: str, message_id: str, now: int, body: bytes) -> dict[str, str]:
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(now),
        "webhook-signature": signature_header([parse_secret(secret)], message_id, now, body),
    }


@given(ids, st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_reference_library_accepts_ours(message_id: str, value: object) -> None:
    """What we sign, the PyPI library `standardwebhooks` verifies."""
    now = int(datetime.now(UTC).timestamp())
    body = json.dumps(value).encode()
    assert Webhook(SECRET).verify(body, signed(SECRET, message_id, now, body)) == value


@given(ids, st.text(), st.booleans())
def test_ours_accepts_reference_library(message_id: str, text: str, unpadded: bool) -> None:
    """What the PyPI library signs, we verify; secrets with and without prefix and padding."""
    now = datetime.now(UTC)
    body = json.dumps(text)
    headers = {
        "Webhook-Id": message_id,
        "Webhook-Timestamp": str(int(now.timestamp())),
        "Webhook-Signature": Webhook(SECRET).sign(message_id, now, body),
    }
    secret = SECRET.rstrip("=") if unpadded else SECRET.removeprefix("whsec_")
    assert verify(headers, body.encode(), secret).id == message_id


@given(ids, st.binary(), st.binary(min_size=32, max_size=32))
def test_v1a_agrees_with_cryptography(message_id: str, body: bytes, seed: bytes) -> None:
    """Our v1a signature verifies with `cryptography`, and one that it makes verifies with ours."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    content = message_id.encode() + b".1000." + body
    header = signature_header([parse_secret(make_secret("v1a", seed))], message_id, 1000, body)
    version, _, text = header.partition(",")
    assert version == "v1a"
    private.public_key().verify(base64.b64decode(text), content)

    public = "whpk_" + base64.b64encode(private.public_key().public_bytes_raw()).decode()
    assert shown_secret(make_secret("v1a", seed)) == public
    theirs = "v1a," + base64.b64encode(private.sign(content)).decode()
    headers = {"webhook-id": message_id, "webhook-timestamp": "1000", "webhook-signature": theirs}
    assert Verifier(public).verify(headers, body, 1000).id == message_id
    with pytest.raises(VerificationError):
        Verifier(public).verify(headers, body + b"x", 1000)


def test_rotation_accepts_either_key() -> None:
    """While a secret is rotated both keys sign, and a receiver with either one verifies; v1 and v1a may be mixed."""
    old, new = SECRET, make_secret("v1a", b"n" * 32)
    header = signature_header([parse_secret(new), parse_secret(old)], "m", 5, b"{}")
    headers = {"webhook-id": "m", "webhook-timestamp": "5", "webhook-signature": header}
    for secret in (old, shown_secret(new)):
        assert Verifier(secret).verify(headers, b"{}", 5).timestamp == 5
    with pytest.raises(VerificationError):
        Verifier(make_secret("v1", b"o" * 32)).verify(headers, b"{}", 5)


@given(st.integers(0, 10**11), st.integers(-1000, 1000))
def test_timestamp_tolerance(now: int, shift: int) -> None:
    """A timestamp is accepted exactly within the tolerance, in both directions."""
    sent = max(0, now + shift)
    headers = signed(SECRET, "m", sent, b"x")
    if abs(sent - now) <= 300:
        assert Verifier(SECRET).verify(headers, b"x", now).timestamp == sent
    else:
        with pytest.raises(VerificationError):
            Verifier(SECRET).verify(headers, b"x", now)


junk = st.one_of(st.text(), st.binary(), st.none(), st.integers(), st.floats(), st.lists(st.text()))
names = st.sampled_from(["webhook-id", "Webhook-Timestamp", "webhook-signature", "x"]) | junk.filter(
    lambda value: not isinstance(value, list)
)


@given(
    st.dictionaries(names, junk | st.just("1000") | st.just("v1,AAAA"))
    | st.lists(st.tuples(names, junk))
    | junk,
    st.binary() | st.text() | st.none() | st.integers(),
)
def test_malformed_raises_only_one_error(headers: object, body: object) -> None:
    """Whatever the headers and the body are, `verify` raises VerificationError and nothing else."""
    with pytest.raises(VerificationError):
        Verifier([SECRET, shown_secret(make_secret("v1a", b"s" * 32))]).verify(headers, body, 1000)  # type: ignore[arg-type]


@given(st.text() | st.sampled_from(["v1,", "v1", ",", "v1,AAAA v1a,AAAA", "v2,AAAA", "v1,===="]))
def test_malformed_signature_raises_only_one_error(signature: str) -> None:
    """A signature header that is garbage is refused, also when everything else is right."""
    headers = signed(SECRET, "m", 1000, b"x") | {"webhook-signature": signature}
    with pytest.raises(VerificationError):
        Verifier([SECRET, shown_secret(make_secret("v1a", b"s" * 32))]).verify(headers, b"x", 1000)


@pytest.mark.parametrize(
    "timestamp", ["1_000", " 1000", "1000.0", "+1000", "１０００", "1e3", "9" * 40, "-1000"]
)
def test_odd_timestamps_are_refused(timestamp: str) -> None:
    """Only plain ASCII digits are a timestamp, though Python's int() takes more."""
    with pytest.raises(VerificationError):
        Verifier(SECRET).verify(
            signed(SECRET, "m", 1000, b"x") | {"webhook-timestamp": timestamp}, b"x", 1000
        )


def test_duplicate_header_is_refused() -> None:
    """Two ids in one request are refused, because a proxy and the application could read different ones."""
    pairs = [*signed(SECRET, "m", 1000, b"x").items(), ("Webhook-Id", "other")]
    with pytest.raises(VerificationError, match="twice"):
        Verifier(SECRET).verify(pairs, b"x", 1000)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_!!!", "whsec_YWJj", b"short", "whpk_AAAA", "whsk_AAAA"])
def test_bad_secrets_are_the_callers_error(secret: str | bytes) -> None:
    """A secret that is no key is a ConfigError when it is parsed, not a surprise at the first webhook."""
    with pytest.raises(ConfigError):
        parse_secret(secret)


def test_no_secrets_is_an_error() -> None:
    """An empty list of secrets would refuse everything; it is refused at once."""
    with pytest.raises(ConfigError):
        Verifier([])


def test_public_key_cannot_sign() -> None:
    """A receiver's configuration cannot be used to forge."""
    key = parse_secret(shown_secret(make_secret("v1a", b"s" * 32)))
    assert isinstance(key, Ed25519Key)
    with pytest.raises(ConfigError):
        key.sign(b"x")
    assert HmacKey(b"k" * 24).version == "v1"
