"""The collector's configuration: one TOML file into documented Structs."""

import re
from typing import Literal

import msgspec

from brokerless.core.config import check_choices
from brokerless.core.errors import ConfigError
from brokerless.spark_collector.tier.object_store import FILE, SCHEMES


class Input(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all inputs."""

    def __post_init__(self) -> None:
        check_choices(self)


class DirectIn(Input, frozen=True, kw_only=True, tag="direct"):
    """Publishers of `brokerless.direct`.

    With `group` this collector is one of its workers, otherwise it gets all.
    """

    addresses: list[str]  # tcp://host:port, …; discover:orders-* for every publisher of such a name
    group: str = ""  # be a worker of this group: several collectors share the load
    topics: list[str] = []  # patterns and prefixes; empty: all
    start: Literal["oldest", "live"] = "oldest"  # a collector that is new wants all there is
    # A name under which publishers keep what this collector has not had, as their journal's on_full says.
    # Empty: they need not wait for a collector that may never come back.
    durable: str = ""
    sent_counts_every_s: float = (
        5.0  # how often producers are asked what they sent; finer windows need it more often
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.addresses:
            raise ConfigError("input.addresses", "is empty: tcp://host:port, or discover:NAME")
        if self.sent_counts_every_s <= 0:
            raise ConfigError("input.sent_counts_every_s", "must be more than 0")


class MulticastIn(Input, frozen=True, kw_only=True, tag="multicast"):
    """A MoldUDP64 group of `brokerless.multicast`."""

    groups: list[str]  # one, or two that carry the same (lines A and B)
    session: str = ""  # a publisher's name; empty: the first that is heard
    interface: str = "127.0.0.1"  # this machine's address on the network of the group
    request_servers: list[str] = []  # empty: the sender's own
    start: Literal["oldest", "live"] = "oldest"  # where a new collector begins

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.groups) not in (1, 2):
            raise ConfigError("input.groups", "must be one group, or two that carry the same")
        for group in self.groups:
            if not re.fullmatch(r".+:\d{1,5}", group):
                raise ConfigError("input.groups", f"{group!r} is not HOST:PORT")


class WebhooksIn(Input, frozen=True, kw_only=True, tag="webhooks"):
    """A webhook receiver: answers 2xx when the event is in the spool."""

    listen: str  # host:port
    secrets: list[str]  # whsec_… or whpk_…; a request must be signed with one of them
    source: str = ""  # the source name of its events; empty: `<collector>.webhooks`


class JournalIn(Input, frozen=True, kw_only=True, tag="journal"):
    """A journal that another process on this machine writes (the metrics daemon's, a producer's own)."""

    path: str  # the journal's directory
    transport: str = "journal"  # what its rows say in the column `transport`


AnyInput = DirectIn | MulticastIn | WebhooksIn | JournalIn


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The spool's remote tier: where Spark reads it without a shared file system."""

    url: str  # s3://bucket/spools/name, gs://…, abfs://…, file:///mounted/directory
    close_after_s: float = 5.0  # how far the tier may be behind the spool
    part_bytes: int = 8 * 1024 * 1024  # one object, and what an executor reads at a time
    storage_options: dict[str, str] = {}  # what the store needs, in the words of obstore
    # Go on with the tier that another machine wrote under this URL, if this machine's spool is a new one. The other one
    # is refused from then on. Say so only where at most one collector of this name is meant to run.
    take_over: bool = False

    def __post_init__(self) -> None:
        if not self.url.startswith((*SCHEMES, FILE)):
            raise ConfigError("spool.remote.url", f"must begin with one of {', '.join((*SCHEMES, FILE))}")
        if self.close_after_s <= 0 or self.part_bytes < 1024:
            raise ConfigError("spool.remote", "close_after_s must be more than 0, part_bytes at least 1024")


class SpoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The spool. 8 GiB hold about 70 million events of 100 bytes: a day at 800/s without Spark running."""

    path: str  # a directory on a local disk
    max_bytes: int = 8 * 1024**3  # beyond it the oldest segments are dropped
    max_age_s: float = 0.0  # segments older than this are dropped; 0: none for its age
    # A power cut may cost the last second, and nothing that was acknowledged: acks wait for the sync.
    fsync: Literal["never", "interval", "batch"] = "interval"
    sync_interval_s: float = 0.2  # how often fsync="interval" syncs
    # With a remote tier, local segments are dropped only after they were uploaded; until then a full spool refuses.
    remote: RemoteConfig | None = None
    # An address where the spool can be read while it is written: Spark's option `endpoint`. Empty: not served.
    serve: str = ""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.max_bytes < 1024 * 1024:
            raise ConfigError("spool.max_bytes", "must be at least 1 MiB")
        if self.sync_interval_s <= 0:
            raise ConfigError("spool.sync_interval_s", "must be more than 0")


class StatusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where `/status` and `/metrics` are served; loopback unless told otherwise. Port 0: a free one."""

    host: str = "127.0.0.1"  # who reaches it reads counters
    port: int = 9464  # what OpenTelemetry's Prometheus exporters use


class CollectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a collector. `name` is the spool's source name and must differ between collectors of one job."""

    name: str  # the spool's source
    spool: SpoolConfig  # the table [spool]
    input: list[AnyInput] = []  # tables [[input]], one at least; `type` chooses among those below
    status: StatusConfig | None = StatusConfig()  # the table [status]
    save_every_s: float = 5.0  # how much of the spool is read again at a start after a crash

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("input", "is empty: a collector needs at least one [[input]]")
