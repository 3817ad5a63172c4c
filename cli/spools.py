"""`brokerless loss`, `counts` and `export`: what spools and journals hold, without Spark."""

from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from brokerless.cli.options import By, DataLoss, Endpoints, Json, LateAfter, Quarantine, Settle, Window
from brokerless.cli.output import result
from brokerless.cli.show import arrow_json, arrow_table
from brokerless.core.errors import UsageError
from brokerless.spark_collector import local
from brokerless.spark_collector.jobs.ledger import Windows

loss_app = cyclopts.App(name="loss", help_epilogue="Example: brokerless loss var/spool --by topic")
counts_app = cyclopts.App(
    name="counts", help_epilogue="Example: brokerless counts 'var/spools/*' --window 3600"
)
export_app = cyclopts.App(
    name="export", help_epilogue="Example: brokerless export var/spool --out events.parquet"
)

Spools = Annotated[str, Parameter(help="spool or journal directories, or globs")]


def _options(
    spools: tuple[str, ...], endpoints: tuple[str, ...], strict: bool, quarantine: bool
) -> dict[str, str]:
    if not spools and not endpoints:
        raise UsageError("give a spool's directory, or --endpoint ADDRESS")
    chosen = {"path": ",".join(spools), "endpoint": ",".join(endpoints)}
    chosen |= {"failOnDataLoss": str(strict).lower(), "onCorrupt": "quarantine" if quarantine else "fail"}
    return {key: value for key, value in chosen.items() if value}


@loss_app.default
def loss(
    *spools: Spools,
    endpoint: Endpoints = (),
    window: Window = 60.0,
    late_after: LateAfter = 60.0,
    settle: Settle = 10.0,
    by: By = "window",
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
) -> None:
    """Loss per source, topic and window in a spool: what was sent, received, lost, and what came late after all."""
    found = local.loss(
        _options(spools, endpoint, fail_on_data_loss, quarantine),
        windows=Windows(window, late_after),
        settle_s=settle,
        by=by,
    )
    (arrow_json if json else arrow_table)(found)


@counts_app.default
def counts(
    *spools: Spools,
    endpoint: Endpoints = (),
    window: Window = 60.0,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
) -> None:
    """Events per window, source and topic in a spool, each counted once."""
    found = local.counts(_options(spools, endpoint, fail_on_data_loss, quarantine), window_s=window)
    (arrow_json if json else arrow_table)(found)


@export_app.default
def export(
    *spools: Spools,
    out: Annotated[Path, Parameter(help="the file to write; its suffix tells the format")],
    endpoint: Endpoints = (),
    format: Annotated[
        Literal["parquet", "arrow", "csv"] | None, Parameter(help="default: by the file's name")
    ] = None,
    fail_on_data_loss: DataLoss = True,
    quarantine: Quarantine = False,
    json: Json = False,
) -> None:
    """Write the events of a spool to one file: Parquet, Arrow or CSV."""
    count = local.export(_options(spools, endpoint, fail_on_data_loss, quarantine), out, format=format)
    result({"events": count, "file": str(out)}, f"exported {count:,} events to {out}", as_json=json)
