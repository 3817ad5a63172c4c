"""The publisher's side of the conversation, without sockets or clock: who is there, and an answer to each request.

    desk.receive(peer, data, now)       one message of the control socket
    desk.departed(peer)                 the connection of a peer is gone
    desk.handle_deadline(now)           when `next_deadline()` has come
    desk.outbox                         (peer, message) to send; the server empties it

Nothing a client says can cost more than its own answer: requests are bounded before they are decoded, hellos
and requests are rationed per peer, sessions are bounded in number, and whoever is silent is forgotten.
"""

import logging
from typing import Annotated

from brokerless.core import Counters, Journal, TokenBucket
from brokerless.core.counters import count
from brokerless.core.errors import BrokerlessError, Evicted, PeerError
from brokerless.core.event import Reason, check_source
from brokerless.direct import wire
from brokerless.direct.batch import Filter
from brokerless.direct.dispatch import Dispatcher

log = logging.getLogger(__name__)
# More than any publisher here has clients; each costs about 1 kB.
MAX_SESSIONS = 10_000
# Durable names are kept in the journal until somebody forgets them.
MAX_DURABLE = 1_000
# Clients show themselves every 10 s; six times that is a minute.
FORGET_S = 60.0
# A worker whose process is gone is found out by the next ping; this is what a crash costs its group.
PING_S = 0.5
# An honest client says hello a few times a minute and sends some thousand messages a second when it acks.
_HELLOS = (5.0, 20.0)
_REQUESTS = (20_000.0, 20_000.0)
# An answer to one Replay; a single frame may be larger. A millisecond or two of work for both sides.
_MAX_CHUNK_BYTES = 1024 * 1024
# How long a client that does not read its answers is not given more of them.
_MUTE_S = 0.2
_SUB_PREFIX = "sub."


class DeskCounters(Counters):
    """What a publisher's control socket saw."""

    component = "direct.control"

    hellos: Annotated[int, count("clients greeted, reconnections included")] = 0
    refused: Annotated[int, count("clients refused: wrong version, wrong name, or too many")] = 0
    replays: Annotated[int, count("replay requests answered")] = 0
    replayed_frames: Annotated[int, count("frames sent again from the journal")] = 0
    bad_requests: Annotated[int, count("messages that were not the protocol, ignored")] = 0
    rationed: Annotated[int, count("messages ignored because their sender sent too many")] = 0
    unsent: Annotated[int, count("answers dropped because a client does not read; it asks again")] = 0
    failures: Annotated[int, count("rounds of the server that failed, which is a defect: see the log")] = 0
    denied: Annotated[int, count("connections refused because their CURVE key is not allowed")] = 0


class Session:
    """One client."""

    __slots__ = ("client", "durable", "group", "heard", "muted_until", "peer", "position", "ready")

    def __init__(self, peer: bytes, hello: wire.Hello, now: float) -> None:
        self.peer = peer
        self.client = hello.client
        self.group = hello.group
        self.durable = hello.durable
        self.heard = now
        self.muted_until = 0.0
        self.ready = False
        self.position = -1  # what the client last said that it has had


class Desk:
    """Answers the clients of one publisher."""

    def __init__(
        self,
        journal: Journal,
        dispatcher: Dispatcher,
        *,
        instance: int,
        live: str,
        beat_s: float,
        begin: int,
        replay: bool,
    ) -> None:
        self.counters = DeskCounters()
        self.outbox: list[tuple[bytes, bytes]] = []
        self.sessions: dict[bytes, Session] = {}
        self.newcomers = 0  # greeted, and not yet seen to receive the live stream
        self._journal = journal
        self._dispatcher = dispatcher
        self._instance = instance
        self._live = live
        self._beat_s = beat_s
        self._begin = begin
        self._replay = replay
        self._workers: dict[str, Session] = {}
        self._rations: dict[bytes, tuple[TokenBucket, TokenBucket]] = {}
        self._ping_at = 0.0
        self._sweep_at = 0.0

    @property
    def subscribers(self) -> int:
        """Subscribers that are known to receive the live stream."""
        return sum(1 for s in list(self.sessions.values()) if s.ready and not s.group)

    def behind(self, offset: int) -> int:
        """How many subscribers have not said that they have had everything before `offset`."""
        return sum(1 for s in list(self.sessions.values()) if not s.group and s.position < offset)

    @property
    def workers(self) -> int:
        """Workers that are there."""
        return len(self._workers)

    # ---- what comes in ---------------------------------------------------------------------------------

    def receive(self, peer: bytes, data: bytes, now: float) -> None:
        """One message of a client. Whatever it is, nothing is raised."""
        hellos, requests = self._ration(peer, now)
        if not requests.take(1, now):
            self.counters.rationed += 1
            return
        try:
            request = wire.decode_request(data)
        except PeerError as error:
            self.counters.bad_requests += 1
            log.debug("bad request: %s", error)
            return
        if isinstance(request, wire.Hello):
            if hellos.take(1, now):
                self._hello(peer, request, now)
            else:
                self.counters.rationed += 1
            return
        session = self.sessions.get(peer)
        if session is None:
            if hellos.take(1, now):
                self._reply(peer, wire.Refused("say hello first", again=True))
            return
        session.heard = now
        try:
            self._request(session, request, now)
        except BrokerlessError as error:
            log.warning("a request of %r failed: %s", session.client, error)

    def _ration(self, peer: bytes, now: float) -> tuple[TokenBucket, TokenBucket]:
        ration = self._rations.get(peer)
        if ration is None:
            if len(self._rations) > 2 * MAX_SESSIONS:
                self._rations = {p: r for p, r in self._rations.items() if p in self.sessions}
            ration = self._rations[peer] = (TokenBucket(*_HELLOS, now), TokenBucket(*_REQUESTS, now))
        return ration

    def _reply(self, peer: bytes, message: wire.Reply) -> None:
        self.outbox.append((peer, wire.encode(message)))

    def _hello(self, peer: bytes, hello: wire.Hello, now: float) -> None:
        problem = self._objection(peer, hello)
        at = -1
        if not problem:
            try:
                at = self._admit(peer, hello, now)
            except BrokerlessError as error:
                problem = str(error)
        if problem:
            self.counters.refused += 1
            self._reply(peer, wire.Refused(problem))
            return
        self.counters.hellos += 1
        journal = self._journal
        self._reply(
            peer,
            wire.Welcome(
                wire.VERSION,
                journal.source,
                self._instance,
                journal.epoch,
                self._begin,
                journal.oldest,
                journal.next,
                self._live,
                self._beat_s,
                self._replay,
                at,
            ),
        )

    def _objection(self, peer: bytes, hello: wire.Hello) -> str:
        if hello.version != wire.VERSION:
            return f"version {hello.version} is not spoken here, version {wire.VERSION} is"
        if not hello.client:
            return "a client needs a name"
        if peer not in self.sessions and len(self.sessions) >= MAX_SESSIONS:
            return f"there are {MAX_SESSIONS} clients already"
        return ""

    def _admit(self, peer: bytes, hello: wire.Hello, now: float) -> int:
        at = -1
        if hello.group:
            check_source(hello.group)
            old = self._workers.get(hello.client)
            if old is not None and old.peer != peer:
                self.sessions.pop(old.peer, None)  # the same worker after a reconnection: it keeps its leases
            self._dispatcher.join(hello.group, hello.client, hello.policy, hello.start, 0)
        elif hello.durable:
            check_source(hello.durable)
            at = self._register(hello)
        session = self.sessions[peer] = Session(peer, hello, now)
        if hello.group:
            self._workers[hello.client] = session
        else:
            self.newcomers += 1
        return at

    def _register(self, hello: wire.Hello) -> int:
        name = _SUB_PREFIX + hello.durable
        known = self._journal.registered()
        if name not in known and sum(n.startswith(_SUB_PREFIX) for n in known) >= MAX_DURABLE:
            raise PeerError(f"there are {MAX_DURABLE} durable subscribers already")
        start = self._journal.next if hello.start == "live" else None
        return self._journal.register(name, start)

    def _request(self, session: Session, request: wire.Request, now: float) -> None:
        if session.group and session.group in self._dispatcher.groups:
            self._dispatcher.groups[session.group].heard(session.client, read=isinstance(request, wire.Pong))
        match request:
            case wire.Replay():
                if now >= session.muted_until:
                    self._answer_replay(session, request)
            case wire.Settle():
                self._dispatcher.settle(session.group, session.client, request, now)
            case wire.Credit():
                group = self._dispatcher.groups.get(session.group)
                if group is not None:
                    group.set_credit(session.client, request.window)
            case wire.Ready():
                if request.epoch == self._journal.epoch:
                    session.position = request.position
                if not session.ready:
                    session.ready = True
                    self.newcomers = max(0, self.newcomers - 1)
            case wire.Advance():
                if session.durable and request.epoch == self._journal.epoch:
                    offset = min(request.offset, self._journal.next)
                    self._journal.advance(_SUB_PREFIX + session.durable, offset)
            case wire.SentRequest():
                self._answer_sent(session, request)
            case wire.Bye():
                if request.forget and session.durable:
                    self._journal.unregister(_SUB_PREFIX + session.durable)
                if session.group:
                    self._dispatcher.bye(session.group, session.client, request.settles)
                self._drop(session)

    # ---- answers ---------------------------------------------------------------------------------------

    def _answer_replay(self, session: Session, request: wire.Replay) -> None:
        journal = self._journal
        if request.epoch != journal.epoch:
            self._reply(session.peer, wire.Refused("another epoch", again=True))
            return
        gone: list[tuple[int, int, str]] = []
        offset = request.offset
        tail = journal.next
        if not self._replay:
            return
        limit = min(request.max_bytes, _MAX_CHUNK_BYTES)
        for _ in range(8):  # retention may move on while we read; it cannot win eight times
            try:
                chunk = journal.read(offset, max_bytes=limit)
                break
            except Evicted as evicted:
                gone = [(request.offset, evicted.oldest, Reason.EVICTED)]
                offset = evicted.oldest
        else:
            return
        gone += [(first, last + 1, Reason.UNATTRIBUTED) for first, last in chunk.gone]
        self.counters.replays += 1
        self.counters.replayed_frames += len(chunk.frames)
        self._reply(
            session.peer,
            wire.Chunk(
                request.request,
                journal.epoch,
                max(chunk.next, offset),
                tail,
                gone,
                [f.raw for f in chunk.frames],
            ),
        )

    def _answer_sent(self, session: Session, request: wire.SentRequest) -> None:
        wanted = Filter(request.topics)
        journal = self._journal
        # In this order: everything that `sent` counts is readable below `at`.
        sent = journal.sent()
        journal.flush()
        at = journal.next
        topics = sorted(t for t in sent if t > request.after and wanted(t))
        page = topics[: wire.MAX_SENT_TOPICS]
        self._reply(
            session.peer, wire.Sent(journal.epoch, at, {t: sent[t] for t in page}, len(topics) > len(page))
        )

    def unsent(self, peer: bytes, now: float) -> None:
        """An answer could not be sent, because the client does not read: no replay for it for a while."""
        self.counters.unsent += 1
        if peer in self.sessions:
            self.sessions[peer].muted_until = now + _MUTE_S

    # ---- leaving, time ---------------------------------------------------------------------------------

    def departed(self, peer: bytes) -> None:
        """The connection of a peer is gone; what a worker held comes again at once."""
        session = self.sessions.get(peer)
        self._rations.pop(peer, None)
        if session is not None:
            self._drop(session)

    def _drop(self, session: Session) -> None:
        self.sessions.pop(session.peer, None)
        if not session.ready and not session.group:
            self.newcomers = max(0, self.newcomers - 1)
        if session.group and self._workers.get(session.client) is session:
            del self._workers[session.client]
            group = self._dispatcher.groups.get(session.group)
            if group is not None:
                group.leave(session.client)

    def forget_group(self, name: str) -> None:
        """Drop a group. Its workers are told; they join anew, and with that there is a new group of the name."""
        for session in [s for s in self._workers.values() if s.group == name]:
            self._reply(session.peer, wire.Refused("the group was forgotten", again=True))
            self._drop(session)
        self._dispatcher.forget(name)

    def peer_of(self, worker: str) -> bytes | None:
        """Where a worker is to be reached."""
        session = self._workers.get(worker)
        return session.peer if session is not None else None

    def next_deadline(self) -> float:
        """When handle_deadline must be called at the latest."""
        return min(self._ping_at, self._sweep_at) if self._workers else self._sweep_at

    def handle_deadline(self, now: float) -> None:
        """Ping workers (sending to one that is gone tells), forget who has been silent."""
        if now >= self._ping_at:
            self._ping_at = now + PING_S
            ping = wire.encode(wire.Ping())
            self.outbox += [(session.peer, ping) for session in self._workers.values()]
        if now >= self._sweep_at:
            self._sweep_at = now + FORGET_S / 4
            # Workers are found out by pings and leases: a handler may well take longer than a minute.
            for session in [s for s in self.sessions.values() if not s.group and now - s.heard > FORGET_S]:
                self._drop(session)
