"""The request server of a publisher in a process of its own: a flood of requests costs the publisher nothing.

The two talk over pipes, in lines of JSON. Parent: one `_Setup`, then nothing; when the pipe ends, so does the child.
Child: one `_Begun`, then a `_Report` whenever something has changed.
"""

import logging
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from brokerless.core.errors import BrokerlessError, Fault
from brokerless.multicast.counters import RequestServerCounters
from brokerless.multicast.policy import AnswerPolicy
from brokerless.multicast.request_server import RequestServer
from brokerless.multicast.send.positions import Position, Positions
from brokerless.multicast.sockets import Address

log = logging.getLogger(__name__)
# A new interpreter with this package, on a busy machine.
_START_S = 30.0
# How often the child looks for something to report: subscribers tell their positions twenty times a second.
_REPORT_EVERY_S = 0.02
# How long a child that keeps ending is left alone before the next is started.
_RESTART_S = 0.5
_STOP_S = 10.0


class _Setup(msgspec.Struct, frozen=True):
    journal: str
    session: str
    address: str
    allow: list[str] | None
    answers: AnswerPolicy | None
    auth_key: bytes | None
    group: list[str]
    interface: list[str]
    ttl: int


class _Begun(msgspec.Struct, frozen=True):
    """Where it listens, or why it cannot."""

    host: str = ""
    port: int = 0
    error: str = ""


class _Report(msgspec.Struct, frozen=True):
    positions: dict[int, Position]
    asked_at: float
    sharing_receivers: int
    counters: RequestServerCounters


class RequestServerProcess:
    """A `RequestServer` elsewhere, with what a publisher needs of it. Started again if it ends by itself."""

    def __init__(
        self,
        journal: str,
        session: str,
        address: str,
        *,
        allow: Iterable[str] | None = None,
        answers: AnswerPolicy | None = None,
        auth_key: bytes | None = None,
        group: Sequence[str] = (),
        interface: Sequence[str] = (),
        ttl: int = 0,
    ) -> None:
        """Start it, and wait until it serves. Raises Fault if it does not."""
        self._setup = _Setup(
            journal,
            session,
            address,
            None if allow is None else list(allow),
            answers,
            auth_key,
            list(group),
            list(interface),
            ttl,
        )
        self.positions = Positions((answers or AnswerPolicy()).max_clients)
        self.asked_at = 0.0
        self.sharing_receivers = 1
        self.counters = RequestServerCounters()
        self._before = RequestServerCounters()  # of those that ended
        self._stop = threading.Event()
        self.address = self._start()
        # One that is started again must be where subscribers look for it.
        self._setup = msgspec.structs.replace(self._setup, address=str(self.address))
        self._thread = threading.Thread(target=self._follow, name="brokerless-requests", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def _start(self) -> Address:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from brokerless.multicast.request_process import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, which lingers
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        with suppress(OSError):
            self._process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], _START_S)[0]:
                line = self._process.stdout.readline()
        begun = msgspec.json.decode(line, type=_Begun) if line else _Begun(error="it does not answer")
        if begun.error:
            self._end()
            raise Fault(f"the process that serves requests cannot begin: {begun.error}")
        return Address(begun.host, begun.port)

    def _follow(self) -> None:
        """Take its reports; start another one when it has ended."""
        decoder = msgspec.json.Decoder(_Report)
        while not self._stop.is_set():
            assert self._process.stdout is not None
            for line in self._process.stdout:
                report = decoder.decode(line)
                self.positions.replace(report.positions)
                self.asked_at = report.asked_at
                self.sharing_receivers = report.sharing_receivers
                for name, value in report.counters.snapshot().items():
                    setattr(self.counters, name, value + getattr(self._before, name))
            if self._stop.is_set():
                return
            self._before = msgspec.structs.replace(self.counters)
            log.error("the process that serves requests has ended; starting another one")
            self._end()
            self._process.stdout.close()
            while not self._stop.wait(_RESTART_S):
                try:
                    self._start()
                except Fault as error:
                    log.error("%s", error)
                    continue
                self._before.restarts += 1
                self.counters.restarts += 1
                break

    def count_drops(self) -> int:
        """What the kernel dropped of the requests, as far as it was reported."""
        return self.counters.kernel_drops

    def _end(self) -> None:
        process = self._process
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process. Closing twice is fine."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._end()
        self._thread.join(_START_S + _STOP_S)
        self._end()  # one that was started meanwhile
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> None:
    """The child: serve until standard input ends."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Setup)
    try:
        server = RequestServer(
            setup.journal,
            setup.session,
            setup.address,
            allow=setup.allow,
            answers=setup.answers,
            auth_key=setup.auth_key,
            group=setup.group,
            interface=setup.interface,
            ttl=setup.ttl,
            announce=False,
        )
    except BrokerlessError as error:
        _say(_Begun(error=str(error)))
        return
    with server, suppress(BrokenPipeError):
        _say(_Begun(*server.address))
        last = b""
        drops_at = 0.0
        while not select.select([sys.stdin], [], [], _REPORT_EVERY_S)[0]:
            if time.monotonic() > drops_at + 1.0:
                drops_at = time.monotonic()
                server.count_drops()
            report = msgspec.json.encode(
                _Report(server.positions.known(), server.asked_at, server.sharing_receivers, server.counters)
            )
            if report != last:
                last = report
                _say(report)


def _say(line: bytes | _Begun) -> None:
    raw = line if isinstance(line, bytes) else msgspec.json.encode(line)
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()
