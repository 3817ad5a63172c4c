"""`brokerless webhooks`: serve the registration endpoint, look after deliveries, receive locally."""

import base64
import json
import os
import secrets as random_secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from cyclopts import App, Parameter

from brokerless.cli.options import Count, Data, Json, check_interval
from brokerless.cli.output import cell, print_rows, result
from brokerless.core.config import load_toml
from brokerless.core.errors import ConfigError, MissingDependency, PeerError, UsageError
from brokerless.webhooks.outbox.database import is_postgres
from brokerless.webhooks.rules import (
    DeliveryStateName,
    HeaderStyle,
    Mode,
    ReplayChoice,
    SignatureVersion,
    TenantVerification,
)

if TYPE_CHECKING:
    import httpx
    import uvicorn

app = App(
    name="webhooks",
    help="Webhooks: registration endpoint, durable delivery, local receiver.",
    help_epilogue="Example: brokerless webhooks serve --outbox var/outbox.sqlite --token-file tokens",
)
endpoints_app = App(
    name="endpoints",
    help="List endpoints, or add, change and remove them.",
    help_epilogue="Example: brokerless webhooks endpoints --json",
)
app.command(endpoints_app)
types_app = App(
    name="types",
    help="List the catalogue of event types, or change it with the operator's token.",
    help_epilogue="Example: brokerless webhooks types --json",
)
app.command(types_app)

Url = Annotated[
    str,
    Parameter(env_var="BROKERLESS_WEBHOOKS_URL", help="Address of the server."),
]
TokenFile = Annotated[
    Path | None,
    Parameter(help="File with lines `TENANT TOKEN`; the first is used. Or set BROKERLESS_WEBHOOKS_TOKEN."),
]
KeyFile = Annotated[
    Path | None,
    Parameter(
        help="File with keys that encrypt secrets in the outbox, the newest first. Or set BROKERLESS_WEBHOOKS_KEYS."
    ),
]
EndpointId = Annotated[str, Parameter(help="Id of the endpoint.")]
SecretFile = Annotated[
    Path | None, Parameter(help="File with a whsec_… secret of your own instead of a new one.")
]
Headers = Annotated[
    tuple[str, ...], Parameter(help="NAME:VALUE sent with every request (X-… or Authorization); repeatable.")
]
Filters = Annotated[
    tuple[str, ...],
    Parameter(
        help="Condition on the data: $.country=CH, $.sku^=book-, $.total>=100; repeatable, all must hold."
    ),
]
DEFAULT_URL = "http://127.0.0.1:8080"
# Deliveries that `tail` asks for again to see how they go on: four pages.
FOLLOWED = 2000


# ── serve ────────────────────────────────────────────────────────────────────


@app.command(
    help_epilogue="Example: brokerless webhooks serve --outbox var/outbox.sqlite --token-file tokens"
)
def serve(
    *,
    outbox: Annotated[str, Parameter(help="SQLite file, or postgresql://…")],
    token_file: Annotated[Path, Parameter(help="Lines `TENANT TOKEN`; tenant * sees all.")],
    port: Annotated[int, Parameter(help="TCP port to listen on; 0: a free one.")] = 8080,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    source: Annotated[str, Parameter(help="The producer's name in every event.")] = "brokerless",
    origin: Annotated[str | None, Parameter(help="DNS name by which receivers know this sender.")] = None,
    config: Annotated[Path | None, Parameter(help="TOML file with the fields of DispatcherConfig.")] = None,
    allow: Annotated[
        tuple[str, ...], Parameter(help="Network that endpoints may be in, e.g. 10.1.0.0/16.")
    ] = (),
    allow_http: Annotated[bool, Parameter(negative="", help="Endpoints may be http:// too.")] = False,
    no_verification: Annotated[
        bool, Parameter(negative="", help="Do not ask endpoints whether they agree.")
    ] = False,
    on_full: Annotated[
        Literal["reject", "block", "evict"] | None, Parameter(help="What to do when the outbox is full.")
    ] = None,
    limits: Annotated[
        Path | None, Parameter(help="TOML file with tables [tenant.NAME]; read again on change.")
    ] = None,
    tls_certificate: Annotated[Path | None, Parameter(help="PEM file; serves https.")] = None,
    tls_key: Annotated[Path | None, Parameter(help="PEM file with the certificate's key.")] = None,
    key_file: KeyFile = None,
    embed_in: Annotated[
        tuple[str, ...], Parameter(help="Origin of pages that may show the portal in a frame; * for all.")
    ] = (),
    metrics: Annotated[
        str, Parameter(help="host:port of /metrics for Prometheus, without a token; not for tenants' eyes.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Serve the registration endpoint and its portal, and deliver. The token file is read again when it changes."""
    from brokerless.core.runtime.http_host import listen, server_for
    from brokerless.core.runtime.process import collect_seldom, raise_file_limit
    from brokerless.webhooks import AddressPolicy, Dispatcher, DispatcherConfig, registration_app
    from brokerless.webhooks.api.files import limits_file
    from brokerless.webhooks.api.files import token_file as follow_tokens

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
    raise_file_limit()
    dispatcher = Dispatcher(
        outbox,
        source=source,
        config=msgspec.structs.replace(settings, **changes),
        encryption_keys=_keys(key_file),
        metrics=metrics,
    )
    auth, bounds = follow_tokens(token_file), limits_file(limits) if limits else None
    application = registration_app(dispatcher, auth=auth, limits=bounds, embed_in=embed_in)
    server = server_for(application, certificate=tls_certificate, key=tls_key)
    with listen(host, port) as listener:
        # After the port, so that a port in use leaves no outbox behind; before the server, so that an outbox that
        # cannot be opened is one line and not a traceback.
        dispatcher.open()
        collect_seldom()
        text = f"outbox {dispatcher.outbox.name}; portal at /, API description at /docs"
        _serve(server, listener, text, as_json)


@app.command(help_epilogue="Example: brokerless webhooks token shop")
def token(tenant: Annotated[str, Parameter(help="Name of the tenant.")], *, as_json: Json = False) -> None:
    """Print a line with a new random token for the token file (`*`: the operator, sees all tenants)."""
    from brokerless.webhooks.rules import check_tenant

    if tenant != "*":
        check_tenant(tenant)
    made = random_secrets.token_urlsafe(32)
    result({"tenant": tenant, "token": made}, f"{tenant} {made}", as_json=as_json)


@app.command(help_epilogue="Example: brokerless webhooks key")
def key(*, as_json: Json = False) -> None:
    """Print a new random key that encrypts secrets in the outbox (`serve --key-file`)."""
    from brokerless.webhooks.outbox.vault import make_key

    made = make_key()
    result({"key": made}, made, as_json=as_json)


def _keys(key_file: Path | None) -> list[str]:
    """Keys of the file, one per line, or of the environment; none: nothing is encrypted."""
    if key_file is None:
        return os.environ.get("BROKERLESS_WEBHOOKS_KEYS", "").split()
    try:
        found = key_file.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(key_file), f"cannot be read: {error}") from None
    if not found:
        raise ConfigError(str(key_file), "has no key; make one with: brokerless webhooks key")
    return found


@app.command(help_epilogue="Example: brokerless webhooks link shop --outbox var/outbox.sqlite")
def link(
    tenant: Annotated[str, Parameter(help="Name of the tenant that the visitor acts for.")],
    *,
    outbox: Annotated[str, Parameter(help="SQLite file, or postgresql://…, of the server.")],
    base: Annotated[str, Parameter(help="Address of the server as the visitor sees it.")] = DEFAULT_URL,
    valid: Annotated[str, Parameter(help="How long, such as 15m, 1h, 1d.")] = "1h",
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Print a link that lets a visitor into the portal as one tenant, for a while."""
    from brokerless.webhooks import Dispatcher

    if not is_postgres(outbox) and not Path(outbox).exists():
        raise ConfigError("outbox", f"{outbox} does not exist")
    age = _age(valid)
    if age is None:
        raise ConfigError("valid", f"{valid!r} is not a time like 15m")
    dispatcher = Dispatcher(outbox, encryption_keys=_keys(key_file))
    dispatcher.open()
    try:
        made = dispatcher.portal_link(tenant, base=base, valid_s=age.total_seconds())
    finally:
        dispatcher.close()
    result({"link": made}, made, as_json=as_json)


def _serve(server: "uvicorn.Server", listener: socket.socket, text: str, as_json: bool) -> None:
    from brokerless.core.runtime.http_host import address_of

    address = address_of(listener, tls=server.config.is_ssl)
    result({"listening": address}, f"listening on {address} ({text})", as_json=as_json)
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
        except UnicodeEncodeError as error:
            raise UsageError(f"not valid UTF-8: {error.object!r}") from None
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
        from brokerless.webhooks.api.files import read_tokens

        secret = next(iter(read_tokens(token_file)))
    if not secret:
        raise UsageError("no token: give --token-file or set BROKERLESS_WEBHOOKS_TOKEN")
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
        yield _Api(client)


@endpoints_app.default
def list_endpoints(*, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List the endpoints of the token's tenant."""
    with _api(url, token_file) as api:
        rows, after = [], None
        while True:
            page = api("GET", "/endpoints", params={"after": after} if after else {})
            rows += page["items"]
            after = page["next"]
            if after is None:
                break
    print_rows(rows, ["id", "tenant", "url", "topics", "state", "reason"], as_json=as_json)


@endpoints_app.command(
    help_epilogue="Example: brokerless webhooks endpoints add https://example.com/hook --topic order.*"
)
def add(
    endpoint_url: Annotated[str, Parameter(help="Where to deliver.")],
    *,
    topic: Annotated[tuple[str, ...], Parameter(help="Pattern; may be repeated.")] = ("**",),
    description: Annotated[str, Parameter(help="A note for people.")] = "",
    rate: Annotated[float, Parameter(help="Requests per second at most; 0: no limit.")] = 0,
    concurrency: Annotated[int, Parameter(help="Requests at once.")] = 8,
    fifo: Annotated[bool, Parameter(negative="", help="One at a time, in order.")] = False,
    mode: Annotated[Mode, Parameter(help="CloudEvents mode of the request.")] = "binary",
    signature: Annotated[SignatureVersion, Parameter(help="HMAC with a shared secret, or ed25519.")] = "v1",
    header: Headers = (),
    where: Filters = (),
    header_style: Annotated[
        HeaderStyle, Parameter(help="Names of the signature's headers; svix sends both.")
    ] = "standard",
    verification: Annotated[
        TenantVerification | None, Parameter(help="How the URL's owner is asked.")
    ] = None,
    secret_file: SecretFile = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Register an endpoint and print its secret, which is shown only now."""
    body: dict[str, Any] = {
        "url": endpoint_url,
        "topics": list(topic),
        "description": description,
        "rate": rate,
        "concurrency": concurrency,
        "fifo": fifo,
        "mode": mode,
        "signature": signature,
        "header_style": header_style,
        "headers": _headers(header),
        "filters": [_filter(text) for text in where],
    }
    if verification is not None:
        body["verification"] = verification
    if secret_file is not None:
        body["secret"] = _secret(secret_file)
    with _api(url, token_file) as api:
        made = api("POST", "/endpoints", json=body)
    text = f"id      {made['id']}\nsecret  {made['secret']}\nstate   {_state(made)}"
    result(made, text, as_json=as_json)


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition(":") for text in given]
    for name, colon, value in pairs:
        if not colon or not value.strip():
            raise ConfigError("header", f"{name!r}: must be NAME:VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _filter(text: str) -> dict[str, Any]:
    """`$.path=VALUE` (JSON, or text), `$.path^=PREFIX`, `$.path>=NUMBER`, `$.path<=NUMBER`."""
    for mark, name in (("^=", "prefix"), (">=", "minimum"), ("<=", "maximum"), ("=", "equals")):
        path, found, value = text.partition(mark)
        if found and not path.endswith(("^", ">", "<")):
            try:
                return {"path": path, name: value if name == "prefix" else json.loads(value)}
            except ValueError:
                if name != "equals":
                    break
                return {"path": path, name: value}
    raise ConfigError("where", f"{text!r}: must be like $.order.total>=100, $.country=CH or $.sku^=book-")


def _secret(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None


def _state(endpoint: dict[str, Any]) -> str:
    return str(endpoint["state"]) + (f" ({endpoint['reason']})" if endpoint["reason"] else "")


@endpoints_app.command(help_epilogue="Example: brokerless webhooks endpoints remove ep_1")
def remove(
    endpoint: EndpointId, *, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Delete an endpoint; what is pending for it is withdrawn."""
    with _api(url, token_file) as api:
        api("DELETE", f"/endpoints/{endpoint}")
    result({"id": endpoint, "state": "removed"}, "removed", as_json=as_json)


@endpoints_app.command(help_epilogue="Example: brokerless webhooks endpoints change ep_1 --rate 5")
def change(
    endpoint: EndpointId,
    *,
    endpoint_url: Annotated[
        str | None, Parameter("--endpoint-url", help="Where to deliver; must agree again.")
    ] = None,
    topic: Annotated[tuple[str, ...], Parameter(help="Pattern; may be repeated.")] = (),
    description: Annotated[str | None, Parameter(help="A note for people.")] = None,
    rate: Annotated[float | None, Parameter(help="Requests per second at most; 0: no limit.")] = None,
    concurrency: Annotated[int | None, Parameter(help="Requests at once.")] = None,
    fifo: Annotated[bool | None, Parameter(help="One at a time, in order.")] = None,
    mode: Annotated[Mode | None, Parameter(help="CloudEvents mode of the request.")] = None,
    header: Headers = (),
    where: Filters = (),
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Change some settings of an endpoint; what is not given stays."""
    wanted = {
        "url": endpoint_url,
        "topics": list(topic) or None,
        "description": description,
        "rate": rate,
        "concurrency": concurrency,
        "fifo": fifo,
        "mode": mode,
        "headers": _headers(header) or None,
        "filters": [_filter(text) for text in where] or None,
    }
    body = {name: value for name, value in wanted.items() if value is not None}
    if not body:
        raise UsageError("nothing to change: give at least one option")
    with _api(url, token_file) as api:
        found = api("PATCH", f"/endpoints/{endpoint}", json=body)
    result(found, _state(found), as_json=as_json)


def _act(endpoint: str, action: str, url: str, token_file: Path | None, as_json: bool) -> None:
    with _api(url, token_file) as api:
        found = api("POST", f"/endpoints/{endpoint}/{action}")
    result(found, _state(found), as_json=as_json)


@endpoints_app.command(help_epilogue="Example: brokerless webhooks endpoints disable ep_1")
def disable(
    endpoint: EndpointId, *, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Stop delivering to an endpoint; events that match are recorded as skipped, and can be replayed."""
    _act(endpoint, "disable", url, token_file, as_json)


@endpoints_app.command(help_epilogue="Example: brokerless webhooks endpoints enable ep_1")
def enable(
    endpoint: EndpointId, *, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Enable an endpoint that was disabled."""
    _act(endpoint, "enable", url, token_file, as_json)


@endpoints_app.command(help_epilogue="Example: brokerless webhooks endpoints verify ep_1")
def verify(
    endpoint: EndpointId, *, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Ask a pending endpoint again whether it agrees."""
    _act(endpoint, "verify", url, token_file, as_json)


@endpoints_app.command(help_epilogue="Example: brokerless webhooks endpoints rotate ep_1")
def rotate(
    endpoint: EndpointId,
    *,
    secret_file: SecretFile = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Print a new secret; the old one signs along for a day."""
    body = {} if secret_file is None else {"secret": _secret(secret_file)}
    with _api(url, token_file) as api:
        made = api("POST", f"/endpoints/{endpoint}/rotate-secret", json=body)
    result(made, made["secret"], as_json=as_json)


@endpoints_app.command(name="test", help_epilogue="Example: brokerless webhooks endpoints test ep_1")
def send_test(
    endpoint: EndpointId, *, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Send a test event now; exit code 1 if it was not delivered."""
    with _api(url, token_file) as api:
        reply = api("POST", f"/endpoints/{endpoint}/test")
    text = f"{reply['status'] or reply['error']} in {reply['duration_ms']} ms {reply['excerpt']}".rstrip()
    result(reply, text, as_json=as_json)
    if not reply["delivered"]:
        raise SystemExit(1)


@app.command(help_epilogue="Example: brokerless webhooks publish order.paid '{\"order\": 17}'")
def publish(
    topic: Annotated[str, Parameter(help="Topic of the event.")],
    data: Data = "null",
    *,
    content_type: Annotated[
        str, Parameter("--content-type", help="Of data that is not JSON.")
    ] = "application/json",
    idempotency_key: Annotated[
        str | None, Parameter(help="The same key and event again are accepted once.")
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Publish an event; it is durable when this returns. `-` as data publishes every line of stdin."""
    lines = sys.stdin.buffer.read().splitlines() if data == "-" else [os.fsencode(data)]
    headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
    with _api(url, token_file) as api:
        for line in lines:
            body: dict[str, Any] = {"topic": topic, "content_type": content_type}
            if content_type == "application/json":
                try:
                    body["data"] = json.loads(line)
                except ValueError:
                    raise ConfigError("data", "is not JSON; give --content-type for anything else") from None
            else:
                body["data_base64"] = base64.b64encode(line).decode()
            made = api("POST", "/events", json=body, headers=headers)
            result(made, f"{made['id']} to {made['deliveries'] or 0} endpoints", as_json=as_json)


def _with_last_answer(found: dict[str, Any]) -> dict[str, Any]:
    last = found["log"][-1] if found["log"] else {}
    return {**found, "last_answer": last.get("status") or last.get("error")}


@app.command(help_epilogue="Example: brokerless webhooks deliveries ep_1 --state gave_up")
def deliveries(
    endpoint: Annotated[str | None, Parameter(help="Id of the endpoint; all if not given.")] = None,
    *,
    state: Annotated[
        DeliveryStateName | None,
        Parameter(help="Only deliveries in this state."),
    ] = None,
    topic: Annotated[str | None, Parameter(help="Only deliveries of this topic.")] = None,
    limit: Annotated[int, Parameter(help="Rows at most.")] = 50,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List deliveries, newest first, with their last attempt."""
    wanted = {"limit": limit, "state": state, "topic": topic, "endpoint": endpoint}
    with _api(url, token_file) as api:
        page = api(
            "GET", "/deliveries", params={n: value for n, value in wanted.items() if value is not None}
        )
    rows = [_with_last_answer(found) for found in page["items"]]
    print_rows(rows, ["id", "topic", "state", "attempts", "last_answer"], as_json=as_json)


@app.command(help_epilogue="Example: brokerless webhooks events --topic order.paid")
def events(
    event: Annotated[
        str | None, Parameter(help="Id of one event, shown with its data and deliveries.")
    ] = None,
    *,
    topic: Annotated[str | None, Parameter(help="Only events of this topic.")] = None,
    since: Annotated[str | None, Parameter(help="RFC 3339 time, or an age such as 90s, 15m, 2h, 3d.")] = None,
    limit: Annotated[int, Parameter(help="Rows at most.")] = 50,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List events, newest first, or show one."""
    with _api(url, token_file) as api:
        if event is not None:
            found = api("GET", f"/events/{quote(event, safe='')}")
            data = (
                json.dumps(found["data"]) if "data" in found else f"base64 {found.get('data_base64', 'null')}"
            )
            lines = [f"{found['time']} {found['topic']} {found['content_type']}", f"  {data}"]
            lines += [f"  {made['endpoint']} {_last_answer(made)}" for made in found["deliveries"]]
            result(found, "\n".join(lines), as_json=as_json)
            return
        wanted = {"limit": limit, "topic": topic, "since": None if since is None else _moment("since", since)}
        page = api("GET", "/events", params={n: value for n, value in wanted.items() if value is not None})
    print_rows(page["items"], ["id", "time", "topic", "content_type", "size"], as_json=as_json)


def _last_answer(found: dict[str, Any]) -> str:
    return f"{found['state']} {cell(_with_last_answer(found)['last_answer'])}"


@app.command(help_epilogue="Example: brokerless webhooks account --json")
def account(*, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Show what was accepted and what became of it."""
    with _api(url, token_file) as api:
        found = api("GET", "/account")
    lost = "".join(f" + {count} {reason}" for reason, count in found["lost"].items())
    text = (
        "events      {events} = {matched} matched + {unmatched} unmatched + {unrouted} unrouted\n"
        "deliveries  {accepted} = {delivered} delivered + {pending} pending + {withdrawn} withdrawn"
    ).format(**found)
    result(found, text + lost, as_json=as_json)


@types_app.default
def list_types(*, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List the topics of the catalogue."""
    with _api(url, token_file) as api:
        found = api("GET", "/event-types")
    print_rows(found["items"], ["topic", "validate", "description"], as_json=as_json)


@types_app.command(
    name="set",
    help_epilogue="Example: brokerless webhooks types set order.paid --schema paid.json --validate",
)
def set_type(
    topic: Annotated[str, Parameter(help="Topic to describe.")],
    *,
    description: Annotated[str, Parameter(help="What it means, for people.")] = "",
    schema: Annotated[Path | None, Parameter(help="File with the JSON Schema of its data.")] = None,
    validate: Annotated[bool, Parameter(negative="", help="Refuse data that does not fit.")] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Describe a topic, or describe it anew."""
    body: dict[str, Any] = {"description": description, "validate": validate}
    if schema is not None:
        try:
            body["schema"] = json.loads(schema.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(schema), f"cannot be read as JSON: {error}") from None
    with _api(url, token_file) as api:
        found = api("PUT", f"/event-types/{quote(topic, safe='')}", json=body)
    result(found, "kept at publish" if found["validate"] else "described", as_json=as_json)


@types_app.command(name="remove", help_epilogue="Example: brokerless webhooks types remove order.paid")
def remove_type(
    topic: Annotated[str, Parameter(help="Topic to take out.")],
    *,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Take a topic out of the catalogue."""
    with _api(url, token_file) as api:
        api("DELETE", f"/event-types/{quote(topic, safe='')}")
    result({"topic": topic, "state": "removed"}, "removed", as_json=as_json)


@app.command(help_epilogue="Example: brokerless webhooks tail --count 10")
def tail(
    endpoint: Annotated[str | None, Parameter(help="Id of the endpoint; all if not given.")] = None,
    *,
    interval: Annotated[float, Parameter(help="Seconds between two looks.")] = 1.0,
    count: Count = 0,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Print deliveries when they begin and whenever an attempt changes them, until Ctrl-C.

    Every new one is printed; changes are, of the newest 2,000.
    """
    check_interval(interval)
    seen: dict[str, tuple[str, int]] = {}
    printed = 0
    since = datetime.now(UTC).isoformat()
    with _api(url, token_file) as api:
        while True:
            listed = list(reversed(_all_since(api, since, endpoint)))
            since = listed[-FOLLOWED]["created"] if len(listed) > FOLLOWED else since
            before, seen = seen, {found["id"]: (found["state"], found["attempts"]) for found in listed}
            for found in listed:
                if before.get(found["id"]) != seen[found["id"]]:
                    row = _with_last_answer(found)
                    text = f"{_clock()} {row['id']} {row['topic']} {row['state']} {cell(row['last_answer'])}"
                    result(row, text, as_json=as_json)
                    printed += 1
                    if count and printed >= count:
                        return
            time.sleep(interval)


def _all_since(api: _Api, since: str, endpoint: str | None) -> list[dict[str, Any]]:
    """All deliveries since then, newest first, however many pages they fill."""
    found: list[dict[str, Any]] = []
    wanted: dict[str, Any] = {"limit": 500, "since": since, "endpoint": endpoint}
    while True:
        page = api("GET", "/deliveries", params={n: v for n, v in wanted.items() if v is not None})
        found += page["items"]
        if page["next"] is None:
            return found
        wanted["after"] = page["next"]


@app.command(help_epilogue="Example: brokerless webhooks retry msg_1.ep_1")
def retry(
    delivery: Annotated[str, Parameter(help="Id of the delivery.")],
    *,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Send a delivery now, finished or pending, with the same webhook-id."""
    with _api(url, token_file) as api:
        found = api("POST", f"/deliveries/{delivery}/retry")
    result(found, found["state"], as_json=as_json)


@app.command(help_epilogue="Example: brokerless webhooks replay ep_1 --since 2h")
def replay(
    endpoint: EndpointId,
    *,
    since: Annotated[str, Parameter(help="RFC 3339 time, or an age such as 90s, 15m, 2h, 3d.")],
    until: Annotated[str | None, Parameter(help="The same; now if not given.")] = None,
    only: Annotated[ReplayChoice, Parameter(help="What was lost, or everything.")] = "failed",
    dry_run: Annotated[bool, Parameter(negative="", help="Only count them.")] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Send the events of a time range again: what was lost, or all."""
    body: dict[str, Any] = {"since": _moment("since", since), "only": only, "dry_run": dry_run}
    if until is not None:
        body["until"] = _moment("until", until)
    with _api(url, token_file) as api:
        made = api("POST", f"/endpoints/{endpoint}/replay", json=body)
    more = "" if made["complete"] else "; the outbox holds no more at a time: replay again later"
    result(made, f"{made['deliveries']} deliveries{more}", as_json=as_json)


def _age(text: str) -> timedelta | None:
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    if text[:-1].isdecimal() and text[:-1].isascii() and len(text) < 9 and text[-1:] in units:
        return timedelta(**{units[text[-1]]: int(text[:-1])})
    return None


def _moment(name: str, text: str) -> str:
    age = _age(text)
    if age is not None:
        return (datetime.now(UTC) - age).isoformat()
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(name, f"{text!r} is neither a time nor an age like 15m") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).isoformat()


# ── listen ───────────────────────────────────────────────────────────────────


@app.command(help_epilogue="Example: brokerless webhooks listen --port 9000 --secret whsec_x")
def listen(
    *,
    port: Annotated[int, Parameter(help="TCP port to listen on; 0: a free one.")] = 9000,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    secret: Annotated[
        tuple[str, ...], Parameter(help="whsec_… or whpk_…; without it nothing is verified.")
    ] = (),
    journal: Annotated[Path | None, Parameter(help="Also append to this journal (needs --secret).")] = None,
    status: Annotated[int, Parameter(help="Answer with this status, to see what the sender does.")] = 200,
    count: Annotated[int | None, Parameter(help="Stop after so many requests.")] = None,
    as_json: Json = False,
) -> None:
    """Receive webhooks locally: print what arrives, and whether its signature is right."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Mount, Route

    from brokerless.core.runtime import http_host
    from brokerless.webhooks import Verifier, receiver_app
    from brokerless.webhooks.errors import VerificationError
    from brokerless.webhooks.receiver.inbound import challenge_of

    if not 200 <= status <= 599:
        raise ConfigError("status", "must be between 200 and 599")
    if count is not None and count < 1:
        raise ConfigError("count", "must be 1 or more")
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
            result(
                {"time": _clock(), "handshake": origin},
                f"{_clock()} handshake from {origin}",
                as_json=as_json,
            )
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
        if not refused and (challenge := challenge_of(request.headers, body)) is not None:
            text = f"{_clock()} challenge answered, {verdict}"
            result({"time": _clock(), "challenge": "answered", "verdict": verdict}, text, as_json=as_json)
            return Response(challenge, media_type="application/json")
        _print_event(request.headers, body, verdict, as_json)
        stop_when_done()
        return Response(status_code=401 if refused else status)

    if journal is not None:
        if verifier is None:
            raise UsageError("--journal needs --secret: what is stored must be verified")
        from brokerless.core import DiskJournal

        # The port first: one in use leaves no journal behind.
        with (
            http_host.listen(host, port) as listener,
            DiskJournal(journal, source="webhooks") as opened,
        ):
            stored = receiver_app(list(secret), journal=opened)

            application = Starlette(routes=[Mount("/", stored)], lifespan=stored.router.lifespan_context)
            _serve(http_host.server_for(application), listener, f"appending to {journal}", as_json)
            counters = stored.state.receiver.counters
            text = f"{counters.accepted} accepted, {counters.duplicates} duplicates, {counters.unverified} refused"
            result(counters.snapshot(), text, as_json=as_json)
        return
    application = Starlette(routes=[Route("/{path:path}", show, methods=["POST", "OPTIONS"])])
    with http_host.listen(host, port) as listener:
        _serve(http_host.server_for(application), listener, "Ctrl-C ends it", as_json)


def _print_event(headers: Any, body: bytes, verdict: str, as_json: bool) -> None:
    fields = {
        "time": _clock(),
        "id": headers.get("webhook-id", "?"),
        "type": headers.get("ce-type") or headers.get("content-type") or "",
        "verdict": verdict,
        "data": body[:2000].decode("utf-8", "backslashreplace"),
    }
    text = (
        f"{fields['time']} {fields['id']} {fields['type']} {len(body)} bytes, {verdict}\n  {fields['data']}"
    )
    result(fields, text, as_json=as_json)


def _clock() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
