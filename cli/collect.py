"""`brokerless collect`: run a collector until it is told to stop."""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import cyclopts

from brokerless.cli.options import Json
from brokerless.cli.output import result
from brokerless.core import load_toml
from brokerless.core.errors import ConfigError
from brokerless.core.runtime.http_host import HttpHost, listen
from brokerless.spark_collector import Collector, CollectorConfig
from brokerless.spark_collector.collector.inputs.factory import all_inputs
from brokerless.spark_collector.collector.status import progress_line, status_app
from brokerless.spark_collector.pipeline.config import PipelineConfig

app = cyclopts.App(
    name="collect",
    help="Collect events of any transport into a spool that Spark can read.",
    help_epilogue="Example: brokerless collect --config collector.toml --check",
)
_EVERY_S = 1.0


@app.default
def collect(
    *,
    config: Annotated[Path, cyclopts.Parameter(help="the collector's TOML file, or a pipeline's")],
    name: Annotated[str, cyclopts.Parameter(help="which collector of a pipeline's file")] = "",
    check: Annotated[
        bool, cyclopts.Parameter(help="read the file, say what it means, and end", negative="")
    ] = False,
    quiet: Annotated[bool, cyclopts.Parameter(help="no progress line", negative="")] = False,
    as_json: Json = False,
) -> None:
    """Run the collector that a TOML file describes; Ctrl-C or SIGTERM ends it in order.

    [example]
    name = "collector-1"
    [spool]
    path = "/var/spool/brokerless/collector-1"
    [[input]]
    type = "direct"
    addresses = ["tcp://127.0.0.1:5555"]
    """
    settings = _settings(config, name)
    if check:
        all_inputs(settings)
        kinds = [str(type(i).__struct_config__.tag) for i in settings.input]
        fields = {"name": settings.name, "spool": str(settings.spool.path), "inputs": kinds}
        text = f"{config}: collector {settings.name}, spool {settings.spool.path}, inputs: {', '.join(kinds)}"
        result(fields, text, as_json=as_json)
        return
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # The port first: one in use leaves no spool behind.
    try:
        listener = listen(settings.status.host, settings.status.port) if settings.status is not None else None
    except ConfigError as error:
        raise ConfigError(str(config), f"status.{error.field}: {error.problem}") from None
    with Collector(settings) as collector:
        server = HttpHost(status_app(collector), listener) if listener is not None else None
        where = f", status at {server.address}/status" if server else ""
        result(
            {
                "name": settings.name,
                "spool": str(settings.spool.path),
                "status": f"{server.address}/status" if server else None,
            },
            f"collector {settings.name}: spool {settings.spool.path}{where}",
            as_json=as_json,
        )
        try:
            _wait(collector, stop, quiet=quiet)
        finally:
            if server is not None:
                server.close()
    events = collector.counters.events
    result(
        {"name": settings.name, "stopped": True, "events": events},
        f"collector {settings.name}: stopped with {events:,} events",
        as_json=as_json,
    )


def _settings(path: Path, name: str) -> CollectorConfig:
    """The collector of a file: all of it, or one of the collectors of a pipeline."""
    if name:
        return load_toml(path, PipelineConfig).collector_named(name)
    return load_toml(path, CollectorConfig)


def _wait(collector: Collector, stop: threading.Event, *, quiet: bool) -> None:
    terminal = sys.stderr.isatty()
    before, at = collector.counters.snapshot(), time.monotonic()
    while not stop.wait(_EVERY_S):
        if quiet or not terminal:
            continue
        now = time.monotonic()
        line = progress_line(collector, before, now - at)
        before, at = collector.counters.snapshot(), now
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    if terminal and not quiet:
        print(file=sys.stderr)
