"""`brokerless webhooks`: serve the registration endpoint, look after deliveries, receive locally."""

import os
import secrets as random_secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter

from brokerless.core.config import load_toml
from brokerless.core.errors import ConfigError, MissingDependency, PeerError, UsageError

if TYPE_CHECKING:
    import httpx
    from starlette.applications import Starlette

app = App(name="webhooks", help="Webhooks: registration endpoint, durable delivery, local receiver.")
endpoints_app = App(name="endpoints", help="List endpoints, or add, change and remove them.")
app.command(endpoints_app)

Url = Annotated[
    str,
    Parameter(env_var="BROKERLESS_WEBHOOKS_URL", help="Address of the server."),
]
TokenFile = Annotated[
    Path | None,
    Parameter(help="File with lines `TENANT TOKEN`; the first is used. Or set BROKERLESS_WEBHOOKS_TOKEN."),
]
DEFAULT_URL = "http://127.0.0.1:8080"


# ── serve ────────────────────────────────────────────────────────────────────


@app.command
def serve(
    *,
    outbox: Annotated[str, Parameter(help="SQLite file, or postgresql://…")],
    token_file: Annotated[Path, Parameter(help="Lines `TENANT TOKEN`; tenant * sees all.")],
    port: int = 8080,
    host: str = "127.0.0.1",
    source: str = "brokerless",
    origin: Annotated[str | None, Parameter(help="DNS name by which receivers know this sender.")] = None,
    config: Annotated[Path | None, Parameter(help="TOML file with the fields of DispatcherConfig.")] = None,
    allow: Annotated[
        tuple[str, ...], Parameter(help="Network that endpoints may be in, e.g. 10.1.0.0/16.")
    ] = (),
    allow_http: Annotated[bool, Parameter(negative="", help="Endpoints may be http:// too.")] = False,
    no_verification: Annotated[
        bool, Parameter(negative="", help="Do not ask endpoints whether they agree.")
    ] = False,
    on_full: Literal["reject", "block", "evict"] | None = None,
) -> None:
    """Serve the registration endpoint and deliver."""
    from brokerless.webhooks import AddressPolicy, Dispatcher, DispatcherConfig, registration_app

    settings = load_toml(config, DispatcherConfig) if config else DispatcherConfig()
    policy = AddressPolicy(
        allow=(*settings.policy.allow, *allow),
        deny=settings.policy.deny,
        schemes=("https", "http") if allow_http else settings.policy.schemes,
    )
    changes: dict[str, Any] = {"policy": policy}
    if origin:
        changes["origin"] = origin
    if no_verification:
        changes["verification"] = "none"
    if on_full:
        changes["on_full"] = on_full
    dispatcher = Dispatcher(outbox, source=source, config=msgspec.structs.replace(settings, **changes))
    application = registration_app(dispatcher, auth=read_tokens(token_file))
    # Opened here, so that a wrong file or address is one line and not a traceback of the server.
    dispatcher.open()
    _serve(application, host, port, f"outbox {outbox}; API description at /openapi.json")


@app.command
def token(tenant: str) -> None:
    """Print a line with a new random token for the token file (`*`: the operator, sees all tenants)."""
    from brokerless.webhooks.endpoints import check_tenant

    if tenant != "*":
        check_tenant(tenant)
    print(tenant, random_secrets.token_urlsafe(32))


def read_tokens(path: Path) -> dict[str, str]:
    """Tokens and their tenants from lines `TENANT TOKEN`; empty lines and # are skipped."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        hint = f"make one with: brokerless webhooks token TENANT > {path}"
        raise ConfigError(str(path), f"cannot be read: {error.strerror}; {hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "is not a text file") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{path}:{number}", "must be: TENANT TOKEN")
        found[words[1]] = words[0]
    if not found:
        raise ConfigError(str(path), "has no tokens; make one with: brokerless webhooks token TENANT")
    return found


def _serve(application: "Starlette", host: str, port: int, text: str) -> None:
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Before the line below says so: who connects from now on waits for the server instead of being refused.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError("port", f"{host}:{port} cannot be used: {error.strerror}") from None
    bound = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    print(f"listening on http://{shown}:{bound} ({text})", flush=True)
    config = uvicorn.Config(application, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    # Ctrl-C is how a server is meant to end; uvicorn raises it again after it has shut down in order.
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if not server.started:
        raise SystemExit(1)


# ── as a client of a server ──────────────────────────────────────────────────


class _Api:
    def __init__(self, client: "httpx.Client") -> None:
        self._client = client

    def __call__(self, method: str, path: str, **options: Any) -> Any:
        import httpx

        try:
            response = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise PeerError(f"{self._client.base_url}: {error}") from None
        if response.is_success:
            return response.json() if response.content else None
        try:
            problem = response.json()
            text = problem.get("detail") or problem.get("title")
            field = f"{problem['field']}: " if problem.get("field") else ""
        except (ValueError, AttributeError):
            text, field = response.text[:200], ""
        raise PeerError(f"{response.status_code}: {field}{text}")


@contextmanager
def _api(url: str, token_file: Path | None) -> Iterator[_Api]:
    try:
        import httpx
    except ImportError:
        raise MissingDependency("httpx", "webhooks", "talking to a webhooks server") from None
    secret = os.environ.get("BROKERLESS_WEBHOOKS_TOKEN")
    if token_file is not None:
        secret = next(iter(read_tokens(token_file)))
    if not secret:
        raise UsageError("no token: give --token-file or set BROKERLESS_WEBHOOKS_TOKEN")
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
        yield _Api(client)


@endpoints_app.default
def list_endpoints(*, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """List the endpoints of the token's tenant."""
    with _api(url, token_file) as api:
        rows, after = [], None
        while True:
            page = api("GET", "/endpoints", params={"after": after} if after else {})
            rows += page["items"]
            after = page["next"]
            if after is None:
                break
    _table(
        ["id", "tenant", "url", "topics", "state", "note"],
        [[e["id"], e["tenant"], e["url"], " ".join(e["topics"]), e["state"], e["reason"]] for e in rows],
    )


@endpoints_app.command
def add(
    endpoint_url: str,
    *,
    topic: Annotated[tuple[str, ...], Parameter(help="Pattern; may be repeated.")] = ("**",),
    description: str = "",
    rate: float = 0,
    concurrency: int = 8,
    fifo: Annotated[bool, Parameter(negative="")] = False,
    mode: Literal["binary", "structured", "batch"] = "binary",
    signature: Literal["v1", "v1a"] = "v1",
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Register an endpoint and print its secret, which is shown only now."""
    body = {
        "url": endpoint_url,
        "topics": list(topic),
        "description": description,
        "rate": rate,
        "concurrency": concurrency,
        "fifo": fifo,
        "mode": mode,
        "signature": signature,
    }
    with _api(url, token_file) as api:
        made = api("POST", "/endpoints", json=body)
    print(f"id      {made['id']}")
    print(f"secret  {made['secret']}")
    print(f"state   {made['state']}" + (f" ({made['reason']})" if made["reason"] else ""))


@endpoints_app.command
def remove(endpoint: str, *, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Delete an endpoint; what is pending for it is withdrawn."""
    with _api(url, token_file) as api:
        api("DELETE", f"/endpoints/{endpoint}")
    print("removed")


@endpoints_app.command
def enable(endpoint: str, *, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Enable an endpoint that was disabled."""
    with _api(url, token_file) as api:
        print(api("POST", f"/endpoints/{endpoint}/enable")["state"])


@endpoints_app.command
def verify(endpoint: str, *, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Ask a pending endpoint again whether it agrees."""
    with _api(url, token_file) as api:
        found = api("POST", f"/endpoints/{endpoint}/verify")
    print(found["state"] + (f" ({found['reason']})" if found["reason"] else ""))


@endpoints_app.command
def rotate(endpoint: str, *, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Print a new secret; the old one signs along for a day."""
    with _api(url, token_file) as api:
        print(api("POST", f"/endpoints/{endpoint}/rotate-secret")["secret"])


@endpoints_app.command(name="test")
def send_test(endpoint: str, *, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Send a test event now; exit code 1 if it was not delivered."""
    with _api(url, token_file) as api:
        reply = api("POST", f"/endpoints/{endpoint}/test")
    print(f"{reply['status'] or reply['error']} in {reply['duration_ms']} ms {reply['excerpt']}".rstrip())
    if not reply["delivered"]:
        raise SystemExit(1)


@app.command
def deliveries(
    endpoint: str,
    *,
    state: Literal["pending", "delivered", "gave_up", "evicted", "withdrawn"] | None = None,
    topic: str | None = None,
    limit: int = 50,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """List an endpoint's deliveries, newest first, with their last attempt."""
    params = {"limit": limit, "state": state, "topic": topic}
    with _api(url, token_file) as api:
        page = api(
            "GET",
            f"/endpoints/{endpoint}/deliveries",
            params={name: value for name, value in params.items() if value is not None},
        )
    rows = []
    for found in page["items"]:
        last = found["log"][-1] if found["log"] else {}
        result = str(last.get("status") or last.get("error") or "")
        rows.append(
            [str(found["id"]), found["event"], found["topic"], found["state"], str(found["attempts"]), result]
        )
    _table(["id", "event", "topic", "state", "attempts", "last answer"], rows)


@app.command
def retry(delivery: int, *, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Send a finished delivery again, with the same webhook-id."""
    with _api(url, token_file) as api:
        print(api("POST", f"/deliveries/{delivery}/retry")["state"])


@app.command
def replay(
    endpoint: str,
    *,
    since: Annotated[str, Parameter(help="RFC 3339 time, or an age such as 90s, 15m, 2h, 3d.")],
    until: Annotated[str | None, Parameter(help="The same; now if not given.")] = None,
    only: Literal["failed", "all"] = "failed",
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Send the events of a time range again: dead letters, or all."""
    body: dict[str, Any] = {"since": _moment("since", since), "only": only}
    if until is not None:
        body["until"] = _moment("until", until)
    with _api(url, token_file) as api:
        print(api("POST", f"/endpoints/{endpoint}/replay", json=body)["deliveries"], "deliveries")


def _moment(name: str, text: str) -> str:
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    if text[:-1].isdigit() and text[-1:] in units:
        return (datetime.now(UTC) - timedelta(**{units[text[-1]]: int(text[:-1])})).isoformat()
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(name, f"{text!r} is neither a time nor an age like 15m") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).isoformat()


def _table(names: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        # For other programs: tabs, and nothing is cut.
        for row in rows:
            print("\t".join(row))
        return
    table = Table(*names, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    console.print(table)


# ── listen ───────────────────────────────────────────────────────────────────


@app.command
def listen(
    *,
    port: int = 9000,
    host: str = "127.0.0.1",
    secret: Annotated[
        tuple[str, ...], Parameter(help="whsec_… or whpk_…; without it nothing is verified.")
    ] = (),
    journal: Annotated[Path | None, Parameter(help="Also append to this journal (needs --secret).")] = None,
    status: Annotated[int, Parameter(help="Answer with this status, to see what the sender does.")] = 200,
    count: Annotated[int | None, Parameter(help="Stop after so many requests.")] = None,
) -> None:
    """Receive webhooks locally: print what arrives, and whether its signature is right."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Mount, Route

    from brokerless.webhooks import Verifier, receiver_app
    from brokerless.webhooks.errors import VerificationError

    if not 200 <= status <= 599:
        raise ConfigError("status", "must be between 200 and 599")
    verifier = Verifier(secret) if secret else None
    seen = 0

    def stop_when_done() -> None:
        nonlocal seen
        seen += 1
        if count is not None and seen >= count:
            os.kill(os.getpid(), signal.SIGINT)

    async def show(request: Request) -> Response:
        if request.method == "OPTIONS":
            origin = request.headers.get("webhook-request-origin", "")
            print(f"{_clock()} handshake from {origin}", flush=True)
            return Response(headers={"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"})
        body = await request.body()
        verdict = "not verified (no --secret)"
        refused = False
        if verifier is not None:
            try:
                verifier.verify(request.headers.items(), body, time.time())
                verdict = "signature ok"
            except VerificationError as error:
                verdict, refused = f"REFUSED: {error.problem}", True
        _print_event(request.headers, body, verdict)
        stop_when_done()
        return Response(status_code=401 if refused else status)

    if journal is not None:
        if verifier is None:
            raise UsageError("--journal needs --secret: what is stored must be verified")
        from brokerless.core import DiskJournal

        with DiskJournal(journal, source="webhooks") as opened:
            stored = receiver_app(list(secret), journal=opened)

            application = Starlette(routes=[Mount("/", stored)], lifespan=stored.router.lifespan_context)
            _serve(application, host, port, f"appending to {journal}")
            counters = stored.state.receiver.counters
            print(
                f"{counters.accepted} accepted, {counters.duplicates} duplicates, {counters.unverified} refused"
            )
        return
    _serve(
        Starlette(routes=[Route("/{path:path}", show, methods=["POST", "OPTIONS"])]),
        host,
        port,
        "Ctrl-C ends it",
    )


def _print_event(headers: Any, body: bytes, verdict: str) -> None:
    message_id = headers.get("webhook-id", "?")
    kind = headers.get("ce-type") or headers.get("content-type") or ""
    print(f"{_clock()} {message_id} {kind} {len(body)} bytes, {verdict}")
    print(f"  {body[:2000].decode('utf-8', 'backslashreplace')}", flush=True)


def _clock() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")
