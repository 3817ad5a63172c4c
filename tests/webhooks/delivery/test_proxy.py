"""The egress proxy: tunnels to checked addresses, TLS end to end, and nobody's attempt used up by a broken proxy."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from brokerless.core.errors import ConfigError
from brokerless.webhooks import AddressPolicy, Dispatcher, DispatcherConfig
from brokerless.webhooks.delivery.client import DeliveryClient, prepare
from tests.webhooks.delivery.test_client import answer_names, certificate

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Dispatchers = Callable[..., Awaitable[Dispatcher]]
Eventually = Callable[..., Awaitable[None]]


class Proxy:
    """A CONNECT proxy on a real socket; `answer` replaces its own when it is set."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.answer = b""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in rest if line)}
            method, where, _ = first.split(" ")
            self.asked.append({"method": method, "where": where, **headers})
            if self.answer:
                writer.write(self.answer)
                await writer.drain()
                return
            host, _, port = where.rpartition(":")
            there, back = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    made = Proxy()
    await made.start()
    yield made
    await made.stop()


def through(proxy: Proxy, **changes: Any) -> DispatcherConfig:
    fields: dict[str, Any] = {
        "policy": AddressPolicy(allow=("127.0.0.1/32",), schemes=("http", "https")),
        "proxy": f"http://user:p%40ss@127.0.0.1:{proxy.port}",
        "attempt_timeout_s": 10.0,
    }
    return DispatcherConfig(**(fields | changes))


async def test_names_are_resolved_and_checked_here(
    targets: Targets, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is asked for the checked address, with its password; TLS checks the endpoint's own name."""
    cert, key = certificate(tmp_path, "right.test")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    target = await targets(ssl=server)
    answer_names(monkeypatch, lambda name: ["127.0.0.1"] if name != "inside.test" else ["10.0.0.7"])
    config = through(proxy, ca_file=str(cert))
    client = DeliveryClient(config, prepare(config))
    reply = await client.post(f"https://right.test:{target.port}/hook", {}, b"x")
    assert reply.status == 200, reply
    assert (target.got[0].headers["host"], target.got[0].path) == (f"right.test:{target.port}", "/hook")
    assert proxy.asked == [
        {
            "method": "CONNECT",
            "where": f"127.0.0.1:{target.port}",
            "host": f"127.0.0.1:{target.port}",
            "proxy-authorization": "Basic dXNlcjpwQHNz",
        }
    ]
    # The connection is used again, and a wrong name does not pass.
    assert (await client.post(f"https://right.test:{target.port}/hook", {}, b"x")).status == 200
    assert len(proxy.asked) == 1
    assert (await client.post(f"https://wrong.test:{target.port}/hook", {}, b"x")).status is None
    asked = len(proxy.asked)
    for url in ("http://inside.test/", "http://10.0.0.7/", "http://[::1]:80/"):
        reply = await client.post(url, {}, b"x")
        assert (reply.status, reply.blocked, reply.local) == (None, True, ""), (url, reply)
    assert len(proxy.asked) == asked, "the proxy was asked for an address that is not allowed"
    await client.close()


@pytest.mark.parametrize(
    ("answer", "local"),
    [
        (b"HTTP/1.1 502 Bad gateway\r\n\r\n", ""),
        (b"HTTP/1.1 403 No\r\n\r\n", ""),
        (b"HTTP/1.1 200 OK\r\n\r\nearly", ""),
        (b"HTTP/1.1 407 Who\r\n\r\n", "endpoint"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "endpoint"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000, "endpoint"),
        (b"HTTP/1.1 2", "endpoint"),
    ],
)
async def test_answers_of_the_proxy(proxy: Proxy, answer: bytes, local: str) -> None:
    """What the proxy says about an endpoint is that endpoint's failure; what is wrong with the proxy is ours."""
    proxy.answer = answer
    config = through(proxy)
    client = DeliveryClient(config, prepare(config))
    reply = await client.post("http://127.0.0.1:9/", {}, b"x")
    assert (reply.status, reply.local, reply.blocked) == (None, local, False), reply
    assert f"proxy 127.0.0.1:{proxy.port}" in reply.error
    assert "p@ss" not in reply.error
    await client.close()


async def test_a_broken_proxy_uses_up_no_attempt(
    targets: Targets, dispatchers: Dispatchers, eventually: Eventually, proxy: Proxy
) -> None:
    """While the proxy is away nothing is attempted and nothing becomes a dead letter; when it is back all arrives."""
    from brokerless.webhooks import Schedule

    target = await targets()
    dispatcher = await dispatchers(
        proxy=f"http://127.0.0.1:{proxy.port}", schedule=Schedule(delays_s=()), verification="handshake"
    )
    await proxy.stop()
    target.answer = lambda _got, _number: (200, {"WebHook-Allowed-Origin": "*"})
    endpoint, _ = await dispatcher.add_endpoint(target.url, ["**"])
    assert endpoint.state == "pending"
    await proxy.start(proxy.port)
    assert (await dispatcher.verify_endpoint(endpoint.id)).state == "active"
    await proxy.stop()
    await dispatcher.publish("t", b"{}")
    await eventually(lambda: dispatcher.counters.local_failures)
    assert dispatcher.counters.attempts == 0
    await proxy.start(proxy.port)
    await eventually(lambda: dispatcher.counters.delivered == 1)
    assert (await dispatcher.account()).lost == {}
    assert all(asked["where"] == f"127.0.0.1:{target.port}" for asked in proxy.asked)


@pytest.mark.parametrize(
    "url",
    ["https://p:1", "http://p", "p:3128", "http://:3128", "http://p:x", "http://p:1/path", "socks5://p:1"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """Only http proxies with host and port are taken; the error does not repeat a password."""
    with pytest.raises(ConfigError) as caught:
        DispatcherConfig(proxy=url)
    assert caught.value.field == "proxy"


async def test_the_senders_own_certificate(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint that asks for a client certificate gets ours; without one it refuses; a new file is followed."""
    cert, key = certificate(tmp_path, "right.test")
    mine, mine_key = certificate(tmp_path, "sender.test")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(mine)
    target = await targets(ssl=server)
    answer_names(monkeypatch, lambda _name: ["127.0.0.1"])
    policy = AddressPolicy(allow=("127.0.0.0/8",))
    url = f"https://right.test:{target.port}/"
    for changes, fine in (
        ({}, False),
        ({"client_certificate": str(mine), "client_key": str(mine_key)}, True),
    ):
        config = DispatcherConfig(policy=policy, ca_file=str(cert), **changes)
        client = DeliveryClient(config, prepare(config))
        assert ((await client.post(url, {}, b"x")).status == 200) is fine
        await client.close()
    # A file that was replaced while the client runs: first one that the endpoint does not know, then the right one.
    other, other_key = certificate(tmp_path, "other.test")
    chosen = tmp_path / "chosen.pem"
    chosen.write_bytes(other.read_bytes() + other_key.read_bytes())
    config = DispatcherConfig(policy=policy, ca_file=str(cert), client_certificate=str(chosen))
    client = DeliveryClient(config, prepare(config))
    assert (await client.post(url, {}, b"x")).status is None
    (tmp_path / "next.pem").write_bytes(mine.read_bytes() + mine_key.read_bytes())
    (tmp_path / "next.pem").replace(chosen)
    client.renew_certificate()
    assert (await client.post(url, {}, b"x")).status == 200
    await client.close()
    for wrong in (str(tmp_path / "missing.pem"), str(key)):
        config = DispatcherConfig(policy=policy, client_certificate=wrong)
        with pytest.raises(ConfigError) as caught:
            prepare(config)
        assert caught.value.field == "client_certificate"
