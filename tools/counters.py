"""Write docs/counters.md from the declarations in the code; `--check` only compares."""

import importlib
import sys
from pathlib import Path

from brokerless.core.counters import Counters

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "counters.md"
PACKAGES = ("core", "direct", "multicast", "webhooks", "metrics", "spark_collector", "losstest")
HEAD = """# Counters
Every path that drops something increments a counter; a **loss** counter that rises means data was dropped or lost.
In Prometheus text they are named `brokerless_<component>_<name>_total`. This page is made from the declarations in
the code by `python tools/counters.py`.
"""


def page() -> str:
    """The page as it should be."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "(Counters)" in path.read_text():
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                importlib.import_module(f"brokerless.{name}")
    parts = [HEAD]
    for component, kind in sorted(Counters.registry.items()):
        if component.startswith("test."):
            continue
        rows = [f"| `{d.name}` | {'**loss**' if d.loss else ''} | {d.text} |" for d in kind.describe()]
        parts.append(
            "\n".join([f"\n## {component}", "| counter | | what it counts |", "| --- | --- | --- |", *rows])
        )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        if PAGE.read_text() != page():
            sys.exit("docs/counters.md is not what the code declares: run python tools/counters.py")
    else:
        PAGE.write_text(page())
