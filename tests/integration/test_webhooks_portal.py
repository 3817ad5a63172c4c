"""The portal in a real browser: register, receive, break the receiver, see the failure, resend, rotate."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import uvicorn

from brokerless.webhooks import (
    AddressPolicy,
    Dispatcher,
    DispatcherConfig,
    Schedule,
    registration_app,
    verify,
)
from brokerless.webhooks.api import app as api
from tests.browser import browser, needs_browser

__all__ = ["browser"]

pytestmark = [needs_browser, pytest.mark.xdist_group("portal")]
TOKEN = "portal-test-token-0123456789"
# Screenshots to look at are kept here when it is set.
SHOTS = os.environ.get("BROKERLESS_SCREENSHOTS")


OUTER = (
    b"<!doctype html><title>An application</title><iframe style='width:100%;height:850px;border:0'></iframe>"
    b"<script>document.querySelector('iframe').src = decodeURIComponent(location.hash.slice(1))</script>"
)


class Receiver:
    """A consumer on a real socket that can be broken."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.got.append((dict(self.headers.items()), body))
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(b"<b>broken</b>" if outer.status != 200 else b"ok")

            def do_GET(self) -> None:
                """A page of an application, which shows the portal in a frame."""
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(OUTER)

            def log_message(self, *_args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()


class Portal:
    """A dispatcher and its app, served from a thread."""

    def __init__(self, directory: Path) -> None:
        config = DispatcherConfig(
            policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
            verification="none",
            schedule=Schedule(delays_s=(3600.0,) * 3),
        )
        self.dispatcher = Dispatcher(directory / "o.sqlite", config=config)
        # The pages of another site: the same server by another name.
        app = registration_app(self.dispatcher, auth={TOKEN: "acme"}, embed_in=["http://localhost:*"])
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    def describe(self, topic: str, text: str) -> None:
        loop = self.dispatcher._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(
            self.dispatcher.set_event_type(topic, description=text), loop
        ).result(30)

    def publish(self, body: bytes) -> str:
        return self.dispatcher.publish_sync("order.paid", body, tenant="acme").id

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture
def portal(tmp_path: Path) -> Iterator[Portal]:
    made = Portal(tmp_path)
    yield made
    made.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.mark.timeout(180)
def test_a_day_in_the_portal(portal: Portal, receiver: Receiver, browser: Any) -> None:
    """What a tenant does with its endpoint, by clicks; no request leaves for another host, and nothing is executed that
    a receiver answered.
    """
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    portal.describe("order.paid", "An order was paid")
    page.set_default_timeout(30_000)
    hosts, problems = set(), []
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(portal.url)
    page.fill("#token", "wrong-token-0123456789")
    page.click("text=Sign in >> nth=-1")
    page.wait_for_selector("#note.bad:has-text('not valid')")
    page.fill("#token", TOKEN)
    page.click("#token-form button")

    # Register and receive.
    page.fill("#add [name=url]", receiver.url)
    page.fill("#add [name=topics]", "order.*")
    page.fill("#add [name=description]", "<i>mine</i>")
    page.click("text=Register")
    page.wait_for_selector("#note:has-text('whsec_')")
    secret = page.inner_text("#note").split()[-1]
    page.wait_for_selector("#endpoints .tag.active")
    assert "<i>mine</i>" in page.inner_text("#endpoints")
    page.click("text=Send test")
    page.wait_for_selector("#note:has-text('Test: 200')")
    portal.publish(b'{"order": 1}')
    page.wait_for_selector("#deliveries .tag.delivered")
    verify(receiver.got[-1][0].items(), receiver.got[-1][1], secret)

    # Break the receiver and see the failure.
    receiver.status = 500
    broken = portal.publish(b'{"order": 2}')
    page.wait_for_selector("#deliveries .tag.pending")
    row = f"#deliveries .item[data-id^='{broken}']"
    page.click(f"{row} >> text=Details")
    page.wait_for_selector(f"{row} pre:has-text('500')")
    assert "<b>broken</b>" in page.inner_text(row)
    page.wait_for_selector("#endpoints .tag.failing")
    page.wait_for_selector("#endpoints >> text=1 waiting, the oldest for less than a minute")
    if SHOTS:
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            for width in (1400, 390):
                page.set_viewport_size({"width": width, "height": 900})
                page.screenshot(path=f"{SHOTS}/portal-{theme}-{width}.png", full_page=True)
        page.set_viewport_size({"width": 1400, "height": 900})

    # Mend it, and send the delivery that waits for an hour now.
    receiver.status = 200
    page.click(f"{row} >> text=Resend now")
    page.wait_for_selector(f"{row} .tag.delivered")
    assert [body for _, body in receiver.got].count(b'{"order": 2}') == 2

    # Rotate the secret: both sign.
    page.click("text=Rotate secret")
    page.wait_for_function(
        "secret => document.getElementById('note').textContent.includes('whsec_') &&"
        " !document.getElementById('note').textContent.includes(secret)",
        arg=secret,
    )
    fresh = page.inner_text("#note").split()[-1]
    count = len(receiver.got)
    portal.publish(b'{"order": 3}')
    deadline = time.monotonic() + 30
    while len(receiver.got) == count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for known in (secret, fresh):
        verify(receiver.got[-1][0].items(), receiver.got[-1][1], known)

    # Replay a range: first the count, then all of it again.
    count = len(receiver.got)
    page.click("text=Replay…")
    page.select_option("#ask [name=only]", "all")
    page.click("#ask-yes:has-text('Count')")
    page.wait_for_selector("#ask-text:has-text('3 deliveries will be sent again')")
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/replay-dark-1400.png")
    assert len(receiver.got) == count
    page.click("#ask-yes:has-text('Send again')")
    page.wait_for_selector("#note:has-text('3 are on their way')")
    while len(receiver.got) < count + 3:
        assert time.monotonic() < deadline + 60
        time.sleep(0.02)
    assert page.locator("#topics option[value='order.paid']").count() == 1

    # Filters, and a page that fits a phone.
    page.select_option("#filters [name=state]", "evicted")
    page.wait_for_selector("text=No delivery matches.")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert hosts == {portal.url.split("/")[2]}
    assert problems == []
    context.close()


@pytest.mark.timeout(120)
def test_a_link_lets_one_tenant_in_for_a_while(portal: Portal, receiver: Receiver, browser: Any) -> None:
    """The link of one tenant shows its endpoints and no other's, leaves the address bar, and expires."""

    async def register() -> None:
        for tenant in ("acme", "other"):
            await portal.dispatcher.add_endpoint(f"{receiver.url}/{tenant}", ["**"], tenant=tenant)

    loop = portal.dispatcher._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(register(), loop).result(30)
    page = browser.new_page()
    page.goto(portal.dispatcher.portal_link("other", base=portal.url))
    page.wait_for_selector("#endpoints .tag.active")
    assert "/hook/other" in page.inner_text("#endpoints")
    assert "/hook/acme" not in page.inner_text("#endpoints")
    assert "token" not in page.url
    page.close()
    page = browser.new_page()
    page.goto(portal.dispatcher.portal_link("other", base=portal.url, valid_s=-1))
    page.wait_for_selector("#note.bad:has-text('not valid')")
    page.goto(portal.url + "docs")
    page.wait_for_selector("summary:has-text('/endpoints/{id}/replay')")
    page.close()


def followed(portal: Portal, receiver: Receiver, browser: Any) -> Any:
    """The page of a tenant with one endpoint and no delivery, which has asked for all there is at least once."""
    loop = portal.dispatcher._loop
    assert loop is not None
    register = portal.dispatcher.add_endpoint(receiver.url, ["**"], tenant="acme")
    asyncio.run_coroutine_threadsafe(register, loop).result(30)
    page = browser.new_page()
    page.set_default_timeout(30_000)
    page.goto(portal.dispatcher.portal_link("acme", base=portal.url))
    page.wait_for_selector("text=No delivery matches.")
    page.wait_for_function("() => asked")
    return page


@pytest.mark.timeout(120)
def test_the_page_is_told_of_changes(
    portal: Portal, receiver: Receiver, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others do appears without a question: the page asks when it is told, and not in between."""
    monkeypatch.setattr(api, "REMIND_S", 3600.0)
    page = followed(portal, receiver, browser)
    page.wait_for_function("() => planned === null && !busy")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.partition("?")[0].rpartition("/")[2]))
    portal.publish(b"{}")
    page.wait_for_selector("#deliveries .tag.delivered")
    assert 1 <= asked.count("deliveries") <= 3
    assert "changes" not in asked
    page.close()


@pytest.mark.timeout(120)
def test_a_page_that_is_cut_off_says_so(
    portal: Portal, receiver: Receiver, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it catches up when it is back."""
    monkeypatch.setattr(api, "STREAM_S", 1.0)
    monkeypatch.setattr(api, "REMIND_S", 0.5)
    page = followed(portal, receiver, browser)
    page.context.set_offline(True)
    page.wait_for_selector("#lost:visible")
    portal.publish(b"{}")
    page.context.set_offline(False)
    page.wait_for_selector("#deliveries .tag.delivered")
    page.wait_for_selector("#lost", state="hidden")
    page.close()


@pytest.mark.timeout(120)
def test_the_portal_in_a_frame_of_another_site(portal: Portal, receiver: Receiver, browser: Any) -> None:
    """A page of an allowed origin shows its tenant's portal, where everything works, deleting after a question too;
    a page of any other origin does not get it.
    """
    portal.describe("order.paid", "An order was paid")
    link = portal.dispatcher.portal_link("acme", base=portal.url)
    outer = receiver.url.rpartition("/")[0]
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_default_timeout(30_000)
    page.goto(f"{outer.replace('127.0.0.1', 'localhost')}/#{quote(link, safe='')}")
    frame = page.frame_locator("iframe")
    frame.locator("#add [name=url]").fill(receiver.url)
    frame.locator("#add button").click()
    frame.locator("#endpoints .tag.active").wait_for()
    portal.publish(b"{}")
    frame.locator("#deliveries .tag.delivered").wait_for()
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/embedded-1000.png")
    frame.locator("#endpoints >> text=Delete").click()
    frame.locator("#ask-no").click()
    frame.locator("#endpoints >> text=Delete").click()
    frame.locator("#ask-yes").click()
    frame.locator("#endpoints >> text=No endpoint yet.").wait_for()
    page.close()
    page = browser.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(f"{outer}/#{quote(link, safe='')}")
    deadline = time.monotonic() + 30
    while not any("frame-ancestors" in text for text in refused):
        assert time.monotonic() < deadline, refused
        page.wait_for_timeout(50)
    page.close()


@pytest.mark.timeout(120)
def test_the_reference_sends_requests(portal: Portal, browser: Any) -> None:
    """Every operation of the document is there; one with a parameter and one with a body are sent from the page, and no
    other host is asked.
    """
    portal.describe("order.paid", "An order was paid")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(30_000)
    hosts = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(portal.url + "docs")
    page.fill("#token", TOKEN)
    document = page.evaluate("fetch('openapi.json').then(answer => answer.json())")
    operations = [m for methods in document["paths"].values() for m in methods if m != "parameters"]
    page.wait_for_function(
        "count => document.querySelectorAll('details').length === count", arg=len(operations)
    )
    shown = page.locator("details", has_text="GET /event-types/{topic}")
    shown.locator("summary").click()
    shown.locator("input").fill("order.paid")
    shown.locator("button").click()
    shown.locator("pre:has-text('An order was paid')").wait_for()
    publish = page.locator("details", has_text="POST /events")
    publish.locator("summary").click()
    publish.locator("textarea").fill('{"topic": "order.paid", "data": 1}')
    publish.locator("button").click()
    publish.locator("pre:has-text('202')").wait_for()
    if SHOTS:
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            for width in (1400, 390):
                page.set_viewport_size({"width": width, "height": 900})
                page.screenshot(path=f"{SHOTS}/docs-{theme}-{width}.png")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert hosts == {portal.url.split("/")[2]}
    page.close()
