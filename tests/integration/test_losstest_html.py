"""The HTML report in a real browser: its figures are those of the JSON, in light, dark, on a phone and in print."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser, needs_browser

__all__ = ["browser"]

# One run and one browser for all of them.
pytestmark = [needs_browser, pytest.mark.xdist_group("report")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A real run with losses of several kinds, as HTML and as JSON."""
    directory = tmp_path_factory.mktemp("html")
    command = [
        sys.executable,
        "-m",
        "brokerless.cli",
        "losstest",
        "run",
        "--rate",
        "200",
        "--duration",
        "1.1",
    ]
    command += ["--offline", "0.5", "--transport", "udp", "--transport", "tcp", "--transport", "zmq-pubsub"]
    command += ["--scenario", "kill", "--scenario", "pause-long", "--scenario", "loss", "--repeat", "2"]
    command += ["--json-file", "r.json", "--html", "r.html"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "r.html", json.loads((directory / "r.json").read_text())["rows"]


def test_figures_on_the_page(browser: Any, made: tuple[Path, list[dict[str, Any]]]) -> None:
    """Every cell of the matrix and every figure of every run is what the JSON says; no script error."""
    path, rows = made
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    cells = page.eval_on_selector_all(
        ".matrix td[data-lost]",
        "all => all.map(e => [e.dataset.transport, e.dataset.scenario, +e.dataset.lost])",
    )
    expected: dict[tuple[str, str], int] = {}
    for row in rows:
        if not row["control"]:
            key = (row["transport"], row["scenario"])
            expected[key] = expected.get(key, 0) + row["lost"]
    assert {(transport, scenario): lost for transport, scenario, lost in cells} == expected
    page.eval_on_selector_all("details", "all => all.forEach(run => { run.open = true; })")
    for row in rows:
        run = page.locator(f"[data-run='{row['transport']}|{row['scenario']}|{row['seed']}']")
        for measure in ("offered", "accepted", "committed", "lost", "duplicates", "pending"):
            shown = run.locator(f"[data-m={measure}]").text_content()
            assert int(shown.replace(",", "")) == row[measure], (row["transport"], row["scenario"], measure)
    tile = page.locator("[data-tile='events lost'] b").text_content()
    assert int(tile.replace(",", "")) == sum(expected.values())
    assert errors == []
    page.close()


def test_a_cell_leads_to_its_timeline(browser: Any, made: tuple[Path, list[dict[str, Any]]]) -> None:
    """Clicking a cell opens the run; its timeline shows sent, committed, the fault and what was lost."""
    page = browser.new_page()
    page.goto(made[0].as_uri())
    page.click("td[data-transport=udp][data-scenario=kill] a")
    run = page.locator("details[id='r-udp-kill']")
    run.locator("svg").wait_for(state="visible", timeout=5000)
    assert run.get_attribute("open") is not None
    for part in ("sent", "delivered", "fault", "lost"):
        assert run.locator(f"svg .{part}").count() >= 1, part
    assert run.locator("svg .lost.offline").count() >= 1  # a colour per reason
    assert "Promises nothing: it must lose" in run.text_content()
    box = run.locator("svg .fault").bounding_box()
    chart = run.locator("svg").bounding_box()
    assert 0.2 < box["width"] / chart["width"] < 0.8
    page.close()


def test_zoom_and_hover(browser: Any, made: tuple[Path, list[dict[str, Any]]]) -> None:
    """Moving over a timeline reads its figures, dragging zooms in, the button shows the whole run again."""
    page = browser.new_page()
    page.goto(f"{made[0].as_uri()}#r-udp-kill")
    run = page.locator("details[id='r-udp-kill']")
    svg = run.locator("svg")
    svg.wait_for(state="visible", timeout=5000)
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    assert "/s sent" in run.locator(".tip").text_content()
    wide = run.locator("svg .fault").bounding_box()["width"]
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20, steps=4)
    page.mouse.up()
    assert run.locator("figure.zoomed").count() == 1
    run.locator(".whole").click()
    assert run.locator("figure.zoomed").count() == 0
    assert abs(run.locator("svg .fault").bounding_box()["width"] - wide) < 2
    page.close()


def test_filter_sort_and_links(browser: Any, made: tuple[Path, list[dict[str, Any]]]) -> None:
    """What is looked for stays, a column sorts, and the address brings somebody else to the same view."""
    page = browser.new_page()
    page.goto(made[0].as_uri())
    page.fill("#find", "udp kill")
    visible = "all => all.filter(e => !e.hidden).map(e => e.id)"
    assert page.eval_on_selector_all("section.transport", visible) == ["r-udp"]
    page.fill("#find", "")
    page.select_option("#show", "lost")
    assert "r-udp-kill" in page.eval_on_selector_all("details", visible)
    page.click("button[data-sort=loss]")
    first = ".matrix tbody tr:first-child th"
    assert page.locator(first).text_content() == "udp"
    address = page.url
    other = browser.new_page()
    other.goto(address)
    assert other.input_value("#show") == "lost"
    assert other.locator("button[data-sort=loss]").get_attribute("aria-pressed") == "true"
    page.close()
    other.close()


def test_light_dark_and_the_switch(browser: Any, made: tuple[Path, list[dict[str, Any]]]) -> None:
    """The page follows the system's scheme, and the button turns it round."""
    background = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(made[0].as_uri())
        seen[scheme] = page.evaluate(background)
        page.click("#theme")
        seen[f"{scheme} switched"] = page.evaluate(background)
        page.close()
    assert seen["light"] == seen["dark switched"] != seen["dark"] == seen["light switched"]


def test_phone_and_print(browser: Any, made: tuple[Path, list[dict[str, Any]]]) -> None:
    """A phone never scrolls sideways except inside the matrix; print shows what lost something, opened."""
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(made[0].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened = page.eval_on_selector_all("details[open]", "all => all.map(e => e.dataset.run)")
    assert "udp|kill|1" in opened
    assert "udp|none|1" not in opened
    assert len(page.pdf(prefer_css_page_size=True, print_background=True)) > 10_000
    page.close()


def test_it_needs_nothing_else(made: tuple[Path, list[dict[str, Any]]]) -> None:
    """One file: no address of anything outside it."""
    text = made[0].read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "src=" not in text
