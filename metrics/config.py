"""The daemon's configuration: one documented Struct, for the library, the command line and the TOML file."""

from math import isfinite

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.metrics.books import BooksConfig
from brokerless.metrics.timers import Bins
from brokerless.metrics.udp import RECEIVE_BUFFER, split_address

BACKENDS = ("console", "graphite", "graphite-pickle", "journal", "repeater")


class GraphiteNames(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Where Graphite finds what; the defaults are the classic daemon's."""

    legacy: bool = True
    """`stats.<name>` and `stats_counts.<name>`, the classic daemon's default; False: `stats.counters.…`."""
    prefix: str = "stats"
    counters: str = "counters"
    timers: str = "timers"
    gauges: str = "gauges"
    sets: str = "sets"
    suffix: str = ""
    """Appended to every name, for example the host."""
    prefix_stats: str = "statsd"
    """Name of the daemon's own figures."""
    loss: bool = True
    """Also send each counter's `.corrected`, `.bound` and `.grade` (0 exact to 3 unknown).
    False gives byte for byte what the classic daemon sends."""


class MetricsConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings. Addresses are `host:port`; port 0 chooses one. Nothing listens that is not named."""

    udp: list[str] = msgspec.field(default_factory=list)
    tcp: list[str] = msgspec.field(default_factory=list)
    unix: list[str] = msgspec.field(default_factory=list)
    """Paths of Unix stream sockets (the PyPI client's)."""
    unix_dgram: list[str] = msgspec.field(default_factory=list)
    """Paths of Unix datagram sockets (DogStatsD's)."""
    mgmt: str = ""
    """The classic TCP management port. It can delete metrics and has no password: keep it on loopback."""
    http: str = ""
    """`/metrics`, `/state` and `/health`."""
    backends: list[str] = msgspec.field(default_factory=list)
    """`console`, `graphite:HOST:PORT`, `graphite-pickle:HOST:PORT`, `journal:DIR`, `repeater:HOST:PORT`."""
    flush_s: float = 10.0
    """Length of a window: the classic daemon's and Graphite's usual finest resolution."""
    workers: int = 1
    """Processes that share the UDP ports; streams and Unix sockets are served by the first."""
    receive_buffer: int = RECEIVE_BUFFER
    percentiles: list[float] = msgspec.field(default_factory=lambda: [90.0])
    """The classic daemon's default; negative ones are taken from the top."""
    histogram: list[Bins] = msgspec.field(default_factory=list)
    delete_idle: bool = False
    """Say nothing of counters, timers and sets without traffic; otherwise they are published as 0 until
    `series_ttl_s`, so that graphs show a pause as a pause."""
    gauge_ttl_s: float = 0.0
    """Forget gauges that were not set for so long; 0 keeps them for ever, as the classic daemon does."""
    series_ttl_s: float = 3600.0
    """Forget idle counters, timers and sets after an hour, so that names that never return do not pile up."""
    client_ttl_s: float = 3600.0
    """Forget numbered clients after an hour of silence (five minutes when half of `max_clients` are there):
    outages up to then are healed exactly."""
    max_series: int = 200_000
    """Some 150 MB with all figures; beyond it lines are refused as `series_limit`."""
    max_clients: int = 10_000
    max_streams: int = 1000
    """Stream connections at once; the usual limit of open files is 1024."""
    state: str = ""
    """File for what must survive a restart (totals, clients' ledgers, gauges), written after each window; then what
    numbered clients sent while the daemon was away is published when it is back. Empty: begin anew each time."""
    graphite: GraphiteNames = msgspec.field(default_factory=GraphiteNames)
    journal_source: str = "metrics"
    """Source name under which the journal backend appends."""

    def __post_init__(self) -> None:
        for field in ("udp", "tcp"):
            for address in getattr(self, field):
                split_address(address, field)
        for field in ("mgmt", "http"):
            if getattr(self, field):
                split_address(getattr(self, field), field)
        for backend in self.backends:
            check_backend(backend)
        for field, least in (("flush_s", 0.05), ("gauge_ttl_s", 0), ("series_ttl_s", 0), ("client_ttl_s", 0)):
            value = getattr(self, field)
            if not isfinite(value) or value < least:
                raise ConfigError(field, f"must be at least {least}, not {value}")
        for field in ("workers", "max_series", "max_clients", "max_streams", "receive_buffer"):
            if getattr(self, field) < 1:
                raise ConfigError(field, "must be at least 1")
        for percent in self.percentiles:
            if not 0 < abs(percent) <= 100:
                raise ConfigError("percentiles", f"{percent} is not within 0 to 100 (or -100)")
        for entry in self.histogram:
            if entry.bins != sorted(entry.bins):
                raise ConfigError("histogram", f"bins must rise: {entry.bins}")

    def books(self) -> BooksConfig:
        """The part that the books need."""
        return BooksConfig(
            percentiles=self.percentiles,
            histogram=self.histogram,
            delete_idle=self.delete_idle,
            gauge_ttl_s=self.gauge_ttl_s,
            series_ttl_s=self.series_ttl_s,
            client_ttl_s=self.client_ttl_s,
            max_series=self.max_series,
            max_clients=self.max_clients,
        )


def check_backend(text: str) -> tuple[str, str]:
    """(kind, argument) of a backend's text, or ConfigError."""
    kind, _, argument = text.partition(":")
    if kind not in BACKENDS:
        raise ConfigError("backends", f"{text!r} is none of {', '.join(BACKENDS)}")
    if kind == "console":
        if argument:
            raise ConfigError("backends", "console takes no argument")
    elif kind == "journal":
        if not argument:
            raise ConfigError("backends", "journal needs a directory: journal:DIR")
    else:
        split_address(argument, f"backends: {kind}")
    return kind, argument
