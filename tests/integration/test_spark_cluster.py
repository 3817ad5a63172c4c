"""A standalone cluster from the pip package: the same job, the same result, work on both workers."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest

from brokerless.core.errors import UsageError
from brokerless.spark_collector import start_cluster, stop_cluster
from brokerless.spark_collector.session.cluster import alive_workers, read_cluster
from tests.command import run_here
from tests.integration.spark_processes import CLI, killable
from tests.spark_collector.spools import fill, open_spool

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(280)]
_JOB = """
import json, sys
from brokerless.spark_collector import Lander, LedgerTable, SparkInput, Windows, run_stream, stop_session
from brokerless.spark_collector.jobs.loss import totals
from brokerless.spark_collector import start_session
master, spool, out = sys.argv[1:4]
fast = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
small = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": fast, "spark.driver.memory": "512m"}
small |= {"spark.driver.extraJavaOptions": fast, "spark.sql.codegen.wholeStage": "false"}
# Wait for both workers' executors, so that both have work however slowly one of them starts.
small |= {"spark.cores.max": "2", "spark.scheduler.minRegisteredResourcesRatio": "1.0"}
small |= {"spark.scheduler.maxRegisteredResourcesWaitingTime": "120s"}
spark = start_session("test", master=master, shuffle_partitions=2, config=small)
rows = SparkInput(paths=(spool,), partitions=4)
lander = Lander(out + "/events")
run_stream(lander.stream(rows, spark), lander, checkpoint=lander.checkpoint)
ledger = LedgerTable(out + "/ledger", Windows(3600.0, 60.0))
run_stream(rows.stream(spark), ledger, checkpoint=ledger.table.checkpoint)
def who(batches):
    import os, time, pyarrow as pa
    for batch in batches:
        time.sleep(1)
        cwd = os.getcwd()
        yield pa.RecordBatch.from_pydict({"where": [cwd] * batch.num_rows})
where = {r["where"] for r in rows.batch(spark).mapInArrow(who, "where string").distinct().collect()}
found = [r.asDict() for r in totals(ledger.loss(spark, settle_s=0)).collect()]
result = {"where": sorted(where), "loss": found, "rows": lander.landed}
json.dump(result, open(out + "/result.json", "w"))
stop_session(spark)
"""


def test_a_job_on_two_workers(tmp_path: Path) -> None:
    """Landing and loss on a master and two workers give what was spooled, and both workers did some of it."""
    with open_spool(tmp_path / "spool") as spool:
        fill(spool, "p", 0, 500)
        fill(spool, "p", 510, 90)
    info = start_cluster(tmp_path / "cluster", workers=2)
    try:
        assert len(alive_workers(info)) == 2
        said = run_here("spark", "cluster", "status", "--directory", tmp_path / "cluster", "--json").stdout
        assert json.loads(said) == {"url": info.url, "workers": 2, "web": info.web}
        with pytest.raises(UsageError, match="runs already"):
            start_cluster(tmp_path / "cluster")
        (tmp_path / "out").mkdir()
        arguments = [info.url, str(tmp_path / "spool"), str(tmp_path / "out")]
        with killable([sys.executable, "-c", _JOB, *arguments], tmp_path / "job.log") as job:
            job.start()
            job.finish()
        found = json.loads((tmp_path / "out" / "result.json").read_text())
    finally:
        assert stop_cluster(tmp_path / "cluster") == 3
    assert found["rows"] == 590
    assert [(r["topic"], r["sent"], r["received"], r["lost"]) for r in found["loss"]] == [
        ("a", 300, 295, 5),
        ("b", 300, 295, 5),
    ]
    workers = {part for path in found["where"] for part in Path(path).parts if part.startswith("worker-")}
    assert workers == {"worker-0", "worker-1"}
    assert read_cluster(tmp_path / "cluster") is None
    said = run_here("spark", "cluster", "stop", "--directory", tmp_path / "cluster", "--json").stdout
    assert json.loads(said) == {"stopped": 0}


def test_a_cluster_that_cannot_start_names_its_log(tmp_path: Path) -> None:
    """The master's port is taken: the command ends with 1, names the master's log, and leaves nothing running."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        command = [*CLI, "spark", "cluster", "start", "--directory", str(tmp_path / "c"), "--port", port]
        with killable(command, tmp_path / "log") as start:
            start.start()
            assert start.process is not None
            assert start.process.wait(150) == 1
    said = " ".join((tmp_path / "log").read_text().split())
    assert "master ended" in said
    assert "master.log" in said
    assert "Address already in use" in (tmp_path / "c" / "master.log").read_text()
    assert not list((tmp_path / "c").glob("worker*")), "no worker was started without a master"
    assert read_cluster(tmp_path / "c") is None


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("memory", "nonsense", "--memory nonsense: a whole number with m, g or t"),
        ("memory", "0g", "--memory 0g"),
        ("memory", "1024", "--memory 1024"),
        ("cores", 0, "--cores 0: must be at least 1"),
        ("workers", 0, "--workers 0: must be at least 1"),
        ("port", 70000, "--port 70000"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_started(
    tmp_path: Path, option: str, value: object, said: str
) -> None:
    """The error names the option and what it takes; not even the directory is made."""
    with pytest.raises(UsageError, match=re.escape(said)):
        start_cluster(tmp_path / "c", **{option: value})  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()
