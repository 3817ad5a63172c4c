"""The publisher's live stream: frames to every subscriber as soon as they are in the journal, and heartbeats.

The queue of a subscriber that is too slow drops frames; the subscriber notices the gap and goes over to
replay (`protocol/subscriber.py`).
"""

import logging
import threading
from collections.abc import Callable

from brokerless.core import Frame, Journal
from brokerless.direct.address import Address
from brokerless.direct.counters import PublisherCounters
from brokerless.direct.io.base import ServerLive
from brokerless.direct.protocol import messages

log = logging.getLogger(__name__)


class LiveStream:
    """Sends in the order of offsets, from whatever thread has a frame. `sent` is called after each."""

    def __init__(
        self,
        socket: ServerLive,
        journal: Journal,
        *,
        instance: int,
        counters: PublisherCounters,
    ) -> None:
        self.address: Address = socket.address
        self.sent: Callable[[], None] = _nothing
        self._socket = socket
        self._send = socket.send
        self._journal = journal
        self._instance = instance
        self._counters = counters
        self._lock = threading.Lock()
        self._next = journal.next  # everything before it has been sent
        self._closed = False

    def send_frame(self, frame: Frame) -> None:
        """Called by the journal, under its lock, for every frame that becomes readable."""
        with self._lock:
            if self._closed:
                return
            self._next = frame.next_offset
            try:
                self._send(frame.raw)
                self._counters.frames += 1
            except Exception:
                self._not_sent()
        self.sent()

    def send_single(self, raw: bytes) -> None:
        """The same for the frame of a lone event: the shortest way to the socket."""
        with self._lock:
            if self._closed:
                return
            try:
                self._send(raw)
                self._counters.frames += 1
            except Exception:
                self._not_sent()
            self._next += 1
        self.sent()

    def _not_sent(self) -> None:
        """The event is accepted and in the journal whatever the socket says: subscribers will ask for it."""
        self._counters.live_errors += 1
        log.exception("live frame not sent")

    def beat(self) -> None:
        """Send a heartbeat: it names the end of what was sent before it, so that a lost last frame is noticed."""
        self._journal.settle()
        with self._lock:
            if self._closed:
                return
            if self._socket.renew_if_crowded():
                self._send = self._socket.send
                self._counters.live_renewed += 1
                log.warning(
                    "%s: strangers have made thousands of subscriptions; all connections to it were ended",
                    self.address,
                )
            try:
                self._send(messages.encode(messages.Beat(self._instance, self._journal.epoch, self._next)))
                self._counters.beats += 1
            except Exception:
                self._not_sent()

    def stop(self) -> None:
        """Send nothing more; the socket stays."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the socket is the parent's."""
        self._closed, self._lock = True, threading.Lock()


def _nothing() -> None:
    """Nobody waits for what was sent."""
