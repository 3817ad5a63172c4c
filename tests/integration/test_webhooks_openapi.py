"""The running server keeps the promises of its own OpenAPI document, as schemathesis sees them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = 5
# Endpoints with invented host names are registered by the hundred: none of them may be looked up for real.
SERVER = """
import socket, sys
real = socket.getaddrinfo
def local_only(host, *rest, **options):
    if host not in ("127.0.0.1", b"127.0.0.1"):
        raise socket.gaierror(socket.EAI_NONAME, "no names here")
    return real(host, *rest, **options)
socket.getaddrinfo = local_only
from brokerless.cli.main import main
main(sys.argv[1:])
"""
# And no literal address may be connected to.
SETTINGS = """
verification = "{verification}"
connect_timeout_s = 0.5
[policy]
deny = ["0.0.0.0/0", "::/0"]
"""
SERVE = ["webhooks", "serve", "--outbox", "o.sqlite", "--port", "0", "--token-file", "tokens"]
SERVE += ["--config", "config.toml", "--allow-http"]
TOOL = "from schemathesis.cli import schemathesis; schemathesis()"
# 422 is the documented answer to what types cannot express: a URL with a password, an internal address.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 401, 403, 404, 409, 422, 429]
"""


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("verification", "tenant"), [("none", "acme"), ("handshake", "acme"), ("none", ""), ("none", "*")]
)
def test_schemathesis(tmp_path: Path, verification: str, tenant: str) -> None:
    """No 5xx, no answer that the document does not describe, no wrong request that is accepted: with a tenant's token,
    without one, and with the operator's on what only the operator may do.
    """
    token = "schemathesis-token-0123456789"
    (tmp_path / "tokens").write_text(f"{tenant or 'acme'} {token}\n")
    (tmp_path / "config.toml").write_text(SETTINGS.format(verification=verification))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, *SERVE],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        match = re.search(r"http://\S+", server.stdout.readline())
        assert match
        # Where everything is refused, nothing is made that a later request could find.
        thorough = verification == "none" and tenant != ""
        examples = EXAMPLES if thorough else 2
        phases = "coverage,fuzzing,stateful" if thorough else "fuzzing,stateful" if tenant else "fuzzing"
        command = [sys.executable, "-c", TOOL, "run", f"{match[0]}/openapi.json"]
        command += ["--checks", "all"]
        # What only the operator may do, and what another way of verification changes.
        part = "event-types" if tenant == "*" else "endpoints" if verification == "handshake" else ""
        if part:
            command += ["--include-path-regex", part]
        if tenant:
            command += ["-H", f"Authorization: Bearer {token}"]
        command += ["--max-examples", str(examples), "--phases", phases, "--no-color"]
        run = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "NO_PROXY": "*"},
            check=False,
        )
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        wanted = {"event-types": "Tested: 4\n", "endpoints": "Tested: 12\n", "": "Tested: 27\n"}[part]
        assert wanted in run.stdout, "not all operations were tested: " + run.stdout
    finally:
        server.send_signal(signal.SIGINT)
        output = server.communicate(timeout=60)[0]
    assert server.returncode == 0
    assert "Traceback" not in output
