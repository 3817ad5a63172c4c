"""The publisher's server thread: control socket, heartbeats, groups. `protocol/server.py` and `groups/` decide."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import zmq

from brokerless.core.errors import BrokerlessError
from brokerless.core.runtime.clock import elapsed_s
from brokerless.core.runtime.wakeup import WakeUp
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.io.base import Network, PeerGone, Served, ServerControl
from brokerless.direct.protocol.server import ControlServer

log = logging.getLogger(__name__)
T = TypeVar("T")
# What is taken from the control socket before groups and heartbeats get their turn: so many messages, or as many
# as there are in this time. Some cost a thousand times more than others.
_PER_ROUND = 256
_PER_ROUND_S = 0.005
# A subscriber that has just said hello learns from the next heartbeat that its live socket is connected.
_EAGER_BEAT_S = 0.01
_EAGER_FOR_S = 2.0
# On stopping, what workers have to say is read, as long as they hold anything: until so long nothing has arrived, and
# no longer than this. An acknowledgement waits 5 ms for others, and then for its thread's turn: on a busy machine that
# has taken more than 100 ms.
_QUIET_MS = 500
_LAST_S = 2.0


class Server:
    """Owns the control socket and its thread; `stop` joins it."""

    def __init__(
        self,
        network: Network,
        control: ServerControl,
        control_server: ControlServer,
        coordinator: GroupCoordinator,
        *,
        beat: Callable[[], None],
        beat_s: float,
        name: str,
    ) -> None:
        self._network = network
        self._control = control
        self._control_server = control_server
        self._coordinator = coordinator
        self._beat = beat
        self._beat_s = beat_s
        self._beat_at = 0.0
        self._eager_until = 0.0
        self._arrivals = 0
        # Set before looking for work: whoever sees it set after making work calls `wake`.
        self.idle = False
        self.changed = threading.Condition()
        self._wakeup = WakeUp()
        self._stopping = False
        self._tasks: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"brokerless {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look for work now."""
        self.idle = False
        self._wakeup.wake()

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
        """Stop, join, close the socket. Workers that hold events get a moment to acknowledge them."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._control.close()
        self._control_server.close()
        self._wakeup.close()

    def _run(self) -> None:
        extra = self._network.extra()
        poller = zmq.Poller()
        for pollable in (self._control.pollable, *(e.pollable for e in extra), self._wakeup.fd):
            poller.register(pollable, zmq.POLLIN)
        while not self._stopping:
            try:
                poller.poll(self._timeout_ms(elapsed_s()))
                self._round(extra, elapsed_s())
            except BrokerlessError as error:
                # A disk that is full or gone: what was accepted stays, and the next round tries again.
                log.error("publisher: %s", error)
                time.sleep(0.05)
            except Exception:
                # A fault of ours must not end the service for everybody; it is told, and counted.
                self._control_server.counters.failures += 1
                log.exception("publisher: a round of the server failed")
                time.sleep(0.05)

        self._receive_rest()

    def _receive_rest(self) -> None:
        """Read what workers have sent before the end: an acknowledgement that nobody reads means a redelivery."""
        deadline = elapsed_s() + _LAST_S
        poller = zmq.Poller()
        poller.register(self._control.pollable, zmq.POLLIN)
        while self._coordinator.leased and elapsed_s() < deadline and poller.poll(_QUIET_MS):
            try:
                self._receive(elapsed_s())
            except BrokerlessError as error:
                log.error("publisher: %s", error)
                return

    def _timeout_ms(self, now: float) -> int:
        due = min(self._beat_at, self._control_server.next_deadline(), self._coordinator.next_deadline())
        return max(0, min(1000, int((due - now) * 1000) + 1)) if due > now else 0

    def _round(self, extra: Sequence[Served], now: float) -> None:
        self._wakeup.clear()
        self.idle = True
        while self._tasks:
            self._tasks.popleft()()
        for server in extra:
            server.serve()
            self._control_server.counters.denied = server.denied
        self._receive(now)
        for peer in self._control.departed():  # after its last messages
            self._control_server.departed(peer)
        if now >= self._control_server.next_deadline():
            self._control_server.handle_deadline(now)
        self._control_server.hold_back()
        self._coordinator.dispatching = self._control_server.replication.may_dispatch(now)
        self._coordinator.run(now, partial(self._send_deliveries, now))
        self._send_replies(now)
        self.idle = self._coordinator.idle
        self._beat_if_due(now)
        with self.changed:
            self.changed.notify_all()

    def _receive(self, now: float) -> None:
        end = now + _PER_ROUND_S
        for _ in range(_PER_ROUND):
            message = self._control.recv()
            if message is None:
                return
            self._control_server.receive(*message, now)
            self._send_replies(now)  # at once: answers can be large
            if elapsed_s() >= end:
                break
        self.wake()  # there may be more: come back after everybody had a turn

    def _send_replies(self, now: float) -> None:
        while self._control_server.outbox:  # what was sent can make pings due
            replies, self._control_server.outbox = self._control_server.outbox, []
            for peer, data in replies:
                try:
                    if self._control.send(peer, data):
                        self._control_server.sent(peer, len(data))
                    else:
                        self._control_server.unsent(peer, now)
                except PeerGone:
                    self._control_server.departed(peer)

    def _send_deliveries(self, now: float) -> None:
        deliveries, self._coordinator.outbox = self._coordinator.outbox, []
        may_dispatch = self._control_server.replication.may_dispatch
        for worker, data in deliveries:
            worker_peer = self._control_server.peer_of(worker)
            try:
                # Looked at again: this process may have been stopped since the round began.
                if (
                    worker_peer is None
                    or not may_dispatch(elapsed_s())
                    or not self._control.send(worker_peer, data)
                ):
                    self._coordinator.undelivered(worker, data, now)
                else:
                    self._control_server.sent(worker_peer, len(data))
            except PeerGone:
                if worker_peer is not None:
                    self._control_server.departed(worker_peer)
        if deliveries:
            self._control_server.hold_back()

    def _beat_if_due(self, now: float) -> None:
        arrivals = self._control_server.arrivals
        if arrivals != self._arrivals:
            self._arrivals = arrivals
            self._eager_until = now + _EAGER_FOR_S
        eager = self._control_server.newcomers > 0 and now < self._eager_until
        if eager:
            self._beat_at = min(self._beat_at, now + _EAGER_BEAT_S)
        if now >= self._beat_at:
            self._beat()
            self._beat_at = now + (_EAGER_BEAT_S if eager else self._beat_s)
