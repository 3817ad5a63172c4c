"""The documentation's site, as `make docs` built it: `make check` runs this, and says where it is."""

import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

SITE = Path(os.environ.get("BROKERLESS_SITE", ""))
if not os.environ.get("BROKERLESS_SITE"):
    pytest.skip("`make check` sets BROKERLESS_SITE to the place of the built site", allow_module_level=True)
# What a browser fetches by itself; where a reader may click is another matter.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}


class Fetches(HTMLParser):
    """What a page loads, and its identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        target = given.get(FETCHED.get(tag, ""))
        if target and given.get("rel") not in ("canonical", "alternate"):
            self.targets.append(target)


def read(page: Path) -> Fetches:
    found = Fetches()
    found.feed(page.read_text("utf-8"))
    return found


def test_no_page_loads_anything_from_another_host() -> None:
    """No fonts, scripts or pictures of others: it is read from a disk, and by whoever has no network."""
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for target in read(page).targets:
            assert "//" not in target, (page, target)
            if not target.startswith(("data:", "#")):
                where = (page.parent / target.partition("?")[0].partition("#")[0]).resolve()
                # The page for what is not found knows its own place only when it is served.
                assert where.exists() or page.name == "404.html", (page, target)


def test_the_reference_has_every_public_name() -> None:
    """Of every transport, with its parameters; and every command."""
    from brokerless import direct, metrics, multicast, webhooks

    ids = read(SITE / "reference" / "api.html").ids
    for module in (direct, metrics, multicast, webhooks):
        missing = [name for name in module.__all__ if f"{module.__name__}.{name}" not in ids]
        assert not missing, missing
    text = (SITE / "reference" / "cli.html").read_text("utf-8")
    for words in ("losstest", "--from", "webhooks", "exit codes"):
        assert words.lower() in text.lower()
