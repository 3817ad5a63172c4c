"""The publisher's side of the conversation, without sockets or clock: who is there, and an answer to each request.

    desk.receive(peer, data, now)       one message of the control socket
    desk.departed(peer)                 the connection of a peer is gone
    desk.handle_deadline(now)           when `next_deadline()` has come
    desk.outbox                         (peer, message) to send; the server empties it

Nothing a client says can cost more than its own answer: requests are bounded before they are decoded, hellos
and requests are rationed per peer, sessions are bounded in number, and whoever is silent is forgotten. A peer
has one session, and a worker is known to its group as long as it has one.
"""

import logging
from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Annotated

from brokerless.core import Counters, IntervalSet, Journal, TokenBucket
from brokerless.core.counters import count
from brokerless.core.errors import BrokerlessError, Evicted, PeerError
from brokerless.core.event import Reason, check_source
from brokerless.direct import wire
from brokerless.direct.dispatch import Dispatcher
from brokerless.direct.unread import Unread

log = logging.getLogger(__name__)
# More than any publisher here has clients; each costs about 1 kB.
MAX_SESSIONS = 10_000
# Durable names are kept in the journal until somebody forgets them.
MAX_DURABLE = 1_000
# Clients show themselves every 10 s; six times that is a minute.
FORGET_S = 60.0
# A worker whose process is gone is found out by the next ping; this is what a crash costs its group.
PING_S = 0.5
# A subscriber that has not been heard of for a second is pinged, too, so often that its queue has room for a minute.
_PING_SILENT_S = 2.0
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

    __slots__ = (
        "client",
        "durable",
        "group",
        "heard",
        "muted_until",
        "peer",
        "position",
        "questions",
        "ready",
    )

    def __init__(self, peer: bytes, hello: wire.Hello, now: float) -> None:
        self.peer = peer
        self.client = hello.client
        self.group = hello.group
        self.durable = hello.durable
        self.heard = now
        self.muted_until = 0.0
        self.ready = False
        self.position = -1  # what the client last said that it has had
        # Those that wait until it has read the answers before them, the last of each kind.
        self.questions: dict[type, wire.Replay | wire.SentRequest] = {}


class _Ration:
    """What one peer may still ask for; it outlives the peer's sessions."""

    __slots__ = ("greeted", "hellos", "requests")

    def __init__(self, now: float) -> None:
        self.hellos = TokenBucket(*_HELLOS, now)
        self.requests = TokenBucket(*_REQUESTS, now)
        self.greeted = False


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
        self.arrivals = 0  # peers that became subscribers; one that says hello again is not another one
        self._journal = journal
        self._dispatcher = dispatcher
        self._instance = instance
        self._live = live
        self._beat_s = beat_s
        self._begin = begin
        self._replay = replay
        self._workers: dict[str, Session] = {}
        # Greeted, and not yet seen to receive the live stream; the oldest first.
        self._unready: dict[bytes, Session] = {}
        self._rations: dict[bytes, _Ration] = {}
        self.unread = Unread()
        self._topics: dict[str, None] = {}  # all that were ever sent, in order
        self._ping_at = 0.0
        self._ping_silent_at = 0.0
        self._sweep_at = 0.0

    @property
    def subscribers(self) -> int:
        """Subscribers that are known to receive the live stream."""
        return sum(1 for s in list(self.sessions.values()) if s.ready and not s.group)

    @property
    def newcomers(self) -> int:
        """Subscribers that are not yet known to receive the live stream."""
        return len(self._unready)

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
        ration = self._ration(peer, now)
        if not ration.requests.take(1, now):
            self.counters.rationed += 1
            return
        try:
            request = wire.decode_request(data)
        except PeerError as error:
            self.counters.bad_requests += 1
            log.debug("bad request: %s", error)
            return
        if isinstance(request, wire.Hello):
            if ration.hellos.take(1, now):
                self._hello(peer, request, now)
            else:
                self.counters.rationed += 1
            return
        if isinstance(request, wire.Pong):
            self.unread.shown(peer, request.number)
        session = self.sessions.get(peer)
        if session is None:
            if not isinstance(request, wire.Pong) and ration.hellos.take(1, now):
                self._reply(peer, wire.Refused("say hello first", again=True))
            return
        session.heard = now
        try:
            self._request(session, request, now)
        except BrokerlessError as error:
            log.warning("a request of %r failed: %s", session.client, error)

    def _ration(self, peer: bytes, now: float) -> _Ration:
        ration = self._rations.get(peer)
        if ration is None:
            if len(self._rations) > 2 * MAX_SESSIONS:
                self._rations = {p: r for p, r in self._rations.items() if p in self.sessions}
            ration = self._rations[peer] = _Ration(now)
        return ration

    def _reply(self, peer: bytes, message: wire.Reply) -> None:
        self.outbox.append((peer, wire.encode(message)))

    def _hello(self, peer: bytes, hello: wire.Hello, now: float) -> None:
        problem = self._objection(hello)
        if not problem and peer not in self.sessions and not self._make_room():
            self.counters.refused += 1
            # Not for ever: the client goes on greeting, more and more slowly.
            self._reply(peer, wire.Refused(f"there are {MAX_SESSIONS} clients already", again=True))
            return
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

    def _make_room(self) -> bool:
        """Whether there is room for one more. Whoever greeted and then did nothing has to go first."""
        if len(self.sessions) < MAX_SESSIONS:
            return True
        if self._unready:
            self._drop(next(iter(self._unready.values())))
            return True
        return False  # pings find out who is gone, and then there is room for whoever greets again

    def _objection(self, hello: wire.Hello) -> str:
        if hello.version != wire.VERSION:
            return f"version {hello.version} is not spoken here, version {wire.VERSION} is"
        if not hello.client:
            return "a client needs a name"
        return ""

    def _admit(self, peer: bytes, hello: wire.Hello, now: float) -> int:
        at = -1
        if hello.group:
            check_source(hello.group)
            self._dispatcher.join(hello.group, hello.client, hello.policy, hello.start, 0)
        elif hello.durable:
            check_source(hello.durable)
            at = self._register(hello)
        for old in (self.sessions.get(peer), self._workers.get(hello.client) if hello.group else None):
            if old is None:
                continue
            if hello.group and (old.client, old.group) == (hello.client, hello.group):
                # The same worker, perhaps after a reconnection: it keeps its leases.
                self.sessions.pop(old.peer, None)
            elif self.sessions.get(old.peer) is old:
                self._drop(old)
        session = self.sessions[peer] = Session(peer, hello, now)
        if hello.group:
            self._workers[hello.client] = session
        else:
            self._unready[peer] = session
            ration = self._ration(peer, now)
            self.arrivals += not ration.greeted
            ration.greeted = True
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
            read = isinstance(request, wire.Pong) and not request.number
            self._dispatcher.groups[session.group].heard(session.client, read=read)
        match request:
            case wire.Replay() | wire.SentRequest():
                session.questions[type(request)] = request
                self._answer(session, now)
            case wire.Pong():
                self._answer(session, now)
            case wire.Settle():
                self._dispatcher.settle(session.group, session.client, request, now)
            case wire.Credit():
                group = self._dispatcher.groups.get(session.group)
                if group is not None:
                    group.set_credit(session.client, request.window)
            case wire.Ready():
                if request.epoch == self._journal.epoch:
                    session.position = request.position
                session.ready = True
                self._unready.pop(session.peer, None)
            case wire.Advance():
                if session.durable and request.epoch == self._journal.epoch:
                    offset = min(request.offset, self._journal.next)
                    self._journal.advance(_SUB_PREFIX + session.durable, offset)
            case wire.Bye():
                if request.forget and session.durable:
                    self._journal.unregister(_SUB_PREFIX + session.durable)
                if session.group:
                    self._dispatcher.bye(session.group, session.client, request.settles)
                self._drop(session)

    # ---- answers ---------------------------------------------------------------------------------------

    def _answer(self, session: Session, now: float) -> None:
        """Answer what a client has asked, as far as it reads."""
        while session.questions and now >= session.muted_until and not self.unread.full(session.peer):
            question = session.questions.pop(next(iter(session.questions)))
            if isinstance(question, wire.Replay):
                self._answer_replay(session, question)
            else:
                self._answer_sent(session, question)
        if session.questions:
            self._ask_if_full(session.peer)

    def _ask_if_full(self, peer: bytes) -> bool:
        """Whether a peer must read first. It is asked at once, if it has not been: what was enough for it when it was
        sent may be too much now that others do not read."""
        full = self.unread.full(peer)
        if full and self.unread.unasked(peer):
            self.outbox.append((peer, self.unread.ping(peer)))
        return full

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
        journal = self._journal
        # In this order: everything that `sent` counts is readable below `at`.
        sent = journal.sent()
        journal.flush()
        at = journal.next
        if sent.keys() != self._topics.keys():
            self._topics = dict.fromkeys(sorted(sent))
        page, more = _page(list(self._topics), request.topics, request.after)
        self._reply(session.peer, wire.Sent(journal.epoch, at, {t: sent[t] for t in page}, more))

    def unsent(self, peer: bytes, now: float) -> None:
        """An answer could not be sent, because the client does not read: no answers for it for a while."""
        self.counters.unsent += 1
        if peer in self.sessions:
            self.sessions[peer].muted_until = now + _MUTE_S

    def sent(self, peer: bytes, size: int) -> None:
        """A message of that size has left for a peer. What it does not read is bounded, so it is asked."""
        if self.unread.sent(peer, size):
            self.outbox.append((peer, self.unread.ping(peer)))

    def hold_back(self) -> None:
        """Workers that do not read wait for their deliveries while there is too much unread for all."""
        if self.unread.scarce:
            for session in self._workers.values():
                if self._ask_if_full(session.peer):
                    self._dispatcher.hold_back(session.group, session.client)

    # ---- leaving, time ---------------------------------------------------------------------------------

    def departed(self, peer: bytes) -> None:
        """The connection of a peer is gone; what a worker held comes again at once."""
        session = self.sessions.get(peer)
        self._rations.pop(peer, None)
        self.unread.forget(peer)
        if session is not None:
            self._drop(session)

    def _drop(self, session: Session) -> None:
        self.sessions.pop(session.peer, None)
        self._unready.pop(session.peer, None)
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
        return min(self._ping_at, self._sweep_at) if self.sessions or self.unread else self._sweep_at

    def handle_deadline(self, now: float) -> None:
        """Ping who has to be asked (sending to one that is gone tells), forget who has been silent."""
        if now >= self._ping_at:
            self._ping_at = now + PING_S
            asked = {session.peer for session in self._workers.values()}
            # Also those that said goodbye: what they have not read is there as long as their connection.
            asked.update(self.unread.peers(again=now >= self._ping_silent_at))
            if now >= self._ping_silent_at:
                self._ping_silent_at = now + _PING_SILENT_S
                asked.update(s.peer for s in self.sessions.values() if now - s.heard > 1.0)
            self.outbox += [(peer, self.unread.ping(peer)) for peer in asked]
        if now >= self._sweep_at:
            self._sweep_at = now + FORGET_S / 4
            # Workers are found out by pings and leases: a handler may well take longer than a minute.
            for session in [s for s in self.sessions.values() if not s.group and now - s.heard > FORGET_S]:
                self._drop(session)


def _page(topics: list[str], prefixes: tuple[str, ...], after: str) -> tuple[list[str], bool]:
    """The first topics beyond `after` that begin with one of the prefixes, of a sorted list; whether there are more.

    Each prefix is one range of the list: what a request costs depends little on how many topics there are.
    """
    begin = bisect_right(topics, after) if after else 0
    found = IntervalSet()
    for prefix in prefixes or ("",):
        first = bisect_left(topics, prefix, begin)
        found.add(first, bisect_right(topics, prefix, first, key=itemgetter(slice(len(prefix)))) - 1)
    page: list[str] = []
    for first, last in found:
        page += topics[first : min(last + 1, first + wire.MAX_SENT_TOPICS - len(page))]
    return page, found.total > len(page)
