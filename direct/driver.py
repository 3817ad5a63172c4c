"""Moves bytes between sockets and protocols, for threads and for asyncio: waiting is the only thing that differs."""

import asyncio
import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Protocol

from brokerless.core import forks
from brokerless.core.allocator import keep_freed_buffers
from brokerless.core.errors import Closed, ConfigError, PeerError
from brokerless.core.turn import Turn
from brokerless.direct import address as addresses
from brokerless.direct.address import Address
from brokerless.direct.keys import ClientKeys
from brokerless.direct.sockets import LIVE_QUEUE, ClientSocket, Empty, Network, open_network

log = logging.getLogger(__name__)
# Messages taken from one socket before the application gets its turn; bounds what lies decoded in memory.
_PER_ROUND = 32
# While live frames keep coming, the control socket is looked at this often.
_CONTROL_S = 0.005
# Greetings without an answer after which an inproc socket is made anew.
_PATIENCE = 3
# Messages kept for a publisher that is away; settlements of a worker, mostly.
_UNSENT = 256


class Speaker(Protocol):
    """What a client's protocol offers its driver; see protocol.py."""

    outbox: list[bytes]
    live: tuple[int, str]
    error: PeerError | None
    greetings: int  # sent since the last answer

    @property
    def wants_live(self) -> bool:
        """Whether live messages are wanted now; or else they wait in their socket's queue."""

    @property
    def ready(self) -> Sized:
        """What the application has not been given yet."""

    def receive_control(self, data: bytes, now: float) -> None: ...
    def receive_live(self, data: bytes, now: float) -> None: ...
    def next_deadline(self) -> float: ...
    def handle_deadline(self, now: float) -> None: ...
    def fail(self, text: str) -> None: ...


class Channel:
    """One publisher's sockets and the protocol that is spoken over them."""

    def __init__(self, address: Address, network: Network, speaker: Speaker) -> None:
        self.address = address
        self.speaker = speaker
        self._network = network
        self._control = network.connect_control(address)
        self.live: ClientSocket | None = None
        self.listening = True  # to the live socket, as of the last pump
        self._generation = 0
        self._lonely = address.scheme == "inproc"
        self._patience = _PATIENCE
        self._control_at = 0.0
        self.quiet = False  # the last pump found both sockets empty, and sent nothing

    @property
    def awaited(self) -> list[ClientSocket]:
        """Everything to wait for."""
        return [self._control, self.live] if self.live is not None and self.listening else [self._control]

    def pump(self, now: float) -> bool:
        """Feed what has arrived and send what is to be said; whether the sockets have changed."""
        speaker = self.speaker
        self.quiet = False
        empty = 0
        if self.live is not None:
            recv, receive = self.live.recv, speaker.receive_live
            for _ in range(_PER_ROUND):
                if not speaker.wants_live:
                    empty = 1
                    break
                data = recv()
                if data is None:
                    empty = 1
                    break
                receive(data, now)
                if speaker.ready:
                    break  # to the application at once: looking for more costs it as much as handing this on
        if not speaker.ready or now >= self._control_at:
            self._control_at = now + _CONTROL_S
            for _ in range(_PER_ROUND):
                data = self._control.recv()
                if data is None:
                    empty += 1
                    break
                speaker.receive_control(data, now)
        self.quiet = empty == 2
        if now >= speaker.next_deadline():
            speaker.handle_deadline(now)
        if speaker.outbox:
            self.quiet = False  # sending can take the socket's word that something has arrived
            self.send()
        if speaker.live[0] != self._generation:
            self._reconnect()
            return True
        if speaker.wants_live != self.listening:
            self.listening = speaker.wants_live
            self.quiet = False
            return True
        if self._lonely and speaker.greetings >= self._patience:
            # Unlike other transports, inproc does not find a publisher that was bound anew.
            self._patience = speaker.greetings + _PATIENCE
            old, self._control = self._control, self._network.connect_control(self.address)
            old.close()
            return True
        return False

    def send(self) -> None:
        """Send what the protocol wants said. What cannot leave now waits, the oldest dropped beyond a bound:
        timers repeat requests, and leases repeat deliveries."""
        outbox = self.speaker.outbox
        sent = 0
        for message in outbox:
            if not self._control.send(message):
                break
            sent += 1
        self.speaker.outbox = outbox[sent:][-_UNSENT:]

    def _reconnect(self) -> None:
        generation, hint = self.speaker.live
        self._patience = _PATIENCE
        old, self.live = self.live, None
        if old is not None:
            old.close()
        self._generation = generation
        try:
            self.live = self._network.connect_live(addresses.live_connect(self.address, hint))
        except (PeerError, ConfigError) as error:
            self.speaker.fail(str(error))  # it is the publisher's word, and not our configuration

    def close(self) -> None:
        """Send last words and close."""
        self.send()
        self._control.close()
        if self.live is not None:
            self.live.close()


class Driver:
    """Drives channels. What is done with them is done in `run`, one thread at a time; `wake` and `close` may come from
    any, and from handlers of signals."""

    def __init__(self, *, live_queue: int = LIVE_QUEUE) -> None:
        keep_freed_buffers()
        self.channels: list[Channel] = []
        self.failed: dict[str, PeerError] = {}  # publishers that we have no more to do with, by address
        self._live_queue = live_queue
        self.closing = False
        self._networks: dict[tuple[str, bool], Network] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller: select.poll | None = None  # made anew when sockets change, with the next
        self._by_live: dict[int, tuple[Callable[[], bytes], Empty, Callable[[bytes, float], None]]] = {}
        self.torn = False  # a message may have been received and not dealt with: a signal's handler raised
        self._ended = False
        self._sleepers = 0  # tasks that wait for a wake
        self._left = False  # this is a fork's copy
        forks.remember(self)
        self._turn = Turn()
        self.run = self._turn.run
        self.attempt = self._turn.attempt

    def add(self, address: Address, speaker: Speaker, keys: ClientKeys | None) -> Channel:
        """Connect to a publisher."""
        kind = (address.library, address.scheme == "inproc")
        if kind not in self._networks:
            self._networks[kind] = open_network(address, client_keys=keys, live_queue=self._live_queue)
        channel = Channel(address, self._networks[kind], speaker)
        self.channels.append(channel)
        return channel

    def steps(self, timeout: float | None) -> Iterator[float]:
        """Pump, then yield how long to wait before the next time; ends when `timeout` is over or on `close`.

        The caller looks for results before every wait, and stops iterating when it has some.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (wait := self.run(self.step, deadline)) >= 0:
            yield wait
        yield 0.0  # a last look at what this pump brought

    def step(self, deadline: float | None) -> float:
        """Pump once; how long to wait before the next time, or -1 if the deadline has come. Raises Closed."""
        if self.closing:
            raise Closed("the connection")
        now = time.monotonic()
        self.pump(now)
        due = min([channel.speaker.next_deadline() for channel in self.channels], default=now + 1)
        if deadline is not None:
            if now >= deadline:
                return -1.0
            due = min(due, deadline)
        return max(0.0, due - now)

    def pump(self, now: float) -> None:
        """One round over all channels. Raises PeerError if no publisher is left that does not refuse us."""
        if self.closing:
            return
        was, self.torn = self.torn, True
        for channel in self.channels:
            if channel.pump(now):
                self._poller = None
            if channel.speaker.error is not None:
                self._drop(channel, channel.speaker.error)
        self.torn = was
        if self.failed and not self.channels:
            raise next(reversed(self.failed.values()))

    def _drop(self, channel: Channel, error: PeerError) -> None:
        """One publisher that cannot be dealt with is told, and does not hold up the others."""
        self.failed[str(channel.address)] = error
        # A new list, because the old one is being gone through.
        self.channels = [other for other in self.channels if other is not channel]
        self._poller = None
        if self.channels:
            log.error("%s: %s; going on with the other publishers", channel.address, error)
        channel.close()

    def wait(self, seconds: float) -> None:
        """Wait until something may have arrived, or `wake`. A live message that ends the wait is received at once.

        From here to the application is the way of every event that somebody waits for: the kernel says which
        socket it is, so no other is looked at.
        """
        if self.closing:
            return
        poller = self._poller or self._register()
        # ZeroMQ's descriptor tells only of changes: look before waiting for the next one.
        for channel in self.channels:
            if not channel.quiet and any(socket.readable() for socket in channel.awaited):
                return
            channel.quiet = False
        # Rounded up: a millisecond too early would mean spinning until it is over.
        for descriptor, _ in poller.poll(min(3_600_000, int(seconds * 1000) + 1)):
            live = self._by_live.get(descriptor)
            if live is not None:
                recv, empty, receive = live
                was, self.torn = self.torn, True
                try:
                    data = recv()
                except empty:
                    self.torn = was
                    continue
                receive(data, time.monotonic())
                self.torn = was
            elif descriptor == self._wake_fd:
                # Reading it when nobody wrote would be an exception.
                self._clear_wake()

    def _register(self) -> "select.poll":
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        self._by_live = {}
        for channel in self.channels:
            for socket in channel.awaited:
                poller.register(socket.descriptor, select.POLLIN)
                if socket is channel.live:
                    receive = channel.speaker.receive_live
                    self._by_live[socket.descriptor] = (socket.recv_ready, socket.empty, receive)
        self._poller = poller
        return poller

    async def wait_async(self, seconds: float) -> None:
        """The same for asyncio. Cancelling it loses nothing, because nothing is received here."""
        sockets = [socket for channel in self.channels for socket in channel.awaited]
        # ZeroMQ's descriptor tells only of changes: look before waiting for the next one.
        if seconds <= 0 or any(socket.readable() for socket in sockets):
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not arrived.done():
                arrived.set_result(None)

        descriptors = [self._wake_fd]
        for socket in sockets:
            descriptors.append(socket.descriptor)
        for descriptor in descriptors:
            loop.add_reader(descriptor, wake)
        timer = loop.call_later(min(seconds, 3600.0), wake)
        self._sleepers += 1
        try:
            await arrived
        finally:
            self._sleepers -= 1
            timer.cancel()
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
            self._clear_wake()
            if self._ended:
                self._close_wake()

    def wake(self) -> None:
        """Make whoever waits look again."""
        with contextlib.suppress(OSError, ValueError):  # -1: closed meanwhile
            os.eventfd_write(self._wake_fd, 1)

    def _clear_wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_read(self._wake_fd)

    def _close_wake(self) -> None:
        descriptor, self._wake_fd = self._wake_fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Make whoever runs or waits end, do `last`, send last words, close. Closing twice is fine.

        A signal's handler may call this in the middle of a turn, which then does it when it ends.
        """
        if self._left:
            return
        self.closing = True
        self.wake()
        self._turn.close(partial(self._end, last))

    def leave_to_parent(self) -> None:
        """In a forked child: positions, sockets and the wake-up are the parent's."""
        self.closing = self._left = True
        self._turn = Turn()  # whoever had it is a thread that is not here
        self.run = self._turn.run
        self._close_wake()

    def _end(self, last: Callable[[], None]) -> None:
        try:
            last()
        finally:
            for channel in self.channels:
                channel.close()
            for network in self._networks.values():
                network.close()
            self._ended = True
            forks.forget(self)
            if not self._sleepers:  # or else these do it, when they have been woken
                self._close_wake()
