"""Make the tables and charts of docs/benchmarks.md from what `make bench` wrote to build/bench."""

import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
STYLE = """text{font:13px system-ui,sans-serif;fill:#1d2430}.s{fill:#5d6675}
.bar{fill:#6db3a4}.one{stroke:#c0662b;stroke-dasharray:4 3}
@media (prefers-color-scheme:dark){text{fill:#e7eaf0}.s{fill:#98a2b3}.bar{fill:#3f8f80}}"""
LEFT, WIDTH, LINE = 430, 860, 26


def human(value: float) -> str:
    """A figure in three digits."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def chart(rows: list[dict[str, Any]]) -> str:
    """A bar per row that was compared with something; the line is what it was compared with."""
    scale = (WIDTH - LEFT - 70) / max(1.0, *(row["ratio"] for row in rows))
    height = LINE * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
    ]
    for number, row in enumerate(rows):
        y = 8 + number * LINE
        label = f"{row['what']} : {row['against']}"
        label = label if len(label) <= 66 else f"{label[:65]}…"
        wide = row["ratio"] * scale
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect class="bar" x="{LEFT}" y="{y}" width="{wide:.1f}" height="{LINE - 6}"/>')
        parts.append(f'<text x="{LEFT + wide + 6:.1f}" y="{y + 15}">{row["ratio"]:.2f}×</text>')
    one, bottom = LEFT + scale, 8 + LINE * len(rows)
    parts.append(f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="4" y2="{bottom}"/>')
    parts.append(f'<text class="s" x="{one:.1f}" y="{bottom + 16}" text-anchor="middle">1×</text></svg>')
    return "\n".join(parts) + "\n"


def section(result: dict[str, Any]) -> str:
    """A benchmark: what it ran on, the chart of its ratios, and every figure."""
    name, machine = result["name"], result["machine"]
    compared = [row for row in result["rows"] if row["ratio"]]
    words = " ".join([f"bench/{name.partition('-')[0]}.py", *machine["arguments"]])
    lines = [
        f"### {name}",
        f"`{words}`, {machine['time']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{'with' if machine['accelerated'] else 'without'} the C modules, "
        f"load average {machine['load']:.1f} at its end"
        + (": not a quiet machine, so goals may be missed for that." if machine["load"] > 2 else "."),
        "",
    ]
    if compared:
        picture = PAGE.parent / "benchmarks" / f"{name}.svg"
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(chart(compared))
        lines += [f"![{name}: how many times what it is compared with](benchmarks/{name}.svg)", ""]
    lines += ["| what | value | compared with | ratio | goal |", "| --- | ---: | --- | ---: | --- |"]
    for row in result["rows"]:
        ratio = f"{row['ratio']:.2f}×" if row["ratio"] else ""
        goal = row["goal"] + {True: ": met", False: ": **missed**", None: ""}[row["met"]]
        cells = [row["what"], f"{human(row['value'])} {row['unit']}", row["against"], ratio, goal]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    results = [result for result in results if "time" in result["machine"]]
    if not results:
        sys.exit("bench page: nothing in build/bench: run `make bench` first")
    text = PAGE.read_text()
    before = re.findall(rf"^### (\S+)\n(.*?)(?=\n### |\n{END})", text, flags=re.DOTALL | re.MULTILINE)
    sections = {name: f"### {name}\n{rest.rstrip()}" for name, rest in before}  # what was not run now stays
    sections |= {result["name"]: section(result).rstrip() for result in results}
    made = "\n\n".join([BEGIN, *(sections[name] for name in sorted(sections)), END])
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: made, text, flags=re.DOTALL))
    print(f"bench page: {', '.join(result['name'] for result in results)} in {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
