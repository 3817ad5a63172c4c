"""The daemon's configuration: one documented Struct, for the library, the command line and the TOML file."""

from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Literal

import msgspec

from brokerless.core.config import check_choices, check_key, split_host_port
from brokerless.core.errors import ConfigError
from brokerless.metrics.aggregate.rollup import RollupConfig
from brokerless.metrics.backends.graphite import GraphiteNames
from brokerless.metrics.backends.prometheus import PrometheusOptions
from brokerless.metrics.parser import ParserOptions, sanitize
from brokerless.metrics.server.udp import RECEIVE_BUFFER, split_dialect

# Beyond these nothing is gained: more processes than any machine has use for; what the kernel's type holds, and memory.
_MOST = {
    "workers": 256,
    "max_series": 10**9,
    "max_clients": 10**9,
    "max_streams": 10**6,
    "receive_buffer": 2**30,
}

BACKENDS = ("console", "graphite", "graphite-pickle", "journal", "otlp", "repeater")


class MetricsConfig(RollupConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings. Addresses are `host:port`; port 0 chooses one. Nothing listens that is not named."""

    udp: list[str] = msgspec.field(default_factory=list)
    """Where to listen for datagrams."""
    tcp: list[str] = msgspec.field(default_factory=list)
    """Where to listen for streams of lines."""
    unix: list[str] = msgspec.field(default_factory=list)
    """Paths of Unix stream sockets (the PyPI client's)."""
    unix_dgram: list[str] = msgspec.field(default_factory=list)
    """Paths of Unix datagram sockets (DogStatsD's)."""
    mgmt: str = ""
    """The classic TCP management port. It can delete metrics and has no password: keep it on loopback."""
    http: str = ""
    """`/metrics`, `/state` and `/health`."""
    backends: list[str] = msgspec.field(default_factory=list)
    """`console`, `graphite:HOST:PORT`, `graphite-pickle:HOST:PORT`, `journal:DIR`, `otlp:URL`, `repeater:HOST:PORT`."""
    flush_s: float = 10.0
    """Length of a window: the classic daemon's and Graphite's usual finest resolution."""
    workers: int = 1
    """Processes that share the UDP ports; streams and Unix sockets are served by the first."""
    receive_buffer: int = RECEIVE_BUFFER
    """Bytes that the kernel holds per UDP socket; capped by `net.core.rmem_max` unless root."""
    auth_key_file: str = ""
    """File with shared keys, one per line, at least 16 characters each. With it only clients that sign their datagrams
    with one of them (`StatsClient(auth_key=…)`) count as numbered; all others count as unnumbered."""
    dialect: Literal["auto", "statsd", "dogstatsd"] = "auto"
    """Whether a signed gauge moves (`statsd`) or sets (`dogstatsd`) it; `auto` decides by line, and by listener once a
    Datadog client has sent its own figures. An address may end in `?dialect=…`."""
    influx_tags: bool = True
    """`name,tag=value` has tags."""
    librato_tags: bool = True
    """`name#tag=value` has tags."""
    signalfx_tags: bool = True
    """`name[tag=value]` has tags."""
    max_streams: int = 1000
    """Stream connections at once; the usual limit of open files is 1024."""
    state: str = ""
    """File for what must survive a restart (totals, clients' ledgers, gauges), written after each window; then what
    numbered clients sent while the daemon was away is published when it is back. Empty: start over each time."""
    graphite: GraphiteNames = msgspec.field(default_factory=GraphiteNames)
    """The table `[graphite]`."""
    prometheus: PrometheusOptions = msgspec.field(default_factory=PrometheusOptions)
    """The table `[prometheus]`."""
    journal_source: str = "metrics"
    """Source name under which the journal backend appends."""

    def __post_init__(self) -> None:
        check_choices(self)
        for field in ("udp", "tcp"):
            for address in getattr(self, field):
                split_host_port(split_dialect(address, field)[0], field)
        for field in ("mgmt", "http"):
            if getattr(self, field):
                split_host_port(getattr(self, field), field)
        for backend in self.backends:
            check_backend(backend)
        for field, least in (("flush_s", 0.05), ("gauge_ttl_s", 0), ("series_ttl_s", 0), ("client_ttl_s", 0)):
            value = getattr(self, field)
            if not isfinite(value) or value < least:
                raise ConfigError(field, f"must be at least {least}, not {value}")
        for field, most in _MOST.items():
            if not 1 <= getattr(self, field) <= most:
                raise ConfigError(field, f"must be within 1 to {most}, not {getattr(self, field)}")
        for percent in self.percentiles:
            if not 0 < abs(percent) <= 100:
                raise ConfigError("percentiles", f"{percent} is not within 0 to 100 (or -100)")
        for entry in self.histogram:
            _check_rising("histogram", entry.bins)
        _check_rising("buckets", self.buckets)
        if inf in self.buckets:
            raise ConfigError("buckets", "must be finite; one for everything is added by itself")
        for tag, limit in self.tag_limits.items():
            if limit < 1:
                raise ConfigError("tag_limits", f"{tag} must be at least 1, not {limit}")
        if sanitize(self.namespace) != self.namespace or ";" in self.namespace:
            raise ConfigError("namespace", f"{self.namespace!r} has characters that a name cannot have")

    @property
    def parser_options(self) -> ParserOptions:
        """How lines are read."""
        return ParserOptions(
            dialect=self.dialect,
            influx_tags=self.influx_tags,
            librato_tags=self.librato_tags,
            signalfx_tags=self.signalfx_tags,
        )

    def read_auth_keys(self) -> list[bytes]:
        """The keys of `auth_key_file`; ConfigError if it cannot be read or holds none."""
        if not self.auth_key_file:
            return []
        try:
            lines = Path(self.auth_key_file).read_bytes().split()
        except OSError as error:
            raise ConfigError("auth_key_file", f"{self.auth_key_file}: {error.strerror}") from None
        return [check_key(line) for line in lines] or [check_key(b"")]


def _check_rising(field: str, limits: list[float]) -> None:
    if any(not below < above for below, above in pairwise([-inf, *limits])):
        raise ConfigError(field, f"limits must rise: {limits}")


def check_backend(text: str) -> tuple[str, str]:
    """(kind, argument) of a backend's text, or ConfigError."""
    kind, _, argument = text.partition(":")
    if kind not in BACKENDS:
        raise ConfigError("backends", f"{text!r} is none of {', '.join(BACKENDS)}")
    if kind == "console":
        if argument:
            raise ConfigError("backends", "console takes no argument")
    elif kind == "otlp":
        if not argument.startswith(("http://", "https://")):
            raise ConfigError("backends", "otlp needs a URL: otlp:http://HOST:4318/v1/metrics")
    elif kind == "journal":
        if not argument:
            raise ConfigError("backends", "journal needs a directory: journal:DIR")
    else:
        split_host_port(argument, f"backends: {kind}")
    return kind, argument
