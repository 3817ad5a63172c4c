"""The collector's configuration: one TOML file into documented Structs."""

from typing import Literal

import msgspec

from brokerless.core.errors import ConfigError


class Input(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all inputs."""


class DirectIn(Input, frozen=True, kw_only=True, tag="direct"):
    """Publishers of `brokerless.direct`.

    With `group` this collector is one of its workers, otherwise it gets all.
    """

    addresses: list[str]
    group: str = ""
    topics: list[str] = []
    start: Literal["oldest", "live"] = "oldest"  # a collector that is new wants all there is
    # A name under which publishers keep what this collector has not had, as their journal's on_full says.
    # Empty: they need not wait for a collector that may never come back.
    durable: str = ""
    words_every_s: float = (
        5.0  # how often producers are asked what they sent; finer windows need it more often
    )


class MulticastIn(Input, frozen=True, kw_only=True, tag="multicast"):
    """A MoldUDP64 group of `brokerless.multicast`."""

    groups: list[str]  # one, or two that carry the same (lines A and B)
    session: str = ""  # a publisher's name; empty: the first that is heard
    interface: str = "127.0.0.1"
    request_servers: list[str] = []  # empty: the sender's own
    start: Literal["oldest", "live"] = "oldest"


class WebhooksIn(Input, frozen=True, kw_only=True, tag="webhooks"):
    """A webhook receiver: answers 2xx when the event is in the spool."""

    listen: str  # host:port
    secrets: list[str]
    source: str = ""  # the source name of its events; empty: `<collector>.webhooks`


class JournalIn(Input, frozen=True, kw_only=True, tag="journal"):
    """A journal that another process on this machine writes (the metrics daemon's, a producer's own)."""

    path: str
    transport: str = "journal"


AnyInput = DirectIn | MulticastIn | WebhooksIn | JournalIn


class SpoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The spool. 8 GiB hold about 70 million events of 100 bytes: a day at 800/s without Spark running."""

    path: str
    max_bytes: int = 8 * 1024**3
    max_age_s: float = 0.0
    # A power cut may cost the last second, and nothing that was acknowledged: acks wait for the sync.
    fsync: Literal["never", "interval", "batch"] = "interval"
    sync_interval_s: float = 0.2

    def __post_init__(self) -> None:
        if self.max_bytes < 1024 * 1024:
            raise ConfigError("spool.max_bytes", "must be at least 1 MiB")
        if self.sync_interval_s <= 0:
            raise ConfigError("spool.sync_interval_s", "must be more than 0")


class StatusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where `/status` and `/metrics` are served; loopback unless told otherwise. Port 0: a free one."""

    host: str = "127.0.0.1"
    port: int = 9464  # what OpenTelemetry's Prometheus exporters use


class CollectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a collector. `name` is the spool's source name and must differ between collectors of one job."""

    name: str
    spool: SpoolConfig
    input: list[AnyInput] = []
    status: StatusConfig | None = StatusConfig()
    save_every_s: float = 5.0  # how much of the spool is read again at a start after a crash

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("input", "is empty: a collector needs at least one [[input]]")
