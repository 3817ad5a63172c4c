"""Exactly once under SIGKILL.

Collectors and streaming queries die at random, and nothing is lost or doubled.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brokerless.core import JournalReader
from brokerless.spark_collector import Lander, SparkInput, run_stream
from brokerless.spark_collector.collector.spool import as_items
from brokerless.spark_collector.jobs.views import read_table
from tests.integration.spark_processes import CLI, collector_config, killable, producer, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def spool_events(path: Path) -> Counter[tuple[str, int]]:
    """How often each (source, offset) is in the spool."""
    found: Counter[tuple[str, int]] = Counter()
    with JournalReader(path) as reader:
        at = reader.oldest
        while at < reader.next:
            chunk = reader.read(at, max_bytes=8 << 20)
            assert not chunk.gone, f"the spool has holes: {chunk.gone}"
            for outer in chunk.frames:
                for item in as_items(outer, at, outer.next_offset):
                    if item.kind == "event":
                        found.update((e.source, e.offset) for e in item.frame.events())
            at = chunk.next
    return found


def tear_tail(spool: Path, rng: random.Random) -> None:
    """What a power cut leaves: a record that was begun at the end of the newest segment."""
    newest = max(spool.glob("*.seg"))
    whole = newest.read_bytes()
    with newest.open("ab") as file:
        file.write(whole[-rng.randint(1, 200) :][: rng.randint(1, 150)])


def spooled(path: Path, total: int) -> bool:
    return (path / "meta.json").exists() and sum(spool_events(path).values()) >= total


@pytest.mark.timeout(300)
def test_a_collector_killed_again_and_again_spools_each_event_once(tmp_path: Path) -> None:
    """14 kills at random under load, half of them with an incomplete tail.

    The spool has what was accepted, each once.
    """
    rng = random.Random(3)
    count = 12_000
    with producer(tmp_path, "p", count, 2_000) as p, producer(tmp_path, "q", count, 2_000) as q:
        config = collector_config(tmp_path, [p.address, q.address])
        with killable([*CLI, "collect", "--config", str(config)], tmp_path / "collect.log") as collector:
            spool = tmp_path / "spool"
            while collector.kills < 14:
                collector.start()
                wait_for((spool / "meta.json").exists, 60, "the collector to open its spool")
                time.sleep(rng.uniform(0.3, 2.0))
                assert collector.running, collector.log.read_text()[-3000:]
                collector.kill()
                if collector.kills % 2 and (spool / "meta.json").exists():
                    tear_tail(spool, rng)
            said = collector.log.read_text().count("status at")
            collector.start()
            p.wait_done()
            q.wait_done()
            wait_for(lambda: spooled(spool, 2 * count), 120, "all events in the spool")
            wait_for(
                lambda: collector.log.read_text().count("status at") > said, 60, "the collector to be up"
            )
            assert collector.end() == 0
            found = spool_events(spool)
    assert found == Counter({(s, n): 1 for s in "pq" for n in range(count)})


def campaign(spark: "SparkSession", tmp_path: Path, kills: int, seed: int) -> None:
    """Producers, a collector and a landing job; both of the latter are killed at random.

    The table is compared.
    """
    rng = random.Random(seed)
    count = 3_000 * kills
    table = tmp_path / "events"
    with producer(tmp_path, "p", count, 800) as p, producer(tmp_path, "q", count, 800) as q:
        config = collector_config(tmp_path, [p.address, q.address])
        spool = tmp_path / "spool"
        follow = [*CLI, "spark", "land", "--spool", str(spool), "--table", str(table), "--master", "local[1]"]
        follow += ["--follow", "--every", "0", "--max-events", "400"]
        with (
            killable([*CLI, "collect", "--config", str(config)], tmp_path / "collect.log") as collector,
            killable(follow, tmp_path / "land.log") as land,
        ):
            collector.start()
            wait_for((spool / "meta.json").exists, 60, "the spool")
            while land.kills < kills:
                version = commits(table)
                land.start()
                # Killed in the middle of work: after it has committed something new, at a random moment.
                wait_for(lambda v=version: commits(table) > v or not land.running, 240, "a batch")
                assert land.running, land.log.read_text()[-3000:]
                time.sleep(rng.uniform(0, 1.5))
                land.kill(whole_group=rng.random() < 0.5)
                if land.kills % 2 == 0:
                    collector.kill()
                    tear_tail(spool, rng)
                    collector.start()
            p.wait_done()
            q.wait_done()
            wait_for(lambda: spooled(spool, 2 * count), 120, "all events in the spool")
            collector.end()
            assert collector.kills == kills // 2
    # The last run, from the same checkpoint, in this process.
    lander = Lander(str(table))
    rows = lander.stream(SparkInput(paths=(str(spool),)), spark)
    run_stream(rows, lander, checkpoint=lander.checkpoint)
    expected = Counter({(s, n): 1 for s in "pq" for n in range(count)})
    assert all(found == expected for found in landed(spark, table))


def commits(table: Path) -> int:
    """How many batches are in the table."""
    return len(list((table / "_delta_log").glob("*.json")))


def landed(spark: "SparkSession", table: Path) -> Iterator[Counter[tuple[str, int]]]:
    """How often each (source, offset) is in the table, for each of its readers."""
    from deltalake import DeltaTable

    found = DeltaTable(str(table)).to_pyarrow_table(columns=["source", "offset"]).to_pydict()
    yield Counter(zip(found["source"], found["offset"], strict=True))
    rows = read_table(spark, str(table)).select("source", "offset").collect()
    yield Counter((r.source, r.offset) for r in rows)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(900)
def test_a_landing_job_killed_lands_each_event_once(spark: "SparkSession", tmp_path: Path) -> None:
    """Two kills of the streaming query and one of the collector.

    The table has what was accepted, each once.
    """
    campaign(spark, tmp_path, kills=2, seed=5)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(1800)
def test_a_landing_job_killed_again_and_again_lands_each_event_once(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """The long form: 12 kills of the streaming query at random, the collector killed and its tail cut in between."""
    campaign(spark, tmp_path, kills=12, seed=6)
