"""JUnit XML from rows made by hand."""

import xml.etree.ElementTree as ET
from pathlib import Path

from evidence_builder import cell

from brokerless.losstest.analysis.expect import Expectation
from brokerless.losstest.evidence.event_log import EventLog, plain
from brokerless.losstest.evidence.evidence import load
from brokerless.losstest.harness.run_directory import Run
from brokerless.losstest.model import Row, to_json
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


def test_foreign_text_makes_no_unreadable_file(tmp_path: Path) -> None:
    """An error with control characters and lone surrogates in it is told without them: XML has no room for those."""
    said = "\x1b[31mno\x00 \udc80"
    log = EventLog(tmp_path / "supervisor.jsonl")
    log.write("error", text=plain(said))
    log.close()
    (tmp_path / "cell.json").write_bytes(to_json(cell()))
    (tmp_path / "producer-0.1.jsonl").write_text('{"t":1,"what":"error","text":"\\u001b[1mworse"}\n')
    row = Row(transport="t", scenario="kill", seed=1, verdict="fail", problems=load(tmp_path).problems)
    case = ET.fromstring(junit(Run(rows=[row]))).find("testcase")
    assert case is not None
    assert case.find("failure").get("message") == " [31mno   ; producer-0.1:  [1mworse"  # type: ignore[union-attr]
