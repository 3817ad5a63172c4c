"""Chromium for tests of pages: one per module, whose tests are kept in one worker by their marks."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def sticking_out(page: Any) -> list[str]:
    """What is drawn beyond the right edge of the card that it belongs to."""
    found: list[str] = page.evaluate(
        """[...document.querySelectorAll('.card')].flatMap(card => [...card.querySelectorAll('summary *')]
            .filter(e => e.getBoundingClientRect().right > card.getBoundingClientRect().right)
            .map(e => `${card.dataset.kind}: ${e.textContent || e.tagName}`))"""
    )
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running browser; every page of `new_page` has cookies and storage of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield launched
        launched.close()
