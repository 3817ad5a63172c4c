"""`brokerless collect` and `brokerless spark` as users call them."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brokerless.cli import spark as cli_spark
from brokerless.cli.main import main
from brokerless.core import DiskJournal
from brokerless.metrics import MetricsServer, StatsClient
from brokerless.spark_collector.jobs.stream import checkpoint_lock
from tests.conftest import Until
from tests.spark_collector.spools import BIG, fill, open_spool, spooled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMAND = [sys.executable, "-c", "from brokerless.cli.main import main; main()"]


def toml(tmp_path: Path, **extra: str) -> Path:
    lines = {"name": '"c"', **extra}
    file = tmp_path / "collector.toml"
    top = "\n".join(f"{k} = {v}" for k, v in lines.items())
    file.write_text(
        f'{top}\n[spool]\npath = "{tmp_path}/spool"\n[status]\nport = 0\n'
        f'[[input]]\ntype = "journal"\npath = "{tmp_path}/journal"\n'
    )
    return file


def run(*arguments: str) -> int:
    """The exit code of the command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_a_collector_from_start_to_sigterm(tmp_path: Path, until: Until) -> None:
    """It says where its spool and status are, collects, answers over HTTP, and ends in order on SIGTERM."""
    with DiskJournal(tmp_path / "journal", source="p", retention=BIG, fsync="never") as journal:
        journal.append_many("a", [b"x"] * 40)
        command = [*COMMAND, "collect", "--config", str(toml(tmp_path))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith(f"collector c: spool {tmp_path}/spool, status at http://127.0.0.1:")
            url = first.split()[-1]

            def events() -> int:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    found: dict[str, Any] = json.load(answer)
                return int(found["counters"]["events"])

            until(lambda: events() == 40, 30, "the events in the status page")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, out, err) == (0, "collector c: stopped with 40 events\n", "")
    assert len(spooled(tmp_path / "spool")) == 40


def test_a_status_port_in_use_leaves_no_spool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing was created."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = toml(tmp_path)
        file.write_text(file.read_text().replace("port = 0", f"port = {taken.getsockname()[1]}"))
        assert run("collect", "--config", str(file)) == 2
    assert "cannot be used" in capsys.readouterr().err
    assert not (tmp_path / "spool").exists()


def test_wrong_configurations_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, an unknown field, a read-only location: code 2 or 1 and one line that names it."""
    assert run("collect", "--config", str(tmp_path / "none.toml")) == 2
    assert "none.toml" in capsys.readouterr().err
    assert run("collect", "--config", str(toml(tmp_path, nonsense="1"))) == 2
    assert "nonsense" in capsys.readouterr().err
    file = toml(tmp_path)
    file.write_text(file.read_text().replace(f'"{tmp_path}/spool"', '"/proc/nowhere"'))
    assert run("collect", "--config", str(file)) == 1
    error = capsys.readouterr().err
    assert "/proc/nowhere" in error
    assert len(error.splitlines()) == 1
    main_check = toml(tmp_path)
    with contextlib.suppress(SystemExit):
        main(["collect", "--config", str(main_check), "--check"])
    assert "collector c" in capsys.readouterr().out


@pytest.fixture
def same_session(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands use the tests' session instead of starting a JVM each."""

    @contextlib.contextmanager
    def running(*_: object) -> Iterator["SparkSession"]:
        yield spark

    monkeypatch.setattr(cli_spark, "_session", running)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("same_session")
def test_spark_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """land, loss, counts, query and compact over one spool print what is in it, as tables and as JSON."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        fill(spool, "p", 110, 90)
    location, table, ledger = str(tmp_path / "s"), str(tmp_path / "t"), str(tmp_path / "l")

    def call(*arguments: str) -> str:
        with contextlib.suppress(SystemExit):
            main(["spark", *arguments])
        return capsys.readouterr().out

    assert "landed 190 events" in call(
        "land", "--spool", location, "--table", table, "--partition-by", "date"
    )
    shown = call("loss", "--spool", location, "--ledger", ledger, "--by", "topic", "--settle", "0", "--json")
    rows = [json.loads(line) for line in shown.splitlines()]
    assert [(r["topic"], r["sent"], r["received"], r["lost"]) for r in rows] == [
        ("a", 100, 95, 5),
        ("b", 100, 95, 5),
    ]
    assert "lost" in call("loss", "--spool", location, "--ledger", ledger, "--settle", "0")
    counted = [
        json.loads(line)
        for line in call("counts", "--spool", location, "--ledger", ledger, "--json").splitlines()
    ]
    assert sum(r["events"] for r in counted) == 190
    sql = "select topic, count(*) n from events group by topic order by topic"
    assert [json.loads(r)["n"] for r in call("query", sql, "--table", table, "--json").splitlines()] == [
        95,
        95,
    ]
    assert "files fewer" in call("compact", "--table", table)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("same_session")
def test_land_in_an_iceberg_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name in the catalogue that pyiceberg's configuration names; a second run lands nothing."""
    pytest.importorskip("pyiceberg")
    from tests.spark_collector.jobs.test_iceberg import catalog, rows_of, use

    use(monkeypatch, catalog(tmp_path / "warehouse"))
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
    land = ("spark", "land", "--spool", str(tmp_path / "s"), "--format", "iceberg", "--table", "shop.events")
    for expected in (100, 0):
        with contextlib.suppress(SystemExit):
            main([*land, "--checkpoint", str(tmp_path / "cp")])
        assert f"landed {expected} events in shop.events" in capsys.readouterr().out
    assert sorted(rows_of("shop.events")["offset"].to_pylist()) == list(range(100))


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("same_session")
def test_a_spool_that_is_away_is_behind_and_holds_up_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two spools that were landed before, one is gone: the other's events are landed; later those that came back."""
    spools = [tmp_path / "a", tmp_path / "b"]
    for path in spools:
        with open_spool(path) as spool:
            fill(spool, path.name, 0, 100)
    land = ["spark", "land", "--table", str(tmp_path / "t"), *(f"--spool={path}" for path in spools)]
    for path, expected in ((None, 200), (spools[0], 50), (None, 0)):
        if path is not None:
            with open_spool(spools[1]) as spool:
                fill(spool, "b", 100, 50)
            path.rename(tmp_path / "elsewhere")
        elif (tmp_path / "elsewhere").exists():
            (tmp_path / "elsewhere").rename(spools[0])
        assert run(*land) == 0
        assert f"landed {expected} events" in capsys.readouterr().out


def test_land_refuses_before_spark_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Impossible partitions, tables and combinations: code 2, one line, and no JVM."""

    def started(*_: object) -> None:
        pytest.fail("Spark was started")

    monkeypatch.setattr(cli_spark, "start_session", started)
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 10)
    land = ("spark", "land", "--spool", str(tmp_path / "s"))
    table = str(tmp_path / "t")
    for arguments, word in (
        (("--table", table, "--partition-by", "nope"), "nope"),
        (("--table", "hdfs://a/b"), "hdfs://a/b"),
        (("--table", table, "--endpoint", "tcp://h:1", "--spool", "hdfs://a/b"), "file://"),
        (("--table", table, "--conf", "memory=1g"), "--conf"),
        (("--table", "s3://bucket/t", "--compact", "--format", "parquet"), "--compact"),
        (("--table", table, "--format", "parquet", "--partition-by", "data"), "data"),
    ):
        assert run(*land, *arguments) == 2
        error = capsys.readouterr().err
        assert word in error
        assert len(error.splitlines()) == 1
    commands = (
        ("land", "--table", table),
        ("counts", "--ledger", table),
        ("loss", "--ledger", table),
        ("query", "select 1"),
        ("metrics",),
    )
    for place in (f"{tmp_path}/none", f"{tmp_path}/none/*", f"file://{tmp_path}/none"):
        for command in commands:
            assert run("spark", *command, "--spool", place) == 2
            assert f"{tmp_path}/none" in capsys.readouterr().err


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.usefixtures("same_session")
def test_the_metrics_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], until: Until) -> None:
    """`spark metrics` prints what a daemon's journal holds: by name, as JSON and as a table."""
    server = MetricsServer(udp=["127.0.0.1:0"], backends=[f"journal:{tmp_path / 'j'}"], flush_s=0.2)
    server.start()
    try:
        host, _, port = server.addresses["udp"][0].rpartition(":")
        with StatsClient(host, int(port), flush_s=0.02, heartbeat_s=0.05) as client:
            for _ in range(250):
                client.incr("orders.paid")
            client.gauge("queue", 7)
        until(
            lambda: server.receive_counters()["datagrams"] >= client.counters.datagrams, 30, "all datagrams"
        )
        until((tmp_path / "j" / "meta.json").exists, 30, "the daemon's journal")
    finally:
        server.stop()

    def call(*arguments: str) -> str:
        with contextlib.suppress(SystemExit):
            main(["spark", *arguments])
        return capsys.readouterr().out

    shown = call("metrics", "--spool", str(tmp_path / "j"), "--name", "orders", "--window", "86400", "--json")
    rows = [json.loads(line) for line in shown.splitlines()]
    assert {r["name"] for r in rows} == {"orders.paid"}
    assert sum(r["corrected"] for r in rows) == 250
    assert all(r["low"] <= r["corrected"] <= r["high"] for r in rows)
    call("land", "--spool", str(tmp_path / "j"), "--table", str(tmp_path / "t"))
    printed = call("metrics", "--table", str(tmp_path / "t"))
    assert "orders.paid" in printed
    assert "queue" in printed
    assert run("spark", "metrics") == 2


@pytest.mark.usefixtures("same_session")
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_spark_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No input, no table, wrong SQL: code 2 and one line."""
    for arguments, said in (
        (["land", "--table", str(tmp_path / "t")], "--spool"),
        (["query", "select 1"], "--table"),
        (["query", "select 1", "--table", str(tmp_path / "t")], "not a landed table"),
        (["compact", "--table", str(tmp_path / "t")], "not a landed table"),
        (["cluster", "status", "--directory", str(tmp_path)], "no cluster"),
    ):
        assert run("spark", *arguments) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1


@pytest.mark.usefixtures("same_session")
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_counts_beside_a_job_that_writes_the_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows what the other job's ledger has, says so, and adds nothing to it."""
    location, ledger = str(tmp_path / "s"), str(tmp_path / "l")
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        main_quietly("spark", "loss", "--spool", location, "--ledger", ledger)
        capsys.readouterr()
        fill(spool, "p", 150, 50)
    with checkpoint_lock(str(tmp_path / "l" / "_brokerless" / "checkpoint")):
        main_quietly("spark", "counts", "--spool", location, "--ledger", ledger, "--json")
        shown = capsys.readouterr()
        assert "another job" in shown.err
        assert sum(json.loads(line)["events"] for line in shown.out.splitlines()) == 100
        assert run("spark", "loss", "--spool", location, "--ledger", ledger, "--follow") == 2
        capsys.readouterr()
    main_quietly(
        "spark", "loss", "--spool", location, "--ledger", ledger, "--settle", "0", "--by", "topic", "--json"
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(r["lost"] for r in rows) == 50


def main_quietly(*arguments: str) -> None:
    with contextlib.suppress(SystemExit):
        main(list(arguments))
