"""The console's Starlette app: one page, its data as JSON, and a stream of server-sent events.

It reads announcements (`core.presence`), so it costs the components nothing more than these. With a token it also shows
dead letters, which hold data of events, and has a publisher send one again. More than five minutes of history come from
a Prometheus server, if given.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from brokerless.console.dead_letters import read_letters, send_again
from brokerless.console.history import History
from brokerless.console.prometheus import query_history
from brokerless.core.counters import PROMETHEUS_TEXT
from brokerless.core.errors import BrokerlessError
from brokerless.core.exposition import exposition
from brokerless.core.presence import present

LOOK_S = 1.0
# Each open page holds a connection; more than this is not a person looking.
MAX_STREAMS = 50
OWN_NAMES = ["127.0.0.1", "localhost", "[::1]"]
SECURITY_HEADERS = {
    # Everything comes from this server, and nobody may frame it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
ASSETS = {
    "console.html": "text/html; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
}


class Console:
    """Looks at the announcements once a second while it runs."""

    def __init__(self, directory: Path | None) -> None:
        self.history = History()
        self.directory = directory
        self.data = b"{}"
        self.number = 0
        self.streams = 0
        self.changed = asyncio.Condition()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Read what is announced now, and wake every open page."""
        components = await asyncio.to_thread(present, self.directory)
        now = time.time()
        self.history.add(components, now)
        self.data = msgspec.json.encode(self.history.page(now, points=0))
        async with self.changed:
            self.number += 1
            self.changed.notify_all()

    def whole(self) -> bytes:
        """The page's data with the history of every component."""
        return msgspec.json.encode(self.history.page(time.time()))

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: everything first, then after every look what is new, without the history."""
        self.streams += 1
        try:
            seen = self.number
            yield b"data: " + self.whole() + b"\n\n"
            while True:
                async with self.changed:
                    await self.changed.wait_for(lambda: self.number > seen)  # noqa: B023 - called at once
                    seen = self.number
                yield b"data: " + self.data + b"\n\n"
        finally:
            self.streams -= 1


def console_app(directory: Path | None = None, *, token: str = "", prometheus: str = "") -> Starlette:
    """The app: the page at `/`, its data at `/data`, `/events`, `/history`, `/dead-letters`, and `/metrics`.

    `directory` is the presence directory, this user's if not given. With a `token`, everything but the page itself
    needs `?token=` or `Authorization: Bearer`; without one, dead letters are not shown, and only requests to this
    machine's own names are answered, so that a web page elsewhere cannot read it through the browser. `prometheus` is
    the URL of a server that scrapes `/metrics`.
    """
    console = Console(directory)

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def check(request: Request) -> Response:
            given = request.query_params.get("token") or request.headers.get(
                "authorization", ""
            ).removeprefix("Bearer ")
            if token and not hmac.compare_digest(given.encode(), token.encode()):
                return _refused(401, "wrong or missing token")
            return await answer(request)

        return check

    async def asset(request: Request) -> Response:
        name = request.url.path.strip("/") or "console.html"
        content = files("brokerless.console").joinpath(name).read_bytes()
        return Response(content, media_type=ASSETS[name], headers=SECURITY_HEADERS)

    async def data(_: Request) -> Response:
        await console.look()
        return Response(console.whole(), media_type="application/json", headers=SECURITY_HEADERS)

    async def metrics(_: Request) -> Response:
        text = exposition(await asyncio.to_thread(present, directory))
        return Response(text, media_type=PROMETHEUS_TEXT, headers=SECURITY_HEADERS)

    async def events(request: Request) -> Response:
        if console.streams >= MAX_STREAMS:
            return _refused(503, "too many pages are open")
        request.scope["endless"] = True  # `server_for` ends it when the server stops
        return StreamingResponse(console.events(), media_type="text/event-stream", headers=SECURITY_HEADERS)

    async def settings(_: Request) -> Response:
        return JSONResponse(
            {"dead_letters": bool(token), "history": bool(prometheus)}, headers=SECURITY_HEADERS
        )

    async def past(request: Request) -> Response:
        if not prometheus:
            return _refused(404, "the console was started without --prometheus")
        try:
            hours = float(request.query_params.get("hours", "1"))
            found = await asyncio.to_thread(query_history, prometheus, hours, time.time())
        except (ValueError, OSError) as error:
            return _refused(502, f"Prometheus: {error}")
        return JSONResponse(found, headers=SECURITY_HEADERS)

    async def letters(request: Request) -> Response:
        if not token:
            return _refused(
                403, "dead letters hold data of events: start the console with --token to see them"
            )
        words = request.query_params
        components = await asyncio.to_thread(present, directory)
        source = words.get("source", "")
        try:
            if request.method == "POST":
                await asyncio.to_thread(send_again, components, source, int(words.get("number", "")))
            found = await asyncio.to_thread(read_letters, components, source, words.get("group", ""))
        except (BrokerlessError, ValueError) as error:
            return _refused(502, str(error))
        return JSONResponse(found, headers=SECURITY_HEADERS)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(console.run())
        yield
        task.cancel()

    hosts = ["*"] if token else OWN_NAMES
    return Starlette(
        routes=[
            *(Route(f"/{name}", asset) for name in ("", *ASSETS)),
            Route("/data", guarded(data)),
            Route("/events", guarded(events)),
            Route("/metrics", guarded(metrics)),
            Route("/settings", guarded(settings)),
            Route("/history", guarded(past)),
            Route("/dead-letters", guarded(letters), methods=["GET", "POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        lifespan=lifespan,
    )


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status, headers=SECURITY_HEADERS)
