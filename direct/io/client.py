"""Moves bytes between sockets and protocols, for threads and for asyncio: waiting is the only thing that differs."""

import asyncio
import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from brokerless.core.discovery import Action, Discovery, Found, decide
from brokerless.core.errors import BrokerlessError, Closed, ConfigError, PeerError
from brokerless.core.runtime import fork as forks
from brokerless.core.runtime.malloc import keep_freed_buffers
from brokerless.core.runtime.serial_section import SerialSection
from brokerless.core.runtime.wakeup import WakeUp
from brokerless.direct.address import Address, live_connect, parse_address
from brokerless.direct.io.base import LIVE_QUEUE, ClientSocket, Empty, Network
from brokerless.direct.io.diagnosis import diagnose
from brokerless.direct.io.network import open_network
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol.client import ClientProtocol, State

log = logging.getLogger(__name__)
# Messages taken from one socket before the application gets its turn; bounds what lies decoded in memory.
_PER_ROUND = 32
# While live frames keep coming, the control socket is looked at this often.
_CONTROL_S = 0.005
# HELLOs without an answer after which an inproc socket is recreated, and a publisher that is not announced any more
# counts as gone.
_PATIENCE = 3
# Whether a publisher still answers is looked at this often, announced or not.
_LOOK_AGAIN_S = 1.0
# HELLOs without an answer after which we look why: with the back-off, some three seconds.
_DIAGNOSED_HELLOS = 6
# Messages kept for a publisher that is away; settlements of a worker, mostly.
_UNSENT = 256


class Channel:
    """One publisher's sockets and the protocol that is spoken over them."""

    def __init__(
        self, address: Address, network: Network, protocol: ClientProtocol, *, curve: bool = False
    ) -> None:
        self.address = address
        self.protocol = protocol
        self._network = network
        self._control = network.connect_control(address)
        self.live: ClientSocket | None = None
        self.listening = True  # to the live socket, as of the last pump
        self._generation = protocol.live[0]
        self._lonely = address.scheme == "inproc"
        self._patience = _PATIENCE
        self._control_at = 0.0
        self.quiet = False  # the last pump found both sockets empty, and sent nothing
        self.problem = ""  # why there seems to be no answer
        self._curve = curve
        self._diagnosis: threading.Thread | None = None

    def replacement(self, protocol: ClientProtocol) -> "Channel":
        """Another channel to the same publisher."""
        return Channel(self.address, self._network, protocol, curve=self._curve)

    @property
    def awaited(self) -> list[ClientSocket]:
        """Everything to wait for."""
        return [self._control, self.live] if self.live is not None and self.listening else [self._control]

    def pump(self, now: float) -> bool:
        """Feed what has arrived and send what is due; whether the sockets have changed."""
        protocol = self.protocol
        self.quiet = False
        empty = 0
        if self.live is not None:
            recv, receive = self.live.recv, protocol.receive_live
            for _ in range(_PER_ROUND):
                if not protocol.wants_live:
                    empty = 1
                    break
                data = recv()
                if data is None:
                    empty = 1
                    break
                receive(data, now)
                if protocol.ready:
                    break  # to the application at once: looking for more costs it as much as handing this on
        if not protocol.ready or now >= self._control_at:
            self._control_at = now + _CONTROL_S
            for _ in range(_PER_ROUND):
                data = self._control.recv()
                if data is None:
                    empty += 1
                    break
                protocol.receive_control(data, now)
        self.quiet = empty == 2
        if now >= protocol.next_deadline():
            protocol.handle_deadline(now)
            self._diagnose_silence()
        if protocol.outbox:
            self.quiet = False  # sending can consume the socket's signal that something has arrived
            self.send()
        if protocol.live[0] != self._generation:
            self._reconnect()
            return True
        if protocol.wants_live != self.listening:
            self.listening = protocol.wants_live
            self.quiet = False
            return True
        if self._lonely and protocol.unanswered_hellos >= self._patience:
            # Unlike other transports, inproc does not find a publisher that was bound again.
            self._patience = protocol.unanswered_hellos + _PATIENCE
            old, self._control = self._control, self._network.connect_control(self.address)
            old.close()
            return True
        return False

    def _diagnose_silence(self) -> None:
        """When several HELLOs were not answered, say why, once; found out by a thread, because it may take long."""
        hellos = self.protocol.unanswered_hellos
        if not hellos:
            self.problem, self._diagnosis = "", None
        elif hellos >= _DIAGNOSED_HELLOS and self._diagnosis is None:
            self._diagnosis = threading.Thread(
                target=self._diagnose, name="brokerless diagnosis", daemon=True
            )
            self._diagnosis.start()

    def _diagnose(self) -> None:
        refusal = self.protocol.refusal
        problem = f"it refuses for now: {refusal}" if refusal else diagnose(self.address, curve=self._curve)
        if self.protocol.unanswered_hellos:
            self.problem = problem
            log.warning("%s does not answer: %s; trying further", self.address, problem)

    def send(self) -> None:
        """Send the protocol's outbox. What cannot leave now waits, the oldest dropped beyond a bound:
        timers repeat requests, and leases repeat deliveries."""
        outbox = self.protocol.outbox
        sent = 0
        for message in outbox:
            if not self._control.send(message):
                break
            sent += 1
        self.protocol.outbox = outbox[sent:][-_UNSENT:]

    def _reconnect(self) -> None:
        generation, hint = self.protocol.live
        self._patience = _PATIENCE
        old, self.live = self.live, None
        if old is not None:
            old.close()
        self._generation = generation
        try:
            self.live = self._network.connect_live(live_connect(self.address, hint))
        except (PeerError, ConfigError) as error:
            self.protocol.fail(str(error))  # the publisher sent it, it is not our configuration

    def close(self) -> None:
        """Send what is queued and close."""
        self.send()
        self._control.close()
        if self.live is not None:
            self.live.close()


class Discovered:
    """Connects a driver to every publisher that a discovery finds: one protocol per name, for good.

    A publisher that moves keeps its protocol, and so its position: what it published meanwhile is replayed at its new
    address, as after a restart at the same one.
    """

    def __init__(
        self,
        driver: "Driver",
        patterns: Sequence[str],
        keys: ClientKeys | None,
        make: Callable[[Found], ClientProtocol],
    ) -> None:
        """`make` gives the protocol for a publisher that was not known. Raises ConfigError."""
        self._driver = driver
        self._keys = keys
        self._make = make
        self._protocols: dict[str, ClientProtocol] = {}
        self._channels: dict[str, Channel] = {}
        self._refused: dict[str, str] = {}  # name → address at which it was given up
        self._seen = 0
        self._look_at = 0.0
        self.discovery = Discovery(patterns, ["direct.publisher"], driver.wake)

    def connected(self, protocol: ClientProtocol) -> bool:
        """Whether there is a connection for this protocol now."""
        return any(channel.protocol is protocol for channel in self._channels.values())

    def update(self, now: float) -> None:
        """Connect, move and disconnect. What was interrupted is done with the next call."""
        version = self.discovery.version
        if version == self._seen and now < self._look_at:
            return
        found = self.discovery.found
        for name in [*found, *[name for name in self._channels if name not in found]]:
            self._update(name, found.get(name, []), now)
        self._seen, self._look_at = version, now + _LOOK_AGAIN_S

    def _update(self, name: str, found: Sequence[Found], now: float) -> None:
        channel = self._channels.get(name)
        if channel is not None and channel.protocol.error is not None:
            self._refused[name] = str(channel.address)
            del self._protocols[name], self._channels[name]
            channel = None
        found = [each for each in found if each.address != self._refused.get(name)]
        current = None if channel is None else str(channel.address)
        answers = channel is not None and channel.protocol.unanswered_hellos < _PATIENCE
        action, where = decide(current, answers, found)
        if action is Action.NOTHING:
            return
        if channel is not None:
            del self._channels[name]
            self._driver.remove(channel)
        if where is None:
            log.info("%s at %s is gone", name, current)
            return
        protocol = self._protocols.get(name)
        try:
            address = parse_address(where.address)
            if protocol is None:
                protocol = self._protocols[name] = self._make(where)
            else:
                protocol.address = where.address
                protocol.moved(now)
            self._channels[name] = self._driver.add(address, protocol, self._keys)
            log.info("%s found at %s", name, address)
        except BrokerlessError as error:
            # Anybody can announce anything: it must not cost the other publishers.
            self._refused[name] = where.address
            log.error("%s: %s; going on with the other publishers", where.address, error)

    def replace(self, old: ClientProtocol, new: ClientProtocol, channel: Channel | None) -> None:
        """Another protocol serves that publisher now, over that channel."""
        for name in [name for name, protocol in self._protocols.items() if protocol is old]:
            self._protocols[name] = new
            if channel is not None:
                self._channels[name] = channel

    def close(self) -> None:
        """Stop looking."""
        self.discovery.close()


class Follows(Protocol):
    """Moves a channel to where its source can be read; see io/failover.py."""

    def update(self, now: float) -> float:
        """Move if need be. Returns when this must be called again at the latest."""

    def close(self) -> None:
        """Release what is open."""


class Driver:
    """Drives channels. What is done with them is done in `run`, one thread at a time; `wake` and `close` may come from
    any, and from handlers of signals."""

    def __init__(self, *, live_queue: int = LIVE_QUEUE) -> None:
        keep_freed_buffers()
        self.channels: list[Channel] = []
        self.failed: dict[str, PeerError] = {}  # publishers that were given up, by address
        self._live_queue = live_queue
        self.closing = False
        self._networks: dict[tuple[str, bool], Network] = {}
        self._wakeup = WakeUp()
        self.wake = self._wakeup.wake  # make whoever waits look again
        self._poller: select.poll | None = (
            None  # None: to be made again, because sockets have changed; with the next
        )
        self._by_live: dict[
            int, tuple[Callable[[], bytes], Empty, Callable[[bytes, float], None], Channel]
        ] = {}
        # Where the last wait found a live message, and nothing else anywhere; when the next step is due at the latest.
        self._woken: Channel | None = None
        self._due = 0.0
        self.interrupted = (
            False  # a message may have been received and not processed: a signal's handler raised
        )
        self._left = False  # this is a fork's copy
        forks.remember(self)
        self.discovered: Discovered | None = None  # who else is to be connected to, as they come and go
        self.failovers: list[Follows] = []  # of sources whose address was given
        self.section = SerialSection()
        self.run = self.section.run
        self.attempt = self.section.attempt

    def _network(self, address: Address, keys: ClientKeys | None) -> Network:
        kind = (address.library, address.scheme == "inproc")
        if kind not in self._networks:
            self._networks[kind] = open_network(address, client_keys=keys, live_queue=self._live_queue)
        return self._networks[kind]

    def add(self, address: Address, protocol: ClientProtocol, keys: ClientKeys | None) -> Channel:
        """Connect to a publisher."""
        channel = Channel(address, self._network(address, keys), protocol, curve=keys is not None)
        self.channels = [*self.channels, channel]  # the old list may be being gone through
        self._poller = self._woken = None
        return channel

    def open_control(self, address: Address, keys: ClientKeys | None) -> ClientSocket:
        """A control socket that whoever asks for it looks at and closes."""
        return self._network(address, keys).connect_control(address)

    def remove(self, channel: Channel) -> None:
        """Disconnect from a publisher; its protocol can be added again later."""
        # A new list, because the old one may be being gone through.
        self.channels = [other for other in self.channels if other is not channel]
        self._poller = self._woken = None
        channel.close()

    def replace(self, old: ClientProtocol, new: ClientProtocol) -> None:
        """Give a publisher another protocol and new sockets: nothing that was meant for the old one arrives."""
        fresh = None
        for channel in [channel for channel in self.channels if channel.protocol is old]:
            fresh = channel.replacement(new)
            self.remove(channel)
            self.channels.append(fresh)
        if self.discovered is not None:
            self.discovered.replace(old, new, fresh)

    @property
    def unanswered(self) -> dict[str, str]:
        """Publishers that do not answer, by address, with what seems to be the reason."""
        return {str(channel.address): channel.problem for channel in self.channels if channel.problem}

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
        woken = self._woken
        if woken is not None:
            self._woken = None
            due = self._due if deadline is None else min(self._due, deadline)
            if now < due and self._follow(woken, now):
                return due - now
        if self.discovered is not None:
            self.discovered.update(now)
        look_at = float("inf")
        for failover in self.failovers:
            look_at = min(look_at, failover.update(now))
        self.pump(now)
        due = min([channel.protocol.next_deadline() for channel in self.channels], default=now + 1)
        self._due = due = min(due, look_at)
        if deadline is not None:
            if now >= deadline:
                return -1.0
            due = min(due, deadline)
        return max(0.0, due - now)

    def _follow(self, channel: Channel, now: float) -> bool:
        """What an event that comes alone needs of a step: look whether another has come. False: do the whole step.

        Everything else was found empty before the wait, which would have told of anything new.
        """
        protocol, live = channel.protocol, channel.live
        if live is None or protocol.state is not State.FOLLOWING:
            return False
        for each in self.channels:
            if each.protocol.outbox:
                return False
        was, self.interrupted = self.interrupted, True
        data = live.recv()
        for each in self.channels:
            each.quiet = True
        if data is not None:
            channel.quiet = False
            protocol.receive_live(data, now)
        self.interrupted = was
        return True

    def pump(self, now: float) -> None:
        """One round over all channels. Raises PeerError if no publisher is left that does not refuse us."""
        if self.closing:
            return
        was, self.interrupted = self.interrupted, True
        for channel in self.channels:
            if channel.pump(now):
                self._poller = None
            if channel.protocol.error is not None:
                self._drop(channel, channel.protocol.error)
        self.interrupted = was
        if self.failed and not self.channels and self.discovered is None:
            raise next(reversed(self.failed.values()))

    def _drop(self, channel: Channel, error: PeerError) -> None:
        """A publisher that cannot be followed is reported, and does not hold up the others."""
        self.failed[str(channel.address)] = error
        self.remove(channel)
        if self.channels or self.discovered is not None:
            log.error("%s: %s; going on with the other publishers", channel.address, error)

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
        readable = poller.poll(min(3_600_000, int(seconds * 1000) + 1))
        for descriptor, _ in readable:
            live = self._by_live.get(descriptor)
            if live is not None:
                recv, empty, receive, channel = live
                self._woken = channel if len(readable) == 1 else None
                was, self.interrupted = self.interrupted, True
                try:
                    data = recv()
                except empty:
                    self.interrupted = was
                    continue
                receive(data, time.monotonic())
                self.interrupted = was
            elif descriptor == self._wakeup.fd:
                # Reading it when nobody wrote would be an exception.
                self._wakeup.clear()

    def _register(self) -> "select.poll":
        poller = select.poll()
        poller.register(self._wakeup.fd, select.POLLIN)
        self._by_live = {}
        for channel in self.channels:
            for socket in channel.awaited:
                poller.register(socket.descriptor, select.POLLIN)
                if socket is channel.live:
                    receive = channel.protocol.receive_live
                    self._by_live[socket.descriptor] = (socket.recv_ready, socket.empty, receive, channel)
        self._poller = poller
        return poller

    async def wait_async(self, seconds: float) -> None:
        """The same for asyncio. Cancelling it loses nothing, because nothing is received here."""
        sockets = [socket for channel in self.channels for socket in channel.awaited]
        # ZeroMQ's descriptor tells only of changes: look before waiting for the next one.
        if seconds <= 0 or any(socket.readable() for socket in sockets):
            await asyncio.sleep(0)
            return
        await self._wakeup.wait([socket.descriptor for socket in sockets], min(seconds, 3600.0))

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Make whoever runs or waits end, do `last`, send what is queued, close. Closing twice is fine.

        A signal's handler may call this while a step runs, which then does it at its end.
        """
        if self._left:
            return
        self.closing = True
        self.wake()
        self.section.close(partial(self._end, last))

    def leave_to_parent(self) -> None:
        """In a forked child: positions, sockets and the wake-up are the parent's."""
        self.closing = self._left = True
        self.section.reset()
        self._wakeup.close(at_once=True)

    def _end(self, last: Callable[[], None]) -> None:
        try:
            last()
        finally:
            if self.discovered is not None:
                self.discovered.close()
            for failover in self.failovers:
                failover.close()
            for channel in self.channels:
                channel.close()
            for network in self._networks.values():
                network.close()
            forks.forget(self)
            self._wakeup.close()


class FollowsPublishers:
    """What a subscriber and a worker tell about the publishers that they follow."""

    _driver: Driver

    @property
    def unanswered(self) -> dict[str, str]:
        """Publishers that have not answered for some seconds, by address, with what seems to be the reason."""
        return self._driver.unanswered

    @property
    def failed(self) -> dict[str, PeerError]:
        """Publishers given up, with the reason, by address; receiving raises when no other is left."""
        return dict(self._driver.failed)
