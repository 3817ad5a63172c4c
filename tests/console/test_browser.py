"""The console in a real browser, while real processes run, die and come back."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.direct import Publisher, Worker
from tests.browser import browser, needs_browser, sticking_out

__all__ = ["browser"]

pytestmark = [needs_browser, pytest.mark.xdist_group("console")]
CONSUMER = """
import json, signal, sys
from brokerless.direct import Subscriber
with Subscriber(sys.argv[1], start="cursor", cursor=sys.argv[2]) as sub:
    signal.signal(signal.SIGTERM, lambda *_: sub.stop())
    for event in sub:
        pass
    account = sub.ledger.account()
    print(json.dumps([account.accepted, account.delivered, account.pending, account.lost]))
"""


def brokerless(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "brokerless.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def consumer(address: str, cursor: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", CONSUMER, address, str(cursor)], stdout=subprocess.PIPE)


@pytest.fixture
def presence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKERLESS_PRESENCE", str(tmp_path / "presence"))


@pytest.fixture
def console(presence: None) -> Iterator[str]:
    """The address of a console in a process of its own."""
    process = brokerless("console", "--port", 0, "--json")
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()


@pytest.fixture
def stop() -> threading.Event:
    """Set it, and nothing more is published."""
    return threading.Event()


@pytest.fixture
def running(tmp_path: Path, presence: None, stop: threading.Event) -> Iterator[Publisher]:
    """A publisher that sends all the time, and one that forgets too early for its group."""
    tiny = MemoryJournal(retention=Retention(max_events=20))
    with (
        Publisher("tcp://127.0.0.1:*", source="orders", journal=DiskJournal(tmp_path / "j")) as publisher,
        Publisher("tcp://127.0.0.1:*", source="forgetful", journal=tiny) as forgetful,
    ):
        with Worker(forgetful.address, group="late", on_loss=lambda _: None) as worker:
            forgetful.publish("t", b"first")
            delivery = worker.receive(timeout=30)
            assert delivery is not None
            delivery.ack()

        def send() -> None:
            while not stop.wait(0.02):
                publisher.publish("orders.eu", b"x" * 50)
                forgetful.publish("t", b"y")

        sender = threading.Thread(target=send)
        sender.start()
        yield publisher
        stop.set()
        sender.join()


def test_a_killed_consumer_is_red_falls_behind_and_catches_up(
    console: str,
    running: Publisher,
    browser: Any,
    tmp_path: Path,
    until: Callable[..., None],
    stop: threading.Event,
) -> None:
    """Within seconds, with lag that grows; the restarted one repairs it; the page's figures are the ledger's."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    foreign: list[str] = []
    page.on("request", lambda r: None if r.url.startswith((console, "data:")) else foreign.append(r.url))
    first = consumer(running.address, tmp_path / "cursor")
    second = None
    try:
        page.goto(console)
        alive = '.card.up[data-kind="direct.subscriber"]'
        page.wait_for_selector(alive, timeout=60_000)
        until(lambda: page.evaluate("document.querySelector('#edges text') !== null"), timeout=60)
        # A consumer that never announced a position has an unknown lag for ever.
        until(lambda: "lag –" not in page.text_content(f"{alive} .figures"), timeout=60)
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        page.wait_for_selector('.card.dead[data-kind="direct.subscriber"]', timeout=60_000)

        def lag() -> int:
            text = page.text_content('.card.dead[data-kind="direct.subscriber"] .figures')
            return int(text.partition("lag ")[2].split(" ")[0].replace(",", "").replace("–", "0"))

        until(lambda: lag() > 20, timeout=60)
        before = lag()
        until(lambda: lag() > before, timeout=60)
        cells = "r => [r.cells[0], r.cells[8]].map(c => c.textContent)"
        behind = dict(page.evaluate(f"[...document.querySelectorAll('#journals tbody tr')].map({cells})"))
        # Who keeps its own position is behind, too.
        assert re.fullmatch(r"\S*cursor\S* [\d,]+", behind["orders"]), behind
        second = consumer(running.address, tmp_path / "cursor")
        page.wait_for_selector(alive, timeout=60_000)

        row = "r => /consumer killed.*repaired/.test(r.textContent)"
        repaired = f"[...document.querySelectorAll('#losses tr')].some({row})"
        until(lambda: page.evaluate(repaired), timeout=60)
        until(lambda: page.evaluate("document.querySelectorAll('#accounting .good').length > 1"), timeout=60)
        assert "DOES NOT BALANCE" not in page.text_content("#accounting")
        assert "late" in page.text_content("#groups")
        assert re.search(r"evicted\d[\d,]* to \d", page.text_content("#losses"))  # by reason, with its range
        assert "forgetful" in page.text_content("#journals")
        stop.set()

        def shown() -> list[int]:
            """The consumer's line under Accounting: accepted, delivered, pending, lost."""
            cells = "r => [...r.cells].map(c => c.textContent)"
            rows = page.evaluate(f"[...document.querySelectorAll('#accounting tbody tr')].map({cells})")
            name = str(tmp_path / "cursor").rpartition("/")[2]
            (row,) = [row for row in rows if row[0].startswith("direct.subscriber") and name in row[0]][-1:]
            return [int(cell.replace(",", "")) for cell in row[1:5]]

        # What the page says is what was published, and what the consumer's own ledger says at its end.
        running.flush()
        until(lambda: shown()[:2] == [running.journal.next] * 2, timeout=60)
        figures = shown()
        second.send_signal(signal.SIGTERM)
        assert json.loads(second.communicate(timeout=60)[0]) == figures
        assert figures[2:] == [0, 0]
    finally:
        for process in [first, second]:
            if process is not None:
                process.kill()
                process.communicate()
    assert not errors
    assert not foreign


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_fits(
    console: str, running: Publisher, browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    """No sideways scrolling of the page, verdicts in sight; sections can be reached with the keyboard."""
    process = consumer(running.address, tmp_path / "cursor")
    try:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto(console)
        page.wait_for_selector('.card.up[data-kind="direct.subscriber"]', timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.wait_for_selector("#accounting td.state", timeout=60_000)
        assert not sticking_out(page)
        edges = "[...document.querySelectorAll('td.state')].map(c => c.getBoundingClientRect().right - innerWidth)"
        assert max(page.evaluate(edges)) <= 0  # green or red is in sight, also where the table scrolls
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "A"
        page.click("details.card summary")
        page.wait_for_selector("details.card[open] dl")
        target = Path("build") / "console"
        target.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=target / f"console-{width}-{scheme}.png", full_page=True)
    finally:
        process.kill()
        process.communicate()


def test_a_hundred_components(console: str, presence: None, browser: Any, until: Callable[..., None]) -> None:
    """All of them are on the page, and an update still takes little time."""
    from brokerless.core.presence import announce

    announced = [
        announce("direct.publisher", f"source-{n}", [f"tcp://h:{n}"], lambda n=n: {"next": n})
        for n in range(50)
    ]
    announced += [
        announce(
            *("direct.subscriber", f"reader-{n}", [f"tcp://h:{n}"]),
            lambda n=n: {"positions": {f"source-{n}": [0, 0]}},
        )
        for n in range(50)
    ]
    try:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(console)
        until(lambda: page.evaluate("document.querySelectorAll('.card').length") == 100, timeout=60)
        until(lambda: page.evaluate("document.querySelectorAll('#edges path').length") == 50, timeout=60)
        took = page.evaluate(
            "(() => { const t = performance.now(); draw(latest); return performance.now() - t; })()"
        )
        assert took < 2000
        page.keyboard.press("/")
        page.keyboard.type("source-4")
        assert page.evaluate("document.querySelectorAll('.card').length") == 11  # 4, and 40 to 49
        page.keyboard.press("Escape")
        assert page.evaluate("document.querySelectorAll('.card').length") == 100
        page.keyboard.press("5")
        until(lambda: page.evaluate("location.hash") == "#groups-title", timeout=30)
    finally:
        for each in announced:
            each.close()
