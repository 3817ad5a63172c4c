"""Leases that an operator gives: whoever holds one is the source's publisher. For promotion without a person.

Each is held by one process at a time, by the word of something that the operator trusts: a file system that all hosts
share, a PostgreSQL server or a Kubernetes API server. The publisher takes it when it starts and shows all the time that
it still has it; a mirror waits for it (`Mirror.promote_when`).
"""

import logging
import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from brokerless.core.errors import ConfigError, MissingDependency
from brokerless.core.runtime.clock import elapsed_s
from brokerless.core.runtime.files import FileLocked, lock_file

log = logging.getLogger(__name__)
# Where Kubernetes puts a pod's token, CA and namespace.
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# The parts of a Lease's duration after which its holder renews it, and after which it stops without a renewal. The rest
# is for clocks that run differently; client-go has 2, 10 and 15 s.
_RENEW_AFTER = 1 / 6
_RENEW_DEADLINE = 2 / 3
_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409


class PublisherLease(Protocol):
    """What a publisher holds. Not thread-safe: each object belongs to one publisher or mirror."""

    taken_after_s: float
    """How long a dead holder's lease still looks held; a publisher that starts waits so long for it."""

    def acquire(self) -> bool:
        """Take it if nobody has it; whether it is ours now. Never waits long."""

    def holds(self) -> bool:
        """Whether it is still ours, as far as can be known now. What cannot be reached is not held."""

    def release(self) -> None:
        """Give it back; doing so twice is fine."""


class FileLease:
    """A lock on a file that all hosts share (NFSv4, CephFS, GFS2, …; on a local disk: for processes of one host).

    The file system gives it back when the process ends, or when its host is declared dead.
    """

    taken_after_s = 0.0

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`path` is made if it is not there. Never delete it while somebody may hold it."""
        self.path = os.fspath(path)
        self._fd = -1

    def acquire(self) -> bool:
        if self.holds():
            return True
        self.release()
        try:
            self._fd = lock_file(self.path)
        except FileLocked:
            return False
        except OSError as error:
            raise ConfigError("lease", f"{self.path}: {error.strerror}") from None
        return self.holds()

    def holds(self) -> bool:
        if self._fd < 0:
            return False
        try:
            mine, there = os.fstat(self._fd), os.stat(self.path)
        except OSError:
            return False
        # A file that was replaced is locked by nobody.
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PostgresLease:
    """An advisory lock of a PostgreSQL server, held as long as the connection lives.

    The server gives it back when the connection ends; let it notice dead hosts soon (`tcp_user_timeout`).
    """

    taken_after_s = 0.0

    def __init__(self, conninfo: str, key: int, *, timeout_s: float = 1.0) -> None:
        """`key` is the number of the lock, one for each source; `timeout_s` bounds each question to the server."""
        self.conninfo = conninfo
        self.key = key
        self._timeout_s = timeout_s
        self._connection: Any = None

    def acquire(self) -> bool:
        if self.holds():
            return True
        self.release()
        try:
            import psycopg
        except ImportError:
            raise MissingDependency("psycopg", "postgres", "a lease in PostgreSQL") from None
        timeout_ms = max(1, round(self._timeout_s * 1000))
        try:
            connection = psycopg.connect(
                self.conninfo,
                autocommit=True,
                connect_timeout=max(2, round(self._timeout_s)),
                options=f"-c statement_timeout={timeout_ms} -c tcp_user_timeout={timeout_ms}",
                tcp_user_timeout=timeout_ms,
            )
        except psycopg.Error:
            return False
        self._connection = connection
        if self._ask("SELECT pg_try_advisory_lock(%s)", self.key):
            return True
        self.release()
        return False

    def _ask(self, question: str, *values: Any) -> Any:
        import psycopg

        try:
            row = self._connection.execute(question, values).fetchone()
        except psycopg.Error:
            return None
        return row[0] if row else None

    def holds(self) -> bool:
        if self._connection is None or self._connection.closed:
            return False
        question = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted"
        )
        return bool(self._ask(question))

    def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class KubernetesLease:
    """A Lease of coordination.k8s.io/v1, renewed while it is held, by the pod's service account.

    Taken from another holder only when that one has not renewed it for its whole duration, by the clock of who watches:
    the hosts' clocks need not agree. The holder stops after two thirds of the duration without a renewal. Every write
    names the version that it replaces, so that of two who write at once one is refused. The service account needs
    get, create and update of leases.
    """

    def __init__(
        self,
        name: str,
        *,
        namespace: str = "",
        duration_s: int = 15,
        timeout_s: float = 1.0,
        server: str = "https://kubernetes.default.svc",
        service_account: str | os.PathLike[str] = _SERVICE_ACCOUNT,
    ) -> None:
        """Use the Lease `name`, one for each source; it is made if it is not there.

        `namespace` is where it lies (default: the pod's). `duration_s` is after how many seconds without a renewal
        somebody else may take it (default: client-go's 15). `timeout_s` bounds each question to the API server at
        `server`. `service_account` is the directory with `token`, `ca.crt` and `namespace`; the token is read for each
        question, because it is renewed.

        Raises ConfigError if an argument or one of these files cannot be used, MissingDependency without httpx.
        """
        if duration_s < 1 or duration_s != int(duration_s):
            raise ConfigError("duration_s", "must be a whole number of seconds, at least 1")
        if timeout_s <= 0:
            raise ConfigError("timeout_s", "must be more than 0")
        self._account = Path(service_account)
        self.namespace = namespace or self._read("namespace")
        self.name = name
        self.identity = f"{socket.gethostname()}_{secrets.token_hex(8)}"
        self.taken_after_s = duration_s * 1.5
        self._duration_s = int(duration_s)
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        self._client = self._connect(server, timeout_s)
        self._lease: dict[str, Any] = {}  # as we wrote it last
        self._renewed_at = float("-inf")  # when the write that was accepted last was sent
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0
        self._problem = ""

    def _read(self, file: str) -> str:
        try:
            return (self._account / file).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("lease", f"{self._account / file} cannot be read: {error}") from None

    def _connect(self, server: str, timeout_s: float) -> Any:
        import ssl

        try:
            import httpx
        except ImportError:
            raise MissingDependency("httpx", "kubernetes", "a lease in Kubernetes") from None
        verify: ssl.SSLContext | bool = True
        if server.startswith("https://"):
            try:
                verify = ssl.create_default_context(cafile=self._account / "ca.crt")
            except OSError as error:
                raise ConfigError("lease", f"{self._account / 'ca.crt'} cannot be used: {error}") from None
        return httpx.Client(base_url=server, verify=verify, timeout=timeout_s, trust_env=False)

    def acquire(self) -> bool:
        if self.holds():
            return True
        asked = elapsed_s()
        status, lease = self._ask("GET", f"/{self.name}")
        if status == _NOT_FOUND:
            return self._write("POST", "", {"metadata": {"name": self.name}}) == _CREATED
        if status != _OK:
            return False
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, elapsed_s()
        duration_s = spec.get("leaseDurationSeconds") or self._duration_s
        if holder not in ("", self.identity) and asked - self._seen_at < duration_s:
            return False
        return self._write("PUT", f"/{self.name}", lease) == _OK

    def holds(self) -> bool:
        if not self._lease:
            return False
        if elapsed_s() - self._renewed_at >= self._duration_s * _RENEW_AFTER:
            self._renew()
        return elapsed_s() - self._renewed_at < self._duration_s * _RENEW_DEADLINE

    def _renew(self) -> None:
        if self._write("PUT", f"/{self.name}", self._lease) not in (_CONFLICT, _NOT_FOUND):
            return
        status, lease = self._ask("GET", f"/{self.name}")
        if status == _OK and (lease.get("spec") or {}).get("holderIdentity") == self.identity:
            self._lease = lease  # somebody wrote something else into it, or we did and did not hear of it
        elif status in (_OK, _NOT_FOUND):
            self._lease, self._renewed_at = {}, float("-inf")  # somebody else has it, or can

    def _write(self, method: str, path: str, lease: dict[str, Any]) -> int:
        """Write our name and the time into a Lease that is of the version given; the status of the answer."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = lease.get("spec") or {}
        ours = spec.get("holderIdentity") == self.identity
        written = {
            **spec,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._duration_s,
            "acquireTime": spec.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": (spec.get("leaseTransitions") or 0) + (not ours),
        }
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        sent = elapsed_s()
        status, answer = self._ask(method, path, {**kind, "metadata": lease["metadata"], "spec": written})
        if status in (_OK, _CREATED):
            self._lease, self._renewed_at = answer, sent
        return status

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """The status and the Lease of an answer; 0 if there is none. A new kind of trouble is logged."""
        import httpx

        status, lease, problem = 0, {}, ""
        try:
            headers = {"Authorization": f"Bearer {self._read('token')}"}
            answer = self._client.request(method, self._path + path, json=body, headers=headers)
            status = answer.status_code
            if answer.is_success:
                lease = answer.json()
            elif status not in (_NOT_FOUND, _CONFLICT):
                problem = f"{status} {answer.text[:200]}"
        except (httpx.HTTPError, ConfigError, ValueError) as error:
            status, problem = 0, str(error) or type(error).__name__
        if problem and problem != self._problem:
            log.warning("lease %s/%s: %s", self.namespace, self.name, problem)
        self._problem = problem
        return status, lease

    def release(self) -> None:
        if self._lease and self._renewed_at > float("-inf"):
            lease, self._lease = self._lease, {}
            self._renewed_at = float("-inf")
            spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
            self._ask("PUT", f"/{self.name}", {**lease, "spec": spec})
