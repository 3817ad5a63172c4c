"""The console's Starlette app: one page, its data as JSON, and a stream of server-sent events. Read-only.

It reads announcements (`core.presence`) and nothing else, so it costs the components nothing more than these.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from brokerless.console.history import History
from brokerless.core.exposition import exposition
from brokerless.core.presence import present

LOOK_S = 1.0
# Each open page holds a connection; more than this is not a person looking.
MAX_STREAMS = 50
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
        self.data = msgspec.json.encode(self.history.page(now))
        async with self.changed:
            self.number += 1
            self.changed.notify_all()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: the whole page's data after every look."""
        self.streams += 1
        try:
            seen = 0
            while True:
                async with self.changed:
                    await self.changed.wait_for(lambda: self.number > seen)  # noqa: B023 - called at once
                    seen = self.number
                yield b"data: " + self.data + b"\n\n"
        finally:
            self.streams -= 1


def console_app(directory: Path | None = None, *, token: str = "") -> Starlette:
    """The app: `/`, `/data`, `/events`, `/metrics`. With a `token`, data needs `?token=` or `Authorization: Bearer`.

    `directory` is the presence directory, this user's if not given.
    """
    console = Console(directory)

    def allowed(request: Request) -> bool:
        if not token:
            return True
        given = request.query_params.get("token") or request.headers.get("authorization", "").removeprefix(
            "Bearer "
        )
        return hmac.compare_digest(given.encode(), token.encode())

    def asset(name: str) -> Response:
        content = files("brokerless.console").joinpath(name).read_bytes()
        return Response(content, media_type=ASSETS[name], headers=SECURITY_HEADERS)

    async def page(_: Request) -> Response:
        return asset("console.html")

    async def script(_: Request) -> Response:
        return asset("console.js")

    async def style(_: Request) -> Response:
        return asset("console.css")

    async def data(request: Request) -> Response:
        if not allowed(request):
            return JSONResponse({"error": "wrong or missing token"}, 401, headers=SECURITY_HEADERS)
        await console.look()
        return Response(console.data, media_type="application/json", headers=SECURITY_HEADERS)

    async def metrics(request: Request) -> Response:
        if not allowed(request):
            return JSONResponse({"error": "wrong or missing token"}, 401, headers=SECURITY_HEADERS)
        text = exposition(await asyncio.to_thread(present, directory))
        return Response(text, media_type="text/plain; version=0.0.4", headers=SECURITY_HEADERS)

    async def events(request: Request) -> Response:
        if not allowed(request):
            return JSONResponse({"error": "wrong or missing token"}, 401, headers=SECURITY_HEADERS)
        if console.streams >= MAX_STREAMS:
            return JSONResponse({"error": "too many pages are open"}, 503, headers=SECURITY_HEADERS)
        return StreamingResponse(console.events(), media_type="text/event-stream", headers=SECURITY_HEADERS)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(console.run())
        yield
        task.cancel()

    return Starlette(
        routes=[
            Route("/", page),
            Route("/console.js", script),
            Route("/console.css", style),
            Route("/data", data),
            Route("/events", events),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
    )
