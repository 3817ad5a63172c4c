"""A session has the data source, whatever came before it in this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brokerless.spark_collector.session.jar import find_jar
from brokerless.spark_collector.session.java import find_java
from tests.spark_collector.spools import fill_journal

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

_TWICE = """
import os, signal, sys
from brokerless.spark_collector.session.session import QUICK, start_session, stop_session
first, second, path = sys.argv[1:4]
signal.signal(signal.SIGINT, own := lambda *_: None)
for pure in (first, second):
    os.environ["BROKERLESS_PURE"] = pure
    spark = start_session("t", master="local[1]", config=QUICK)
    assert signal.getsignal(signal.SIGINT) is own, "PySpark has one that raises"
    print(spark.read.format("brokerless").load(path).count())
    stop_session(spark)
"""


def test_one_session_after_the_other(tmp_path: Path) -> None:
    """A second one makes do with the JVM of the first, which outlives it. Ctrl-C stays the caller's."""
    if find_jar(find_java().home) is None:
        pytest.skip("no Java compiler here")
    fill_journal(tmp_path / "j", "p", 30)
    command = [sys.executable, "-c", _TWICE, "1", "0", str(tmp_path / "j")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=180, env=dict(os.environ)
    )
    assert done.stdout.split() == ["30", "30"], done.stderr


_REFUSED = """
import sys
from brokerless.spark_collector import start_session
from brokerless.spark_collector.session.session import SparkNotStarted
try:
    start_session("t", master="spark//nowhere")
except SparkNotStarted as error:
    print(error)
"""


def test_a_session_that_cannot_be_started_names_the_cause() -> None:
    """In one line, while the JVM can still be asked for it; and the JVM is gone afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.stdout.startswith("Spark cannot be started: Could not parse Master URL"), done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_names_that_the_locale_lacks(tmp_path: Path) -> None:
    """In the C locale Java cannot open a path with an umlaut; a home with one, and with a space, does no harm."""
    path = tmp_path / "größe ü"
    fill_journal(path / "j", "p", 30)
    command = [sys.executable, "-c", _TWICE, "0", "0", str(path / "j")]
    env = os.environ | {"LC_ALL": "C", "HOME": str(path), "XDG_CACHE_HOME": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, env=env)
    assert done.stdout.split() == ["30", "30"], done.stderr
