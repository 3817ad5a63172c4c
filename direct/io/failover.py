"""Reading on from a mirror while the publisher is away, and going back to it afterwards."""

import contextlib
import secrets

from brokerless.core.errors import BrokerlessError, PeerError
from brokerless.core.journal.epoch import is_superseded
from brokerless.direct.address import parse_address
from brokerless.direct.io.base import ClientSocket
from brokerless.direct.io.client import Channel, Driver
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import ClientProtocol, State

# HELLOs without an answer after which the next address is tried: with their back-off less than half a second,
# after the three heartbeats that it takes to notice the silence.
_PATIENCE = 3
# How often a client that reads from a mirror looks for the publisher.
_LOOK_EVERY_S = 0.5


class Failover:
    """Keeps one source's protocol connected to whoever has it: its publisher, or else a mirror.

    A protocol keeps its position when it moves, so nothing is missed and nothing comes twice.
    """

    def __init__(
        self, driver: Driver, channel: Channel, keys: ClientKeys | None, known: list[str] | None = None
    ) -> None:
        """`known` are mirrors that an earlier process learned of."""
        self._driver = driver
        self.channel = channel
        self._keys = keys
        self.home = str(channel.address)
        self.places = [self.home]
        self.excluded = ""  # our own address, if we are a mirror
        self._learned: list[str] = []
        self._probes: dict[str, ClientSocket] = {}
        self._look_at = 0.0
        self._hello = messages.encode(messages.Hello(messages.VERSION, secrets.token_hex(16), start="live"))
        self._learn(known or [])

    def _learn(self, mirrors: list[str]) -> None:
        """Take over what WELCOME says, as far as it is of our own transport."""
        self._learned = list(mirrors)
        for place in mirrors:
            with contextlib.suppress(BrokerlessError):
                address = parse_address(place)
                ours = self.channel.address
                same = (address.library, address.scheme) == (ours.library, ours.scheme)
                if same and place not in self.places and len(self.places) <= messages.MAX_MIRRORS:
                    self.places.append(place)

    def update(self, now: float) -> float:
        """Move if there is no answer, or if the publisher is back. Returns when to look again at the latest."""
        protocol = self.channel.protocol
        if protocol.mirrors != self._learned:
            self._learn(protocol.mirrors)
        if len(self.places) > 1:
            self._follow(protocol, now)
        return self._look_at if self._probes else float("inf")

    def _follow(self, protocol: ClientProtocol, now: float) -> None:
        if protocol.state is State.JOINING and protocol.unanswered_hellos > _PATIENCE:
            at = self.places.index(str(self.channel.address))
            following = [
                place for place in self.places[at + 1 :] + self.places[:at] if place != self.excluded
            ]
            if following:
                self._move(following[0], now)
        elif protocol.state is State.FOLLOWING and protocol.at_copy:
            self._look_for_publisher(now)
        elif self._probes:
            self._close_probes()

    def _move(self, place: str, now: float) -> None:
        protocol = self.channel.protocol
        self._driver.remove(self.channel)
        protocol.address = place
        protocol.moved(now)
        self.channel = self._driver.add(parse_address(place), protocol, self._keys)
        self._close_probes()

    def _look_for_publisher(self, now: float) -> None:
        if not self._probes:
            others = [p for p in self.places if p not in (str(self.channel.address), self.excluded)]
            self._probes = {
                place: self._driver.open_control(parse_address(place), self._keys) for place in others
            }
            self._look_at = now
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            for probe in self._probes.values():
                probe.send(self._hello)
        for place, probe in self._probes.items():
            while (data := probe.recv()) is not None:
                if self._is_publisher(data, probe):
                    probe.send(messages.encode(messages.Bye()))
                    self._move(place, now)
                    return

    def _is_publisher(self, data: bytes, probe: ClientSocket) -> bool:
        try:
            reply = messages.decode_reply(data)
        except PeerError:
            return False
        protocol = self.channel.protocol
        if isinstance(reply, messages.Ping):
            probe.send(messages.encode(messages.Pong(reply.number)))
        if not isinstance(reply, messages.Welcome) or reply.source != protocol.source:
            return False
        if is_superseded(reply.epoch, protocol.newest_epoch):
            probe.send(messages.encode(messages.Superseded(protocol.newest_epoch)))
            return False
        return not reply.copy

    def _close_probes(self) -> None:
        probes, self._probes = self._probes, {}
        for probe in probes.values():
            probe.close()

    def close(self) -> None:
        """Look no more."""
        self._close_probes()
