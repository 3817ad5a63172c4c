"""The client: the PyPI `statsd` package's API, buffered, tagged, numbered, never in the way.

    from brokerless.metrics import StatsClient

    statsd = StatsClient("localhost", 8125, prefix="shop")
    statsd.incr("orders")
    with statsd.timer("checkout"): ...

Question 1, the application is faster than the network: lines wait in one datagram's buffer and are sent as soon as it
is full; the socket never blocks, and what it refuses is dropped and counted. Question 2, the daemon is away: everything
sent meanwhile is lost, and the heartbeats after it tell the counters' totals all the same.
"""

import atexit
import os
import random
import secrets
import socket
import string
import threading
import time
import weakref
from math import inf

from brokerless.core.config import check_key
from brokerless.core.errors import ConfigError
from brokerless.metrics.client.api import Pipeline, StatsApi, Tags, join_tags
from brokerless.metrics.client.totals import Totals
from brokerless.metrics.client.transport import Transport
from brokerless.metrics.counters import ClientCounters
from brokerless.metrics.limits import HEARTBEAT_S
from brokerless.metrics.parser import Number
from brokerless.metrics.sequence_lines import ID_LENGTH, MAC_BYTES, mac_line, number_line

# Ethernet's 1500 bytes less IPv6 and UDP headers and 20 for tunnels: what Datadog's client uses too.
MAX_UDP_SIZE = 1432
# Lines wait at most this long: a window is ten seconds, so a hundredth of it.
FLUSH_S = 0.1
# What is told as the time between heartbeats by a client that sends none by itself.
_NEVER_S = 1e9
# Datagrams of totals per heartbeat, with some 35 counters each: up to 12 for counters that changed (with more
# than 420 of these, each is told less often), and 4 for all others in turn: 140 counters are all told every
# time, 10,000 within 72 heartbeats, which is six minutes. Together 4.6 kB/s at most.
CHANGED_DATAGRAMS = 12
IN_TURN_DATAGRAMS = 4
# 10,000 names and totals are about 2 MB.
MAX_COUNTERS = 10_000
_ALPHABET = string.digits + string.ascii_lowercase


def new_id() -> str:
    """A client id that no other client has, for practical purposes."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))


class StatsClient(StatsApi):
    """Drop-in for `statsd.StatsClient`; every method may be called from any thread, and after a fork.

    Nothing here raises into the application once it is made: what cannot be sent is counted in `counters`.
    `host` may be a path (`/run/statsd.sock`): a Unix datagram socket. `audit=False` sends no lines of our own.
    `heartbeat_s=inf` sends heartbeats only when `heartbeat` is called, and at the end.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int = 8125,
        prefix: str | None = None,
        maxudpsize: int = MAX_UDP_SIZE,
        ipv6: bool = False,
        *,
        tags: Tags | None = None,
        audit: bool = True,
        name: str | None = None,
        flush_s: float = FLUSH_S,
        heartbeat_s: float = HEARTBEAT_S,
        resolve_s: float = 60.0,
        max_counters: int = MAX_COUNTERS,
        auth_key: bytes | None = None,
    ) -> None:
        if not 64 <= maxudpsize <= 65507:
            raise ConfigError("maxudpsize", f"must be within 64 to 65507, not {maxudpsize}")
        if not isinstance(prefix, str | None):
            raise ConfigError("prefix", f"must be a string, not {prefix!r}")
        if flush_s <= 0 or heartbeat_s <= 0:
            raise ConfigError("flush_s", "and heartbeat_s must be positive")
        super().__init__(prefix, join_tags(tags))
        # With 30 attributes or more, Python reads each of them slower: a twentieth of an `incr`.
        self._audit = audit
        self._name = name
        self._flush_s = flush_s
        self._heartbeat_s = heartbeat_s
        self._max_counters = max_counters
        self._auth_key = check_key(auth_key) if auth_key is not None and audit else None
        # Lines that count one, by name: most of all lines, and a quarter of what an incr costs is making them.
        self._ones: dict[str, str] = {}
        self._transport = Transport(host, port, ipv6=ipv6, resolve_s=resolve_s)
        # Bytes that fit after the number line, `_bl.<id>:<up to 12 digits>.<up to 7>|g`.
        self._capacity = maxudpsize - ((ID_LENGTH + 28) if audit else 0)
        self._capacity -= MAC_BYTES if self._auth_key else 0
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        """Fresh state: at the start, and in a child after a fork, which is a client of its own."""
        self.id = new_id()
        self.counters = ClientCounters()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._done = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._number = 0
        self._beats = 0
        self._sent_lines = 0
        self._started_ms = int(time.time() * 1000)
        self._totals = Totals(self._max_counters)
        self._buffer: list[str] = []
        self._counted: list[str] = []
        # Lines beyond one per entry of the buffer.
        self._extra = 0
        # Nothing fits into an empty buffer: its first line makes room, and starts the thread.
        self._room = 0

    # -- lines

    def incr(self, stat: str, count: Number = 1, rate: float = 1, *, tags: Tags | None = None) -> None:
        """Add to a counter. What is no number is counted in `counters.invalid`."""
        try:
            line = self._ones.get(stat) if count == 1 and rate == 1 and tags is None else None
            if line is None:
                line = self._counter_line(stat, count, rate, tags)
                if not line:
                    return
                if not line.isascii():
                    self._put(line)
                    return
        except Exception:
            self._invalid()
            return
        with self._lock:
            room = self._room - len(line) - 1
            if room < 0:
                self._make_room(len(line) + 1)
                room = self._room - len(line) - 1
                if room < 0:
                    return
            self._room = room
            self._buffer.append(line)
            self._counted.append(line)

    def _counter_line(self, stat: str, count: Number, rate: float, tags: Tags | None) -> str:
        """The line of an increment; empty if it is sampled away. Raises if an argument is wrong."""
        if rate != 1 or tags is not None:
            if rate < 1 and random.random() > rate:
                return ""
            return self._line(stat, f"{count + 0}|c", rate, tags)
        if not isinstance(stat, str) or "\n" in stat:
            raise TypeError("a name is a string without newlines")
        line = f"{self._start}{stat}:{count + 0}|c{self._end}"
        if count == 1 and type(count) is int and line.isascii() and len(self._ones) < self._max_counters:
            self._ones[stat] = line
        return line

    def _invalid(self) -> None:
        self.counters.invalid += 1

    def pipeline(self) -> Pipeline:
        """Collect lines and hand them over together, by `send()` or at the end of a `with` block."""
        return Pipeline(self)

    # -- buffer

    def _put(self, line: str, lines: int = 1) -> None:
        size = 1 + (len(line) if line.isascii() else len(line.encode("utf-8", "replace")))
        with self._lock:
            if self._room < size:
                self._make_room(size, lines)
                if self._room < size:
                    return
            self._room -= size
            self._buffer.append(line)
            self._extra += lines - 1
            if "|c" in line:
                self._counted += [part for part in line.split("\n") if _is_counter(part)]

    def _make_room(self, size: int, lines: int = 1) -> None:
        """The rare part of adding a line: the buffer is empty or full, or the line does not fit at all."""
        if self._closed:
            self._room = 0
            self.counters.failed_lines += lines
            return
        if self._buffer:
            self._send_buffer()
        self._room = self._capacity
        if size > self._capacity:
            self._room = 0
            self.counters.oversized += lines
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._wake, self._done), daemon=True)
            self._thread.name = "statsd-client"
            self._thread.start()
        self._wake.set()

    def _send_buffer(self) -> None:
        buffer, self._buffer = self._buffer, []
        self._room = 0
        lines = len(buffer) + self._extra
        self._extra = 0
        self.counters.lines += lines
        if self._audit:
            if self._counted:
                self._totals.add(self._counted)
                self._counted = []
            self._sent_lines += lines
        else:
            self._counted = []
        self._send_datagram("\n".join(buffer), lines)

    def _send_datagram(self, text: str, lines: int) -> None:
        if self._audit:
            self._number += 1
            text = f"{number_line(self.id, self._number, self._beats)}\n{text}"
        payload = text.encode("utf-8", "replace")
        if self._auth_key:
            payload += b"\n" + mac_line(self.id, payload, self._auth_key, int(time.time() * 1000))
        outcome = self._transport.send(payload)
        self.counters.unreachable += outcome.unreachable
        if outcome.sent:
            self.counters.datagrams += 1
        else:
            self.counters.failed += 1
            self.counters.failed_lines += lines

    def flush(self) -> None:
        """Send what is buffered now."""
        with self._lock:
            if self._buffer:
                self._send_buffer()

    def heartbeat(self, *, closing: bool = False) -> None:
        """Tell the daemon the totals now; happens by itself every `heartbeat_s`."""
        with self._lock:
            self.flush()
            if not self._audit or not self._number:
                return
            every_ms = round(min(self._heartbeat_s, _NEVER_S) * 1000)
            base = [
                f"_bl.{self.id}.start:{self._started_ms}|g",
                f"_bl.{self.id}.lines:{self._sent_lines}|g",
                f"_bl.{self.id}.failed:{self.counters.failed}|g",
                f"_bl.{self.id}.every:{every_ms}|g",
                f"_bl.{self.id}.name.{self._shown_name()}:1|g",
            ]
            if closing:
                base.append(f"_bl.{self.id}.end:1|g")
            base.append(f"_bl.{self.id}.counters:{self._totals.known}|g")
            room = self._capacity - sum(len(line) + 1 for line in base)
            chunks = (
                self._totals.report_all(self.id, room)
                if closing
                else self._totals.report(self.id, room, changed=CHANGED_DATAGRAMS, in_turn=IN_TURN_DATAGRAMS)
            )
            self.counters.unreported = self._totals.unreported
            for chunk in chunks or [[]]:
                self._beats += 1
                self._send_datagram("\n".join(base + chunk), 0)

    def _shown_name(self) -> str:
        name = self._name or f"{socket.gethostname()}-{os.getpid()}"
        return "".join(c if c.isalnum() or c in "_-" else "-" for c in name)[:64]

    # -- life

    def _run(self, wake: threading.Event, done: threading.Event) -> None:
        # The first one is never late: until a daemon has it, it does not know what was lost before.
        first_s = min(self._heartbeat_s, HEARTBEAT_S) if self._heartbeat_s < inf else inf
        next_beat = time.monotonic() + first_s
        while True:
            wake.wait(min(max(0.0, next_beat - time.monotonic()), threading.TIMEOUT_MAX))
            if done.is_set():
                return
            if wake.is_set():
                # Something was buffered: it may wait this long for more.
                if done.wait(self._flush_s):
                    return
                wake.clear()
                self.flush()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._heartbeat_s
                self.heartbeat()

    def close(self) -> None:
        """Send what is buffered and the last totals, and end; later calls count as failed lines."""
        with self._lock:
            if self._closed:
                return
            # Everything is told, twice, because nobody can be asked again.
            for _ in range(2 if self._audit else 1):
                self.heartbeat(closing=True)
            self._closed = True
            self._room = 0
            self._done.set()
            self._wake.set()
            self._transport.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def __enter__(self) -> "StatsClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked(self) -> None:
        """In a child: the parent sends what was buffered; here begins another client."""
        closed = self._closed
        self._transport.forked()
        self._begin()
        self._closed = closed
        if closed:
            self._room = 0


def _is_counter(line: str) -> bool:
    fields = line.split("|")
    return len(fields) > 1 and fields[1] == "c"


_clients: "weakref.WeakSet[StatsClient]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._forked()


def _at_exit() -> None:
    """What an application that just ends had buffered is sent, and its counters are told."""
    for client in list(_clients):
        client.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
