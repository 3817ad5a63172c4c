"""Spark between two object-store locations: a spool's tier in, a Delta table out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from brokerless.core.errors import UsageError
from brokerless.spark_collector import Lander, LandOptions, LedgerTable, SparkInput, Windows, run_stream
from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.jobs.views import read_table
from brokerless.spark_collector.tier.uploader import TierUploader
from tests.spark_collector.spools import fill, open_spool
from tests.spark_collector.twins import JVM, PYTHON, require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def test_from_tier_to_table(spark: "SparkSession", tmp_path: Path, url: str, s3: dict[str, str]) -> None:
    """Landed once and counted exactly, over restarts, with nothing of it on a disk that Spark reads."""
    with open_spool(tmp_path / "s") as spool:
        for part in range(2):
            fill(spool, "p", 110 * part, 100)
            made = TierUploader(
                str(tmp_path / "s"), f"{url}/spool", counters=CollectorCounters(), storage_options=s3
            )
            made.start()
            made.stop()
            rows = SparkInput(paths=(f"{url}/spool",), storage_options=s3, max_events_per_trigger=60)
            options = LandOptions(storage_options=s3, dedupe=True)
            lander = Lander(f"{url}/events", options)
            with pytest.raises(UsageError, match="checkpoint"):
                _ = lander.checkpoint
            run_stream(rows.stream(spark), lander, checkpoint=str(tmp_path / "cp"))
            ledger = LedgerTable(f"{url}/ledger", Windows(3600), storage_options=s3)
            run_stream(rows.stream(spark), ledger, checkpoint=str(tmp_path / "cp-ledger"))
    table = DeltaTable(f"{url}/events", storage_options=s3).to_pyarrow_table()
    expected = [*range(100), *range(110, 210)]
    assert sorted(table["offset"].to_pylist()) == expected
    found = read_table(spark, f"{url}/events", s3)
    assert sorted(r.offset for r in found.collect()) == expected
    sums = ledger.loss(spark, settle_s=0).groupBy().sum("sent", "received", "lost").first()
    assert sums is not None
    assert tuple(sums) == (210, 200, 10)


@pytest.mark.parametrize("name", [JVM, PYTHON])
def test_both_readers(spark: "SparkSession", tmp_path: Path, url: str, s3: dict[str, str], name: str) -> None:
    """The data source in the JVM asks Python for the parts; the one in Python reads them itself."""
    require(spark, name)
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        made = TierUploader(str(tmp_path / "s"), url, counters=CollectorCounters(), storage_options=s3)
        made.start()
        made.stop()
    rows = spark.read.format(name).option("storageOptions", json.dumps(s3)).load(url)
    assert sorted(r.offset for r in rows.collect()) == list(range(100))
