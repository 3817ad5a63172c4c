"""The data source and the sink over Spark Connect: the client has no JVM, the server is another process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.spark_collector.session.jar import find_jar
from brokerless.spark_collector.session.java import find_java, java_home
from tests.conftest import Until
from tests.integration.spark_processes import QUICK_JAVA
from tests.spark_collector.spools import fill, open_spool

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,  # a minute on a busy machine: two JVMs and both readers
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).resolve().parent.parent.parent
_CLIENT = """
import json, sys
from pyspark.sql import SparkSession
from brokerless.spark_collector import register
from tests.spark_collector.twins import PythonSource
remote, work = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
register(spark)
spark.dataSource.register(PythonSource)
out = {}
for name in ("brokerless", "brokerless_python"):
    rows = spark.read.format(name).load(work + "/spool").where("topic = 'a'")
    out[name] = rows.count()
    stream = spark.readStream.format(name).load(work + "/spool")
    query = stream.writeStream.format(name).option("checkpointLocation", f"{work}/cp-{name}").trigger(
        availableNow=True).start(f"{work}/{name}")
    query.awaitTermination(120)
    out[name + " copied"] = spark.read.format(name).load(f"{work}/{name}").count()
    with open(work + "/result.json", "w") as file:
        json.dump(out, file)
spark.stop()
"""


def test_a_client_without_a_jvm(tmp_path: Path, until: Until) -> None:
    """Reads, streams and writes in the server's JVM, and through Python there."""
    pytest.importorskip("grpc")
    import pyspark

    jar = find_jar(find_java().home)
    if jar is None:
        pytest.skip("no Java compiler here")
    with open_spool(tmp_path / "spool") as spool:
        fill(spool, "p", 0, 300)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = (
        os.environ
        | QUICK_JAVA
        | {
            "JAVA_HOME": str(java_home()),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": str(ROOT),
        }
    )
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[2]"]
    for key, value in {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.extraClassPath": str(jar),
        "spark.brokerless.python": sys.executable,
        "spark.ui.enabled": "false",
    }.items():
        submit += ["--conf", f"{key}={value}"]
    submit += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(submit, env=environment, stdout=output, stderr=output, cwd=tmp_path)
    try:

        def listening() -> bool:
            assert server.poll() is None, log.read_text()[-3000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listening, 120, "the server")
        done = subprocess.run(
            [sys.executable, "-c", _CLIENT, f"sc://127.0.0.1:{port}", str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:] + log.read_text()[-2000:]
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "brokerless": 150,
        "brokerless copied": 300,
        "brokerless_python": 150,
        "brokerless_python copied": 300,
    }
