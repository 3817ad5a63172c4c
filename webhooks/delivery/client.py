"""HTTP for deliveries: aiohttp with a guarded connect, and an httpx client over the same connections.

The hot path talks to aiohttp itself. Measured with 64 in flight and 500-byte bodies, httpx's own pool makes 346
requests/s, httpx over aiohttp 2,298 and aiohttp alone 7,708: request building in httpx is the ceiling. Everything
that is not hot (handshake, challenge) uses httpx on the same session, so there is one guard for both.
"""

import asyncio
import errno
import logging
import math
import os
import socket
import ssl
import time
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

import msgspec

from brokerless.core.errors import ConfigError, MissingDependency
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.delivery.proxy import ProxyUnavailable, parse_proxy, tunnelling
from brokerless.webhooks.delivery.ssrf import AddressGuard
from brokerless.webhooks.errors import BlockedAddress

if TYPE_CHECKING:
    import aiohttp
    import httpx

# A connection that was idle longer is likely closed by the other side (nginx: 75 s, Node: 5 s).
KEEPALIVE_S = 15.0

Local = Literal["", "endpoint", "all"]


class Reply(msgspec.Struct, gc=False):
    """The result of an attempt: a status, or an error text without one.

    `local` tells that nothing was sent, and not through the endpoint's fault: "all" for lack of our own descriptors,
    memory or proxy, "endpoint" for what may concern this one alone (ports to its address, the proxy's answer to it).
    """

    status: int | None
    duration_s: float
    retry_after: str | None = None
    excerpt: str = ""
    error: str = ""
    blocked: bool = False
    local: Local = ""


class DeliveryClient:
    """One pool of connections, made inside a running event loop; `close()` it there."""

    def __init__(self, config: DispatcherConfig, context: ssl.SSLContext) -> None:
        import aiohttp
        from yarl import URL

        from brokerless.webhooks.delivery.answers import MAX_HEAD_BYTES, BoundedAnswers
        from brokerless.webhooks.delivery.names import Names

        self._config = config
        self._context = context
        self.guard = AddressGuard(config.policy)
        self._url = lru_cache(maxsize=4096)(partial(URL, encoded=True))
        self._names = Names(self.guard, config.attempt_timeout_s)
        proxy = parse_proxy(config.proxy)
        kind = tunnelling(aiohttp.TCPConnector, proxy, self.guard) if proxy else aiohttp.TCPConnector
        connector = kind(
            limit=0,  # lanes limit themselves
            use_dns_cache=False,  # the resolver has its own
            keepalive_timeout=KEEPALIVE_S,
            ssl=context,
            resolver=self._names,
            socket_factory=self._socket,
        )
        # Twice for what chunks add to a body.
        limit = MAX_HEAD_BYTES + 2 * config.max_response_bytes
        connector._factory = partial(BoundedAnswers, asyncio.get_running_loop(), limit)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # an answer of some bytes must not become gigabytes
            trust_env=False,  # no proxy from the environment: it would connect where we may not
            # `sock_connect` and not `connect`: the latter costs a timer for every request, also on open connections.
            # Not rounded up to whole seconds, as aiohttp does: all that hung would end in the same moment.
            timeout=aiohttp.ClientTimeout(
                total=config.attempt_timeout_s,
                sock_connect=config.connect_timeout_s,
                ceil_threshold=math.inf,
            ),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        self._failures: tuple[type[Exception], ...] = (aiohttp.ClientError, OSError, ValueError)
        self._certificate = _stamp(config.client_certificate)
        self.httpx = self._httpx()

    def _httpx(self) -> "httpx.AsyncClient":
        import httpx
        from httpx_aiohttp import AiohttpTransport

        return httpx.AsyncClient(
            transport=AiohttpTransport(client=self._session, verify=self._context),
            timeout=self._config.attempt_timeout_s,
            trust_env=False,
            follow_redirects=False,
        )

    def _socket(self, info: "aiohttp.AddrInfoType") -> socket.socket:
        """Called by aiohttp with the very address it connects to: the last and deciding check."""
        family, kind, proto, _, address = info
        host = str(address[0])
        rule = self.guard.blocked(host)
        if rule is not None:
            raise BlockedAddress(host, rule)
        if family == socket.AF_INET6 and not _has_source(address):
            raise OSError(errno.ENETUNREACH, "this machine has no IPv6 address")
        made = socket.socket(family=family, type=kind, proto=proto)
        made.setblocking(False)
        return made

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """One attempt; never raises for anything that the other side or the network does."""
        started = time.monotonic()
        response = None
        try:
            # The URL goes out as it was registered.
            response = await self._session.post(
                self._url(url), data=body, headers=headers, allow_redirects=False
            )
            excerpt, whole = await self._excerpt(response)
            reply = Reply(
                response.status,
                time.monotonic() - started,
                response.headers.get("Retry-After"),
                excerpt,
            )
            if whole:
                response.release()
                response = None
            return reply
        except TimeoutError:
            return Reply(None, time.monotonic() - started, error="timeout")
        except self._failures as error:
            blocked = _blocked(error)
            text = str(blocked or error) or type(error).__name__
            return Reply(
                None,
                time.monotonic() - started,
                error=text[:200],
                blocked=blocked is not None,
                local="" if blocked else _local(error),
            )
        finally:
            if response is not None:
                response.close()

    async def _excerpt(self, response: "aiohttp.ClientResponse") -> tuple[str, bool]:
        """The beginning of the answer, and whether it was read to its end (so that the connection can be kept).

        An answer that is longer than `max_response_bytes` is cut there. One that drips or breaks off before is no
        answer: the timeout or the error is the result of the attempt.
        """
        limit = self._config.max_response_bytes
        length = response.content_length
        if length == 0 or response.status == 204:
            return "", True
        data = b""
        whole = False
        if length is not None and length <= limit:
            data, whole = await response.read(), True
        else:
            while len(data) < limit:
                piece = await response.content.read(limit - len(data))
                if not piece:
                    whole = True
                    break
                data += piece
        return data[: self._config.excerpt_bytes].decode("utf-8", "replace"), whole

    def renew_certificate(self) -> None:
        """Read the own certificate again if its file was replaced; new connections show it."""
        stamp = _stamp(self._config.client_certificate)
        if stamp != self._certificate:
            self._certificate = stamp
            load_certificate(self._context, self._config)

    async def close(self) -> None:
        """Close all connections, and look no more names up."""
        await self._session.close()
        await self._names.close()


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path) if path else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_ino)


def _blocked(error: BaseException) -> BlockedAddress | None:
    """The guard's refusal, however deep aiohttp wrapped it."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None or isinstance(seen, BlockedAddress):
            return seen
        inner = getattr(seen, "os_error", None)
        seen = inner if isinstance(inner, BlockedAddress) else seen.__cause__ or seen.__context__
    return None


# What the operating system refuses for lack of our own resources, to any address.
_LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def _local(error: BaseException) -> Local:
    """Whether an attempt failed before anything was sent and through no fault of the other side, and whom it concerns.

    Nothing that an endpoint's owner can bring about may concern others: that would hold up everybody's deliveries.
    """
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return ""
        if isinstance(seen, socket.gaierror):
            return "endpoint" if seen.errno in {socket.EAI_SYSTEM, socket.EAI_MEMORY} else ""
        if isinstance(seen, ProxyUnavailable):
            return "endpoint" if seen.answered else "all"
        if isinstance(seen, OSError) and seen.errno in _LACKING:
            return "all"
        if isinstance(seen, OSError) and seen.errno == errno.EADDRNOTAVAIL:
            return "endpoint"  # no port is left for its address
        inner = getattr(seen, "os_error", None)
        seen = (
            inner if isinstance(inner, OSError) and inner is not seen else seen.__cause__ or seen.__context__
        )
    return ""


def _has_source(address: tuple[object, ...]) -> bool:
    """Whether this machine has an IPv6 address to connect from; asks the routing table and sends nothing.

    Without one, connecting fails as if all ports were used up.
    """
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
        return True


def prepare(config: DispatcherConfig) -> ssl.SSLContext:
    """What takes long (imports, certificates) before a client can be made; call it outside the event loop."""
    try:
        import aiohttp
        import httpx
        import httpx_aiohttp
    except ImportError as error:
        name = (error.name or "httpx-aiohttp").partition(".")[0]
        raise MissingDependency(name, "webhooks", "delivering webhooks") from None
    logging.getLogger(__name__).debug("aiohttp %s, httpx %s", aiohttp.__version__, httpx.__version__)
    del httpx_aiohttp
    try:
        context = ssl.create_default_context()
        if config.ca_file:
            context.load_verify_locations(config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("ca_file", f"{config.ca_file}: {error}") from None
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: DispatcherConfig) -> None:
    """Show the sender's own certificate from now on, if it has one; ConfigError if it cannot be used."""
    if config.client_certificate:
        try:
            # Never ask for a password at the terminal.
            context.load_cert_chain(
                config.client_certificate, config.client_key or None, password=lambda: b""
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("client_certificate", f"{config.client_certificate}: {error}") from None
