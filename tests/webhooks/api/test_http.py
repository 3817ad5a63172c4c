"""Reading requests: a body that does not come, or is too long, is an answer and not a wait."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokerless.core.runtime.http_host import HttpHost, listen
from brokerless.webhooks.api import http
from brokerless.webhooks.api.http import Refused, problem, read_body

pytestmark = pytest.mark.anyio


async def echo(request: Request) -> Response:
    """Send the body back, as the API reads it."""
    try:
        return Response(await read_body(request, 1000))
    except Refused as refused:
        return problem(refused)


async def test_a_body_that_does_not_come_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers without their body: 408 after the deadline."""
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.5)
    host = HttpHost(Starlette(routes=[Route("/", echo, methods=["POST"])]), listen("127.0.0.1", 0))
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    async with asyncio.timeout(30):
        assert b" 408 " in await reader.readline()
    writer.close()
    await asyncio.to_thread(host.close)
