"""A pipeline as commands: for this machine, and as lines for spark-submit; pure."""

import shlex

import msgspec

from brokerless.spark_collector.pipeline.config import Job, LandJob, LossJob, PipelineConfig


class Command(msgspec.Struct, frozen=True):
    """Arguments of `brokerless`. `every_s`: it ends by itself, and is run again after this time; None: it stays."""

    name: str
    arguments: list[str]
    every_s: float | None = None


def collector_commands(config: PipelineConfig, file: str) -> list[Command]:
    """One for each collector of the file."""
    return [
        Command(
            f"collector-{each.name}", ["collect", "--config", file, "--name", each.name, "--quiet", "--json"]
        )
        for each in config.collector
    ]


def job_commands(config: PipelineConfig) -> list[Command]:
    """One for each job that goes on for ever."""
    made = []
    for n, land in enumerate(config.land):
        arguments = ["spark", "land", "--table", land.table, *_shared(config, land)]
        if land.format != "delta":
            arguments += ["--format", land.format]
        for column in land.partition_by:
            arguments += ["--partition-by", column]
        if land.dedupe is not None:
            arguments.append("--dedupe" if land.dedupe else "--no-dedupe")
        if land.json_schema is not None:
            arguments += ["--json-schema", land.json_schema]
        made.append(Command(f"land-{n}", arguments))
    for n, loss in enumerate(config.loss):
        arguments = ["spark", "loss", "--ledger", loss.ledger, *_shared(config, loss)]
        arguments += ["--window", str(loss.window_s), "--late-after", str(loss.late_after_s)]
        made.append(Command(f"loss-{n}", [*arguments, "--settle", str(loss.settle_s), "--by", "topic"]))
    return made


def compact_commands(config: PipelineConfig) -> list[Command]:
    """One for each table that is compacted periodically."""
    return [
        Command(
            f"compact-{n}",
            ["spark", "compact", "--table", job.table]
            + (["--vacuum", str(job.vacuum_hours)] if job.vacuum_hours is not None else []),
            job.every_s,
        )
        for n, job in enumerate(config.compact)
    ]


def _shared(config: PipelineConfig, job: LandJob | LossJob | Job) -> list[str]:
    arguments = [part for spool in config.spools(job) for part in ("--spool", spool)]
    arguments += ["--follow", "--every", str(job.every_s), "--master", config.spark.master]
    for key, value in config.spark.conf.items():
        arguments += ["--conf", f"{key}={value}"]
    if job.checkpoint:
        arguments += ["--checkpoint", job.checkpoint]
    if job.max_events is not None:
        arguments += ["--max-events", str(job.max_events)]
    if not job.fail_on_data_loss:
        arguments.append("--no-fail-on-data-loss")
    if job.quarantine:
        arguments.append("--quarantine")
    return arguments


def submit_lines(config: PipelineConfig, *, script: str, jar: str = "") -> list[str]:
    """One spark-submit line for each job. `script`: the path of `brokerless/cli/__main__.py` where they will run."""
    lines = []
    for command in job_commands(config):
        line = ["spark-submit", "--master", config.spark.master, "--name", f"{config.name} {command.name}"]
        for key, value in config.spark.conf.items():
            line += ["--conf", f"{key}={value}"]
        if jar:
            line += ["--jars", jar]
        lines.append(shlex.join([*line, script, *command.arguments]))
    return lines
