"""Configuration of a Dispatcher: one documented Struct; every default has its reason."""

from typing import Literal

import msgspec

from brokerless.core.config import check_choices
from brokerless.core.errors import ConfigError
from brokerless.webhooks.delivery.proxy import parse_proxy
from brokerless.webhooks.delivery.retry import Schedule
from brokerless.webhooks.delivery.ssrf import AddressPolicy
from brokerless.webhooks.rules import Verification

DAY_S = 86400.0
OnFull = Literal["reject", "block", "evict"]


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that can be set; times in seconds."""

    schedule: Schedule = Schedule()
    """When to try again."""
    policy: AddressPolicy = AddressPolicy()
    """Which addresses and schemes may be used."""
    attempt_timeout_s: float = 15.0
    """For one attempt in total: name, connect, TLS, request, answer. Standard Webhooks recommends 15 to 30."""
    connect_timeout_s: float = 5.0
    """For the TCP connect alone: a host that is away is noticed sooner than one that is slow."""
    max_response_bytes: int = 16 * 1024
    """Read of an answer: enough for ordinary ones, so that the connection can be used again."""
    excerpt_bytes: int = 512
    """Kept of an answer for the deliveries list."""
    max_in_flight: int = 512
    """Attempts at a time over all endpoints: half of the usual limit of 1024 open files."""
    max_parked: int = 4096
    """More attempts that have waited for an answer for a quarter of a second, as far as the limit of open files allows:
    so many endpoints can hang without holding up others."""
    max_pending: int = 1_000_000
    """Undelivered deliveries in the outbox: about 1 GB of 500-byte events."""
    max_pending_per_endpoint: int = 100_000
    """A tenth of it, so that one dead consumer cannot close the outbox for the others."""
    on_full: OnFull = "reject"
    """Never lose silently and never hang a web request, unless told to."""
    block_timeout_s: float = 10.0
    """With on_full="block": shorter than the 30 s after which most callers' own clients give up."""
    max_event_bytes: int = 1024 * 1024
    """Standard Webhooks recommends under 20 kB; 1 MiB is what common servers accept by default (nginx)."""
    memory_bytes: int = 64 * 1024 * 1024
    """Bodies that wait in memory; beyond it each lane keeps one. The rest stays in the database."""
    retain_s: float = 7 * DAY_S
    """How long finished deliveries and their events are kept for replay: longer than schedule and disabling."""
    retain_events: int = 10_000_000
    """Finished events kept at most, however young: ten times `max_pending`, so the file's size has a bound too."""
    disable_after_s: float = 5 * DAY_S
    """An endpoint without one success for so long, in spite of attempts, is disabled."""
    rotation_overlap_s: float = DAY_S
    """After rotate-secret the old key signs too for so long: a day to deploy."""
    verification: Verification = "handshake"
    """What new endpoints must pass unless they choose the other; "none" switches ownership checks off."""
    verify_for_s: float = DAY_S
    """How long a pending endpoint is asked again."""
    origin: str = "brokerless.invalid"
    """`WebHook-Request-Origin`: the DNS name by which receivers know this sender. Set your own."""
    batch_events: int = 100
    """Events in one request of an endpoint in batch mode, at most; they also stay below 1 MiB together."""
    lease_s: float = 6.0
    """A process renews the leases of its endpoints every second; on another machine they are taken over after so long
    without that."""
    poll_s: float = 0.05
    """SQLite: how often commits of other processes are looked for. PostgreSQL tells of them by itself."""
    database_timeout_s: float = 5.0
    """PostgreSQL: for one statement. A server that hangs must fail a `publish` before its caller's client gives up."""
    operator_tenant: str = ""
    """A tenant whose endpoints also get the dispatcher's own events (`brokerless.…`) of all other tenants."""
    synchronous: Literal["full", "normal"] = "full"
    """SQLite: "full" survives a power cut, "normal" only a killed process."""
    tracing: bool = False
    """OpenTelemetry spans for publish and attempts, with `traceparent` sent to endpoints; needs `brokerless[otel]`."""
    ca_file: str = ""
    """Certificates of an own authority to trust for deliveries, PEM; empty: the system's."""
    client_certificate: str = ""
    """PEM file with the certificate (chain) by which endpoints that ask for one know this sender (mTLS)."""
    client_key: str = ""
    """PEM file with its key, without a password; empty: it is in the file of the certificate."""
    proxy: str = ""
    """Egress proxy for all requests to endpoints, `http://[user:password@]host:port`. It is asked to CONNECT to
    addresses that were resolved and checked here; its own address is the operator's and not checked."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name in (
            "attempt_timeout_s",
            "connect_timeout_s",
            "database_timeout_s",
            "lease_s",
            "poll_s",
            "retain_s",
        ):
            if not 0 < getattr(self, name) <= 366 * DAY_S:
                raise ConfigError(name, "must be above 0 and at most a year")
        for name in (
            "max_in_flight",
            "max_pending",
            "max_pending_per_endpoint",
            "max_event_bytes",
            "retain_events",
            "batch_events",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(name, "must be at least 1")
        if (
            not self.origin.isascii()
            or not self.origin.isprintable()
            or " " in self.origin
            or not self.origin
        ):
            raise ConfigError("origin", "must be a DNS name")
        if self.client_key and not self.client_certificate:
            raise ConfigError("client_key", "needs client_certificate")
        parse_proxy(self.proxy)
