"""`brokerless webhooks` as a user types it: real processes, real ports."""

import base64
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from brokerless.core import JournalReader
from brokerless.webhooks.signing import parse_secret, signature_header
from tests.command import run_here
from tests.webhooks.delivery.test_client import certificate

MAIN = "from brokerless.cli.main import main; main()"


def run(
    *arguments: str, cwd: Path, token_file: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    extra = ["--token-file", "tokens"] if token_file else []
    return run_here("webhooks", *arguments, *extra, cwd=cwd, env=environment)


class Running:
    """A command that goes on until it is interrupted."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        self.log = cwd / f"{arguments[0]}-{time.time_ns()}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, "webhooks", *arguments], cwd=cwd, stdout=out, stderr=out
            )
        self.url = self.wait_for(r"https?://\S+")

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.log.read_text())):
            assert time.monotonic() < deadline, f"{pattern} not in {self.log.read_text()}"
            assert self.process.poll() is None or re.search(pattern, self.log.read_text()), (
                self.log.read_text()
            )
            time.sleep(0.05)
        return match[0]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    line = run("token", "acme", cwd=tmp_path, token_file=False).stdout
    (tmp_path / "tokens").write_text("# tokens of the test\n" + line)
    made = Running(
        *("serve", "--outbox", "var/o.sqlite", "--port", "0", "--token-file", "tokens"),
        *("--allow", "127.0.0.0/8", "--allow-http"),
        cwd=tmp_path,
    )
    yield made
    assert made.stop() == 0
    assert "Traceback" not in made.log.read_text()


def test_from_registration_to_replay(tmp_path: Path, server: Running) -> None:
    """Serve, listen, register, publish, list, test, retry and replay: each command does what it says."""
    listener = Running("listen", "--port", "0", cwd=tmp_path)
    try:
        where = {"BROKERLESS_WEBHOOKS_URL": server.url}
        added = run("endpoints", "add", listener.url + "/hook", "--topic", "order.*", cwd=tmp_path, **where)
        assert "state   active" in added.stdout, added.stdout + added.stderr
        listener.wait_for("handshake from")
        listed = json.loads(run("endpoints", "--json", cwd=tmp_path, **where).stdout)
        endpoint = listed["id"]
        assert listed["state"] == "active"
        token = (tmp_path / "tokens").read_text().split()[-1]
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {token}"}) as http:
            assert http.post("/events", json={"topic": "order.paid", "data": {"n": 1}}).status_code == 202
        listener.wait_for(r'order.paid 7 bytes, not verified.*\n  \{"n":1\}')
        assert run("endpoints", "test", endpoint, cwd=tmp_path, **where).stdout.startswith("200 in")
        deadline = time.monotonic() + 30
        while "delivered" not in (shown := run("deliveries", endpoint, cwd=tmp_path, **where).stdout):
            assert time.monotonic() < deadline, shown
        number = shown.splitlines()[-1].split()[0]
        assert run("retry", number, cwd=tmp_path, **where).stdout.strip() == "pending"
        wrong = run("replay", endpoint, "--since", "yesterday", cwd=tmp_path, **where)
        assert (wrong.returncode, "since" in wrong.stderr) == (2, True)
        listener.wait_for(r"(?s)(order.paid.*){2}")
        replayed = run("replay", endpoint, "--since", "1h", "--only", "all", cwd=tmp_path, **where)
        assert replayed.stdout.strip() in {"1 deliveries", "0 deliveries"}, replayed.stderr
        unknown = number[:-1] + ("a" if number[-1] != "a" else "b")
        missing = run("retry", unknown, cwd=tmp_path, **where)
        assert (missing.returncode, missing.stderr.strip()) == (
            1,
            f"brokerless: 404: no such delivery: {unknown}",
        )
    finally:
        listener.stop()


def test_listen_verifies_and_stores(tmp_path: Path, server: Running) -> None:
    """`listen --secret --journal` takes only what is signed, and what it took is in the journal."""
    where = {"BROKERLESS_WEBHOOKS_URL": server.url}
    secret = "whsec_" + "A" * 43 + "="
    listener = Running("listen", "--port", "0", "--secret", secret, "--count", "1", cwd=tmp_path)
    assert httpx.post(listener.url, content=b"x").status_code == 401
    listener.wait_for("REFUSED: webhook-id is missing")
    assert listener.process.wait(30) == 0

    storing = Running("listen", "--port", "0", "--secret", secret, "--journal", "j", cwd=tmp_path)
    added = run("endpoints", "add", storing.url + "/", cwd=tmp_path, **where)
    assert "state   active" in added.stdout
    assert httpx.post(storing.url, content=b"x").status_code == 401
    now = int(time.time())
    headers = {
        "webhook-id": "m1",
        "webhook-timestamp": str(now),
        "webhook-signature": signature_header([parse_secret(secret)], "m1", now, b"x"),
    }
    for _ in range(2):
        assert httpx.post(storing.url, content=b"x", headers=headers).status_code == 200
    assert storing.stop() == 0
    assert "1 accepted, 1 duplicates, 1 refused" in storing.log.read_text()
    with JournalReader(tmp_path / "j") as reader:
        assert reader.next == 1


def test_mistakes_are_one_line(tmp_path: Path, server: Running) -> None:
    """A port in use, an unreadable file, no token, a server that is away: one line that says it, no traceback, and
    nothing is left behind.
    """
    port = server.url.rpartition(":")[2]
    (tmp_path / "empty").write_text("")
    (tmp_path / "odd").write_text("a b c\n")
    cases = [
        (("serve", "--outbox", "o.sqlite", "--port", port), 2, "cannot be used"),
        (("serve", "--outbox", "/proc/nowhere/o.sqlite", "--port", "0"), 1, "outbox /proc/nowhere"),
        (("serve", "--outbox", "o.sqlite", "--port", "0", "--allow", "nonsense"), 2, "allow"),
        (("deliveries", "ep_x", "--url", "http://127.0.0.1:9"), 1, "127.0.0.1:9"),
        (("listen", "--status", "99"), 2, "status"),
        (("listen", "--secret", "whsec_" + "A" * 32, "--journal", "j", "--port", port), 2, "cannot be used"),
    ]
    for arguments, code, text in cases:
        done = run(*arguments, cwd=tmp_path, token_file=arguments[0] != "listen")
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert text in done.stderr
        assert not [path.name for path in tmp_path.glob("[oj]*") if path.name != "odd"]
    for name, text in (
        ("missing", "brokerless webhooks token"),
        ("empty", "no tokens"),
        ("odd", "TENANT TOKEN"),
    ):
        done = run("serve", "--outbox", "o.sqlite", "--token-file", name, cwd=tmp_path, token_file=False)
        assert done.returncode == 2
        assert text in done.stderr
    none = run("endpoints", cwd=tmp_path, token_file=False, BROKERLESS_WEBHOOKS_TOKEN="")
    assert (none.returncode, "no token" in none.stderr) == (2, True)


def test_publish_change_disable_and_tail(tmp_path: Path, server: Running) -> None:
    """What can be done over the API can be typed: publish, change, disable, enable, tail, count a replay."""
    listener = Running("listen", "--port", "0", cwd=tmp_path)
    try:
        where = {"BROKERLESS_WEBHOOKS_URL": server.url}
        added = run("endpoints", "add", listener.url + "/", cwd=tmp_path, **where)
        endpoint = added.stdout.split()[1]
        changed = run("endpoints", "change", endpoint, "--rate", "50", "--json", cwd=tmp_path, **where)
        assert '"rate": 50' in changed.stdout, changed.stderr
        assert run("endpoints", "change", endpoint, cwd=tmp_path, **where).returncode == 2
        tail = Running.__new__(Running)
        tail.log = tmp_path / "tail.log"
        with tail.log.open("w") as out:
            command = [
                sys.executable,
                "-c",
                MAIN,
                "webhooks",
                "tail",
                "--token-file",
                "tokens",
                "--interval",
                "0.2",
            ]
            environment = {**os.environ, **where}
            tail.process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, env=environment)
        published = run("publish", "order.paid", '{"n": "\\u001b]0;title\\u0007"}', cwd=tmp_path, **where)
        assert "to 1 endpoints" in published.stdout, published.stderr
        listener.wait_for("order.paid")
        deadline = time.monotonic() + 60
        while "order.paid" not in tail.log.read_text():
            run("publish", "order.paid", "{}", cwd=tmp_path, **where)
            assert time.monotonic() < deadline, tail.log.read_text()
        tail.stop()
        assert "disabled" in run("endpoints", "disable", endpoint, cwd=tmp_path, **where).stdout
        run("publish", "order.paid", cwd=tmp_path, **where)
        assert run("endpoints", "enable", endpoint, cwd=tmp_path, **where).stdout.strip() == "active"
        counted = run("replay", endpoint, "--since", "1h", "--dry-run", cwd=tmp_path, **where)
        assert counted.stdout.strip() == "1 deliveries", counted.stderr
        wrong = run("publish", "t", "no json", cwd=tmp_path, **where)
        assert (wrong.returncode, "is not JSON" in wrong.stderr) == (2, True)
        for arguments in (("t", '{"a": "\udcff"}'), ("t\udcff", "{}")):
            wrong = run("publish", *arguments, cwd=tmp_path, **where)
            assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
            assert "defect" not in wrong.stderr
    finally:
        listener.stop()


def test_tail_prints_what_comes_at_once(tmp_path: Path, server: Running) -> None:
    """More deliveries than a page has, between two looks: none is passed over, and none is printed again unchanged."""
    listener = Running("listen", "--port", "0", cwd=tmp_path)
    where = {"BROKERLESS_WEBHOOKS_URL": server.url}
    token = (tmp_path / "tokens").read_text().split()[-1]
    tail = Running.__new__(Running)
    tail.log = tmp_path / "tail.log"
    command = [sys.executable, "-c", MAIN, "webhooks", "tail", "--token-file", "tokens", "--interval", "0.2"]
    try:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {token}"}) as http:
            for number in range(13):
                body = {"url": f"{listener.url}/{number}", "topics": ["t"]}
                assert http.post("/endpoints", json=body).json()["state"] == "active"
            with tail.log.open("w") as out:
                tail.process = subprocess.Popen(
                    command, cwd=tmp_path, stdout=out, stderr=out, env={**os.environ, **where}
                )
            sent = [http.post("/events", json={"topic": "t"}).json()["id"]]
            deadline = time.monotonic() + 60
            while sent[0] not in tail.log.read_text():
                assert time.monotonic() < deadline, tail.log.read_text()
                sent.insert(0, http.post("/events", json={"topic": "t"}).json()["id"])
                time.sleep(0.1)
            tail.process.send_signal(signal.SIGSTOP)
            many = [http.post("/events", json={"topic": "t"}).json()["id"] for _ in range(50)]
            tail.process.send_signal(signal.SIGCONT)
            while not all(tail.log.read_text().count(f"{event}.ep_") >= 13 for event in many):
                assert time.monotonic() < deadline, [tail.log.read_text().count(event) for event in many]
                time.sleep(0.1)
            tail.stop()
        lines = [line.split(maxsplit=1)[1] for line in tail.log.read_text().splitlines()]
        assert len(lines) == len(set(lines))
    finally:
        listener.stop()


def test_nothing_that_arrives_reaches_the_terminal(tmp_path: Path) -> None:
    """Escape sequences in a webhook are printed as text."""
    listener = Running("listen", "--port", "0", "--count", "1", cwd=tmp_path)
    headers = {"webhook-id": "m1", "ce-type": "t"}
    httpx.post(listener.url, content=b"\x1b]0;owned\x07\x9b2J \xc2\x9b", headers=headers)
    assert listener.process.wait(30) == 0
    text = listener.log.read_text()
    assert "owned" in text
    assert not any(
        (character < " " and character != "\n") or "\x7f" <= character <= "\x9f" for character in text
    )


def test_the_challenge_is_answered(tmp_path: Path, server: Running) -> None:
    """`listen` answers the challenge of an endpoint that asks for one."""
    listener = Running("listen", "--port", "0", cwd=tmp_path)
    try:
        token = (tmp_path / "tokens").read_text().split()[-1]
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {token}"}) as http:
            body = {"url": listener.url + "/", "topics": ["**"], "verification": "challenge"}
            assert http.post("/endpoints", json=body).json()["state"] == "active"
        listener.wait_for("challenge answered")
    finally:
        listener.stop()


def test_the_password_is_not_printed(tmp_path: Path) -> None:
    """A database's password is in no output of `serve`."""
    line = run("token", "acme", cwd=tmp_path, token_file=False).stdout
    (tmp_path / "tokens").write_text(line)
    done = run("serve", "--outbox", "postgresql://me:topsecret@127.0.0.1:1/x", "--port", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert "127.0.0.1:1/x" in done.stderr
    assert "topsecret" not in done.stdout + done.stderr


@pytest.fixture
def network() -> Iterator[int]:
    """A network of its own, with nothing but a loopback interface: the ports that the page prints are free in it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("needs root and unshare, to use the ports of the page")
    command = "ip link set lo up && echo up && exec sleep 600"
    holder = subprocess.Popen(["unshare", "-n", "sh", "-c", command], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "up":
            pytest.skip("cannot make a network namespace")
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.timeout(180)
def test_the_walk_through_works_as_printed(tmp_path: Path, network: int) -> None:
    """Every line of the page's first block, unchanged and in order: from `serve` to the first delivery."""
    page = (Path(__file__).parent.parent.parent / "docs" / "webhooks.md").read_text()
    block = re.search(r"## Command line\n.*?```sh\n(.*?)```", page, re.DOTALL)
    assert block is not None
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "brokerless"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{MAIN}" "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    inside = ["nsenter", "-t", str(network), "-n", "sh", "-c"]
    running: list[subprocess.Popen[str]] = []
    printed: dict[str, str] = {}
    began = time.monotonic()
    try:
        for line in block[1].splitlines():
            word = line.split()[2]
            made = subprocess.Popen(
                [*inside, f"exec {line}"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
            )
            if word in {"serve", "listen"}:
                running.append(made)
                assert made.stdout is not None
                printed[word] = made.stdout.readline()
                assert "listening on http://127.0.0.1:" in printed[word]
            else:
                printed[word] = made.communicate(timeout=60)[0]
                assert made.returncode == 0, line
            if word == "publish":
                receiver = running[1].stdout
                assert receiver is not None
                arrived = [receiver.readline() for _ in range(3)]
                first = time.monotonic() - began
        print(f"first delivery {first:.1f} s after the first line")
        assert first < 60, "the page promises less than a minute"
        assert "handshake" in arrived[0]
        assert "order.paid" in arrived[1]
        assert arrived[2].strip() in {'{"order":17}', '{"order": 17}'}
        assert "to 1 endpoints" in printed["publish"]
        assert "order.paid" in printed["deliveries"]
        assert "1 = 1 matched" in printed["account"]
        assert printed["link"].startswith("http://127.0.0.1:8080/#token=portal_")
        assert "portal at /" in printed["serve"]
    finally:
        for made in running:
            made.send_signal(signal.SIGINT)
            made.communicate(timeout=60)


def test_catalogue_filters_and_encryption(tmp_path: Path) -> None:
    """Keys in a file, types set and kept, endpoints with filters, headers and an own secret, events and accounts."""
    token = run("token", "*", cwd=tmp_path, token_file=False).stdout
    (tmp_path / "tokens").write_text(token)
    (tmp_path / "keys").write_text(run("key", cwd=tmp_path, token_file=False).stdout)
    secret = "whsec_" + base64.b64encode(b"s" * 32).decode()
    (tmp_path / "secret").write_text(secret + "\n")
    serve = ["serve", "--outbox", "o.sqlite", "--port", "0", "--token-file", "tokens", "--key-file", "keys"]
    server = Running(*serve, "--allow", "127.0.0.0/8", "--allow-http", "--no-verification", cwd=tmp_path)
    try:
        where = {"BROKERLESS_WEBHOOKS_URL": server.url}
        (tmp_path / "paid.json").write_text('{"type": "object", "required": ["total"]}')
        set_type = ["types", "set", "order.paid", "--schema", "paid.json", "--validate"]
        assert run(*set_type, cwd=tmp_path, **where).stdout.strip() == "kept at publish"
        assert json.loads(run("types", "--json", cwd=tmp_path, **where).stdout)["topic"] == "order.paid"
        add = [
            "endpoints",
            "add",
            "http://127.0.0.1:9/",
            "--where",
            "$.total>=100",
            "--where",
            "$.country=CH",
        ]
        add += ["--header", "X-Team: shop", "--secret-file", "secret", "--header-style", "svix", "--json"]
        made = json.loads(run(*add, cwd=tmp_path, **where).stdout)
        assert made["secret"] == secret
        assert (made["headers"], made["header_style"]) == (["x-team"], "svix")
        assert made["filters"] == [{"path": "$.total", "minimum": 100}, {"path": "$.country", "equals": "CH"}]
        refused = run("publish", "order.paid", "{}", cwd=tmp_path, **where)
        assert (refused.returncode, "422: data: $:" in refused.stderr) == (1, True), refused.stderr
        for data, count in (('{"total": 99, "country": "CH"}', 0), ('{"total": 100, "country": "CH"}', 1)):
            sent = run("publish", "order.paid", data, cwd=tmp_path, **where)
            assert f"to {count} endpoints" in sent.stdout, sent.stderr
        event = sent.stdout.split()[0]
        assert run("events", cwd=tmp_path, **where).stdout.count("order.paid") == 2
        shown = run("events", event, cwd=tmp_path, **where).stdout
        assert '{"total": 100, "country": "CH"}' in shown
        assert made["id"] in shown
        assert "2 = 1 matched + 1 unmatched" in run("account", cwd=tmp_path, **where).stdout
        assert run("types", "remove", "order.paid", cwd=tmp_path, **where).stdout.strip() == "removed"
        wrong = run(
            "endpoints", "add", "http://127.0.0.1:9/", "--where", "$.total>=many", cwd=tmp_path, **where
        )
        assert (wrong.returncode, "where" in wrong.stderr) == (2, True)
    finally:
        assert server.stop() == 0
    link = ["link", "acme", "--outbox", "o.sqlite"]
    without = run(*link, cwd=tmp_path, token_file=False)
    assert (without.returncode, "encrypted with key" in without.stderr) == (1, True), without.stderr
    keys = (tmp_path / "keys").read_text()
    made_link = run(*link, cwd=tmp_path, token_file=False, BROKERLESS_WEBHOOKS_KEYS=keys)
    assert "#token=portal_" in made_link.stdout, made_link.stderr
    assert secret.removeprefix("whsec_").encode() not in (tmp_path / "o.sqlite").read_bytes()
    missing = run("link", "acme", "--outbox", "missing.sqlite", cwd=tmp_path, token_file=False)
    assert (missing.returncode, "does not exist" in missing.stderr) == (2, True)
    assert not (tmp_path / "missing.sqlite").exists()


def test_serve_speaks_tls(tmp_path: Path) -> None:
    """With a certificate the server is https only; a file that is none is one clear line."""
    certificate_file, key_file = certificate(tmp_path, "localhost")
    (tmp_path / "tokens").write_text(run("token", "acme", cwd=tmp_path, token_file=False).stdout)
    serve = ["serve", "--outbox", "o.sqlite", "--port", "0", "--token-file", "tokens"]
    wrong = run(*serve[:-2], "--tls-certificate", "tokens", cwd=tmp_path)
    assert (wrong.returncode, "--tls-certificate: cannot be used" in wrong.stderr) == (2, True), wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert not (tmp_path / "o.sqlite").exists()
    server = Running(
        *serve, "--tls-certificate", str(certificate_file), "--tls-key", str(key_file), cwd=tmp_path
    )
    try:
        assert server.url.startswith("https://")
        port = server.url.rpartition(":")[2]
        trusted = ssl.create_default_context(cafile=str(certificate_file))
        with httpx.Client(verify=trusted, trust_env=False) as http:
            deadline = time.monotonic() + 30
            while http.get(f"https://localhost:{port}/readyz").status_code != 200:
                assert time.monotonic() < deadline
        with httpx.Client(trust_env=False) as plain, pytest.raises(httpx.HTTPError):
            plain.get(f"http://127.0.0.1:{port}/healthz")
    finally:
        assert server.stop() == 0
