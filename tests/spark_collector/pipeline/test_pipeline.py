"""One TOML file becomes processes on this machine, lines for spark-submit, and manifests for Kubernetes."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from brokerless.cli.main import app
from brokerless.core import DiskJournal
from brokerless.core.config import parse_toml
from brokerless.core.errors import ConfigError
from brokerless.core.journal.meta import META
from brokerless.direct import Publisher
from brokerless.spark_collector.pipeline import supervisor
from brokerless.spark_collector.pipeline.commands import (
    Command,
    collector_commands,
    compact_commands,
    job_commands,
    submit_lines,
)
from brokerless.spark_collector.pipeline.config import PipelineConfig
from brokerless.spark_collector.pipeline.manifests import manifests
from brokerless.spark_collector.pipeline.supervisor import Supervisor
from tests.conftest import Until
from tests.spark_collector.spools import BIG, spooled

CLI = [sys.executable, "-m", "brokerless.cli"]
CLOUD = """
name = "shop"
[[collector]]
name = "one"
[collector.spool]
path = "/var/lib/brokerless/spool"
[collector.spool.remote]
url = "s3://bucket/spools/one"
[collector.status]
host = "0.0.0.0"
[[collector.input]]
type = "direct"
addresses = ["tcp://orders:5555"]
[[land]]
table = "s3://bucket/events"
checkpoint = "/var/lib/brokerless/checkpoint"
json_schema = "a int, b string"
dedupe = true
[[loss]]
ledger = "s3://bucket/ledger"
checkpoint = "/var/lib/brokerless/checkpoint"
fail_on_data_loss = false
[[compact]]
table = "s3://bucket/events"
vacuum_hours = 200
[spark]
master = "spark://master:7077"
conf = { "spark.executor.memory" = "2g" }
"""


def accepted(arguments: list[str]) -> None:
    """The command line takes these arguments."""
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_commands_and_lines() -> None:
    """Every command parses, says what the file says, and reads the collectors' tiers."""
    config = parse_toml(CLOUD, PipelineConfig)
    commands = [
        *collector_commands(config, "/etc/shop.toml"),
        *job_commands(config),
        *compact_commands(config),
    ]
    for command in commands:
        accepted(command.arguments)
    collector, land, loss, compact = (" ".join(command.arguments) for command in commands)
    assert "--name one" in collector
    assert "--spool s3://bucket/spools/one --follow" in land
    assert "--json-schema a int, b string" in land
    assert "--no-fail-on-data-loss" in loss
    assert "--vacuum 200" in compact
    assert all("--conf spark.executor.memory=2g" in job for job in (land, loss))
    lines = [shlex.split(line) for line in submit_lines(config, script="/x/__main__.py", jar="/x/b.jar")]
    assert [line[:3] for line in lines] == [["spark-submit", "--master", "spark://master:7077"]] * 2
    for line in lines:
        assert "spark.executor.memory=2g" in line
        assert line[line.index("--jars") + 1] == "/x/b.jar"
        accepted(line[line.index("/x/__main__.py") + 1 :])


ICEBERG = CLOUD.replace(
    'table = "s3://bucket/events"\ncheckpoint', 'table = "shop.events"\nformat = "iceberg"\ncheckpoint'
).replace('[[compact]]\ntable = "s3://bucket/events"\nvacuum_hours = 200\n', "")


def test_an_iceberg_table() -> None:
    """Its name in the catalogue goes to the command, which takes it, and to manifests, which need no URL."""
    config = parse_toml(ICEBERG, PipelineConfig)
    land = job_commands(config)[0].arguments
    accepted(land)
    assert "--table shop.events" in " ".join(land)
    assert "--format iceberg" in " ".join(land)
    assert any("--format" in str(each) for each in manifests(config, ICEBERG))


def test_manifests_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They follow the schemas of Kubernetes; each collector and job has a volume where it writes."""
    import kubernetes_validate

    (tmp_path / "shop.toml").write_text(CLOUD)
    app(["pipeline", "manifests", str(tmp_path / "shop.toml")], result_action="return_value")
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    assert found[0]["data"]["pipeline.toml"] == CLOUD
    sets = [m for m in found if m["kind"] == "StatefulSet"]
    assert [m["metadata"]["name"] for m in sets] == ["shop-collector-one", "shop-land-0", "shop-loss-0"]
    for each in sets:
        (container,) = each["spec"]["template"]["spec"]["containers"]
        accepted(container["args"])
        assert "/var/lib/brokerless" in [m["mountPath"] for m in container["volumeMounts"]]
    (cron,) = (m for m in found if m["kind"] == "CronJob")
    assert cron["spec"]["schedule"] == "0 */1 * * *"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("[[collector]]", "[[wrong]]"), "wrong"),
        (('"s3://bucket/ledger"', "5"), "ledger"),
        (('"spark.executor.memory"', "memory"), "memory"),
        (("[[loss]]", '[[land]]\ntable = "s3://bucket/events"\ncheckpoint = "/c"\n[[loss]]'), "twice"),
    ],
)
def test_mistakes_are_named(change: tuple[str, str], match: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=match):
        parse_toml(CLOUD.replace(*change), PipelineConfig)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (('"iceberg"\ncheckpoint = "/var/lib/brokerless/checkpoint"', '"iceberg"'), r"checkpoint.*Iceberg"),
        (("[spark]", '[[compact]]\ntable = "shop.events"\n[spark]'), "only Delta"),
        (('"iceberg"', '"hudi"'), "hudi"),
        (('format = "iceberg"', 'partition_by = ["dat"]'), "no such column"),
    ],
)
def test_mistakes_about_iceberg_are_named(change: tuple[str, str], match: str) -> None:
    """Also what only one kind of table refuses."""
    assert change[0] in ICEBERG
    with pytest.raises(ConfigError, match=match):
        parse_toml(ICEBERG.replace(*change), PipelineConfig)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (('table = "s3://bucket/events"\ncheck', 'table = "hdfs://n/events"\ncheck'), "hdfs.*file://"),
        (('ledger"\ncheckpoint = "/var/lib/brokerless/checkpoint"', 'ledger"'), "checkpoint: of ledger"),
        (("dedupe = true", "every_s = -1"), "every_s"),
        (("dedupe = true", "max_events = 0"), "max_events"),
        (("dedupe = true", 'spools = ["hdfs://n/s"]'), "hdfs"),
        (("fail_on_data_loss = false", "window_s = 0"), "window_s"),
        (("vacuum_hours = 200", "vacuum_hours = 2"), "vacuum_hours"),
        (('"tcp://orders:5555"', ""), "addresses"),
        (('"tcp://orders:5555"', '"orders:5555"'), "orders:5555"),
        (('"tcp://orders:5555"', '"discover:"'), "discover:"),
    ],
)
def test_mistakes_are_named_before_anything_runs(tmp_path: Path, change: tuple[str, str], match: str) -> None:
    """By the command that only checks, too: a job that can never work would be started again for ever."""
    assert change[0] in CLOUD
    (tmp_path / "shop.toml").write_text(CLOUD.replace(*change))
    with pytest.raises(ConfigError, match=match):
        app(["pipeline", "run", str(tmp_path / "shop.toml"), "--check"], result_action="return_value")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (('[collector.spool.remote]\nurl = "s3://bucket/spools/one"\n', ""), "remote"),
        (('host = "0.0.0.0"', 'host = "127.0.0.1"'), "host"),
        (("s3://bucket/ledger", "/data/ledger"), "ledger"),
        (('checkpoint = "/var/lib/brokerless/checkpoint"\njson', 'checkpoint = "here"\njson'), "absolute"),
    ],
)
def test_what_one_machine_can_and_many_cannot(change: tuple[str, str], match: str) -> None:
    """A file that needs a shared disk is refused as manifests, with the reason."""
    config = parse_toml(CLOUD.replace(*change), PipelineConfig)
    with pytest.raises(ConfigError, match=match):
        manifests(config, "")


def test_what_ends_is_started_again(tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process, one that fails, one that is meant to end; and none is left at the end."""
    monkeypatch.setattr(supervisor, "RETRY", supervisor.Backoff(first_s=0.05, limit_s=0.1))
    count = "import sys, time; open(sys.argv[1], 'a').write('x');"
    commands = [
        Command("stays", ["-c", count + "time.sleep(600)", str(tmp_path / "stays")]),
        Command("fails", ["-c", count + "sys.exit(3)", str(tmp_path / "fails")]),
        Command("again", ["-c", count, str(tmp_path / "again")], 0.3),
    ]

    def starts(name: str) -> int:
        path = tmp_path / name
        return len(path.read_text()) if path.exists() else 0

    stop = threading.Event()
    made = Supervisor([sys.executable], commands)
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    try:
        until(lambda: starts("stays") == 1, 60, "its first start")
        first = made.pids()["stays"]
        os.kill(first, signal.SIGKILL)
        until(lambda: starts("stays") == 2 and starts("fails") >= 2 and starts("again") >= 2, 60, "restarts")
        second = made.pids()["stays"]
        assert second != first
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def pipeline(tmp_path: Path, address: str, more: str = "") -> Path:
    file = tmp_path / "shop.toml"
    file.write_text(
        f"""name = "shop"
[[collector]]
name = "one"
[collector.spool]
path = "{tmp_path / "spool"}"
[collector.status]
port = 0
[[collector.input]]
type = "direct"
addresses = ["{address}"]
{more}"""
    )
    return file


def started(line: str) -> int:
    return int(json.loads(line)["what"].rpartition(" ")[2])


def test_a_collector_is_supervised(tmp_path: Path, until: Until) -> None:
    """Killed, it comes back and goes on; SIGTERM ends all in order; a killed supervisor leaves no process."""
    spool = tmp_path / "spool"

    def events() -> int:
        return len(spooled(spool)) if (spool / META).exists() else 0

    journal = DiskJournal(tmp_path / "p", retention=BIG, fsync="never")
    with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as p:
        command = [*CLI, "pipeline", "run", str(pipeline(tmp_path, p.address)), "--json"]
        for sent, end in ((100, signal.SIGTERM), (200, signal.SIGKILL)):
            p.publish_many("a", [b"x"] * 50)
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                lines = (line for line in process.stdout if "started as" in line)
                pid = started(next(lines))
                os.kill(pid, signal.SIGKILL)
                pid = started(next(lines))
                p.publish_many("a", [b"x"] * 50)
                until(lambda sent=sent: events() == sent, 60, "all events")
                os.kill(process.pid, end)
                process.stdout.read()  # ends when the last process that writes there has ended
                assert process.wait(60) == (0 if end == signal.SIGTERM else -signal.SIGKILL)
    assert sorted(spooled(spool)) == [("p", n) for n in range(200)]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_from_producer_to_table(tmp_path: Path, until: Until) -> None:
    """The collector and three Spark jobs of one file: what was published is landed in Delta and Iceberg and counted,
    the jobs have the file's settings, and Ctrl-C ends all."""
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    table, ledger, warehouse = tmp_path / "events", tmp_path / "ledger", tmp_path / "warehouse"
    warehouse.mkdir()
    where = {"uri": f"sqlite:///{warehouse}/catalog.db", "warehouse": f"file://{warehouse}"}
    jobs = f"""[[land]]
table = "{table}"
every_s = 1
[[land]]
table = "shop.events"
format = "iceberg"
checkpoint = "{tmp_path / "checkpoint"}"
every_s = 1
[[loss]]
ledger = "{ledger}"
every_s = 1
[spark]
master = "local[1]"
conf = {{ "spark.eventLog.enabled" = "true", "spark.eventLog.dir" = "{tmp_path}/log.d" }}
"""
    (tmp_path / "log.d").mkdir()
    catalog = SqlCatalog("default", **where)
    catalog.create_tables()

    def in_iceberg() -> int:
        try:
            return int(catalog.load_table("shop.events").scan().count())
        except (NoSuchNamespaceError, NoSuchTableError):
            return 0

    journal = DiskJournal(tmp_path / "p", retention=BIG, fsync="never")
    with Publisher("tcp://127.0.0.1:0", source="p", journal=journal) as p:
        file = pipeline(tmp_path, p.address, jobs)
        p.publish_many("a", [b"x"] * 500)
        with (tmp_path / "log").open("wb") as log:
            settings = {f"PYICEBERG_CATALOG__DEFAULT__{name.upper()}": value for name, value in where.items()}
            process = subprocess.Popen(
                [*CLI, "pipeline", "run", str(file)], stdout=log, stderr=log, env=os.environ | settings
            )
        try:

            def landed() -> bool:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                there = (table / "_delta_log").exists() and (ledger / "_delta_log").exists()
                return (
                    there
                    and DeltaTable(str(table)).count() == 500
                    and DeltaTable(str(ledger)).count() > 0
                    and in_iceberg() == 500
                )

            until(landed, 240, "the rows in the tables")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(90) == 0
    assert len(list((tmp_path / "log.d").iterdir())) == 3, "a log of each job"
