"""The console in a browser during the real demo: the outage, its repair, Spark, and figures that agree."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser import ARGUMENTS, CHROMIUM, needs_browser, sticking_out

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = "[...document.querySelectorAll('#journals tbody tr')].map(r => [...r.cells].map(c => c.textContent))"


@pytest.mark.slow
@pytest.mark.serial
@needs_browser
def test_the_demo_is_shown_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """The killed collector is red and its lag grows; it comes back, and the page says what was repaired and lost."""
    from playwright.sync_api import sync_playwright

    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "presence"))
    demo = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "demo.py")], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert demo.stdout is not None
    said: list[str] = []

    def read_until(words: str) -> None:
        while True:
            assert demo.stdout is not None
            line = demo.stdout.readline()
            assert line, "".join(said)
            said.append(line)
            if words in line:
                return

    try:
        with sync_playwright() as playwright:
            read_until("to watch")
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
            pages = watch(browser, str(re.findall(r"http://\S+", said[-1])[0]))
            page = pages[0]
            read_until("was killed")
            killed = time.time()
            page.wait_for_selector('.card.dead[data-kind="collector"]', timeout=30_000)
            # By the clock of the console's own look, however late this process or the browser comes to it.
            data = page.request.get(page.url.rstrip("/") + "/data").json()
            noticed = min(each["time"] for each in data["incidents"] if each["reason"] == "consumer killed")
            assert noticed - killed < 3
            subscriber = '.card.dead[data-kind="direct.subscriber"]'
            lags = "[...document.querySelectorAll('.card.dead .figures')].map(f => f.textContent).join()"
            page.wait_for_selector(subscriber, timeout=30_000)
            before = page.evaluate(lags)
            until(lambda: page.evaluate(lags) != before, timeout=30)
            shoot(pages, "outage")
            read_until("is back")
            state = "document.querySelector('#losses').textContent"
            until(lambda: re.search(r"shop.*?consumer killed.*?repaired", page.evaluate(state)), timeout=60)
            until(lambda: re.search(r"forgetfulevicted", page.evaluate(state)), timeout=60)
            read_until("has what can be had")
            journals = {row[0]: row[1:] for row in page.evaluate(ROWS)}
            losses = page.evaluate(state)
            assert "DOES NOT BALANCE" not in page.text_content("#accounting")
            page.wait_for_selector('.card[data-kind="spark.job"]', timeout=120_000)
            # The edge from the collector's spool to the job: a rate while it reads, and no lag when it has all.
            drawn = '#edges path[data-edge="collector spark.job"]'
            rates = f"[...document.querySelectorAll('{drawn}')].map(e => Number(e.dataset.rate))"
            until(lambda: any(rate > 0 for rate in page.evaluate(rates)), timeout=120)
            page.wait_for_selector(f'{drawn}[data-lag="0"]', state="attached", timeout=30_000)
            shoot(pages, "spark")
            said.append(demo.stdout.read())
            browser.close()
        assert demo.wait(60) == 0, "".join(said)
    finally:
        demo.send_signal(signal.SIGINT)  # it ends what it started
        try:
            demo.wait(60)
        finally:
            demo.kill()
            demo.stdout.close()
    # What the page had when the demo said that all was there is what producers and Spark say at the end.
    text = "".join(said)
    summary = re.search(r"forgetful +sent +([\d,]+) .*lost +([\d,]+)", text)
    assert summary is not None
    sent, lost = summary.groups()
    assert number(journals["forgetful"][2]) == number(sent)
    assert number(lost) > 0
    assert f"{lost} lost" in losses


def number(text: str) -> int:
    return int(text.replace(",", ""))


def watch(browser: Any, address: str) -> list[Any]:
    """The page on a desktop and on a phone, light and dark."""
    pages = []
    for width in (1400, 390):
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto(address)
            pages.append(page)
    return pages


def shoot(pages: list[Any], name: str) -> None:
    """Keep what can be seen, for people."""
    target = ROOT / "build" / "console"
    target.mkdir(parents=True, exist_ok=True)
    for page in pages:
        width = page.viewport_size["width"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not sticking_out(page)
        scheme = "dark" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
        page.screenshot(path=target / f"demo-{name}-{width}-{scheme}.png", full_page=True)
