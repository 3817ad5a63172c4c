"""The publisher: accepts events into its journal and sends them to a group, heartbeats when it is idle."""

import asyncio
import functools
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic, time_ns
from typing import Any, Literal

from brokerless.core import DiskJournal, Frame, Journal, MemoryJournal, Receipt, TokenBucket
from brokerless.core.errors import Closed, ConfigError, InvalidEvent, JournalError
from brokerless.core.event import check_data, check_source
from brokerless.core.exporter import Announced
from brokerless.core.journal.disk import as_journal, closed_on_error
from brokerless.core.presence import journal_state
from brokerless.core.runtime.closing import Closing
from brokerless.core.runtime.datagrams import Io, check_io
from brokerless.multicast.counters import PublisherCounters
from brokerless.multicast.policy import AnswerPolicy, FlowControl, HeartbeatPolicy
from brokerless.multicast.request_process import RequestServerProcess
from brokerless.multicast.request_server import RequestServer
from brokerless.multicast.send.flow_control import FlowController
from brokerless.multicast.send.session import Sender
from brokerless.multicast.send.transmit import Transmitter, open_lines
from brokerless.multicast.sockets import (
    DEFAULT_INTERFACE,
    DEFAULT_TTL,
    Address,
    address_of_interface,
    interface_index,
    pair_lines,
    parse_address,
)
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.kernels import send_lone, size_range
from brokerless.multicast.wire.message import describe
from brokerless.multicast.wire.moldudp64 import HEADER_BYTES, LENGTH, MAX_DATAGRAM, check_name, wire_session
from brokerless.multicast.wire.packing import GsoBatch, message_overhead
from brokerless.multicast.wire.pure import STAMP

log = logging.getLogger(__name__)
# What exchanges and PGM use: fits an Ethernet frame of 1,500 bytes with IPv6 and a tunnel header.
DATAGRAM_BYTES = 1400
# The longest an event is batched while the publisher is busy; an idle one sends at once.
MAX_WAIT_S = 0.001
# An event that comes this long after the one before it is alone, and sent at once: at up to 5,000 events/s each is.
ALONE_S = 0.0002
# Sent without waiting for more: what one call with segmentation offload takes.
BATCH_BYTES = 60_000
SMALL_BYTES = 1000
# The largest event: one message in the largest datagram, which IP fragments where it must.
MAX_EVENT_BYTES = 60_000
# How long closing waits at most for subscribers that have not got everything: ten of their retries.
LINGER_S = 1.0
# A packet with one message, beside what the message begins with and its data.
_SINGLE_BYTES = HEADER_BYTES + LENGTH.size + STAMP.size
# Topics whose beginnings are remembered; 4,096 of them are about 1 MB.
_MAX_HEADS = 4096
# At the end: so many packets that tell it, this far apart. One of them should arrive.
_ENDS = 3
_END_APART_S = 0.005
# And then one as often, until everybody has everything.
_LINGER_APART_S = 0.05
# How often subscribers are asked for their positions, with flow control: they answer twenty times a second.
_POSITIONS_EVERY_S = 0.05
# The thread that sends heartbeats wakes this much after they are due: a publisher that sends every millisecond would
# otherwise meet it there, ten milliseconds after an event.
_OFF_BEAT_S = 0.0004
# A receiver that does not tell its position (of another make) asks again within this, if an answer was lost.
_QUIET_S = 0.25


class Publisher(Announced, Closing):
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
        journal: Journal | str | os.PathLike[str] | None = None,
        interface: str | Sequence[str] = DEFAULT_INTERFACE,
        ttl: int = DEFAULT_TTL,
        requests: str | None = "auto",
        request_process: bool = False,
        allow: Iterable[str] | None = None,
        answers: AnswerPolicy | None = None,
        heartbeat: HeartbeatPolicy | None = None,
        datagram_bytes: int = DATAGRAM_BYTES,
        max_wait_s: float = MAX_WAIT_S,
        rate_bytes_s: float = 0,
        linger_s: float = LINGER_S,
        flow_control: FlowControl | None = None,
        auth_key: bytes | None = None,
        io: Io = "auto",
        announce: bool = True,
        metrics: str = "",
    ) -> None:
        """Begin the session, or go on with it if the journal has a past.

        `session` is a name of up to six characters; `source` is the same unless given. `journal` is a MemoryJournal
        unless given. `requests` is where to answer requests: "auto" is the interface's address and the port after the
        group's, None is nowhere (run a `RequestServer` elsewhere). `request_process` answers them in a process of its
        own, so that they cost this one nothing; it needs a DiskJournal, which both can read, and is started again if it
        ends. `rate_bytes_s` limits the live stream; 0 does not. `linger_s` is how long `close` waits at most for
        subscribers that have not got everything. `flow_control` holds `publish` back to the pace of the subscribers; it
        needs `requests`. `announce=False` keeps it out of `brokerless ps`; `metrics` is a host:port where this process
        serves `/metrics` for Prometheus. Raises ConfigError, JournalLocked, or a Fault of the sockets.
        """
        with closed_on_error(journal):
            check_name(session)
            check_io(io)
            groups = [group] if isinstance(group, str) else list(group)
            interfaces = [interface] if isinstance(interface, str) else list(interface)
            pair_lines([parse_address(text, "group", multicast=True) for text in groups], interfaces)
            if not HEADER_BYTES + 100 <= datagram_bytes <= MAX_DATAGRAM:
                raise ConfigError("datagram_bytes", f"must be {HEADER_BYTES + 100} to {MAX_DATAGRAM}")
            for name, value in (
                ("max_wait_s", max_wait_s),
                ("rate_bytes_s", rate_bytes_s),
                ("linger_s", linger_s),
            ):
                if not 0 <= value < math.inf:
                    raise ConfigError(name, f"must be a number from 0 on, not {value}")
            self._sign = Signer(auth_key, "group") if auth_key is not None else None
        self._name = session
        self.journal = as_journal(journal) if journal is not None else MemoryJournal()
        self._heads: dict[str, bytes] = {}  # by topic
        self.counters = PublisherCounters()
        self._max_wait_s = max_wait_s
        self._bucket = TokenBucket(rate_bytes_s, max(65_536, rate_bytes_s / 100), time.monotonic())
        self._lock = threading.Lock()
        self._outbox: deque[Frame] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._armed = False
        self._send_after = 0.0
        self._alone_after = 0.0
        self._logged = False
        with closed_on_error(self.journal):
            self.journal.bind(check_source(source if source is not None else self.journal.source or session))
            self._room = MAX_EVENT_BYTES - message_overhead(self.journal.source, "", "", "")
            wire = wire_session(session, self.journal.epoch)
            self._sender = Sender(
                wire,
                session,
                self.journal.next + 1,
                datagram_bytes=datagram_bytes,
                policy=heartbeat or HeartbeatPolicy(),
                now=time.monotonic(),
                sign=self._sign,
            )
            if flow_control is not None and requests is None:
                raise ConfigError(
                    "flow_control", "needs requests: that is where subscribers tell their positions"
                )
        self._positions_at = 0.0
        self._linger_s = linger_s
        self._lines: list[Transmitter] = []
        self._descriptors: list[int] = []  # of their sockets
        self.request_server: RequestServer | RequestServerProcess | None = None
        try:
            self._lines = open_lines(groups, interfaces, ttl, io, self.counters, self._descriptors)
            if requests is not None:
                at = _request_address(requests, parse_address(groups[0], "group"), interfaces[0])
                serve: Any = functools.partial(RequestServer, self.journal, session, at, announce=False)
                if request_process:
                    serve = functools.partial(RequestServerProcess, self._journal_path(), session, at)
                self.request_server = serve(
                    allow=allow,
                    answers=answers,
                    auth_key=auth_key,
                    group=groups,
                    interface=interfaces,
                    ttl=ttl,
                )
        except BaseException:
            for line in self._lines:
                line.close()
            self.journal.close()  # it is ours from the start: a publisher that failed must not keep its lock
            raise
        self._flow: FlowController | None = None
        if flow_control is not None and self.request_server is not None:
            self._flow = FlowController(flow_control, self.request_server.positions, time.monotonic())
        self.journal.on_frame = self._on_frame
        self.journal.keep_singles()
        self._offer, self._keep = self.journal.single_steps()
        self._thread = threading.Thread(target=self._run, name="brokerless-multicast", daemon=True)
        self._thread.start()
        self._announce("multicast.publisher", self.journal.source, groups, enabled=announce, metrics=metrics)

    def _state(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        state = journal_state(self.journal)
        state["counters"] = {**self.counters.snapshot(), "accepted": self.journal.counters.appended}
        state["session"] = self.session
        if self.request_server is not None:
            state["requests"] = self.request_server.counters.snapshot()
        return state

    def _journal_path(self) -> str:
        if not isinstance(self.journal, DiskJournal):
            raise ConfigError(
                "request_process", "needs a DiskJournal: another process cannot read this one's memory"
            )
        return self.journal.path

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
    def io_mode(self) -> str:
        """How packets are sent now: gso, mmsg or plain."""
        return self._lines[0].io_mode

    # -- publishing --------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        data: bytes,
        *,
        content_type: str = "",
        key: str = "",
        time_us: int | None = None,
    ) -> Receipt:
        """Accept one event: when this returns it is in the journal, and sent or about to be.

        Raises InvalidEvent, JournalFull or JournalError, and then the event was not accepted.
        """
        if len(data) > self._room - 1024:
            self._check_size(topic, data, content_type, key)
        if self._flow is not None:
            self._hold_back(1)
        with self._lock:
            if self._stopping:
                raise Closed("publisher")
            now = monotonic()
            if now >= self._alone_after and not (content_type or key):
                return self._publish_alone(topic, data, time_us, now)
            self._alone_after = now + ALONE_S
            journal = self.journal
            receipt = journal.stage(
                topic, data, content_type, key, time_us
            )  # by position: half the call's time
            self.counters.published += 1
            if now >= self._send_after or (
                # Asking costs a tenth of the call, so of small events one in sixteen asks.
                (len(data) > SMALL_BYTES or not receipt.offset & 15) and journal.staged_bytes >= BATCH_BYTES
            ):
                self._flush()
                self._alone_after = time.monotonic() + ALONE_S  # the time that sending takes is no pause
            elif not self._armed:
                self._armed = True
                self._wake.set()
        return receipt

    async def apublish(
        self,
        topic: str,
        data: bytes,
        *,
        content_type: str = "",
        key: str = "",
        time_us: int | None = None,
    ) -> Receipt:
        """`publish` for a coroutine that must not block: with a rate limit, or a journal with `on_full="block"`."""
        return await asyncio.to_thread(
            self.publish, topic, data, content_type=content_type, key=key, time_us=time_us
        )

    def publish_many(
        self,
        topic: str,
        datas: Sequence[bytes],
        *,
        content_type: str = "",
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
        if self._flow is not None:
            self._hold_back(len(datas))
        with self._lock:
            self._check_open()
            receipt = self.journal.append_many(topic, datas, content_type, keys=keys, times=times)
            self.counters.published += receipt.count
            self._send_outbox((receipt.offset, times, datas) if keys is None else None)
        return receipt

    async def apublish_many(
        self,
        topic: str,
        datas: Sequence[bytes],
        *,
        content_type: str = "",
        keys: Sequence[str] | None = None,
        times_us: Sequence[int] | None = None,
    ) -> Receipt:
        """`publish_many` for a coroutine that must not block, because of a rate limit or `on_full="block"`."""
        work = functools.partial(self.publish_many, topic, datas, content_type=content_type)
        return await asyncio.to_thread(work, keys=keys, times_us=times_us)

    def flush(self) -> None:
        """Send everything that is batched."""
        with self._lock:
            self._flush()

    def _hold_back(self, events: int) -> None:
        """Wait while the subscribers are too far behind. Raises Closed."""
        assert self._flow is not None
        waited = False
        journal = self.journal
        while (wait_s := self._flow.wait_s(journal.next + journal.staged + 1, events, monotonic())) > 0:
            self._check_open()
            if not waited:
                self.flush()  # what they wait for may wait here
                waited = True
                self.counters.held_back += 1
            self._ask_positions()
            time.sleep(wait_s)
        if time.monotonic() >= self._positions_at + _POSITIONS_EVERY_S:
            self._ask_positions()

    def _ask_positions(self) -> None:
        """Ask every subscriber where it is, but not more often than they answer."""
        with self._lock:
            now = time.monotonic()
            if now >= self._positions_at + _POSITIONS_EVERY_S:
                self._positions_at = now
                self._send_control(self._sender.solicit())

    def _check_size(self, topic: str, data: bytes, content_type: str, key: str) -> None:
        if len(data) + len(f"{topic}{content_type}{key}".encode()) > self._room:
            raise InvalidEvent(
                "data", f"has {len(data)} bytes; a multicast message holds {self._room - 1024}"
            )

    def _check_open(self) -> None:
        if self._stopping:
            raise Closed("publisher")

    # -- sending -----------------------------------------------------------------------------------------

    def _publish_alone(self, topic: str, data: bytes, time_us: int | None, now: float) -> Receipt:
        """Accept an event and send it before it becomes a frame, which whoever waits for it need not wait for.

        If it is not next (others wait to be sent), or must be paced, it goes the general way. Hold the lock.
        """
        self._alone_after = now + ALONE_S
        if time_us is None:
            time_us = time_ns() // 1000
        # This is short on purpose: between two lone events other programs fill the processor's caches, and then every
        # function, object and line costs several times what it does in a loop.
        receipt = self._offer(topic, data, time_us) or self.journal.stage(topic, data, "", "", time_us)
        sequence, sender = receipt.offset + 1, self._sender
        head = self._heads.get(topic) or self._describe(topic)
        if sequence == sender.next_sequence and not self._bucket.rate and type(data) is bytes:
            sent, lines, counters = 0, self._lines, self.counters
            if self._sign is None:
                sent = send_lone(
                    self._descriptors, sender.session, sequence, head, receipt.seq, time_us, data
                )
                counters.packets += sent
                counters.sent_bytes += sent * (_SINGLE_BYTES + len(head) + len(data))
            if sent < len(lines):
                packet = sender.single(head, receipt.seq, time_us, data)
                for line in lines[sent:]:
                    line.send_one(packet)
            sender.sent_single(now)
            counters.published += 1
            if self._keep():
                self._send_after = now + self._max_wait_s
                return receipt
        else:
            self.counters.published += 1
        self._flush()
        return receipt

    def _describe(self, topic: str) -> bytes:
        """What the messages of a topic begin with. An event that can have none is refused as a frame, too."""
        source = self.journal.source
        head = describe("" if source == self._name else source, self.journal.epoch, topic, "", 0)
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[topic] = head
        return head

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
            if not self._logged:
                self._logged = True
                log.warning("events are accepted, but cannot be sent: %s", error)
        else:
            self._armed = False
        self._send_outbox()

    def _send_outbox(self, current: tuple[int, int | Sequence[int], Sequence[bytes]] | None = None) -> None:
        """Send the frames that wait. `current` is what some of them are made of: offset, times, datas."""
        while self._outbox:
            frame = self._outbox.popleft()
            if frame.next_offset < self._sender.next_sequence:
                continue  # sent as a single event
            known = None
            if current is not None and frame.first_offset >= current[0]:
                first, times, datas = current
                lo, hi = frame.first_offset - first, frame.next_offset - first
                if hi <= len(datas):
                    known = times if isinstance(times, int) else times[lo:hi], datas[lo:hi]
            batches = self._sender.frame(frame, time.monotonic(), known)
            if self._bucket.rate:
                batches = self._paced(batches)
            if len(self._lines) == 1:
                self._lines[0].send(batches)
                continue
            for batch in batches:
                for line in self._lines:
                    line.send([batch])
        self._send_after = time.monotonic() + self._max_wait_s

    def _paced(self, batches: Iterator[GsoBatch]) -> Iterator[GsoBatch]:
        """The same, each when the rate allows it."""
        bucket = self._bucket
        for batch in batches:
            size = min(len(batch.buffer), bucket.burst)
            waited = False
            while not bucket.take(size, time.monotonic()):
                waited = True
                time.sleep(bucket.wait_s(size, time.monotonic()))
            self.counters.paced += waited
            yield batch

    def _run(self) -> None:
        """Flush what waited long enough, and send heartbeats."""
        while not self._stopping:
            with self._lock:
                now = time.monotonic()
                if self._outbox or (self._armed and now >= self._send_after):
                    self._flush()
                    now = time.monotonic()
                beat = self._tell_receivers() or self._sender.heartbeat(now)
                if beat is not None:
                    self._send_control(beat)
                due = self._sender.next_deadline()
                if self._armed:
                    due = min(due, self._send_after)
            self.journal.settle()
            if self._wake.wait(max(0.0, due - time.monotonic()) + _OFF_BEAT_S):
                self._wake.clear()

    def _tell_receivers(self) -> bytes | None:
        """A heartbeat if there are other subscribers than before: they share what they ask for."""
        server = self.request_server
        return None if server is None else self._sender.tell_receivers(server.sharing_receivers)

    def _send_control(self, packet: bytes) -> None:
        for line in self._lines:
            if line.send_control(packet):
                self.counters.heartbeats += 1

    # -- end ---------------------------------------------------------------------------------------------

    def close(self, *, end: bool | None = None, linger_s: float | None = None) -> None:
        """Send what is left, stop, and close the journal. Closing twice is fine.

        `end` says whether the session is over. By default it is unless the journal is on disk, because then it can
        be continued. Requests are answered until every known subscriber has everything, but not for longer than
        `linger_s` (by default the publisher's); `counters.lingered` is how many were left behind.
        """
        with self._lock:
            if self._stopping:
                return
            self._flush()
            self._stopping = True
        self._withdraw()
        self._wake.set()
        self._thread.join(10)
        ends = end if end is not None else not isinstance(self.journal, DiskJournal)
        self._linger(ends, self._linger_s if linger_s is None else linger_s)
        if self.request_server is not None:
            self.request_server.close()
        for line in self._lines:
            line.close()
        self.journal.on_frame = None
        self.journal.close()

    def _linger(self, ends: bool, linger_s: float) -> None:
        """Tell where the stream ends, and answer requests until everybody has everything."""
        begun, sent = time.monotonic(), 0
        while sent < _ENDS or (time.monotonic() < begun + linger_s and not self._satisfied()):
            self._send_control(self._sender.end() if ends else self._sender.solicit())
            sent += 1
            time.sleep(_END_APART_S if sent <= _ENDS else _LINGER_APART_S)
        server = self.request_server
        if server is not None and (behind := server.positions.behind(self._sender.next_sequence)):
            self.counters.lingered += behind
            log.warning("closing although %d subscribers have not got everything", behind)

    def _satisfied(self) -> bool:
        """Has every subscriber that we know of got everything?"""
        server = self.request_server
        if server is None:
            return True
        now = time.monotonic()
        server.positions.expire(now)
        if len(server.positions):
            return not server.positions.behind(self._sender.next_sequence)
        return now > server.asked_at + _QUIET_S

    @property
    def failed_lines(self) -> int:
        """Lines on which nothing can be sent now, because their interface is gone or down."""
        return sum(line.failed for line in self._lines)

    async def aclose(self, *, end: bool | None = None, linger_s: float | None = None) -> None:
        """`close` for asyncio: in a thread, because it waits."""
        await asyncio.to_thread(self.close, end=end, linger_s=linger_s)


def default_request_host(group: Address, interface: str) -> str | None:
    """The address of the interface; None if that is not known (IPv6 has several)."""
    if ":" in group.host:
        return "::1" if interface in ("lo", "::1", DEFAULT_INTERFACE) else None
    if interface.count(".") == 3:
        return interface
    return address_of_interface(socket.if_indextoname(interface_index(interface, group.family)))


def _request_address(requests: str | Literal["auto"], group: Address, interface: str) -> str:
    if requests != "auto":
        return str(parse_address(requests, "requests", any_port=True))
    host = default_request_host(group, interface)
    if host is None:
        raise ConfigError("requests", f"give the address of {interface} at which to answer requests, or None")
    return str(Address(host, group.port + 1))
