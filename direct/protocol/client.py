"""What the protocols of subscribers and workers share, without I/O: joining a publisher, and leaving it.

The driver (io/client.py) feeds what arrived and does what is asked:

    protocol.receive_control(data, now)     one message of the control socket
    protocol.receive_live(data, now)        one message of the live socket (subscribers)
    protocol.handle_deadline(now)           when `next_deadline()` has come
    protocol.outbox                         messages to send on the control socket; the driver empties it
    protocol.live                           (generation, hint): connect the live socket there when it changes
    protocol.ready                          what happened, in order; the application's side takes it
"""

import enum
import logging
from collections.abc import Callable, Sized

from brokerless.core import Backoff, Reason
from brokerless.core.errors import PeerError
from brokerless.core.journal.epoch import is_superseded
from brokerless.direct.counters import SubscriberCounters, WorkerCounters
from brokerless.direct.protocol import messages

log = logging.getLogger(__name__)
# A session that lasted this long was a real one: when it ends, HELLO is sent at once, without back-off.
_SESSION_LASTED_S = 1.0
# How much of a publisher's own text is shown in an error.
_MAX_TEXT = 1000
# HELLOs without an answer after which a publisher of the same name at another address takes over.
_UNANSWERED_HELLOS = 3
# First retry soon, because publisher and client are often started together; then spread out.
HELLO_BACKOFF = Backoff(first_s=0.05, limit_s=1.0)


class State(enum.Enum):
    """The state of the connection to one publisher."""

    JOINING = "joining"
    FOLLOWING = "following"
    REFUSED = "refused"
    CLOSED = "closed"


# All allowed transitions; `ClientProtocol._become` refuses anything else.
TRANSITIONS = {
    State.JOINING: {State.FOLLOWING, State.REFUSED, State.CLOSED},
    State.FOLLOWING: {State.JOINING, State.FOLLOWING, State.REFUSED, State.CLOSED},
    State.REFUSED: {State.CLOSED},
    State.CLOSED: set[State](),
}


class ClientProtocol:
    """One publisher as a client sees it. See the module's docstring for what the driver must do."""

    ready: Sized

    def __init__(
        self,
        hello: messages.Hello,
        *,
        counters: SubscriberCounters | WorkerCounters,
        random: Callable[[], float],
        now: float,
        address: str = "",
        backoff: Backoff = HELLO_BACKOFF,
    ) -> None:
        self.state = State.JOINING
        self.outbox: list[bytes] = []
        self.live: tuple[int, str] = (0, "")
        self.error: PeerError | None = None
        self.address = address
        self.source = ""
        self.instance = 0
        self.epoch = -1
        self.unanswered_hellos = 0
        self.refusal = ""  # with which the HELLO before the last was answered, if it was
        self._refusal = ""
        # Where else the source can be read, in the publisher's words, and whether this is such a place.
        self.mirrors: list[str] = []
        self.at_copy = False
        self.newest_epoch = -1  # that we have seen of the source
        self._hello = hello
        self._hello_message = messages.encode(hello)
        self._client_counters = counters
        self._random = random
        self._backoff = backoff
        self._attempts = 0  # HELLOs that did not lead to a session that lasted
        self._joined_at = now
        self._hello_at = now

    # ---- what the driver calls -------------------------------------------------------------------------

    @property
    def wants_live(self) -> bool:
        """Whether live messages are wanted now; otherwise they wait in the socket's queue."""
        return True

    def next_deadline(self) -> float:
        """When handle_deadline must be called at the latest."""
        if self.state is State.JOINING:
            return self._hello_at
        return self._following_deadline() if self.state is State.FOLLOWING else float("inf")

    def handle_deadline(self, now: float) -> None:
        """Do what is due: send HELLO, or what the state FOLLOWING asks for."""
        if self.state is State.FOLLOWING:
            self._handle_following(now)
        elif self.state is State.JOINING and now >= self._hello_at:
            self._send_hello(now)

    def receive_live(self, data: bytes, now: float) -> None:
        """A message of the live socket. Workers have none."""

    def receive_control(self, data: bytes, now: float) -> None:
        """A message of the control socket. Whatever it is, nothing is raised."""
        if self.state in (State.REFUSED, State.CLOSED):
            return
        try:
            reply = messages.decode_reply(data)
        except PeerError:
            self._client_counters.bad_messages += 1
            return
        self._heard_control(now)
        if isinstance(reply, messages.Ping):
            self.outbox.append(messages.encode(messages.Pong(reply.number)))
        elif isinstance(reply, messages.Welcome):
            if reply.version == messages.VERSION:
                self._welcomed(reply, now)
            else:
                self.fail(
                    f"the publisher speaks version {reply.version}, we speak {messages.VERSION}; upgrade the older side"
                )
        elif isinstance(reply, messages.Refused):
            if reply.again:
                self._refusal = reply.text[:_MAX_TEXT]
                self._rejoin(now)
            else:
                self.fail(f"the publisher refused: {reply.text[:_MAX_TEXT]}")
        else:
            self._receive_reply(reply, now)

    def _welcomed(self, welcome: messages.Welcome, now: float) -> None:
        if is_superseded(welcome.epoch, self._seen_of(welcome.source)):
            # A mirror took its place, and it may not know: neither its events nor its deliveries count.
            self.outbox.append(messages.encode(messages.Superseded(self._seen_of(welcome.source))))
            self._rejoin(now)
            return
        self.newest_epoch = max(self.newest_epoch, welcome.epoch)
        self.mirrors = list(welcome.mirrors) or self.mirrors
        self.at_copy = welcome.copy
        self._receive_welcome(welcome, now)

    def _seen_of(self, source: str) -> int:
        """The newest epoch that we know of a source."""
        return self.newest_epoch

    def fail(self, text: str) -> None:
        """Give up this publisher, and keep the reason in `error`."""
        if self.error is None:
            self.error = PeerError(text)
            self._become(State.REFUSED)

    def moved(self, now: float) -> None:
        """The publisher is at another address, where the driver connects next: join it there, and go on as before."""
        self.outbox = []  # for the old address; what matters of it is sent again after WELCOME
        self.live = (self.live[0], "")  # so that WELCOME's hint counts as a new one
        self.unanswered_hellos = self._attempts = 0
        self._hello_at = now
        self._rejoin(now)

    # ---- what subclasses add ---------------------------------------------------------------------------

    def _following_deadline(self) -> float:
        raise NotImplementedError

    def _handle_following(self, now: float) -> None:
        raise NotImplementedError

    def _receive_welcome(self, welcome: messages.Welcome, now: float) -> None:
        raise NotImplementedError

    def _receive_reply(self, reply: messages.Reply, now: float) -> None:
        raise NotImplementedError

    def _heard_control(self, now: float) -> None:
        """A valid message arrived on the control socket."""

    # ---- joining ---------------------------------------------------------------------------------------

    def _become(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a client cannot go from {self.state.value} to {state.value}")
        self.state = state

    def _joined(self, now: float) -> None:
        self._become(State.FOLLOWING)
        self._joined_at = now
        self._client_counters.joins += 1

    def _send_hello(self, now: float) -> None:
        if self._hello_message not in self.outbox:  # the last one may not have left yet
            self.outbox.append(self._hello_message)
        self._hello_at = now + self._backoff.delay_s(self._attempts, self._random)
        self.unanswered_hellos += 1
        self.refusal, self._refusal = self._refusal, ""
        self._attempts += 1

    def _rejoin(self, now: float) -> None:
        """Start again with HELLO. Back-off applies if the session was short: a publisher that welcomes and refuses us
        in turn must not make us spin."""
        if self.state is not State.FOLLOWING:
            return
        self._become(State.JOINING)
        if now - self._joined_at >= _SESSION_LASTED_S:
            self._attempts = 0
        if not self._attempts or now >= self._hello_at:
            self._send_hello(now)


class SourceOwners:
    """Which connection of a subscriber follows the publisher of each source name.

    Two publishers of one name would share one position and one ledger, so only one is followed. If the publisher moved
    to another of the configured addresses, that one takes over when the old one has not answered for a while.
    """

    def __init__(self) -> None:
        self._owners: dict[str, ClientProtocol] = {}
        self._warned: set[tuple[str, str]] = set()

    def followed_by_other(self, name: str, client: ClientProtocol) -> bool:
        """Whether another connection has followed the publisher of this name until now."""
        return self._owners.get(name, client) is not client

    def claim(self, name: str, client: ClientProtocol) -> bool:
        """Whether this connection may follow the publisher of this name; it gives up any other name."""
        owner = self._owners.get(name, client)
        waits = owner.state is State.JOINING and owner.unanswered_hellos < _UNANSWERED_HELLOS
        if owner is not client and (waits or owner.state is State.FOLLOWING):
            if (owner.address, client.address) not in self._warned:
                self._warned.add((owner.address, client.address))
                log.warning(
                    "%s and %s both publish as %r; only the first is followed",
                    owner.address,
                    client.address,
                    name,
                )
            return False
        for old in [other for other, owner in self._owners.items() if owner is client and other != name]:
            del self._owners[old]
        self._owners[name] = client
        return True


def reason_of(text: str) -> Reason:
    """The reason that a publisher names, or `unattributed` if it is not known here."""
    try:
        return Reason(text)
    except ValueError:
        return Reason.UNATTRIBUTED
