"""The fixture that other projects use in their own tests."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
from examples_plain_socket import transport


measured = []


def test_that_holds(losstest):
    measured.append(losstest.run(transport, scenario="kill", rate=200))
    measured[0].expect("lost < 60", unattributed=0)


def test_that_does_not(losstest):
    losstest.run("udp", scenario="late", rate=200, offline="400ms").expect(lost=0)


def test_of_what_is_nowhere(losstest):
    here = type(transport)("x", transport.producer, transport.consumer, transport.traits)
    losstest.run(here)


def test_of_a_scenario_that_is_none(losstest):
    losstest.run(transport, "kil")


def test_of_a_measure_that_is_none():
    measured[0].expect(losst=0)
"""


def test_the_fixture(tmp_path: Path) -> None:
    """A transport of the test's own, a loss that was not expected, a transport that workers cannot find, and mistakes,
    which are told in words and not by our own lines."""
    (tmp_path / "examples_plain_socket.py").write_text((ROOT / "examples/plain_socket.py").read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        "--junitxml",
        "junit.xml",
        "test_it.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "4 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "there is no 'kil'" in done.stdout
    assert "there is no field 'losst'" in done.stdout
    assert "/losstest/" not in done.stdout
    assert "udp · late" in done.stdout
    assert "not met: lost == 0" in done.stdout
    assert "must be a global" in done.stdout
    cases = {case.get("name"): case for case in ET.parse(tmp_path / "junit.xml").iter("testcase")}  # ours
    properties = {one.get("name", ""): one.get("value") for one in cases["test_that_holds"].iter("property")}
    [verdict] = [value for name, value in properties.items() if name.endswith(".verdict")]
    assert verdict == "pass"
