"""The rows as JUnit XML, for CI systems that show tests: a test case per run."""

import xml.etree.ElementTree as ET  # written, never read
from collections.abc import Sequence

from brokerless.losstest.analysis.expect import Outcome
from brokerless.losstest.harness.run_directory import Run

FIGURES = ("accepted", "lost", "lost_percent", "duplicates", "recovery_s", "backlog_clear_s")


def junit(run: Run, outcomes: Sequence[Outcome] = ()) -> bytes:
    """One test suite: a case per run and one per expectation.

    `fail` or not met is a failure; `unknown`, undecided or never finished is an error.
    """
    failed = sum(row.verdict == "fail" for row in run.rows) + sum(one.word == "NOT MET" for one in outcomes)
    unknown = sum(row.verdict == "unknown" for row in run.rows) + sum(
        one.word == "undecided" for one in outcomes
    )
    total = len(run.rows) + run.unfinished + len(outcomes)
    counts = {"tests": total, "failures": failed, "errors": unknown + run.unfinished}
    suite = ET.Element("testsuite", {"name": "losstest", **{name: str(n) for name, n in counts.items()}})
    for row in run.rows:
        names = {"classname": row.transport, "name": f"{row.scenario}[{row.seed}]"}
        case = ET.SubElement(suite, "testcase", {**names, "time": f"{row.duration_s:.3f}"})
        properties = ET.SubElement(case, "properties")
        for name in FIGURES:
            ET.SubElement(properties, "property", {"name": name, "value": str(getattr(row, name))})
        if row.verdict != "pass":
            kind = "failure" if row.verdict == "fail" else "error"
            ET.SubElement(case, kind, {"message": "; ".join(row.problems) or row.verdict})
        if row.findings:
            ET.SubElement(case, "system-out").text = "\n".join(row.findings)
    done = {f"{row.transport}/{row.scenario}/{row.seed}" for row in run.rows}
    for key in run.planned:
        if key not in done:
            transport, scenario, seed = key.rsplit("/", 2)
            case = ET.SubElement(suite, "testcase", {"classname": transport, "name": f"{scenario}[{seed}]"})
            ET.SubElement(case, "error", {"message": "not finished"})
    for one in outcomes:
        case = ET.SubElement(suite, "testcase", {"classname": "expect", "name": one.text})
        if not one.met:
            runs = [
                f"{row.transport} · {row.scenario} · seed {row.seed}: lost {row.lost}" for row in one.unmet
            ]
            kind = "failure" if one.word == "NOT MET" else "error"
            ET.SubElement(case, kind, {"message": "; ".join(runs) or f"{one.word} ({one.rows} runs)"})
    text: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text
