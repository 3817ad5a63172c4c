"""A Lease of Kubernetes: held by one at a time, whatever pauses, clocks and the API server do."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from brokerless.core.errors import ConfigError, UsageError
from brokerless.core.runtime.clock import elapsed_s
from brokerless.direct import KubernetesLease, Mirror, Publisher
from brokerless.losstest.harness.ports import Ports

from .conftest import eventually

TOKEN = "a-token"
PREFIX = "/apis/coordination.k8s.io/v1/namespaces/shop/leases"


class ApiServer(ThreadingHTTPServer):
    """The rules of the API server for Leases: versions, conflicts, tokens. It can be away, or answer too late."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.leases: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.lock = threading.Lock()
        self.away = False
        self.deaf = False  # does what it is asked, and its answer is lost

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def edit(self, name: str, **spec: Any) -> None:
        """What anybody else with the right to do so may write."""
        with self.lock:
            self.leases[name]["spec"].update(spec)
            self.store(name, self.leases[name])

    def store(self, name: str, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        lease["metadata"] = {**lease["metadata"], "name": name, "resourceVersion": str(self.version)}
        self.leases[name] = lease
        return lease


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        if self.server.away:
            self.close_connection = True
            return
        status, content = self.decide(body)
        if self.server.deaf:
            self.close_connection = True
            return
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def decide(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        name = self.path.removeprefix(PREFIX).strip("/")
        if not self.path.startswith(PREFIX):
            return 403, {"message": "leases is forbidden"}
        with self.server.lock:
            if self.command == "POST":
                name = body["metadata"]["name"]
                if name in self.server.leases:
                    return 409, {"reason": "AlreadyExists"}
                return 201, self.server.store(name, body)
            known = self.server.leases.get(name)
            if known is None:
                return 404, {"reason": "NotFound"}
            if self.command == "GET":
                return 200, known
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", body["spec"]["renewTime"])
            assert isinstance(body["spec"]["leaseDurationSeconds"], int)
            if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
                return 409, {"reason": "Conflict"}
            return 200, self.server.store(name, body)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    path = tmp_path / "account"
    path.mkdir()
    (path / "token").write_text(TOKEN + "\n")
    (path / "namespace").write_text("shop")
    return path


class Leases:
    """Makes leases of one name."""

    def __init__(self, api: ApiServer, account: Path) -> None:
        self.api, self.account = api, account

    def __call__(self, duration_s: int = 2) -> KubernetesLease:
        return KubernetesLease(
            "orders", duration_s=duration_s, server=self.api.url, service_account=self.account
        )


@pytest.fixture
def lease(api: ApiServer, account: Path) -> Leases:
    return Leases(api, account)


@contextmanager
def renewed_by_a_thread(lease: KubernetesLease) -> Iterator[None]:
    """Renew it in a thread, as a publisher does."""
    stop = threading.Event()

    def hold() -> None:
        while not stop.wait(0.05):
            lease.holds()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def test_one_holds_it_and_gives_it_back(lease: Leases, api: ApiServer) -> None:
    """The second gets it when the first gives it back, at once; the first then knows."""
    one, two = lease(60), lease(60)
    assert one.acquire()
    assert one.acquire()
    assert one.holds()
    assert not two.acquire()
    assert not two.holds()
    one.release()
    one.release()
    assert two.acquire()
    assert not one.acquire()
    spec = api.leases["orders"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == (two.identity, 2)


def test_whoever_renews_keeps_it_and_whoever_pauses_loses_it_before_another_has_it(lease: Leases) -> None:
    """A pause longer than the lease: the paused one is out before the other is in, and stays out."""
    one, two = lease(), lease()
    assert one.acquire()
    with renewed_by_a_thread(one):
        end = time.monotonic() + 4
        while time.monotonic() < end:
            assert not two.acquire()
            time.sleep(0.1)
    eventually(two.acquire)
    # Without a question to the server: the time alone says so.
    assert elapsed_s() - one._renewed_at >= 2 * one._duration_s / 3
    assert not one.holds()
    assert two.holds()


def test_the_clocks_of_hosts_need_not_agree(lease: Leases, api: ApiServer) -> None:
    """A holder whose clock is a year slow is not taken for dead, and one whose clock is fast does not hold for ever."""
    for shift in (-365, 365):
        one, two = lease(), lease()
        eventually(one.acquire)
        odd = (datetime.now(UTC) + timedelta(days=shift)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        api.edit("orders", renewTime=odd)
        assert not two.acquire()
        eventually(two.acquire)
        assert not one.holds()
        two.release()


def test_of_those_who_take_it_at_once_one_has_it(lease: Leases) -> None:
    """Both for a Lease that is not there and for one that is free, the version decides."""
    for _ in range(5):
        leases = [lease(60) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(KubernetesLease.acquire, leases))
        got = [each for each, ours in zip(leases, taken, strict=True) if ours]
        assert len(got) == 1
        assert [x for x in leases if x.holds()] == got
        got[0].release()


def test_a_conflict_that_takes_nothing_away_is_passed_over(lease: Leases, api: ApiServer) -> None:
    """Somebody annotates it, or our own write was not answered: it is still ours. Another's name in it: it is not."""
    one = lease(3)
    assert one.acquire()
    api.edit("orders", strategy="x")
    renewed = one._renewed_at
    eventually(lambda: one.holds() and one._renewed_at > renewed)
    assert api.leases["orders"]["spec"]["strategy"] == "x"
    api.deaf, version = True, api.version
    eventually(lambda: (one.holds(), api.version > version)[1])
    api.deaf, renewed = False, one._renewed_at
    eventually(lambda: one.holds() and one._renewed_at > renewed)
    api.edit("orders", holderIdentity="another")
    eventually(lambda: not one.holds())
    assert not one.acquire()
    with api.lock:
        del api.leases["orders"]
    assert one.acquire()
    with api.lock:
        del api.leases["orders"]
    eventually(lambda: not one.holds())


def test_while_the_server_is_away_it_ends_in_time_and_goes_on_if_nobody_took_it(
    lease: Leases, api: ApiServer
) -> None:
    """Held until two thirds of its duration have passed; then not, until it could be renewed."""
    one, two = lease(3), lease(3)
    assert one.acquire()
    api.away = True
    sent = one._renewed_at
    assert not two.acquire()
    assert one.holds()
    eventually(lambda: not one.holds())
    assert elapsed_s() - sent >= 2.0
    api.away = False
    eventually(one.holds)
    assert not two.acquire()


def test_what_cannot_work_is_said(lease: Leases, api: ApiServer, account: Path, caplog: Any) -> None:
    """Missing files, odd durations; a token that the server refuses is in the log, and a new one is used at once."""
    with pytest.raises(ConfigError, match="namespace"):
        KubernetesLease("orders", service_account=account / "none")
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        KubernetesLease("orders", service_account=account)
    with pytest.raises(ConfigError, match="duration_s"):
        lease(0)
    (account / "token").write_text("wrong")
    one = lease()
    assert not one.acquire()
    assert not one.acquire()
    assert [record.message for record in caplog.records] == [
        'lease shop/orders: 401 {"message": "Unauthorized"}'
    ]
    (account / "token").write_text(TOKEN)
    assert one.acquire()


def test_a_publisher_waits_for_its_dead_predecessors_lease(lease: Leases, tmp_path: Path) -> None:
    """Killed and started again, it finds a lease that looks held; one that is held is refused."""
    dead, alive = lease(1), lease(1)
    assert dead.acquire()
    with (
        Publisher("tcp://127.0.0.1:*", source="s", journal=tmp_path / "a", lease=lease(1)),
        pytest.raises(UsageError, match="lease"),
    ):
        Publisher("tcp://127.0.0.1:*", source="s", journal=tmp_path / "b", lease=alive)
    assert alive.acquire()


HOLDER = """
import sys
from brokerless.direct import KubernetesLease, Publisher, Worker
server, account, address, journal, mirror = sys.argv[1:]
lease = KubernetesLease("orders", duration_s=3, server=server, service_account=account)
with Publisher(address, source="s", journal=journal, mirrors=[mirror], mirrored=1, lease=lease) as pub:
    pub.publish("t", b"1", wait="mirrored", timeout=60)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_mirror_takes_over_from_a_publisher_that_is_killed(
    lease: Leases, api: ApiServer, account: Path, tmp_path: Path, ports: Ports
) -> None:
    """Nothing happens while it lives; when it is gone the mirror publishes, after the lease's duration."""
    a, b = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(2))
    command = [sys.executable, "-c", HOLDER, api.url, str(account), a, str(tmp_path / "a"), b]
    with (
        Mirror(a, journal=tmp_path / "b", serve=b) as mirror,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder,
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            taken = lease(3)
            assert mirror.promote_when(taken, timeout=4) is None
        finally:
            holder.kill()
        new = mirror.promote_when(taken, timeout=60)
        assert new is not None
        with new:
            assert new.publish("t", b"2").offset == 1
            assert taken.holds()


def test_a_publisher_dispatches_nothing_before_another_can_take_its_lease(
    lease: Leases, api: ApiServer, tmp_path: Path
) -> None:
    """The API server is away from the holder only: it has stopped when the other one may begin."""
    two = lease(3)
    with Publisher("tcp://127.0.0.1:*", source="s", journal=tmp_path / "a", lease=lease(3)) as pub:
        assert pub._mirrored.may_dispatch(elapsed_s())
        holder = pub._mirrored._lease
        assert isinstance(holder, KubernetesLease)
        holder._client.base_url = "http://127.0.0.1:1"  # only for the holder
        eventually(two.acquire)
        # A mirror waits for LEASE_S and a quarter from here on (`promote_when`); by then the holder must be out.
        taken = elapsed_s()
        assert not pub._mirrored.may_dispatch(taken + 2.0 * 1.25)
        eventually(lambda: not pub._mirrored.may_dispatch(elapsed_s()))
        assert elapsed_s() - taken < 2.5
