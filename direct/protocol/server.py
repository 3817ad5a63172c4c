"""The publisher's side of the conversation, without sockets or clock: who is there, and an answer to each request.

    control_server.receive(peer, data, now)       one message of the control socket
    control_server.departed(peer)                 the connection of a peer is gone
    control_server.handle_deadline(now)           when `next_deadline()` has come
    control_server.outbox                         (peer, message) to send; the server empties it

Nothing a client says can cost more than its own answer: requests are bounded before they are decoded, hellos
and requests are rationed per peer, sessions are bounded in number, and whoever is silent is forgotten. A peer
has one session, and a worker is known to its group as long as it has one.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import itemgetter

import msgspec

from brokerless.core import IntervalSet, Journal, TokenBucket
from brokerless.core.errors import BrokerlessError, Evicted, PeerError
from brokerless.core.event import Reason, check_source
from brokerless.core.frame import merge_small
from brokerless.core.journal.key_state import State
from brokerless.direct.counters import ControlCounters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.promotion import Replication
from brokerless.direct.protocol.unread import UnreadBytes

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
# Opening the state of a journal's keys can take two tenths of a second.
_STATE_AGAIN_S = 1.0


class Session:
    """One client."""

    __slots__ = (
        "ahead",
        "answered",
        "client",
        "durable",
        "group",
        "heard",
        "mirror",
        "muted_until",
        "peer",
        "position",
        "questions",
        "ready",
    )

    def __init__(self, peer: bytes, hello: messages.Hello, now: float) -> None:
        self.peer = peer
        self.client = hello.client
        self.group = hello.group
        self.durable = hello.durable
        self.mirror = hello.mirror
        self.heard = now
        self.muted_until = 0.0
        self.ready = False
        # The last Replay answered, and what must be shown as read before it is answered again.
        self.answered = (-1, 0)
        self.ahead = False  # it has seen more than the journal has, and that was reported
        self.position = -1  # what the client last said that it has had
        # Those that wait until it has read the answers before them, the last of each kind.
        self.questions: dict[type, messages.Replay | messages.SentRequest] = {}


class _Quota:
    """What one peer may still ask for; it outlives the peer's sessions."""

    __slots__ = ("greeted", "hellos", "requests")

    def __init__(self, now: float) -> None:
        self.hellos = TokenBucket(*_HELLOS, now)
        self.requests = TokenBucket(*_REQUESTS, now)
        self.greeted = False


class ControlServer:
    """Answers the clients of one publisher."""

    def __init__(
        self,
        journal: Journal,
        coordinator: GroupCoordinator,
        *,
        instance: int,
        live: str,
        beat_s: float,
        begin: int,
        replay: bool,
        replication: Replication | None = None,
    ) -> None:
        self.counters = ControlCounters()
        self.replication = replication or Replication()
        self.outbox: list[tuple[bytes, bytes]] = []
        self.sessions: dict[bytes, Session] = {}
        # Executes what administrators ask for; None: this one is not allowed to.
        self.administer: Callable[[messages.Admin], messages.Report | None] = lambda _: None
        self.answered: Callable[[messages.Answer], None] = lambda _: None  # a worker replies to a request
        # A client has seen what the journal never had; whether it is the mirror that it says.
        self.went_back: Callable[[], None] = lambda: None
        self.arrivals = 0  # peers that became subscribers; one that says hello again is not another one
        self._journal = journal
        self._coordinator = coordinator
        self._instance = instance
        self._live = live
        self._beat_s = beat_s
        self._begin = begin
        self._replay = replay
        self._workers: dict[str, Session] = {}
        # HELLO was answered, and they are not yet seen to receive the live stream; the oldest first.
        self._unready: dict[bytes, Session] = {}
        self._quotas: dict[bytes, _Quota] = {}
        self.unread = UnreadBytes()
        self._state: State | None = None  # the newest events of all keys, as long as somebody asks for them
        self._state_used = self._state_opened = 0.0
        self._topics: dict[str, None] = {}  # all that were ever sent, in order
        self._ping_at = 0.0
        self._ping_silent_at = 0.0
        self._sweep_at = 0.0

    @property
    def subscribers(self) -> int:
        """Subscribers that are known to receive the live stream."""
        return sum(1 for s in list(self.sessions.values()) if s.ready and not s.group and not s.mirror)

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
        quota = self._quota(peer, now)
        if not quota.requests.take(1, now):
            self.counters.rationed += 1
            return
        try:
            request = messages.decode_request(data)
        except PeerError as error:
            self.counters.bad_requests += 1
            log.debug("bad request: %s", error)
            return
        if isinstance(request, messages.Hello):
            if quota.hellos.take(1, now):
                self._hello(peer, request, now)
            else:
                self.counters.rationed += 1
            return
        if isinstance(request, messages.Admin):
            if quota.hellos.take(1, now):
                self._administer(peer, request)
            else:
                self.counters.rationed += 1
            return
        if isinstance(request, messages.Pong):
            self.unread.shown(peer, request.number)
        session = self.sessions.get(peer)
        if session is None:
            if not isinstance(request, messages.Pong) and quota.hellos.take(1, now):
                self._reply(peer, messages.Refused("say hello first", again=True))
            return
        session.heard = now
        try:
            self._request(session, request, now)
        except BrokerlessError as error:
            log.warning("a request of %r failed: %s", session.client, error)

    def _administer(self, peer: bytes, request: messages.Admin) -> None:
        report = self.administer(request)
        if report is None:
            self.counters.unauthorised += 1
            text = "administration is allowed to programs on the publisher's machine, or to the keys in its admin="
            if self.replication.copy:
                text = "this is a mirror, and knows nothing of consumers: ask the publisher"
            report = messages.Report(request.number, False, msgspec.json.encode(text))
        else:
            self.counters.administered += 1
        self._reply(peer, report)

    def _quota(self, peer: bytes, now: float) -> _Quota:
        quota = self._quotas.get(peer)
        if quota is None:
            if len(self._quotas) > 2 * MAX_SESSIONS:
                self._quotas = {p: r for p, r in self._quotas.items() if p in self.sessions}
            quota = self._quotas[peer] = _Quota(now)
        return quota

    def _reply(self, peer: bytes, message: messages.Reply) -> None:
        self.outbox.append((peer, messages.encode(message)))

    def _hello(self, peer: bytes, hello: messages.Hello, now: float) -> None:
        problem = self._objection(hello)
        elsewhere = self.replication.refusal
        if hello.group and self.replication.copy:
            # It may become the publisher at any moment: the worker goes on asking, here and elsewhere.
            elsewhere = "a mirror does not dispatch"
        if elsewhere and not problem:
            self._reply(peer, messages.Refused(elsewhere, again=True))
            return
        if not problem and peer not in self.sessions and not self._make_room():
            self.counters.refused += 1
            # Not for ever: the client goes on sending HELLO, less and less often.
            self._reply(peer, messages.Refused(f"there are {MAX_SESSIONS} clients already", again=True))
            return
        at = -1
        if not problem:
            try:
                at = self._admit(peer, hello, now)
            except BrokerlessError as error:
                problem = str(error)
        if problem:
            self.counters.refused += 1
            self._reply(peer, messages.Refused(problem))
            return
        self.counters.hellos += 1
        journal, replication = self._journal, self.replication
        epochs = replication.epochs()[-messages.MAX_EPOCHS :]
        self._reply(
            peer,
            messages.Welcome(
                messages.VERSION,
                journal.source,
                self._instance,
                journal.epoch,
                epochs[-1][1] if replication.copy and epochs else self._begin,
                journal.oldest,
                journal.next,
                self._live,
                self._beat_s,
                self._replay,
                at,
                epochs,
                list(replication.addresses),
                replication.mirrored,
                replication.copy,
                replication.lease_s,
                journal.state_end() if self._replay else -1,
            ),
        )

    def _make_room(self) -> bool:
        """Whether there is room for one more. A client that sent nothing after HELLO has to go first."""
        if len(self.sessions) < MAX_SESSIONS:
            return True
        if self._unready:
            self._drop(next(iter(self._unready.values())))
            return True
        return False  # pings find out who is gone, and then there is room for the next HELLO

    def _objection(self, hello: messages.Hello) -> str:
        if hello.version != messages.VERSION:
            return f"version {hello.version} is not spoken here, version {messages.VERSION} is"
        if not hello.client:
            return "a client needs a name"
        return ""

    def _admit(self, peer: bytes, hello: messages.Hello, now: float) -> int:
        at = -1
        if hello.group:
            check_source(hello.group)
            self._coordinator.join(hello.group, hello.client, hello.policy, hello.start, 0)
        elif hello.durable:
            check_source(hello.durable)
            at = self._register(hello)
        time = messages.start_time(hello.start)
        if time is not None:
            at = self._journal.offset_at(time)
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
            quota = self._quota(peer, now)
            self.arrivals += not quota.greeted
            quota.greeted = True
        return at

    def _register(self, hello: messages.Hello) -> int:
        name = _SUB_PREFIX + hello.durable
        known = self._journal.registered()
        if self.replication.copy:
            return known.get(name, -1)  # positions are the publisher's, and come from there
        if name not in known and sum(n.startswith(_SUB_PREFIX) for n in known) >= MAX_DURABLE:
            raise PeerError(f"there are {MAX_DURABLE} durable subscribers already")
        time = messages.start_time(hello.start)
        start = self._journal.next if hello.start == "live" else None
        if time is not None:
            start = self._journal.offset_at(time)
        return self._journal.register(name, start)

    def _request(self, session: Session, request: messages.Request, now: float) -> None:
        if session.group and session.group in self._coordinator.groups:
            read = isinstance(request, messages.Pong) and not request.number
            self._coordinator.groups[session.group].heard(session.client, read=read)
        match request:
            case messages.Replay() | messages.SentRequest():
                if isinstance(request, messages.Replay) and self._is_answered(session, request):
                    return
                session.questions[type(request)] = request
                self._answer(session, now)
            case messages.Pong():
                self._answer(session, now)
            case messages.Settle():
                self._coordinator.settle(session.group, session.client, request, now)
            case messages.Credit():
                group = self._coordinator.groups.get(session.group)
                if group is not None:
                    group.set_credit(session.client, request.window)
            case messages.Ready():
                self._check_ahead(session, request.epoch, request.position)
                if request.epoch == self._journal.epoch:
                    session.position = request.position
                session.ready = True
                self._unready.pop(session.peer, None)
            case messages.Advance():
                self._advance(session, request)
            case messages.StateRequest() | messages.Fence() | messages.Superseded() | messages.Challenge():
                reply = self.replication.answer(session.mirror, request, now)
                if reply is not None:
                    self._reply(session.peer, reply)
            case messages.Answer() if session.group:
                self.answered(request)
            case messages.Bye():
                self._bye(session, request)

    def _bye(self, session: Session, request: messages.Bye) -> None:
        if request.forget and session.durable and not self.replication.copy:
            self._journal.unregister(_SUB_PREFIX + session.durable)
        if session.group:
            self._coordinator.bye(session.group, session.client, request.settles)
        self._drop(session)

    def _advance(self, session: Session, request: messages.Advance) -> None:
        self._check_ahead(session, request.epoch, request.offset)
        if request.epoch != self._journal.epoch:
            return
        offset = min(request.offset, self._journal.next)
        if session.mirror:
            self.replication.acknowledged(session.mirror, offset, request.proof)
        if session.durable and not self.replication.copy:
            self._journal.advance(_SUB_PREFIX + session.durable, offset)

    # ---- answers ---------------------------------------------------------------------------------------

    def _answer(self, session: Session, now: float) -> None:
        """Answer what a client has asked, as far as it reads."""
        while session.questions and now >= session.muted_until and not self.unread.full(session.peer):
            question = session.questions.pop(next(iter(session.questions)))
            if isinstance(question, messages.Replay) and question.state >= 0:
                self._answer_state(session, question, now)
            elif isinstance(question, messages.Replay):
                self._answer_replay(session, question)
            else:
                self._answer_sent(session, question)
        if session.questions:
            self._ask_if_full(session.peer)

    def _check_ahead(self, session: Session, epoch: int, seen: int) -> None:
        """A client that has seen more of this epoch than the journal has: this journal is an older copy of another."""
        if self.replication.copy:
            return  # whose end is behind the publisher's
        if epoch == self._journal.epoch and seen > self._journal.next + self._journal.staged:
            self._went_back(
                session, f"seen this source up to offset {seen}, but the journal ends at {self._journal.next}"
            )

    def _went_back(self, session: Session, evidence: str) -> None:
        """This journal is an older copy of what the client knows; each client is named in the log once."""
        self.counters.ahead += 1
        if not session.ahead:
            session.ahead = True
            log.error(
                "a client has %s (epoch %d): it was restored from an older copy",
                evidence,
                self._journal.epoch,
            )
        self.went_back()

    def _is_answered(self, session: Session, request: messages.Replay) -> bool:
        """Whether a client repeats a request whose answer is on its way: a second one would only be in its way. The
        client is pinged, so that an answer that was lost is found out."""
        number, until = session.answered
        if number != request.request or not self.unread.is_unread(session.peer, until):
            return False
        self.counters.repeated += 1
        if self.unread.unasked(session.peer):
            self.outbox.append((session.peer, self.unread.ping(session.peer)))
        return True

    def _ask_if_full(self, peer: bytes) -> bool:
        """Whether a peer must read first. It is asked at once, if it has not been: what was enough for it when it was
        sent may be too much now that others do not read."""
        full = self.unread.full(peer)
        if full and self.unread.unasked(peer):
            self.outbox.append((peer, self.unread.ping(peer)))
        return full

    def _answer_replay(self, session: Session, request: messages.Replay) -> None:
        journal = self._journal
        if request.epoch != journal.epoch:
            self._reply(session.peer, messages.Refused("another epoch", again=True))
            return
        if not self.replication.copy and self._is_other(request):
            # For the client a journal that ends before its position.
            self._reply(session.peer, messages.Chunk(request.request, journal.epoch, 0, 0, [], []))
            self._went_back(session, f"had another event at offset {request.offset - 1} than the journal has")
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
        session.answered = (request.request, self.unread.bytes_sent(session.peer) + 1)
        self._reply(
            session.peer,
            messages.Chunk(
                request.request,
                journal.epoch,
                max(chunk.next, offset),
                tail,
                gone,
                [f.raw for f in (chunk.frames if session.mirror else merge_small(chunk.frames))],
            ),
        )
        self._check_ahead(session, request.epoch, request.offset)

    def _is_other(self, request: messages.Replay) -> bool:
        """Whether the event before is not the one that the client has had."""
        if request.time < 0 or request.offset > self._journal.next:
            return False
        return self._journal.time_before(request.offset) not in (-1, request.time)

    def new_epoch(self, begin: int) -> None:
        """The journal has begun a new epoch at that offset: tell everybody to rejoin."""
        self._begin = begin
        self._topics = {}
        for session in list(self.sessions.values()):
            self._reply(session.peer, messages.Refused("a new epoch has begun", again=True))
            self._drop(session)

    def _answer_state(self, session: Session, request: messages.Replay, now: float) -> None:
        journal = self._journal
        if request.epoch != journal.epoch or not self._replay:
            self._reply(session.peer, messages.Refused("another epoch", again=True))
            return
        offset, end, oldest = request.offset, request.state, journal.oldest
        # A newer state will do for an older end: what it lacks has changed since, and follows from there on. A new
        # snapshot should end so far from the oldest event that it has arrived before what follows is dropped.
        state = self._state_up_to(end if offset else oldest + (journal.next - oldest) // 4, now)
        if not offset or not oldest <= end <= state.end:
            offset, end = 0, state.end
            self.counters.snapshots += 1
        self._state_used = now
        chunk = state.read(offset, end, max_bytes=min(request.max_bytes, _MAX_CHUNK_BYTES))
        session.answered = (request.request, self.unread.bytes_sent(session.peer) + 1)
        reply = messages.KeyState(request.request, journal.epoch, end, chunk.next, chunk.blocks, chunk.gone)
        self._reply(session.peer, reply)

    def _state_up_to(self, end: int, now: float) -> State:
        """A state that reaches so far, if there is one; looked for not too often. Raises BrokerlessError."""
        state = self._state
        late = now - self._state_opened >= _STATE_AGAIN_S
        if state is None or state.end < self._journal.oldest or (state.end < end and late):
            self.close()
            state = self._state = self._journal.state()
            self._state_opened = now
        return state

    def close(self) -> None:
        """Release what is open."""
        state, self._state = self._state, None
        if state is not None:
            state.close()

    def _answer_sent(self, session: Session, request: messages.SentRequest) -> None:
        journal = self._journal
        # In this order: everything that `sent` counts is readable below `at`.
        sent = journal.sent()
        journal.flush()
        at = journal.next
        if sent.keys() != self._topics.keys():
            self._topics = dict.fromkeys(sorted(sent))
        page, more = _page(list(self._topics), request.topics, request.after)
        self._reply(session.peer, messages.Sent(journal.epoch, at, {t: sent[t] for t in page}, more))

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
                    self._coordinator.hold_back(session.group, session.client)

    # ---- leaving, time ---------------------------------------------------------------------------------

    def departed(self, peer: bytes) -> None:
        """The connection of a peer is gone; what a worker held comes again at once."""
        session = self.sessions.get(peer)
        self._quotas.pop(peer, None)
        self.unread.forget(peer)
        if session is not None:
            self._drop(session)

    def _drop(self, session: Session) -> None:
        self.sessions.pop(session.peer, None)
        self._unready.pop(session.peer, None)
        if session.group and self._workers.get(session.client) is session:
            del self._workers[session.client]
            group = self._coordinator.groups.get(session.group)
            if group is not None:
                group.leave(session.client)

    def send_away(self, reason: str) -> None:
        """Serve nobody any more: everybody is told, and looks for the source elsewhere."""
        self.replication.refusal = reason
        for session in list(self.sessions.values()):
            self._reply(session.peer, messages.Refused(reason, again=True))
            self._drop(session)

    def forget_group(self, name: str) -> None:
        """Drop a group. Its workers are told, and rejoin, which creates a new group of that name."""
        for session in [s for s in self._workers.values() if s.group == name]:
            self._reply(session.peer, messages.Refused("the group was forgotten", again=True))
            self._drop(session)
        self._coordinator.forget(name)

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
            # Also those that sent BYE: what they have not read is there as long as their connection.
            asked.update(self.unread.peers(again=now >= self._ping_silent_at))
            if now >= self._ping_silent_at:
                self._ping_silent_at = now + _PING_SILENT_S
                asked.update(s.peer for s in self.sessions.values() if now - s.heard > 1.0)
            self.outbox += [(peer, self.unread.ping(peer)) for peer in asked]
        if now >= self._sweep_at:
            self._sweep_at = now + FORGET_S / 4
            if now - self._state_used > FORGET_S:
                self.close()
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
        page += topics[first : min(last + 1, first + messages.MAX_SENT_TOPICS - len(page))]
    return page, found.total > len(page)
