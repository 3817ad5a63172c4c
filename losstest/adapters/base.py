"""What a transport must offer to be measured: a producer, a consumer, and its traits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from brokerless.core.errors import Fault
from brokerless.losstest.model import Traits

CONNECT_HOST = "127.0.0.1"
# The whole of 127.0.0.0/8 is this machine: with a relay, who listens has the same port at another address,
# so that a protocol which tells port numbers (the way FTP did) cannot get around the relay unnoticed.
RELAYED_HOST = "127.0.0.2"


class Rejected(Fault):
    """Raise this in `send()` to say that the event was not accepted, and never will be delivered."""


class Indeterminate(Fault):
    """Raise this in `send()` when the event may have been accepted or not, such as after a timeout."""


class Position(msgspec.Struct, frozen=True, gc=False):
    """Where the transport put an accepted event; `losses()` speaks in these numbers."""

    epoch: int
    offset: int


class Loss(msgspec.Struct, frozen=True):
    """The transport says that positions `first` to `last` of `epoch` will not come, and why."""

    epoch: int
    first: int
    last: int
    reason: str


class Message(msgspec.Struct):
    """One delivery. `ack`, if there is one, is called after the effect was recorded.

    It may raise Fault: then the event does not count as acknowledged, and may be delivered again.
    """

    data: bytes
    ack: Callable[[], None] | None = None
    attempt: int = 1


class Setup(msgspec.Struct, kw_only=True):
    """What a producer or consumer is given; `docs/losstest.md` explains the fields."""

    state: Path
    shared: Path
    ports: list[int]
    listen_host: str = "127.0.0.1"
    rate: float
    size: int
    seed: int
    buffer_events: int
    retention_events: int
    index: int = 0
    subscription: str = "sub-0"
    consumers: int = 1
    producers: int = 1
    incarnation: int = 1
    # Longer than any outage of this run: how long to wait for the other side before giving up
    patience_s: float = 30.0
    compress: float = 1.0  # divide the transport's own timers by this; 1: as they are for runs of seconds
    sync: bool = False  # what `send` accepts must survive a power cut: sync it, at the price that this has

    def listen(self, number: int = 0) -> tuple[str, int]:
        """What to bind. With a relay in between, the relay has the same port on `connect_host`."""
        return self.listen_host, self.ports[number]

    def connect(self, number: int = 0) -> tuple[str, int]:
        """Where the other side is reached, through the relay if there is one."""
        return CONNECT_HOST, self.ports[number]

    def broker(self, *, producer: bool) -> tuple[str, int]:
        """Where a broker is reached. Network faults lie between it and the consumers: producers go past the relay."""
        return self.listen(self.consumers) if producer else self.connect(self.consumers)

    @property
    def buffer_bytes(self) -> int:
        """The buffer in bytes, for those who count so."""
        return self.buffer_events * self.size


class Side:
    """What both sides can tell about themselves."""

    def losses(self) -> list[Loss]:
        """Losses it learned of since the last call."""
        return []


class Producer(Side, ABC):
    """The sending side, in a process of its own."""

    @abstractmethod
    def __init__(self, setup: Setup) -> None: ...

    @abstractmethod
    def send(self, data: bytes) -> Position | None:
        """Hand over one event. Returning means accepted.

        Raises Rejected if it is refused and will never be delivered, Indeterminate if that is not known.
        """

    def flush(self) -> None:  # most have nothing to flush
        """Called when all has been offered, and now and then while waiting to be stopped."""

    def pending(self) -> int:
        """How many accepted events it still means to deliver; 0 if it cannot know."""
        return 0

    def close(self) -> None:
        """Called when the run is over; must return within a few seconds."""


class Consumer(Side, ABC):
    """The receiving side, in a process of its own."""

    @abstractmethod
    def __init__(self, setup: Setup) -> None: ...

    @abstractmethod
    def receive(self, timeout_s: float) -> Iterable[Message]:
        """What has arrived, waiting at most `timeout_s` for the first of it."""

    def pending(self) -> int:
        """How many events it knows of and still expects, such as gaps that are being repaired."""
        return 0

    def command(self, word: str) -> None:
        """An instruction of the scenario that concerns the transport: `answer-500`, `hang`, `answer-200`."""

    def close(self) -> None:
        """Called at an orderly stop."""


class Command(msgspec.Struct, frozen=True):
    """A program that runs beside the run. It is ready when it accepts connections on `port`.

    The program must stay in the foreground: it is killed when the loss test ends, in whatever way.
    """

    words: list[str]
    port: int
    env: dict[str, str] = {}  # added to the environment


class Transport(msgspec.Struct, frozen=True):
    """One transport: its name, how to make its two ends, and its traits.

    `missing` returns why it cannot run on this machine (a package, a program), or an empty text. `services`
    returns what runs beside the run, in the order in which it starts; the last one is the broker itself. `version`
    returns which version of it is installed, for the run's record.
    """

    name: str
    producer: Callable[[Setup], Producer]
    consumer: Callable[[Setup], Consumer]
    traits: Traits
    missing: Callable[[], str] = lambda: ""
    preload: tuple[str, ...] = ()  # modules that its processes share: imported once, before they are forked
    services: Callable[[Setup], list[Command]] | None = None
    version: Callable[[], str] = lambda: ""
