"""A cluster of hosts: each a network and a mount namespace, so that they share a network and no files.

One Spark master, three workers, a driver, two collectors, four producers and an S3 server. Producers, collectors,
workers and the driver are killed or cut off at random; then everything heals, and the table is compared with what
was accepted.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brokerless.spark_collector.session.java import java_home
from brokerless.spark_collector.session.spark_home import spark_home
from tests.integration.spark_processes import CLI, QUICK_JAVA

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,  # eight JVMs
    pytest.mark.serial,
    pytest.mark.timeout(1800),
]
_PRODUCER = """
import os, sys, time
from brokerless.core import DiskJournal, Retention
from brokerless.direct import Publisher
address, disk, source, count, rate = sys.argv[1:4] + [int(n) for n in sys.argv[4:]]
journal = DiskJournal(disk + "/journal", retention=Retention(max_bytes=1 << 30), fsync="never")
witness = os.open(disk + "/witness", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # a byte for each publish that returned
with Publisher(address, source=source, journal=journal) as publisher:
    accepted, found = os.fstat(witness).st_size, journal.next + journal.staged
    if found < accepted:
        print("LOST", accepted - found, "accepted events", flush=True)
    while (sent := journal.next + journal.staged) < count:
        publisher.publish("ab"[sent % 2], b"%d" % sent)
        os.write(witness, b".")
        time.sleep(1 / rate)
    publisher.flush()
    print("done", flush=True)
    while True:
        time.sleep(3600)
"""
_DRIVER = """
import json, os, sys, time
from brokerless.spark_collector import (
    Lander, LandOptions, LedgerTable, SparkInput, Windows, run_stream, start_session, stop_session)
master, disk, follow = sys.argv[1:]
s3 = json.loads(os.environ["S3"])
address = os.environ["SPARK_LOCAL_IP"]
spark = start_session("campaign", master=master, shuffle_partitions=1, config={
    "spark.driver.host": address, "spark.driver.bindAddress": address, "spark.executor.memory": "512m",
    "spark.driver.memory": "512m", "spark.network.timeout": "60s", "spark.executor.heartbeatInterval": "5s"})
rows = SparkInput(paths=("s3://bucket/spools/*",), storage_options=s3, max_events_per_trigger=2000, partitions=3)
lander = Lander("s3://bucket/events", LandOptions(dedupe=True, storage_options=s3))
every = 0.5 if follow == "follow" else None
run_stream(rows.stream(spark), lander, checkpoint=disk + "/land", every_s=every)
ledger = LedgerTable("s3://bucket/ledger", Windows(3600.0), storage_options=s3)
run_stream(rows.stream(spark), ledger, checkpoint=disk + "/ledger")
found = [r.asDict() for r in ledger.loss(spark, settle_s=0).collect()]
names = ("source", "topic", "sent", "received", "lost")
print(json.dumps([[r[name] for name in names] for r in found]), flush=True)
stop_session(spark)
"""
_BUCKET = """
import json, os, boto3
s3 = json.loads(os.environ["S3"])
boto3.client("s3", endpoint_url=s3["aws_endpoint"], region_name="us-east-1", aws_access_key_id="test",
             aws_secret_access_key="test").create_bucket(Bucket="bucket")
"""
_LANDED = """
import json, os, sys
from deltalake import DeltaTable
found = DeltaTable("s3://bucket/events", storage_options=json.loads(os.environ["S3"])).to_pyarrow_table(
    columns=["source", "offset"]).to_pydict()
print(json.dumps([found["source"], found["offset"]]))
"""


class Host:
    """A namespace with an address on the network, a disk of its own, and one process that can be killed."""

    def __init__(self, cluster: "Cluster", name: str, number: int) -> None:
        self.cluster, self.name, self.address = cluster, name, f"10.78.0.{number}"
        self._link = f"h{number}"
        disk = cluster.disk
        self._holder = subprocess.Popen(
            [
                "unshare",
                "-n",
                "-m",
                "sh",
                "-c",
                f"mount -t tmpfs none {disk} && ip link set lo up && echo up && exec sleep 3600",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "up":
            pytest.skip("cannot make namespaces here")
        made = subprocess.run(
            [
                "ip",
                "link",
                "add",
                "name",
                self._link,
                "netns",
                str(cluster.switch.pid),
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(self._holder.pid),
            ],
            capture_output=True,
            check=False,
        )
        if made.returncode:
            pytest.skip("cannot make a network here")
        cluster.in_switch("ip", "link", "set", self._link, "master", "bridge", "up")
        for words in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run([*self._enter(), "ip", *words], check=True)
        self.command: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.log = cluster.logs / f"{name}.log"

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._holder.pid), "-n", "-m"]

    def environment(self) -> dict[str, str]:
        s3 = {
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
            "aws_endpoint": f"http://{self.cluster.hosts['s3'].address}:9000",
            "aws_allow_http": "true",
        }
        return (
            os.environ
            | QUICK_JAVA
            | {
                "S3": json.dumps(s3),
                "SPARK_LOCAL_IP": self.address,
                "JAVA_HOME": str(java_home()),
                "SPARK_HOME": str(spark_home()),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_DAEMON_MEMORY": "256m",
            }
        )

    def start(self, *command: str) -> None:
        """Start its process (again)."""
        self.command = list(command) or self.command
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*self._enter(), *self.command],
                stdout=out,
                stderr=out,
                env=self.environment(),
                start_new_session=True,
            )

    def run(self, *command: str, timeout: float = 300) -> str:
        """Run something that ends; its output."""
        done = subprocess.run(
            [*self._enter(), *command],
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    def kill(self) -> None:
        """All of its processes, at once; the disk stays."""
        if self.process is not None:
            inside = os.readlink(f"/proc/{self._holder.pid}/ns/net")
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    theirs = entry.name.isdigit() and os.readlink(entry / "ns" / "net")
                    if theirs == inside and int(entry.name) != self._holder.pid:
                        os.kill(int(entry.name), signal.SIGKILL)
            self.process.wait()
            self.process = None

    def cut(self, on: bool) -> None:
        """Take its cable out, or put it back."""
        self.cluster.in_switch("ip", "link", "set", self._link, "down" if on else "up")

    def end(self) -> None:
        self.kill()
        self._holder.kill()
        self._holder.wait()


class Cluster:
    """Hosts on one switch."""

    def __init__(self, work: Path) -> None:
        self.disk, self.logs = work / "disk", work / "logs"
        self.disk.mkdir()
        self.logs.mkdir()
        self.hosts: dict[str, Host] = {}
        self.switch = subprocess.Popen(
            [
                "unshare",
                "-n",
                "sh",
                "-c",
                "ip link add bridge type bridge && ip link set bridge up && echo up && exec sleep 3600",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.switch.stdout is not None
        if self.switch.stdout.readline().strip() != "up":
            pytest.skip("cannot make namespaces here")

    def in_switch(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.switch.pid), "-n", *words], check=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    names = ["s3", "master", "w1", "w2", "w3", "driver", "c1", "c2", "p1", "p2", "p3", "p4"]
    try:
        for number, name in enumerate(names, start=1):
            made.hosts[name] = Host(made, name, number)
        yield made
    finally:
        for host in made.hosts.values():
            host.end()
        made.switch.kill()
        made.switch.wait()


def wait_for(ready: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.2)


def answers(host: Host, address: str, port: int) -> bool:
    probe = f"import socket; socket.create_connection(('{address}', {port}), 2)"
    return (
        subprocess.run(
            [*host._enter(), sys.executable, "-c", probe], capture_output=True, check=False
        ).returncode
        == 0
    )


def begin(cluster: Cluster, count: int) -> None:
    """Start everything, each on its host."""
    hosts, disk = cluster.hosts, str(cluster.disk)
    s3, master = hosts["s3"], hosts["master"]
    s3.start(sys.executable, "-m", "moto.server", "-H", s3.address, "-p", "9000")
    wait_for(lambda: answers(s3, s3.address, 9000), 60, "the S3 server")
    s3.run(sys.executable, "-c", _BUCKET)
    java = str(spark_home() / "bin" / "spark-class")
    master.start(
        *(java, "org.apache.spark.deploy.master.Master", "--host", master.address, "--port", "7077"),
        *("--webui-port", "0"),
    )
    wait_for(lambda: answers(master, master.address, 7077), 120, "the master")
    for name in ("w1", "w2", "w3"):
        hosts[name].start(
            *(java, "org.apache.spark.deploy.worker.Worker", "--host", hosts[name].address, "--cores", "1"),
            *("--memory", "700m", "--work-dir", f"{disk}/work", "--webui-port", "0"),
            f"spark://{master.address}:7077",
        )
    producers = [hosts[f"p{n}"] for n in range(1, 5)]
    for host in producers:
        host.start(
            *(
                sys.executable,
                "-c",
                _PRODUCER,
                f"tcp://{host.address}:5555",
                disk,
                host.name,
                str(count),
                "100",
            )
        )
    options = "\n".join(
        f"{key} = {json.dumps(value)}" for key, value in json.loads(s3.environment()["S3"]).items()
    )
    for name in ("c1", "c2"):
        text = f"""name = "{name}"
[spool]
path = "{disk}/spool"
[spool.remote]
url = "s3://bucket/spools/{name}"
close_after_s = 0.5
[spool.remote.storage_options]
{options}
[status]
port = 0
[[input]]
type = "direct"
addresses = {json.dumps([f"tcp://{host.address}:5555" for host in producers])}
"""
        (cluster.logs / f"{name}.toml").write_text(text)
        hosts[name].start(*CLI, "collect", "--config", str(cluster.logs / f"{name}.toml"), "--quiet")
    url = f"spark://{master.address}:7077"
    hosts["driver"].start(sys.executable, "-c", _DRIVER, url, disk, "follow")


def campaign(cluster: Cluster, *, seed: int, faults: int, count: int) -> Counter[str]:
    """Break things at random, heal, drain, compare; returns what was broken how often."""
    rng = random.Random(seed)
    hosts = cluster.hosts
    begin(cluster, count)
    wait_for(lambda: "events" in listed(cluster), 300, "the first rows in the table")
    done: Counter[str] = Counter()
    victims = ["w1", "w2", "w3", "driver", "driver", "c1", "c2", "p1", "p2", "p3", "p4"]
    for _ in range(faults):
        name = rng.choice(victims)
        host = hosts[name]
        if rng.random() < 0.5:
            host.cut(True)
            time.sleep(rng.uniform(0.5, 6))
            host.cut(False)
            done[f"cut {name[0]}"] += 1
        else:
            host.kill()
            time.sleep(rng.uniform(0, 2))
            done[f"kill {name[0]}"] += 1
        if host.process is None or host.process.poll() is not None:
            host.kill()
            host.start()
        time.sleep(rng.uniform(0.5, 4))
    for name, host in hosts.items():
        if host.process is None or host.process.poll() is not None:
            assert name != "s3"
            host.start()
    for n in range(1, 5):
        wait_for(lambda n=n: "done" in hosts[f"p{n}"].log.read_text(), 300, f"the end of p{n}")
    wait_for(lambda: uploaded(cluster, 4 * count), 300, "everything in a tier")
    hosts["driver"].kill()
    url = f"spark://{hosts['master'].address}:7077"
    said = hosts["driver"].run(sys.executable, "-c", _DRIVER, url, str(cluster.disk), "once", timeout=600)
    loss = json.loads(said.splitlines()[-1])
    sources, offsets = json.loads(hosts["s3"].run(sys.executable, "-c", _LANDED))
    expected = Counter({(f"p{p}", n): 1 for p in range(1, 5) for n in range(count)})
    assert Counter(zip(sources, offsets, strict=True)) == expected
    assert {(source, topic) for source, topic, *_ in loss} == {
        (f"p{p}", t) for p in range(1, 5) for t in "ab"
    }
    assert [sum(row[n] for row in loss) for n in (2, 3, 4)] == [4 * count, 4 * count, 0]
    for n in range(1, 5):
        assert "LOST" not in hosts[f"p{n}"].log.read_text()
    return done


def listed(cluster: Cluster) -> str:
    look = (
        "import json, os; from brokerless.spark_collector.tier.object_store import open_store; import obstore; "
        "print(obstore.list_with_delimiter(open_store('s3://bucket', json.loads(os.environ['S3'])))['common_prefixes'])"
    )
    return cluster.hosts["s3"].run(sys.executable, "-c", look)


def uploaded(cluster: Cluster, count: int) -> bool:
    """Whether the tiers together have so many different events."""
    look = (
        "import os; from brokerless.spark_collector import local; "
        "t = local.loss({'path': 's3://bucket/spools/*', 'storageOptions': os.environ['S3']}, settle_s=0, by='topic'); "
        "print(sum(t['received'].to_pylist()))"
    )
    return int(cluster.hosts["s3"].run(sys.executable, "-c", look)) >= count


def test_a_few_faults(cluster: Cluster) -> None:
    """The short form: eight faults."""
    assert campaign(cluster, seed=1, faults=8, count=4000).total() == 8


def test_many_faults(cluster: Cluster) -> None:
    """The long form: sixty faults, of every kind and in every place."""
    done = campaign(cluster, seed=2, faults=60, count=25_000)
    assert done.total() == 60
    assert set(done) == {f"{what} {where}" for what in ("cut", "kill") for where in "wdcp"}
