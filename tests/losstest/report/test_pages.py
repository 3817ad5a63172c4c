"""The published pages: of one run, with a verdict for each, and what they call promised is what the code promises."""

from pathlib import Path

from brokerless.losstest import Promise, resolve
from brokerless.losstest.harness.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[3]


def cells(page: str) -> dict[tuple[str, str], str]:
    """What the matrices of a page say, by transport and scenario."""
    found = {}
    scenarios: list[str] = []
    for line in (ROOT / page).read_text().splitlines():
        words = [word.strip().strip("`") for word in line.strip("|").split("|")]
        if line.startswith("| transport | `"):
            scenarios = words[1:]
        elif not line.startswith("|"):
            scenarios = []
        elif scenarios and not line.startswith("| ---"):
            found |= {(words[0], name): value for name, value in zip(scenarios, words[1:], strict=True)}
    return found


def test_the_pages_are_of_one_run() -> None:
    """Loss table and README show what the comparison shows."""
    whole = cells("docs/comparison.md")
    assert len(whole) > 700
    for page in ("docs/loss_table.md", "README.md"):
        part = cells(page)
        assert part
        assert part.items() <= whole.items(), sorted(part.items() - whole.items())


def test_no_run_of_the_pages_broke_a_promise_or_lost_without_a_reason() -> None:
    """That is mended before a page is published. A run that did not rest is shown, and explained on the page."""
    for cell, value in cells("docs/comparison.md").items():
        assert not any(word in value for word in ("✗", "unattributed")), (cell, value)


def test_what_is_called_promised_is_promised_today() -> None:
    """A zero is bold where the code promises it, and nothing is shown that has no meaning any more."""
    for (transport, scenario), value in cells("docs/comparison.md").items():
        traits = resolve(transport).traits
        if value in ("·", "unknown"):
            continue
        assert SCENARIOS[scenario].fits(traits), (transport, scenario)
        promised = traits.promises.get(scenario, Promise()).loss == "none"
        assert promised == (value == "**0**"), (transport, scenario, value)
