"""The publisher's server thread: control socket, heartbeats, groups. `desk` and `dispatch` decide."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import zmq

from brokerless.core.errors import BrokerlessError
from brokerless.direct.desk import Desk
from brokerless.direct.dispatch import Dispatcher
from brokerless.direct.sockets import Network, PeerGone, Served, ServerControl

log = logging.getLogger(__name__)
T = TypeVar("T")
# What is taken from the control socket before groups and heartbeats get their turn: so many messages, or as many
# as there are in this time. Some cost a thousand times more than others.
_PER_ROUND = 256
_PER_ROUND_S = 0.005
# A subscriber that has just said hello learns from the next heartbeat that its live socket is connected.
_EAGER_BEAT_S = 0.01
_EAGER_FOR_S = 2.0


class Server:
    """Owns the control socket and its thread; `stop` joins it."""

    def __init__(
        self,
        network: Network,
        control: ServerControl,
        desk: Desk,
        dispatcher: Dispatcher,
        *,
        beat: Callable[[], None],
        beat_s: float,
        name: str,
    ) -> None:
        self._network = network
        self._control = control
        self._desk = desk
        self._dispatcher = dispatcher
        self._beat = beat
        self._beat_s = beat_s
        self._beat_at = 0.0
        self._eager_until = 0.0
        self._arrivals = 0
        # Set before looking for work: whoever sees it set after making work calls `wake`.
        self.hungry = False
        self.changed = threading.Condition()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Between reading the descriptor's number and writing to it nobody may close it: it could be another file's.
        self._wake_lock = threading.RLock()
        self._stopping = False
        self._tasks: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"brokerless {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look for work now."""
        self.hungry = False
        with self._wake_lock:
            if self._wake_fd >= 0:
                with contextlib.suppress(BlockingIOError):  # awake for a long time
                    os.eventfd_write(self._wake_fd, 1)

    def call(self, task: Callable[[], None]) -> None:
        """Run something in the server thread, which alone may touch groups and sessions."""
        self._tasks.append(task)
        self.wake()

    def ask(self, question: Callable[[], T]) -> T:
        """Run something in the server thread and return what it returns; when that has ended, here."""
        answer: Future[T] = Future()

        def task() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        if threading.current_thread() is not self._thread:
            self.call(task)
            while self._thread.is_alive():
                with contextlib.suppress(TimeoutError):
                    return answer.result(0.05)
        return answer.result() if answer.done() else question()

    def stop(self) -> None:
        """Stop, join, close the socket. Takes at most a few milliseconds more than the current round."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._control.close()
        with self._wake_lock:
            descriptor, self._wake_fd = self._wake_fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _run(self) -> None:
        extra = self._network.extra()
        poller = zmq.Poller()
        for pollable in (self._control.pollable, *(e.pollable for e in extra), self._wake_fd):
            poller.register(pollable, zmq.POLLIN)
        while not self._stopping:
            try:
                poller.poll(self._timeout_ms(time.monotonic()))
                self._round(extra, time.monotonic())
            except BrokerlessError as error:
                # A disk that is full or gone: what was accepted stays, and the next round tries again.
                log.error("publisher: %s", error)
                time.sleep(0.05)
            except Exception:
                # A fault of ours must not end the service for everybody; it is told, and counted.
                self._desk.counters.failures += 1
                log.exception("publisher: a round of the server failed")
                time.sleep(0.05)

    def _timeout_ms(self, now: float) -> int:
        due = min(self._beat_at, self._desk.next_deadline(), self._dispatcher.next_deadline())
        return max(0, min(1000, int((due - now) * 1000) + 1)) if due > now else 0

    def _round(self, extra: Sequence[Served], now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self.hungry = True
        while self._tasks:
            self._tasks.popleft()()
        for server in extra:
            server.serve()
            self._desk.counters.denied = server.denied
        self._receive(now)
        for peer in self._control.departed():  # after its last words
            self._desk.departed(peer)
        if now >= self._desk.next_deadline():
            self._desk.handle_deadline(now)
        self._desk.hold_back()
        self._dispatcher.run(now, partial(self._send_deliveries, now))
        self._send_replies(now)
        self.hungry = self._dispatcher.hungry
        self._beat_if_due(now)
        with self.changed:
            self.changed.notify_all()

    def _receive(self, now: float) -> None:
        end = now + _PER_ROUND_S
        for _ in range(_PER_ROUND):
            message = self._control.recv()
            if message is None:
                return
            self._desk.receive(*message, now)
            self._send_replies(now)  # at once: answers can be large
            if time.monotonic() >= end:
                break
        self.wake()  # there may be more: come back after everybody had a turn

    def _send_replies(self, now: float) -> None:
        while self._desk.outbox:  # what was sent can make pings due
            replies, self._desk.outbox = self._desk.outbox, []
            for peer, data in replies:
                try:
                    if self._control.send(peer, data):
                        self._desk.sent(peer, len(data))
                    else:
                        self._desk.unsent(peer, now)
                except PeerGone:
                    self._desk.departed(peer)

    def _send_deliveries(self, now: float) -> None:
        deliveries, self._dispatcher.outbox = self._dispatcher.outbox, []
        for worker, data in deliveries:
            worker_peer = self._desk.peer_of(worker)
            try:
                if worker_peer is None or not self._control.send(worker_peer, data):
                    self._dispatcher.undelivered(worker, data, now)
                else:
                    self._desk.sent(worker_peer, len(data))
            except PeerGone:
                if worker_peer is not None:
                    self._desk.departed(worker_peer)
        if deliveries:
            self._desk.hold_back()

    def _beat_if_due(self, now: float) -> None:
        arrivals = self._desk.arrivals
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            self._eager_until = now + _EAGER_FOR_S
        eager = self._desk.newcomers > 0 and now < self._eager_until
        if eager:
            self._beat_at = min(self._beat_at, now + _EAGER_BEAT_S)
        if now >= self._beat_at:
            self._beat()
            self._beat_at = now + (_EAGER_BEAT_S if eager else self._beat_s)
