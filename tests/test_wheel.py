"""The wheel is what users get: `make check` runs this, and some of core's tests, on the built one."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = os.environ.get("BROKERLESS_WHEEL")
if not SITE:
    pytest.skip("`make check` sets BROKERLESS_WHEEL to the place of the built wheel", allow_module_level=True)


@pytest.mark.parametrize(
    "package",
    ["core", "direct", "multicast", "webhooks", "metrics", "spark_collector", "losstest", "console", "cli"],
)
def test_the_package_is_imported_from_the_wheel(package: str) -> None:
    """Every package, with its typing marker, is in the wheel, and this run uses that one."""
    module = importlib.import_module(f"brokerless.{package}")
    assert module.__file__ is not None
    folder = Path(module.__file__).parent
    assert folder == Path(str(SITE)).resolve() / "brokerless" / package
    assert (folder / "py.typed").exists()


EMPTY_PROJECT = """
import brokerless.losstest

def test_a_killed_consumer_misses_datagrams_and_only_while_it_is_away(losstest):
    assert brokerless.losstest.__file__.startswith(SITE)
    losstest.run("udp", "kill", rate=200, offline="400ms").expect("lost > 0", unattributed=0)
"""


def test_the_pytest_plugin_in_an_empty_project(tmp_path: Path) -> None:
    """pytest finds the fixture by itself, and its runs the files that they need: nothing comes from the sources."""
    site = str(Path(str(SITE)).resolve())
    (tmp_path / "test_it.py").write_text(f"SITE = {site!r}\n{EMPTY_PROJECT}")
    words = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", "j.xml"]
    env = os.environ | {"PYTHONPATH": site}
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losstest.udp.kill.1.lost" in (tmp_path / "j.xml").read_text()
