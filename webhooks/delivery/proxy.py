"""An egress proxy: connections are tunnels by HTTP CONNECT to addresses that were resolved and checked here.

The proxy gets an address and never a name, so what the table of addresses allows is what is connected to; TLS is end to
end with the endpoint's own name.
"""

import asyncio
import base64
import socket
from errno import ECONNREFUSED
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.webhooks.delivery.ssrf import AddressGuard
from brokerless.webhooks.errors import BlockedAddress

# Errors carry a number, because aiohttp shows only the text of those that have one.
# The answer to CONNECT is a few lines.
MAX_HEAD = 8192


class ProxyUnavailable(OSError):
    """The proxy itself cannot be used: no endpoint's fault, so no attempt of one is used up.

    `answered` tells that it took the connection, and may serve others.
    """

    def __init__(self, number: int, text: str, *, answered: bool = False) -> None:
        super().__init__(number, text)
        self.answered = answered


class Proxy(msgspec.Struct, frozen=True):
    """Where the proxy is, and what it wants to know."""

    host: str
    port: int
    authorization: str = ""

    @property
    def name(self) -> str:
        """For people: without the password."""
        return f"proxy {self.host}:{self.port}"


def parse_proxy(url: str) -> Proxy | None:
    """`http://[user:password@]host:port`, or nothing; ConfigError otherwise."""
    if not url:
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in {"", "/"}:
        raise ConfigError("proxy", "must be http://[user:password@]host:port")
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.hostname, port, authorization)


async def open_tunnel(proxy: Proxy, address: tuple[Any, ...], guard: AddressGuard) -> socket.socket:
    """A connected socket whose other end is `address`; OSError if there is none.

    BlockedAddress if the table forbids the address: then the proxy is not even asked.
    """
    host, port = str(address[0]), int(address[1])
    rule = guard.blocked(host)
    if rule is not None:
        raise BlockedAddress(host, rule)
    made = await _connect(proxy)
    try:
        await _ask(made, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except BaseException:
        made.close()
        raise
    return made


async def _connect(proxy: Proxy) -> socket.socket:
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    try:
        found = await loop.getaddrinfo(proxy.host, proxy.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ProxyUnavailable(ECONNREFUSED, f"{proxy.name}: {error}") from error
    for family, kind, proto, _, address in found:
        made = socket.socket(family, kind, proto)
        made.setblocking(False)
        try:
            await loop.sock_connect(made, address)
        except OSError as error:
            made.close()
            problem = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise ProxyUnavailable(ECONNREFUSED, f"{proxy.name}: {problem or 'no address'}") from problem


async def _ask(made: socket.socket, proxy: Proxy, where: str) -> None:
    loop = asyncio.get_running_loop()
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    await loop.sock_sendall(made, ("\r\n".join(lines) + "\r\n\r\n").encode())
    head = b""
    while b"\r\n\r\n" not in head:
        piece = await loop.sock_recv(made, MAX_HEAD)
        head += piece
        if not piece or len(head) > MAX_HEAD:
            raise ProxyUnavailable(
                ECONNREFUSED, f"{proxy.name}: its answer is not one to CONNECT", answered=True
            )
    version, _, rest = head.partition(b"\r\n")[0].partition(b" ")
    status = rest[:3].decode("ascii", "replace")
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise ProxyUnavailable(ECONNREFUSED, f"{proxy.name}: its answer is not one to CONNECT", answered=True)
    if status == "407":
        raise ProxyUnavailable(
            ECONNREFUSED, f"{proxy.name}: it wants another user or password", answered=True
        )
    if not status.startswith("2"):
        raise OSError(ECONNREFUSED, f"{proxy.name} answered {status} to CONNECT {where}")
    if not head.endswith(b"\r\n\r\n"):
        # The endpoint does not speak first, neither in TLS nor in HTTP.
        raise OSError(ECONNREFUSED, f"{proxy.name} sent data before the endpoint was asked anything")


def tunnelling(base: type, proxy: Proxy, guard: AddressGuard) -> type:
    """aiohttp's connector with tunnels instead of connections; names are still resolved and checked by it."""

    class TunnellingConnector(base):  # type: ignore[misc]
        """Overrides the one method in which aiohttp opens a socket to an address that it has resolved."""

        async def _wrap_create_connection(
            self,
            *args: Any,
            addr_infos: list[Any],
            req: Any,
            timeout: Any,  # noqa: ASYNC109 (aiohttp's own argument)
            client_error: Any,
            **kwargs: Any,
        ) -> Any:
            try:
                async with asyncio.timeout(timeout.sock_connect):
                    tunnel = await open_tunnel(proxy, addr_infos[0][4], guard)
            except TimeoutError:
                raise
            except OSError as error:
                raise client_error(req.connection_key, error) from error
            try:
                return await self._wrap_existing_connection(
                    *args, req=req, timeout=timeout, client_error=client_error, sock=tunnel, **kwargs
                )
            except BaseException:
                tunnel.close()
                raise

    return TunnellingConnector
