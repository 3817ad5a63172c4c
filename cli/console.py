"""`brokerless console`: the live page of what runs on this machine."""

import contextlib
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from brokerless.cli.options import Json
from brokerless.cli.output import result
from brokerless.console import console_app
from brokerless.core.errors import ConfigError

app = cyclopts.App(
    name="console",
    help="Serve a live page of what runs on this machine: map, losses, accounting.",
    help_epilogue="Example: brokerless console --port 8350",
)


@app.default
def console(
    *,
    port: Annotated[int, Parameter(help="TCP port to listen on; 0: a free one")] = 8350,
    host: Annotated[
        str, Parameter(help="address to listen on; another than 127.0.0.1 needs --token")
    ] = "127.0.0.1",
    token: Annotated[
        str,
        Parameter(
            env_var="BROKERLESS_CONSOLE_TOKEN",
            help="what a reader must give as ?token=…; only with one, dead letters can be seen and sent again",
        ),
    ] = "",
    prometheus: Annotated[
        str, Parameter(help="URL of a Prometheus server, for more history than five minutes")
    ] = "",
    directory: Annotated[Path | None, Parameter(help="another presence directory")] = None,
    as_json: Json = False,
) -> None:
    """Serve the page until Ctrl-C. It is read-only without a token, and asks no other host for anything."""
    from brokerless.core.runtime.http_host import address_of, listen, server_for

    if host not in ("127.0.0.1", "::1", "localhost") and not token:
        raise ConfigError("host", f"{host} is reachable for others: give --token as well")
    if prometheus and not prometheus.startswith(("http://", "https://")):
        raise ConfigError("prometheus", f"must be a URL such as http://127.0.0.1:9090, not {prometheus!r}")
    listener = listen(host, port)
    address = f"{address_of(listener)}/"
    result({"address": address}, f"console at {address} (Ctrl-C ends it)", as_json=as_json)
    server = server_for(console_app(directory, token=token, prometheus=prometheus), linger_s=1)
    with contextlib.suppress(KeyboardInterrupt), listener:
        server.run(sockets=[listener])
