"""Does the owner of a URL agree to be called? The CloudEvents handshake, or a signed challenge."""

import asyncio
import secrets
from typing import TYPE_CHECKING

import msgspec

from brokerless.webhooks.cloudevents import CHALLENGE, CloudEvent, to_json
from brokerless.webhooks.delivery.request import RequestWriter
from brokerless.webhooks.models import Endpoint

if TYPE_CHECKING:
    import httpx

# An answer to a challenge is some dozen bytes.
MAX_ANSWER = 4096


class Agreement(msgspec.Struct, frozen=True):
    """Whether it agreed; if not, what was wrong. `allowed_rate` in requests per minute, 0: no limit."""

    agreed: bool
    problem: str = ""
    allowed_rate: float = 0.0


class _Answer(msgspec.Struct):
    challenge: str


async def ask(
    client: "httpx.AsyncClient", endpoint: Endpoint, *, source: str, origin: str, timeout_s: float, now: float
) -> Agreement:
    """Ask the endpoint in the way it chose; never raises for what the other side does."""
    import httpx

    try:
        async with asyncio.timeout(timeout_s):
            if endpoint.verification == "challenge":
                return await _challenge(client, endpoint, source, now)
            return await _handshake(client, endpoint, origin)
    except TimeoutError:
        return Agreement(False, f"no answer within {timeout_s:g} s")
    except (httpx.HTTPError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        return Agreement(False, str(cause)[:200] or type(cause).__name__)


async def _handshake(client: "httpx.AsyncClient", endpoint: Endpoint, origin: str) -> Agreement:
    headers = {"WebHook-Request-Origin": origin}
    if endpoint.rate:
        headers["WebHook-Request-Rate"] = str(max(1, int(endpoint.rate * 60)))
    async with client.stream("OPTIONS", endpoint.url, headers=headers) as response:
        allowed = response.headers.get("WebHook-Allowed-Origin", "")
        rate = response.headers.get("WebHook-Allowed-Rate", "*").strip()
        if not response.is_success:
            return Agreement(False, f"answered {response.status_code} to OPTIONS")
        if allowed.strip() not in {"*", origin}:
            return Agreement(
                False, f"did not allow the origin {origin} (WebHook-Allowed-Origin: {allowed[:100]!r})"
            )
        if rate == "*":
            return Agreement(True)
        if not (rate.isascii() and rate.isdigit() and 0 < len(rate) < 10 and int(rate) > 0):
            return Agreement(False, f"WebHook-Allowed-Rate {rate[:100]!r} is neither a number nor '*'")
        return Agreement(True, allowed_rate=float(rate))


async def _challenge(client: "httpx.AsyncClient", endpoint: Endpoint, source: str, now: float) -> Agreement:
    token = secrets.token_urlsafe(24)
    message_id = "challenge_" + secrets.token_hex(12)
    body = to_json(
        CloudEvent(
            id=message_id,
            source=source,
            type=CHALLENGE,
            datacontenttype="application/json",
            data=msgspec.json.encode(_Answer(token)),
        )
    )
    writer = RequestWriter(endpoint, source)
    headers = {
        **writer.base_headers(),
        "content-type": "application/cloudevents+json",
        "webhook-id": message_id,
    }
    writer.sign(headers, message_id, body, now)
    async with client.stream("POST", endpoint.url, headers=headers, content=body) as response:
        if not response.is_success:
            return Agreement(False, f"answered {response.status_code} to the challenge")
        data = b""
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > MAX_ANSWER:
                break
    try:
        answer = msgspec.json.decode(data, type=_Answer).challenge
    except (msgspec.DecodeError, UnicodeDecodeError):
        answer = ""
    if not secrets.compare_digest(answer.encode(), token.encode()):
        return Agreement(False, "did not send the challenge back")
    return Agreement(True)
