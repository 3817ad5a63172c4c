"""JUnit XML from rows made by hand."""

import xml.etree.ElementTree as ET

from brokerless.losstest.analysis.expect import Expectation
from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.model import Row
from brokerless.losstest.report.junit import junit


def test_verdicts_become_results() -> None:
    """A failed run is a failure with its problems, an unknown or unfinished one an error; findings are its output."""
    rows = [
        Row(transport="t", scenario="kill", seed=1, verdict="pass", findings=["says overflow, was offline"]),
        Row(transport="t", scenario="kill", seed=2, verdict="fail", problems=["lost <3>"]),
        Row(transport="t", scenario="late", seed=1),
    ]
    planned = ["t/kill/1", "t/kill/2", "t/late/1", "t/stop/1"]
    suite = ET.fromstring(junit(Run(rows=rows, planned=planned)))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "2")
    cases = {case.get("name"): case for case in suite}
    assert cases["kill[1]"].find("system-out").text == "says overflow, was offline"
    assert cases["kill[2]"].find("failure").get("message") == "lost <3>"
    assert cases["stop[1]"].find("error").get("message") == "not finished"


def test_expectations_are_results_too() -> None:
    """One that is met is a case, one that is not a failure that names the runs; of what is unknown it is an error."""
    rows = [
        Row(transport="t", scenario="kill", seed=1, verdict="pass", accepted=9, lost=3),
        Row(transport="t", scenario="late", seed=1),
    ]
    texts = ("accepted > 0 when scenario == kill", "lost == 0", "lost < 1 when scenario == late")
    outcomes = [Expectation(text).check(rows) for text in texts]
    suite = ET.fromstring(junit(Run(rows=rows, planned=["t/kill/1", "t/late/1"]), outcomes))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "2")
    cases = {case.get("name"): case for case in suite if case.get("classname") == "expect"}
    assert list(cases[texts[0]]) == []
    assert cases[texts[1]].find("failure").get("message") == "t · kill · seed 1: lost 3"
    assert cases[texts[2]].find("error").get("message") == "undecided (1 runs)"
