"""The I/O of a subscriber: reads the sockets, feeds the receiver, sends its requests. One lock, no thread.

Whoever holds the lock may call `step`; the application's thread does when it waits for events, a helper
thread does while the application is busy. A step can be interrupted anywhere, by a signal's handler that raises: what
it had read and not dealt with is asked for again, as if it were lost on its way.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty

from brokerless.multicast.acquire import Acquirer
from brokerless.multicast.fetch import Fetch
from brokerless.multicast.intake import Intake
from brokerless.multicast.message import Columns
from brokerless.multicast.packing import Seal
from brokerless.multicast.protocol import MAX_DATAGRAM, request
from brokerless.multicast.repair import Ask, Missing
from brokerless.multicast.sockets import Address, kernel_drops

Item = tuple[bytes, Columns | Missing]
# Packets taken from one socket before the others and the timers have their turn.
_ROUND = 256
# And bytes: the application gets them while they are in the cache.
_ROUND_BYTES = 200_000
# Whoever waits looks at least every half second. More between two looks is a process that was stopped.
_STALLED_S = 1.0


class Engine:
    """Sockets around one receiver. `queue` is what the application has not taken yet, bounded by bytes.

    When it is full, nothing more is read: the kernel's buffer fills, what it drops is counted and repaired.
    """

    def __init__(
        self,
        lines: list[socket.socket],
        acquirers: list[Acquirer],
        intake: Intake,
        servers: list[Address],
        answers: dict[int, socket.socket],
        *,
        seal: Seal | None,
        max_queue_bytes: int,
    ) -> None:
        # Taken twice by whoever looks at gaps in the handler of a signal, or where losses are told.
        self.lock = threading.RLock()
        self.queue: deque[tuple[Item, int]] = deque()
        self._in_bytes = 0  # changed under the lock
        self.out_bytes = 0  # of what the application's thread took out of the queue
        self._torn = False  # a step began and did not end
        self.intake = intake
        self.receiver = intake.receiver
        self._lines = lines
        self._acquirers = acquirers
        self._servers = servers
        self._where = {(s.host, s.port): i for i, s in enumerate(servers)}
        self._answers = answers  # by address family
        self._seal = seal
        self._max_queue_bytes = max_queue_bytes
        self._drops = 0  # of the kernel, as far as they were looked at
        self._unexplained = 0  # of these, not seen as a gap yet
        self._drained = False  # everything was read that came before the last look at the drops
        self._clock = time.monotonic()
        self._now = 0.0
        self._fetch: Fetch | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fds = [*(s.fileno() for s in lines), *(s.fileno() for s in answers.values()), self._wake_fd]
        self._closed = False

    # -- waiting -----------------------------------------------------------------------------------------

    def poller(self) -> Callable[[float], None]:
        """A function that waits until there is something to do, or so many seconds. One per thread."""
        poll = select.poll()
        for fd in self.fds:
            poll.register(fd, select.POLLIN)

        def wait(seconds: float) -> None:
            poll.poll(max(0, int(seconds * 1000 + 0.999)))
            self.quiet()

        return wait

    def wake(self) -> None:
        """Make waiters look."""
        with suppress(OSError, ValueError):  # -1: closed
            os.eventfd_write(self._wake_fd, 1)

    def quiet(self) -> None:
        """Take back `wake`."""
        with suppress(OSError, ValueError):  # nothing to take back, or closed meanwhile
            os.eventfd_read(self._wake_fd)

    def wait_s(self) -> float | None:
        """In how many seconds `step` has something to do even if nothing arrives."""
        due = self.receiver.next_deadline()
        return None if due is None else max(0.0, due - self._now)

    @property
    def full(self) -> bool:
        """The application has so much to take that nothing more is read."""
        return self._in_bytes - self.out_bytes >= self._max_queue_bytes

    # -- working -----------------------------------------------------------------------------------------

    def _tick(self) -> float:
        """The receiver's time, which stands still while nothing is read, or the process was stopped.

        Otherwise an application that pauses for longer than the deadline would lose what it never looked for.
        """
        clock = time.monotonic()
        passed, self._clock = clock - self._clock, clock
        if not self.full:
            self._now += min(passed, _STALLED_S)
        return self._now

    def step(self) -> bool:
        """Read what is there, ask for what is missing; True if something was read. Hold the lock."""
        now = self._tick()
        if self.full or self._closed:
            return False
        if self._torn:
            self._recover(now)
        self._torn = True
        moved, drained = False, True
        for acquirer in self._acquirers:
            some, all_of_it = self._read_line(acquirer, now)
            moved |= some
            drained &= all_of_it
        self._blame(moved, drained)
        for sock in self._answers.values():
            moved |= self._read_answers(sock, now)
        if self._fetch is not None:
            moved |= self._read_fetch(self._fetch, now)
        for ask in self.receiver.asks(now):
            self._ask(ask)
        self._collect()
        self._torn = False
        return moved

    def _recover(self, now: float) -> None:
        fetch = self._fetch
        if fetch is not None and not fetch.done and not fetch.is_alive():
            fetch.stop()  # interrupted before it had begun
            self._fetch = None
        self.receiver.recover(now)

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

    def _read_line(self, acquirer: Acquirer, now: float) -> tuple[bool, bool]:
        """Take what one socket has, up to a round of it; whether that was anything, and whether it was all."""
        intake = self.intake
        rounds = size = 0
        while rounds < _ROUND and size < _ROUND_BYTES:
            arrivals = acquirer.receive()
            if not arrivals:
                return rounds > 0, True
            for data, packet_bytes in arrivals:
                rounds += 1
                size += len(data)
                if len(data) > packet_bytes:
                    intake.train(data, packet_bytes, now)
                else:
                    intake.packet(data, now)
        return True, False

    def _read_answers(self, sock: socket.socket, now: float) -> bool:
        for done in range(_ROUND):
            try:
                packet, address = sock.recvfrom(MAX_DATAGRAM)
            except (BlockingIOError, ConnectionError):
                return done > 0
            server = self._where.get((address[0], address[1]))
            if server is None:
                self.intake.receiver.counters.malformed += 1  # nobody else has any business here
            else:
                self.intake.packet(packet, now, server=server)
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
            self.intake.packet(packet, now, server=fetch.ask.server)
        if finished:
            self._fetch = None
            fetch.join(5)
            self.receiver.failed(fetch.ask, now)
        return moved

    def _blame(self, moved: bool, drained: bool) -> None:
        """Say of new gaps whether they are the kernel's doing: if it dropped something that no gap showed yet.

        It drops when a datagram comes and the gap is seen when the ones behind it are read, so drops are
        remembered until then: until something that came after them was read, and showed no gap.
        """
        if self.receiver.has_fresh_gaps:
            self.count_drops()
            drops = self.receiver.counters.kernel_drops
            self._unexplained += drops - self._drops
            self._drops = drops
            self._unexplained -= self.receiver.blame(self._unexplained)
            self._drained = False
        else:
            if moved and self._drained:
                self._unexplained = 0  # heartbeats and repeats leave no gap
            self._drained |= drained

    def count_drops(self) -> None:
        """Bring the counter of kernel drops up to date."""
        with self.lock:
            if not self._closed:
                self.receiver.counters.kernel_drops = sum(map(kernel_drops, self._lines))

    def _ask(self, ask: Ask) -> None:
        session = self.receiver.session
        assert session is not None
        server = self._servers[ask.server]
        if ask.tcp:
            if self._fetch is None:
                self._fetch = Fetch(
                    server,
                    session,
                    ask,
                    seal=self._seal,
                    idle_s=self.receiver.policy.tcp_idle_s,
                    wake=self.wake,
                )
                self._fetch.start()
            return  # one that is still ending: this one is tried again when its time is up
        packet = request(session, ask.first, ask.messages)
        if self._seal:
            packet += self._seal(packet)
        with suppress(OSError):  # as if it were lost on its way: the retry schedule has it
            self._answers[server.family].sendto(packet, server)

    def close(self) -> None:
        """Close everything; joins the fetch if there is one."""
        with self.lock:
            if self._closed:
                return
            self.count_drops()
            self._closed = True
        fetch = self._fetch
        if fetch is not None:
            fetch.stop()
            if fetch.is_alive():
                fetch.join(10)
        for sock in (*self._lines, *self._answers.values()):
            sock.close()
        descriptor, self._wake_fd = self._wake_fd, -1
        os.close(descriptor)
