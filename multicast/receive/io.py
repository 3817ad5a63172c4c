"""The I/O of a subscriber: reads the sockets, feeds the receiver, sends its requests. One lock, no thread.

Whoever holds the lock may call `step`; the application's thread does when it waits for events, a helper
thread does while the application is busy. A step can be interrupted anywhere, by a signal's handler that raises: what
it had read and not processed is asked for again, as if it were lost on its way.
"""

import logging
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty
from time import monotonic
from typing import Literal, NamedTuple

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.core.runtime.datagrams import (
    SLOT_BYTES,
    SO_BUSY_POLL,
    DatagramReceiver,
    Io,
    check_io,
    kernel_drops,
)
from brokerless.core.runtime.wakeup import WakeUp
from brokerless.multicast.counters import SubscriberCounters
from brokerless.multicast.policy import RepairPolicy
from brokerless.multicast.receive.decode import PacketDecoder
from brokerless.multicast.receive.gaps import Missing, RepairRequest
from brokerless.multicast.receive.reorder import Receiver
from brokerless.multicast.receive.tcp_fetch import Fetch
from brokerless.multicast.sockets import (
    Address,
    SocketFault,
    interface_index,
    pair_lines,
    parse_address,
    receiving_socket,
    unicast_socket,
)
from brokerless.multicast.wire.auth import CLOCK_WINDOW_S, Signer
from brokerless.multicast.wire.kernels import wait_next
from brokerless.multicast.wire.message import Columns, Described
from brokerless.multicast.wire.moldudp64 import MAX_DATAGRAM, SESSION_BYTES, Gone, request
from brokerless.multicast.wire.status import ANY_SESSION, LEAVING, Requester, Status, extended_request

log = logging.getLogger("brokerless.multicast")

Item = tuple[bytes, Columns | Missing]
# Of an event that came alone: seq, time, data.
LoneEvent = tuple[int, int, bytes]
# The session and sequence that were expected next, and what `kernels.wait_next` found.
Found = tuple[bytes, int, tuple[int, int, int, LoneEvent | None]]
# Packets taken from one socket before the others and the timers have their turn.
_ROUND = 256
# And bytes: the application gets them while they are in the cache.
_ROUND_BYTES = 200_000
# A waiting receiver looks at least every half second. A longer pause means that the process was stopped.
_STALLED_S = 1.0

# How often a subscriber that reads nothing, because its queue is full, tells its position; and how often one that a
# server does not know asks it for a cookie.
_TELL_EVERY_S = 0.25


class SubscriberOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `Subscriber` was given."""

    groups: list[str]
    interfaces: list[str]
    sender: str | None
    request_servers: Sequence[str] | None
    session: str | None
    repair: RepairPolicy
    tcp: bool
    auth_key: bytes | None
    opaque: bool
    receive_buffer_bytes: int
    max_queue_bytes: int
    io: Io
    clock_window_s: float = CLOCK_WINDOW_S
    flow_control_tag: int = 0
    busy_poll_s: float = 0.0


class Stale(NamedTuple):
    """The subscriber may be behind without knowing by how much."""

    session: str | None
    reason: Literal["silent", "rewound"]
    silent_s: float
    next_offset: int  # the next one that it expects


class Line:
    """One group on one interface: the socket that has joined it, and when something came."""

    def __init__(self, group: Address, interface: str, options: SubscriberOptions) -> None:
        self.group = group
        self.interface = interface
        self._options = options
        self.heard_at = self.joined_at = 0.0
        self.silent = False  # nothing comes by it, but by another line
        self.dropped_before = 0  # by the kernel, at sockets that were replaced
        self.sock, self.datagrams = self._open()

    def _open(self) -> tuple[socket.socket, DatagramReceiver]:
        options = self._options
        sock = receiving_socket(self.group, self.interface, options.sender, options.receive_buffer_bytes)
        try:
            if options.busy_poll_s:
                with suppress(OSError):  # it takes privileges, and a driver that polls
                    sock.setsockopt(socket.SOL_SOCKET, SO_BUSY_POLL, 50)
            return sock, DatagramReceiver(sock, options.io)
        except BaseException:
            sock.close()
            raise

    def rejoin(self) -> None:
        """Replace the socket: a new membership, on the interface of that name as it is now.

        Raises SocketFault or ConfigError if that is not possible, and then nothing has changed.
        """
        sock, datagrams = self._open()
        old, self.sock, self.datagrams = self.sock, sock, datagrams
        self.dropped_before += kernel_drops(old)
        old.close()

    def drops(self) -> int:
        """What the kernel dropped of this line."""
        return self.dropped_before + kernel_drops(self.sock)


class SubscriberIo:
    """Sockets around one receiver. `queue` is what the application has not taken yet, bounded by bytes.

    When it is full, nothing more is read: the kernel's buffer fills, what it drops is counted and repaired.
    """

    def __init__(
        self,
        lines: list[Line],
        decoder: PacketDecoder,
        servers: list[Address],
        answers: dict[int, socket.socket],
        *,
        sign: Signer | None,
        max_queue_bytes: int,
        requester: int = 0,
        tag: int = 0,
        busy_poll_s: float = 0.0,
    ) -> None:
        # Taken twice by whoever looks at gaps in the handler of a signal, or where losses are told.
        self.lock = threading.RLock()
        self.queue: deque[tuple[Item, int]] = deque()
        self._in_bytes = 0  # changed under the lock
        self.out_bytes = 0  # of what the application's thread took out of the queue
        self._interrupted = False  # a step began and did not end
        self.decoder = decoder
        self.receiver = decoder.receiver
        self._lines = lines
        self.notices: deque[Stale] = deque()  # what the application is to be told
        self._cookies: dict[int, int] = {}  # by server: what it gave us
        self._cookie_asked_at: dict[int, float] = {}
        self._requester = requester
        self._tag = tag
        self._stale = False
        self._stale_attempts = 0
        self._told_at = 0.0
        self._rewinds = 0
        self._line_due = 0.0  # when lines are looked at again
        self._rejoin_failed = False
        self._servers = servers
        self._where = {(s.host, s.port): i for i, s in enumerate(servers)}
        self._answers = answers  # by address family
        self._sign = sign
        self._max_queue_bytes = max_queue_bytes
        self._buffer = bytearray(SLOT_BYTES)  # of the thread that calls `wait_next`
        self._busy_poll_ns = int(busy_poll_s * 1e9)
        self._drops = 0  # of the kernel, as far as they were looked at
        self._unexplained = 0  # of these, not seen as a gap yet
        self._drained = False  # everything was read that came before the last look at the drops
        self._clock = time.monotonic()
        self.now = 0.0  # see `_tick`
        self._fetch: Fetch | None = None
        self._wakeup = WakeUp()
        self.wake = self._wakeup.wake  # make waiters look
        self._closed = False
        decoder.on_status = self._keep_cookie

    # -- waiting -----------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Wait until something can be read, `wake`, or so many seconds."""
        poll = select.poll()
        for fd in (*self._descriptors(), self._wakeup.fd):
            if fd >= 0:  # -1: closed meanwhile
                poll.register(fd, select.POLLIN)
        poll.poll(int(seconds * 1000 + 0.999))
        self._wakeup.clear()

    def wait_next(self, seconds: float) -> Found | None:
        """`wait`, and read the first datagram: the short way of a lone event. Call `take` with what it returns.

        For one thread, without the lock. Looks again and again for `busy_poll_s` before it sleeps.
        """
        expects = self.decoder.expects
        socks = tuple([line.sock for line in self._lines])
        others = (*[sock.fileno() for sock in self._answers.values()], self._wakeup.fd)
        wait_ns = int(seconds * 1e9)
        found = wait_next(socks, others, wait_ns, self._busy_poll_ns, self._buffer, *expects)
        if found is None:
            self._wakeup.clear()
            return None
        return expects[0], expects[1], found

    async def wait_async(self, seconds: float) -> None:
        """The same for asyncio."""
        await self._wakeup.wait(self._descriptors(), seconds)

    def _descriptors(self) -> list[int]:
        return [
            *(line.sock.fileno() for line in self._lines),
            *(sock.fileno() for sock in self._answers.values()),
        ]

    def wait_s(self) -> float | None:
        """In how many seconds `step` has something to do even if nothing arrives."""
        due = self.receiver.next_deadline()
        return None if due is None else max(0.0, due - self.now)

    @property
    def full(self) -> bool:
        """The application has so much to take that nothing more is read."""
        return self._in_bytes - self.out_bytes >= self._max_queue_bytes

    # -- working -----------------------------------------------------------------------------------------

    def _tick(self) -> float:
        """The receiver's time, which stands still while nothing is read, or the process was stopped.

        Otherwise an application that pauses for longer than the deadline would lose what it never looked for.
        """
        clock = monotonic()
        passed = clock - self._clock
        self._clock = clock
        if self._in_bytes - self.out_bytes < self._max_queue_bytes:
            self.now += passed if passed < _STALLED_S else _STALLED_S
        return self.now

    def step(self) -> bool:
        """Read what is there, ask for what is missing; True if something was read. Hold the lock."""
        now = self._tick()
        if self._closed:
            return False
        if self.full:
            self._tell_position()
            return False
        if self._interrupted:
            self._recover(now)
        self._interrupted = True
        moved, drained = False, True
        for line in self._lines:
            some, all_of_it = self._read_line(line.datagrams, now)
            if some:
                line.heard_at = now
            moved |= some
            drained &= all_of_it
        self._attribute_drops(moved, drained)
        for sock in self._answers.values():
            moved |= self._read_answers(sock, now)
        if self._fetch is not None:
            moved |= self._read_fetch(self._fetch, now)
        for repair_request in self.receiver.due_requests(now):
            self._send_request(repair_request)
        self._watch(now)
        self._collect()
        self._interrupted = False
        return moved

    def take(self, found: Found, described: Sequence[Described | None] | None = None) -> LoneEvent | None:
        """Take in what `wait_next` read, and leave the rest to the next `step`. Hold the lock.

        If it is the event that was expected, like the one before as `described`, and nothing else waits, it is
        returned: the caller hands it over, and calls `receiver.next_in_order`.
        """
        now = self._tick()
        if self._closed:
            return None
        if self._interrupted:
            self._recover(now)
        session, expected, (line, size, packet_bytes, event) = found
        self._lines[line].heard_at = now
        if event is not None and not self.queue and described is self.decoder.last[1]:
            receiver = self.receiver
            if expected == receiver.expected == receiver.highest and session == receiver.session:
                counters = receiver.counters
                counters.packets += 1
                counters.received_bytes += size
                return event
        self._interrupted = True
        self._decode([(memoryview(self._buffer)[:size], packet_bytes)], now)
        self._collect()
        self._interrupted = False
        return None

    def _recover(self, now: float) -> None:
        fetch = self._fetch
        if fetch is not None and not fetch.done and not fetch.is_alive():
            fetch.stop()  # interrupted before it had begun
            self._fetch = None
        self.receiver.recover(now)

    def _watch(self, now: float) -> None:
        """Notice silence and senders that went back; join again what is silent."""
        receiver = self.receiver
        if receiver.counters.rewinds != self._rewinds:
            self._rewinds = receiver.counters.rewinds
            self._notice("rewound", 0.0)
            log.error("the sender went back to sequence %d: its journal was restored", receiver.expected)
        if receiver.stale != self._stale:
            self._stale = receiver.stale
            if self._stale:
                silent_s = receiver.silent_s(now)
                self._notice("silent", silent_s)
                log.warning(
                    "nothing was heard of %s for %.1f s: the publisher is gone, or multicast does not arrive; "
                    "joining again and asking %d request servers",
                    receiver.session_text or "any session",
                    silent_s,
                    len(self._servers),
                )
            else:
                log.info("%s is heard again", receiver.session_text)
        if receiver.stale_attempts != self._stale_attempts:
            self._stale_attempts = receiver.stale_attempts
            self._rejoin(self._lines, now)
        elif len(self._lines) > 1 and not self._stale and now >= self._line_due:
            stale_after_s = receiver.policy.stale_after_s
            self._line_due = now + stale_after_s
            silent = [line for line in self._lines if now - line.heard_at > stale_after_s]
            if silent and len(silent) < len(self._lines):
                self._tell_silent(silent)
                self._rejoin(silent, now)
            for line in self._lines:
                if line.silent and line.heard_at > line.joined_at:
                    line.silent = False
                    log.info("%s on %s is heard again", line.group, line.interface)

    def _tell_silent(self, lines: list[Line]) -> None:
        for line in lines:
            if not line.silent:
                line.silent = True
                log.warning(
                    "nothing comes by %s on %s any more, but by another line; joining again",
                    line.group,
                    line.interface,
                )

    @property
    def silent_lines(self) -> int:
        """Lines by which nothing comes, although something comes by another."""
        return sum(line.silent for line in self._lines)

    def _notice(self, reason: Literal["silent", "rewound"], silent_s: float) -> None:
        receiver = self.receiver
        self.notices.append(Stale(receiver.session_text, reason, silent_s, max(0, receiver.expected - 1)))

    def _rejoin(self, lines: list[Line], now: float) -> None:
        for line in lines:
            line.heard_at = line.joined_at = now
            try:
                line.rejoin()
            except (SocketFault, ConfigError) as error:
                if not self._rejoin_failed:
                    self._rejoin_failed = True
                    log.warning("%s; trying again", error)
                continue
            self._rejoin_failed = False
            self.receiver.counters.rejoins += 1
        self.wake()

    def _keep_cookie(self, server: int, status: Status) -> None:
        if server not in self._cookies:
            self.receiver.want_status(self.now)  # now it believes where we are
        self._cookies[server] = status.cookie

    def _tell_position(self) -> None:
        """Nothing is read, so nobody asks us: tell the servers by ourselves that we are alive, and where."""
        clock = time.monotonic()
        if clock >= self._told_at + _TELL_EVERY_S:
            self._told_at = clock
            for server in self._cookies:
                self._send_to(server, self._taken(), 0)

    def _collect(self) -> None:
        ready = self.receiver.ready
        while ready:
            item = ready[0]
            payload = item[1]
            size = 100 if isinstance(payload, Missing) else payload.wire_bytes + 200
            # From one queue to the other between two points where a signal's handler can raise.
            self._in_bytes += size
            del ready[0]
            self.queue.append((item, size))

    def _read_line(self, reader: DatagramReceiver, now: float) -> tuple[bool, bool]:
        """Take what one socket has, up to a round of it; whether that was anything, and whether it was all."""
        rounds = size = 0
        while rounds < _ROUND and size < _ROUND_BYTES:
            arrivals = reader.receive()
            if not arrivals:
                return rounds > 0, True
            rounds += len(arrivals)
            size += self._decode(arrivals, now)
        return True, False

    def _decode(self, arrivals: Sequence[tuple[bytes | memoryview, int]], now: float) -> int:
        """Feed the receiver; returns how many bytes it was."""
        decoder, total = self.decoder, 0
        for data, packet_bytes in arrivals:
            size = len(data)
            total += size
            if size > packet_bytes:
                decoder.batch(data, packet_bytes, now)
            else:
                decoder.packet(data, now)
        return total

    def _read_answers(self, sock: socket.socket, now: float) -> bool:
        for done in range(_ROUND):
            try:
                packet, address = sock.recvfrom(MAX_DATAGRAM)
            except (BlockingIOError, ConnectionError):
                return done > 0
            server = self._where.get((address[0], address[1]))
            if server is None:
                self.decoder.receiver.counters.malformed += 1  # nobody else has any business here
            else:
                self.decoder.packet(packet, now, server=server)
        return True

    def _read_fetch(self, fetch: Fetch, now: float) -> bool:
        moved = False
        finished = fetch.done  # looked at before the queue: what was put before is seen below
        while True:
            try:
                packet = fetch.packets.get_nowait()
            except Empty:
                break
            moved = True
            self.decoder.packet(packet, now, server=fetch.repair_request.server)
        if finished:
            self._fetch = None
            fetch.join(5)
            self.receiver.failed(fetch.repair_request, now)
        return moved

    def _attribute_drops(self, moved: bool, drained: bool) -> None:
        """Say of new gaps whether they are the kernel's doing: if it dropped something that no gap showed yet.

        It drops when a datagram comes and the gap is seen when the ones behind it are read, so drops are
        remembered until then: until something that came after them was read, and showed no gap.
        """
        if self.receiver.has_new_gaps:
            self.count_drops()
            drops = self.receiver.counters.kernel_drops
            self._unexplained += drops - self._drops
            self._drops = drops
            self._unexplained -= self.receiver.attribute_to_kernel(self._unexplained)
            self._drained = False
        else:
            if moved and self._drained:
                self._unexplained = 0  # heartbeats and repeats leave no gap
            self._drained |= drained

    def count_drops(self) -> None:
        """Bring the counter of kernel drops up to date."""
        with self.lock:
            if not self._closed:
                self.receiver.counters.kernel_drops = sum(line.drops() for line in self._lines)

    def _send_request(self, repair_request: RepairRequest) -> None:
        if repair_request.tcp:
            session = self.receiver.session
            assert session is not None
            if self._fetch is None:
                self._fetch = Fetch(
                    self._servers[repair_request.server],
                    session,
                    repair_request,
                    sign=self._sign,
                    idle_s=self.receiver.policy.tcp_idle_s,
                    wake=self.wake,
                )
                self._fetch.start()
            return  # one that is still ending: this one is tried again when its time is up
        first = repair_request.first if repair_request.messages else self._taken()
        self._send_to(repair_request.server, first, repair_request.messages)

    def _taken(self) -> int:
        """The sequence that the application takes next: what flow control goes by."""
        with suppress(IndexError):  # taken meanwhile
            (session, payload), _ = self.queue[0]
            if session == self.receiver.session:
                return payload.first
        ready = self.receiver.ready  # read in this step, and not in the queue yet
        if ready and ready[0][0] == self.receiver.session:
            return ready[0][1].first
        return self.receiver.expected

    def _send_to(self, server: int, first: int, messages: int, *, expected: int | None = None) -> None:
        """Send a request, or (`messages` 0) our position and a question for the status."""
        session = self.receiver.session or ANY_SESSION
        cookie = self._cookies.get(server)
        if cookie is None and messages:
            packet = request(session, first, messages)  # it may be a server of another make
            clock = time.monotonic()
            if clock >= self._cookie_asked_at.get(server, 0.0) + _TELL_EVERY_S:
                # Until it knows that answers reach us, it sends few bytes per second.
                self._cookie_asked_at[server] = clock
                self._send_to(server, self._taken(), 0)
        else:
            position = self.receiver.expected if expected is None else expected
            who = Requester(cookie or 0, self._requester, position, self._tag)
            packet = extended_request(session, first, messages, who)
        if self._sign:
            packet += self._sign(packet)
        address = self._servers[server]
        with suppress(OSError):  # as if it were lost on its way: the retry schedule has it
            self._answers[address.family].sendto(packet, address)

    def close(self) -> None:
        """Close everything; joins the fetch if there is one."""
        with self.lock:
            if self._closed:
                return
            self.count_drops()
            self._closed = True
            for server in self._cookies:
                self._send_to(server, 0, 0, expected=LEAVING)
        fetch = self._fetch
        if fetch is not None:
            fetch.stop()
            if fetch.is_alive():
                fetch.join(10)
        for sock in (*(line.sock for line in self._lines), *self._answers.values()):
            sock.close()
        self._wakeup.close()


def open_subscriber_io(
    options: SubscriberOptions,
    start: Callable[[bytes], int],
    counters: SubscriberCounters,
    random: Callable[[], float],
    *,
    on_source: Callable[[Gone | Status], None],
) -> SubscriberIo:
    """Join, and return the engine. Raises ConfigError or SocketFault, and then nothing is left open."""
    check_io(options.io)
    if options.session is not None and not 0 < len(options.session) <= SESSION_BYTES:
        raise ConfigError("session", f"has 1 to {SESSION_BYTES} characters")
    if not 0 <= options.busy_poll_s <= 1:
        raise ConfigError("busy_poll_s", "must be 0 to 1 second")
    groups = [parse_address(text, "group", multicast=True) for text in options.groups]
    pairs = pair_lines(groups, options.interfaces)
    servers = _servers(options, groups[0])
    receiver: Receiver[Columns] = Receiver(
        start=start,
        policy=options.repair,
        servers=len(servers),
        random=random,
        session=options.session,
        lines=len(pairs),
        tcp=options.tcp,
        counters=counters,
    )
    key = options.auth_key
    requester = secrets.randbits(64)
    decoder = PacketDecoder(
        receiver,
        auth_key=key,
        opaque=options.opaque,
        on_source=on_source,
        requester=requester,
        clock_window_s=options.clock_window_s,
    )
    opened: list[socket.socket] = []
    lines: list[Line] = []
    try:
        for group, interface in pairs:
            lines.append(Line(group, interface, options))
        answers: dict[int, socket.socket] = {}
        for family in {server.family for server in servers}:
            answers[family] = unicast_socket(family, _local(family, servers), 0)
            opened.append(answers[family])
        return SubscriberIo(
            lines,
            decoder,
            servers,
            answers,
            sign=Signer(key, "request") if key is not None else None,
            max_queue_bytes=options.max_queue_bytes,
            requester=requester,
            tag=options.flow_control_tag,
            busy_poll_s=options.busy_poll_s,
        )
    except BaseException:
        for sock in (*opened, *(line.sock for line in lines)):
            sock.close()
        raise


def _servers(options: SubscriberOptions, group: Address) -> list[Address]:
    if options.request_servers is not None:
        if isinstance(options.request_servers, str):
            raise ConfigError("request_servers", "must be a list of HOST:PORT")
        return [parse_address(text, "request_servers") for text in options.request_servers]
    if options.sender is not None:
        return [Address(options.sender, group.port + 1)]
    local = {"127.0.0.1", "lo", "::1"}
    if set(options.interfaces) <= local:
        return [Address("::1" if ":" in group.host else "127.0.0.1", group.port + 1)]
    for where in options.interfaces:
        if where.count(".") != 3:
            interface_index(where, group.family)  # a wrong name is reported first
    raise ConfigError(
        "request_servers",
        "give the publisher's request address (Publisher.request_address), or [] for no repair",
    )


def _local(family: int, servers: list[Address]) -> str:
    """Bind to loopback if only loopback is asked: then nobody else can send us anything."""
    if family == socket.AF_INET6:
        return "::1" if all(s.host == "::1" for s in servers if s.family == family) else "::"
    on_loopback = all(s.host.startswith("127.") for s in servers if s.family == family)
    return "127.0.0.1" if on_loopback else "0.0.0.0"  # noqa: S104 - answers come from another machine
