"""`brokerless metrics`: the StatsD daemon, and a live view of it."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter

from brokerless.cli.options import Json
from brokerless.cli.output import print_json, say
from brokerless.core.config import load_toml
from brokerless.core.errors import BrokerlessError, UsageError
from brokerless.metrics import MetricsConfig, MetricsServer

app = cyclopts.App(
    name="metrics",
    help="A StatsD daemon that knows how wrong its counters are.",
    help_epilogue="Example: brokerless metrics serve --udp 127.0.0.1:8125 --http 127.0.0.1:9125",
)
app.command(
    "brokerless.cli.metrics_top:top",
    name="top",
    help="A live table of rates, losses, worst clients and kernel drops of a running daemon.",
    help_epilogue="Example: brokerless metrics top 127.0.0.1:9125 --interval 2",
)
DEFAULT_UDP = "127.0.0.1:8125"


@app.command(help_epilogue="Example: brokerless metrics serve --udp 127.0.0.1:8125 --http 127.0.0.1:9125")
def serve(
    *,
    config: Path | None = None,
    udp: Annotated[list[str] | None, Parameter(negative="")] = None,
    tcp: Annotated[list[str] | None, Parameter(negative="")] = None,
    unix: Annotated[list[str] | None, Parameter(negative="")] = None,
    unix_dgram: Annotated[list[str] | None, Parameter(negative="")] = None,
    mgmt: str | None = None,
    http: str | None = None,
    flush: float | None = None,
    backend: Annotated[list[str] | None, Parameter(negative="")] = None,
    workers: int | None = None,
    state: str | None = None,
    percentile: Annotated[list[float] | None, Parameter(negative="", allow_leading_hyphen=True)] = None,
    as_json: Json = False,
) -> None:
    """Receive StatsD and DogStatsD, publish every window, until SIGTERM or Ctrl-C; SIGHUP re-reads the file.

    What the command line says wins over the file. Without any address it listens on 127.0.0.1:8125.

    Parameters
    ----------
    config
        A TOML file with the same settings (see docs/metrics.md).
    udp
        host:port to receive datagrams on; may be repeated.
    tcp
        host:port to accept lines on; may be repeated.
    unix
        Path of a Unix stream socket; may be repeated.
    unix_dgram
        Path of a Unix datagram socket (DogStatsD); may be repeated.
    mgmt
        host:port of the classic management commands.
    http
        host:port of /metrics, /state and /health.
    flush
        Seconds per window.
    backend
        console, graphite:HOST:PORT, graphite-pickle:HOST:PORT, journal:DIR, otlp:URL,
        repeater:HOST:PORT; may be repeated.
    workers
        Processes that share the UDP port.
    state
        File that lets totals, clients' ledgers and gauges survive a restart.
    percentile
        Percentile of timers, for example 99 or -10; may be repeated.
    """
    given = {
        "udp": udp,
        "tcp": tcp,
        "unix": unix,
        "unix_dgram": unix_dgram,
        "mgmt": mgmt,
        "http": http,
        "flush_s": flush,
        "backends": backend,
        "workers": workers,
        "state": state,
        "percentiles": percentile,
    }
    overrides = {name: value for name, value in given.items() if value is not None}
    settings = _settings(config, overrides)
    server = MetricsServer(settings)
    asyncio.run(_serve(server, config, overrides, as_json))


def _settings(config: Path | None, overrides: dict[str, Any]) -> MetricsConfig:
    settings = load_toml(config, MetricsConfig) if config is not None else MetricsConfig()
    settings = msgspec.structs.replace(settings, **overrides)
    if not (settings.udp or settings.tcp or settings.unix or settings.unix_dgram):
        settings = msgspec.structs.replace(settings, udp=[DEFAULT_UDP])
    return settings


async def _serve(
    server: MetricsServer, config: Path | None, overrides: dict[str, Any], as_json: bool
) -> None:
    from brokerless.metrics.server.worker import tune_process

    loop = asyncio.get_running_loop()

    def reload() -> None:
        if config is None:
            say("brokerless metrics: SIGHUP: there is no configuration file to read")
            return
        try:
            kept = server.reload(_settings(config, overrides))
        except BrokerlessError as error:
            say(f"brokerless metrics: SIGHUP: the old configuration stays: {error}")
            return
        say(
            "brokerless metrics: SIGHUP: configuration read"
            + (f"; needs a restart: {', '.join(kept)}" if kept else "")
        )

    if not (server.backends or server.repeaters or server.config.http or server.config.mgmt):
        say("brokerless metrics: nothing will be published: give --backend, --http or --mgmt")
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, server.request_stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if as_json:
        print_json({"listening": server.addresses})
    for kind, addresses in server.addresses.items():
        for address in addresses:
            say(f"brokerless metrics: listening {kind} {address}")
    tune_process()
    try:
        await server.serve()
    except OSError as error:
        raise UsageError(str(error)) from None
    counted = server.rollup.counters
    say(
        f"brokerless metrics: stopped: {counted.lines} lines, {counted.refused} refused, "
        f"{counted.lost_datagrams} datagrams lost by clients' "
        f"numbers, {server.receive_counters()['kernel_drops']} by the kernel"
    )
