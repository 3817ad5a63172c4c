"""The publisher: accepts events into its journal and sends them to a group, heartbeats when it is idle."""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal

from brokerless.core import DiskJournal, Frame, Journal, MemoryJournal, Receipt, TokenBucket
from brokerless.core.errors import Closed, ConfigError, InvalidEvent, JournalError
from brokerless.core.event import check_data, check_source
from brokerless.multicast.auth import sealer
from brokerless.multicast.counters import PublisherCounters
from brokerless.multicast.packing import Train, message_overhead
from brokerless.multicast.policy import AnswerPolicy, HeartbeatPolicy
from brokerless.multicast.protocol import HEADER_BYTES, MAX_DATAGRAM, check_name, wire_session
from brokerless.multicast.request_server import RequestServer
from brokerless.multicast.sender import Sender
from brokerless.multicast.sockets import (
    DEFAULT_INTERFACE,
    DEFAULT_TTL,
    Address,
    address_of_interface,
    interface_index,
    parse_address,
    sending_socket,
)
from brokerless.multicast.speed import size_range
from brokerless.multicast.transmit import Io, Transmitter, check_io

log = logging.getLogger(__name__)
# What exchanges and PGM use: fits an Ethernet frame of 1,500 bytes with IPv6 and a tunnel header.
DATAGRAM_BYTES = 1400
# The longest an event waits for company while the publisher is busy; an idle one sends at once.
MAX_WAIT_S = 0.001
# Sent without waiting for more: what one call with segmentation offload takes.
BATCH_BYTES = 60_000
# The largest event: one message in the largest datagram, which IP fragments where it must.
MAX_EVENT_BYTES = 60_000
# So many end-of-session packets, this far apart: one of them should arrive.
_ENDS = 3
_END_APART_S = 0.005


class Publisher:
    """Publishes events of one source as one MoldUDP64 session to one group (or two: lines A and B).

    Question 1, the producer is faster than a consumer: multicast does not hold back by itself. A receiver
    that is too slow drops, notices, and repairs from the journal while the journal still has it;
    `rate_bytes_s` holds the producer back to what the slowest may be expected to take. Question 2, a node
    crashes: a receiver that comes back repairs from the journal. A publisher that is restarted on its
    DiskJournal goes on with the same session; with a MemoryJournal it begins a new one, and what nobody had
    received is lost.

    Thread-safe. Closes the journal when it is closed.
    """

    def __init__(
        self,
        group: str | Sequence[str],
        session: str,
        *,
        source: str | None = None,
        journal: Journal | None = None,
        interface: str | Sequence[str] = DEFAULT_INTERFACE,
        ttl: int = DEFAULT_TTL,
        requests: str | None = "auto",
        allow: Iterable[str] | None = None,
        answers: AnswerPolicy | None = None,
        heartbeat: HeartbeatPolicy | None = None,
        datagram_bytes: int = DATAGRAM_BYTES,
        max_wait_s: float = MAX_WAIT_S,
        rate_bytes_s: float = 0,
        auth_key: bytes | None = None,
        io: Io = "auto",
    ) -> None:
        """Begin the session, or go on with it if the journal has a past.

        `session` is a name of up to six characters; `source` is the same unless given. `journal` is a
        MemoryJournal unless given. `requests` is where to answer requests: "auto" is the interface's address
        and the port after the group's, None is nowhere (run a `RequestServer` elsewhere). `rate_bytes_s`
        limits the live stream; 0 does not. Raises ConfigError, JournalLocked, or a Fault of the sockets.
        """
        check_name(session)
        check_io(io)
        groups = [group] if isinstance(group, str) else list(group)
        interfaces = [interface] if isinstance(interface, str) else list(interface)
        if not groups or not interfaces:
            raise ConfigError("group", "give at least one group and one interface")
        addresses = [parse_address(text, "group", multicast=True) for text in groups]
        if not HEADER_BYTES + 100 <= datagram_bytes <= MAX_DATAGRAM:
            raise ConfigError("datagram_bytes", f"must be {HEADER_BYTES + 100} to {MAX_DATAGRAM}")
        if max_wait_s < 0 or rate_bytes_s < 0:
            raise ConfigError("max_wait_s", "must not be negative, nor must rate_bytes_s")
        self._seal = sealer(auth_key) if auth_key is not None else None
        self._name = session
        self.journal = journal if journal is not None else MemoryJournal()
        self.journal.bind(check_source(source if source is not None else self.journal.source or session))
        self.counters = PublisherCounters()
        self._max_wait_s = max_wait_s
        self._bucket = TokenBucket(rate_bytes_s, max(65_536, rate_bytes_s / 100), time.monotonic())
        self._lock = threading.Lock()
        self._outbox: deque[Frame] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._armed = False
        self._send_after = 0.0
        self._complained = False
        self._room = MAX_EVENT_BYTES - message_overhead(self.journal.source, "", "", "")
        wire = wire_session(session, self.journal.epoch)
        self._sender = Sender(
            wire,
            session,
            self.journal.next + 1,
            datagram_bytes=datagram_bytes,
            policy=heartbeat or HeartbeatPolicy(),
            now=time.monotonic(),
            seal=self._seal,
        )
        self._sockets: list[socket.socket] = []
        self.request_server: RequestServer | None = None
        try:
            for address in addresses:
                self._sockets += [sending_socket(address, where, ttl) for where in interfaces]
            self._lines = [Transmitter(sock, io, self.counters) for sock in self._sockets]
            if requests is not None:
                at = _request_address(requests, addresses[0], interfaces[0])
                self.request_server = RequestServer(
                    self.journal, session, at, allow=allow, policy=answers, auth_key=auth_key
                )
        except BaseException:
            for sock in self._sockets:
                sock.close()
            raise
        self.journal.on_frame = self._on_frame
        self._thread = threading.Thread(target=self._run, name="brokerless-multicast", daemon=True)
        self._thread.start()

    # -- what it is --------------------------------------------------------------------------------------

    @property
    def session(self) -> str:
        """The session as it is on the wire: the name, and four digits of the epoch."""
        return self._sender.session.decode().rstrip()

    @property
    def source(self) -> str:
        """The producer's name."""
        return self.journal.source

    @property
    def epoch(self) -> int:
        """The producer's epoch."""
        return self.journal.epoch

    @property
    def request_address(self) -> str | None:
        """Where receivers ask for what they missed."""
        return str(self.request_server.address) if self.request_server else None

    @property
    def way(self) -> str:
        """How packets are sent now: gso, mmsg or plain."""
        return self._lines[0].way

    # -- publishing --------------------------------------------------------------------------------------

    def publish(
        self, topic: str, data: bytes, content_type: str = "", key: str = "", *, time_us: int | None = None
    ) -> Receipt:
        """Accept one event: when this returns it is in the journal, and sent or about to be.

        Raises InvalidEvent, JournalFull or JournalError, and then the event was not accepted.
        """
        if len(data) > self._room - 1024:
            self._check_size(topic, data, content_type, key)
        with self._lock:
            self._check_open()
            receipt = self.journal.stage(topic, data, content_type, key, time=time_us)
            self.counters.published += 1
            if self.journal.staged_bytes >= BATCH_BYTES or time.monotonic() >= self._send_after:
                self._flush()
            elif not self._armed:
                self._armed = True
                self._wake.set()
        return receipt

    def publish_many(
        self,
        topic: str,
        datas: Sequence[bytes],
        content_type: str = "",
        *,
        keys: Sequence[str] | None = None,
        times_us: Sequence[int] | None = None,
    ) -> Receipt:
        """Accept many events of one topic, all or none, and send them. Returns the receipt of the first."""
        sizes = size_range(datas)
        if sizes is None or sizes[1] > self._room - 1024:
            datas = [check_data(data, MAX_EVENT_BYTES) for data in datas]
            for i, data in enumerate(datas):
                self._check_size(topic, data, content_type, keys[i] if keys is not None else "")
        times = times_us if times_us is not None else time.time_ns() // 1000
        with self._lock:
            self._check_open()
            receipt = self.journal.append_many(topic, datas, content_type, keys=keys, times=times)
            self.counters.published += receipt.count
            self._send_outbox((receipt.offset, times, datas) if keys is None else None)
        return receipt

    def flush(self) -> None:
        """Send everything that waits for company."""
        with self._lock:
            self._flush()

    def _check_size(self, topic: str, data: bytes, content_type: str, key: str) -> None:
        if len(data) + len(f"{topic}{content_type}{key}".encode()) > self._room:
            raise InvalidEvent(
                "data", f"has {len(data)} bytes; a multicast message holds {self._room - 1024}"
            )

    def _check_open(self) -> None:
        if self._stopping:
            raise Closed("publisher")

    # -- sending -----------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        """The journal has a new frame. Under the journal's lock, in any thread: only remember it."""
        self._outbox.append(frame)
        if not self._lock.locked():
            self._wake.set()  # somebody appended to the journal directly

    def _flush(self) -> None:
        """Make staged events frames, and send them. Hold the lock."""
        try:
            self.journal.flush()
        except JournalError as error:
            # The events are accepted and stay staged; the next flush tries again.
            self.counters.journal_errors += 1
            if not self._complained:
                self._complained = True
                log.warning("events are accepted, but cannot be sent: %s", error)
        else:
            self._armed = False
        self._send_outbox()

    def _send_outbox(self, at_hand: tuple[int, int | Sequence[int], Sequence[bytes]] | None = None) -> None:
        """Send the frames that wait. `at_hand` is what some of them are made of: offset, times, datas."""
        while self._outbox:
            frame = self._outbox.popleft()
            known = None
            if at_hand is not None and frame.first_offset >= at_hand[0]:
                first, times, datas = at_hand
                lo, hi = frame.first_offset - first, frame.next_offset - first
                if hi <= len(datas):
                    known = times if isinstance(times, int) else times[lo:hi], datas[lo:hi]
            trains = self._sender.frame(frame, time.monotonic(), known)
            if self._bucket.rate:
                trains = self._paced(trains)
            if len(self._lines) == 1:
                self._lines[0].send(trains)
                continue
            for train in trains:
                for line in self._lines:
                    line.send([train])
        self._send_after = time.monotonic() + self._max_wait_s

    def _paced(self, trains: Iterator[Train]) -> Iterator[Train]:
        """The same, each when the rate allows it."""
        bucket = self._bucket
        for train in trains:
            size = min(len(train.buffer), bucket.burst)
            waited = False
            while not bucket.take(size, time.monotonic()):
                waited = True
                time.sleep(bucket.wait_s(size, time.monotonic()))
            self.counters.paced += waited
            yield train

    def _run(self) -> None:
        """Flush what waited long enough, and send heartbeats."""
        while not self._stopping:
            with self._lock:
                now = time.monotonic()
                if self._outbox or (self._armed and now >= self._send_after):
                    self._flush()
                    now = time.monotonic()
                beat = self._sender.heartbeat(now)
                if beat is not None:
                    self._send_control(beat)
                due = self._sender.next_deadline()
                if self._armed:
                    due = min(due, self._send_after)
            if self._wake.wait(max(0.0, due - time.monotonic())):
                self._wake.clear()

    def _send_control(self, packet: bytes) -> None:
        for line in self._lines:
            if line.send_control(packet):
                self.counters.heartbeats += 1

    # -- end ---------------------------------------------------------------------------------------------

    def close(self, *, end: bool | None = None) -> None:
        """Send what is left, stop, and close the journal. Closing twice is fine.

        `end` says whether the session is over. By default it is unless the journal is on disk, because then
        it can be gone on with.
        """
        with self._lock:
            if self._stopping:
                return
            self._flush()
            self._stopping = True
        self._wake.set()
        self._thread.join(10)
        if end if end is not None else not isinstance(self.journal, DiskJournal):
            for _ in range(_ENDS):
                self._send_control(self._sender.end())
                time.sleep(_END_APART_S)
        if self.request_server is not None:
            self.request_server.close()
        for sock in self._sockets:
            sock.close()
        self.journal.on_frame = None
        self.journal.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "Publisher":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def default_request_host(group: Address, interface: str) -> str | None:
    """The address of the interface; None if that is not known (IPv6 has several)."""
    if ":" in group.host:
        return "::1" if interface in ("lo", "::1", DEFAULT_INTERFACE) else None
    if interface.count(".") == 3:
        return interface
    return address_of_interface(socket.if_indextoname(interface_index(interface, group.family)))


def _request_address(requests: str | Literal["auto"], group: Address, interface: str) -> str:
    if requests != "auto":
        return requests
    host = default_request_host(group, interface)
    if host is None:
        raise ConfigError("requests", f"give the address of {interface} at which to answer requests, or None")
    return str(Address(host, group.port + 1))
