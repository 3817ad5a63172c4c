"""The pipeline's configuration: one TOML file into documented Structs."""

from typing import Literal

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.spark_collector.collector.config import CollectorConfig
from brokerless.spark_collector.jobs.land import LandOptions
from brokerless.spark_collector.jobs.ledger import Windows
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.tier.object_store import is_url


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the jobs share. `spools`: what it reads; default: the tiers or spools of all collectors of the file."""

    spools: list[str] = []  # what it reads; empty: the tiers or spools of all collectors of the file
    checkpoint: str = ""  # of the query; must be given where the table is in an object store
    every_s: float = 10.0  # seconds between batches
    max_events: int | None = None  # largest batch
    fail_on_data_loss: bool = True  # stop if retention passed what is wanted
    quarantine: bool = False  # go on over damaged segments, with a row that says so

    def __post_init__(self) -> None:
        if self.every_s < 0:
            raise ConfigError("every_s", "must not be negative")
        if self.max_events is not None and self.max_events < 1:
            raise ConfigError("max_events", "must be at least 1")
        if self.spools:
            parse_options({"path": ",".join(self.spools)})

    def _check_place(self, field: str, target: str) -> None:
        if is_url(target) and not self.checkpoint:
            raise ConfigError(
                "checkpoint", f"of {field} {target} must be given: Spark cannot keep it in an object store"
            )


class LandJob(Job, frozen=True, kw_only=True):
    """`brokerless spark land --follow`."""

    table: str  # a directory or URL; with format "iceberg" namespace.name
    format: Literal["delta", "iceberg"] = (
        "delta"  # iceberg: in the default catalogue of pyiceberg's configuration
    )
    partition_by: tuple[str, ...] = ("date",)  # columns
    dedupe: bool | None = None  # default: with several spools
    json_schema: str | None = None  # of the data, in Spark's DDL; what does not fit goes to quarantine

    def __post_init__(self) -> None:
        super().__post_init__()
        LandOptions(partition_by=self.partition_by)
        if self.format == "delta":
            self._check_place("table", self.table)
        elif not self.checkpoint:
            raise ConfigError(
                "checkpoint", f"of table {self.table} must be given: an Iceberg table has no place for it"
            )


class LossJob(Job, frozen=True, kw_only=True):
    """`brokerless spark loss --follow`."""

    ledger: str  # a directory or URL
    window_s: float = 60.0  # length of a window
    late_after_s: float = 60.0  # after its window an event counts as late
    settle_s: float = 10.0  # how long a gap is pending before it is lost

    def __post_init__(self) -> None:
        super().__post_init__()
        Windows(self.window_s, self.late_after_s)
        self._check_place("ledger", self.ledger)


class CompactJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`brokerless spark compact`, again and again."""

    table: str  # what a [[land]] writes, in Delta
    every_s: float = 3600.0  # seconds between runs
    vacuum_hours: int | None = (
        None  # also delete files that no version of the last hours needs (at least 168)
    )

    def __post_init__(self) -> None:
        is_url(self.table)
        if self.every_s <= 0:
            raise ConfigError("every_s", "must be more than 0")
        if self.vacuum_hours is not None and self.vacuum_hours < 168:
            raise ConfigError("vacuum_hours", "must be at least 168: a running job may need younger files")


class SparkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the jobs run: `master` and `conf` as for spark-submit."""

    master: str = "local[*]"  # spark://host:port, …
    conf: dict[str, str] = {}  # as for spark-submit

    def __post_init__(self) -> None:
        for name in self.conf:
            if not name.startswith("spark."):
                raise ConfigError(
                    "spark.conf", f"{name!r} is not a setting of Spark, which begins with spark."
                )


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the manifests name. `secret`: environment variables for the object store; may be missing."""

    image: str = "brokerless:0.1.0"  # of the collectors
    job_image: str = "brokerless-spark:0.1.0"  # the same with brokerless[spark,remote,java]
    secret: str = "object-store"  # noqa: S105  # a name, not a secret
    storage: str = "10Gi"  # of each volume


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a pipeline. Raises ConfigError if names or tables are there twice, or a job has nothing to read."""

    name: str  # of the pipeline
    collector: list[CollectorConfig] = []  # tables [[collector]], each like a collector's file
    land: list[LandJob] = []  # tables [[land]]
    loss: list[LossJob] = []  # tables [[loss]]
    compact: list[CompactJob] = []  # tables [[compact]]
    spark: SparkSettings = SparkSettings()  # the table [spark]
    kubernetes: KubernetesSettings = KubernetesSettings()  # the table [kubernetes]

    def __post_init__(self) -> None:
        jobs: list[LandJob | LossJob] = [*self.land, *self.loss]
        if not self.collector and not jobs:
            raise ConfigError("collector", "is empty, and there are no jobs: nothing to run")
        if not self.collector and not all(job.spools for job in jobs):
            raise ConfigError("spools", "must be given where the file has no [[collector]]")
        for field, names in (
            ("collector.name", [c.name for c in self.collector]),
            ("collector.spool.path", [c.spool.path for c in self.collector]),
            ("land.table", [job.table for job in self.land]),
            ("loss.ledger", [job.ledger for job in self.loss]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ConfigError(field, f"{sorted(twice)[0]} is there twice: each has one writer")
        for land in self.land:
            if land.format == "iceberg" and land.table in {each.table for each in self.compact}:
                raise ConfigError(
                    "compact.table", f"{land.table} is an Iceberg table; only Delta is compacted"
                )

    def spools(self, job: Job) -> list[str]:
        """What a job reads."""
        return job.spools or [c.spool.remote.url if c.spool.remote else c.spool.path for c in self.collector]

    def collector_named(self, name: str) -> CollectorConfig:
        """One collector of the file; the only one if there is no name. Raises ConfigError."""
        found = [c for c in self.collector if not name or c.name == name]
        if len(found) != 1:
            names = ", ".join(c.name for c in self.collector) or "none"
            raise ConfigError("--name", f"must be one of the file's collectors: {names}")
        return found[0]
