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
import os, sys
from brokerless.spark_collector.session.session import QUICK, start_session, stop_session
first, second, path = sys.argv[1:4]
for pure in (first, second):
    os.environ["BROKERLESS_PURE"] = pure
    spark = start_session("t", master="local[1]", config=QUICK)
    print(spark.read.format("brokerless").load(path).count())
    stop_session(spark)
"""


@pytest.mark.parametrize(("first", "second"), [("1", "0"), ("0", "0")])
def test_one_session_after_the_other(tmp_path: Path, first: str, second: str) -> None:
    """The JVM outlives a session: a second one makes do with what the first one's JVM has."""
    if find_jar(find_java().home) is None:
        pytest.skip("no Java compiler here")
    fill_journal(tmp_path / "j", "p", 30)
    command = [sys.executable, "-c", _TWICE, first, second, str(tmp_path / "j")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=180, env=dict(os.environ)
    )
    assert done.stdout.split() == ["30", "30"], done.stderr


def test_names_that_the_locale_lacks(tmp_path: Path) -> None:
    """In the C locale Java cannot open a path with an umlaut; a home with one, and with a space, does no harm."""
    path = tmp_path / "größe ü"
    fill_journal(path / "j", "p", 30)
    command = [sys.executable, "-c", _TWICE, "0", "0", str(path / "j")]
    env = os.environ | {"LC_ALL": "C", "HOME": str(path), "XDG_CACHE_HOME": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, env=env)
    assert done.stdout.split() == ["30", "30"], done.stderr
