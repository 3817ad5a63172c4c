"""Serving: connections that do not finish their requests cannot stop the app; a port in use is one clear error."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from brokerless.core.errors import ConfigError
from brokerless.core.runtime.http_host import HttpHost, address_of, listen, server_for

pytestmark = pytest.mark.anyio


async def echo(request: Request) -> Response:
    """Send the body back."""
    return Response(await request.body())


async def endless(request: Request) -> Response:
    """Something at once, and then nothing until the client or the server ends it."""

    async def stream() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    request.scope["endless"] = True
    return StreamingResponse(stream())


LARGE = b"x" * 16_000_000


async def large(_: Request) -> Response:
    """More than sockets hold."""
    return Response(LARGE)


ROUTES = [Route("/", echo, methods=["GET", "POST"]), Route("/endless", endless), Route("/large", large)]
APP = Starlette(routes=ROUTES)


@contextlib.asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[tuple[str, Any]]:
    running, listener = server_for(APP, **limits), listen("127.0.0.1", 0)
    task = asyncio.create_task(running.serve(sockets=[listener]))
    while not running.started:
        await asyncio.sleep(0.01)
    yield address_of(listener), running.config.http_protocol_class
    running.should_exit = True
    await task


async def test_half_sent_requests_do_not_stop_the_app() -> None:
    """Three hundred connections with half a request: the oldest are closed, the rest after the deadline, and the app
    answers meanwhile.
    """
    async with (
        served(max_unfinished=100, header_timeout_s=3.0) as (url, protocol),
        contextlib.AsyncExitStack() as stack,
    ):
        port = int(url.rpartition(":")[2])
        readers = []
        for _ in range(300):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Half:")
            readers.append(reader)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
        assert len(protocol.unfinished) <= 101
        async with asyncio.timeout(30):
            for reader in readers:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not protocol.unfinished


async def test_a_second_half_request_on_one_connection_is_noticed() -> None:
    """A connection that was answered once has to finish its next request in time too."""
    async with served(header_timeout_s=1.0) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.write(b"GET / HTTP/1.1\r\n")
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()


async def test_answers_that_nobody_reads_do_not_stay_in_memory() -> None:
    """Of twenty clients that ask and do not read, four are left at once, and none after the deadline."""
    async with (
        served(max_unread=4, header_timeout_s=2.0) as (url, protocol),
        contextlib.AsyncExitStack() as stack,
        asyncio.timeout(60),
    ):
        for _ in range(20):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            stack.callback(sock.close)
            sock.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
        while not protocol.unread:
            await asyncio.sleep(0.01)
        assert len(protocol.unread) <= 4
        while protocol.unread:
            await asyncio.sleep(0.01)


async def test_who_reads_slowly_gets_the_whole_answer() -> None:
    """It takes longer than the deadline, but something is read before each."""
    async with served(header_timeout_s=1.5) as (url, _), asyncio.timeout(60):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=100_000)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        got = 0
        while data := await reader.read(100_000):
            got += len(data)
            await asyncio.sleep(0.02)
        assert got == len(LARGE)
        writer.close()


def test_an_app_in_a_thread_answers_until_it_is_closed() -> None:
    """Started when the constructor returns; closed twice; its port is free again."""
    host = HttpHost(APP, listen("127.0.0.1", 0))
    assert httpx.post(host.address, content=b"hello", trust_env=False).content == b"hello"
    host.close()
    host.close()
    listen("127.0.0.1", host.port).close()


async def test_a_server_that_stops_does_not_wait_for_a_stream_without_an_end() -> None:
    """It is closed at once, not after the time that requests under way get."""
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(trust_env=False) as client,
        served(linger_s=3600) as (url, _),
    ):
        request = client.build_request("GET", url + "/endless")
        answer = await client.send(request, stream=True)
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"begun"


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 70_000), ("192.0.2.1", 0), ("no.such.host.invalid", 0)]
)
def test_an_address_that_cannot_be_used_is_one_clear_error(host: str, port: int) -> None:
    """A port beyond the range, an address of another machine, a name nobody knows: ConfigError that names it."""
    with pytest.raises(ConfigError, match=f"{host}:{port} cannot be used"):
        listen(host, port)


def test_an_address_in_use_is_one_clear_error() -> None:
    """A port that another socket has: ConfigError that names it."""
    with (
        contextlib.closing(listen("127.0.0.1", 0)) as first,
        pytest.raises(ConfigError, match="cannot be used"),
    ):
        listen("127.0.0.1", first.getsockname()[1])
