"""A mirror: an identical copy of a source's journal, usually on another host, that consumers can read from.

It is a client of the publisher that appends the publisher's frames as they are, and a server that answers consumers
from that copy. When a person (or a lease that the operator trusts) says so, it becomes the publisher: `promote`.
"""

import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from brokerless.core import DiskJournal, Frame, Journal, Lost, Position, presence
from brokerless.core.errors import (
    BrokerlessError,
    Closed,
    ConfigError,
    FrameError,
    JournalError,
    NotPromoted,
    UsageError,
)
from brokerless.core.journal.disk import as_journal, closed_on_error
from brokerless.core.journal.epoch import next_term
from brokerless.core.journal.key_state import StateWriter
from brokerless.core.loss_log import LossLog
from brokerless.core.runtime.closing import Closing
from brokerless.core.runtime.files import atomic_write
from brokerless.direct.address import Address, address_given_as, live_bind, live_hint, parse_address
from brokerless.direct.batch import Batch, StateBatch
from brokerless.direct.counters import MirrorCounters, PublisherCounters, SubscriberCounters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.members import GroupState
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.io.client import Driver
from brokerless.direct.io.failover import Failover
from brokerless.direct.io.live import LiveStream
from brokerless.direct.io.network import open_network
from brokerless.direct.io.publisher_mirrors import dead_letters_from
from brokerless.direct.io.server import Server
from brokerless.direct.keys import ClientKeys, ServerKeys, allow_list
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import State
from brokerless.direct.protocol.loss_accounting import Snapshot
from brokerless.direct.protocol.mirror_client import MirrorProtocol
from brokerless.direct.protocol.promotion import LEASE_MARGIN, LEASE_S, Replication, divergence, objection
from brokerless.direct.protocol.server import ControlServer
from brokerless.direct.publisher import HEARTBEAT_S, Publisher
from brokerless.direct.publisher_lease import PublisherLease
from brokerless.direct.replay import ReplayClient

log = logging.getLogger(__name__)
# How old the groups' state is at most when the publisher is gone: what was acknowledged in that time comes again.
STATE_EVERY_S = 0.1
# While nobody waits for them, acknowledgements are this far apart: each takes the publisher's interpreter from who
# publishes, at full rate a sixth of its time if every batch is acknowledged.
_ACKNOWLEDGE_EVERY_S = 0.005
# How long another mirror may take to promise.
_PROMISE_S = 3.0
# After a fault of the disk: when to try again.
_RETRY_S = 0.5
# How often a mirror tries to take an operator's lease.
_LEASE_EVERY_S = 0.5
_SETTINGS = "mirror.json"
_SET_ASIDE = "unmirrored"


class PublisherOptions(TypedDict, total=False):
    """The arguments of Publisher that a mirror does not decide itself."""

    live: str | None
    max_wait_s: float
    heartbeat_s: float
    dead_letters: Journal | None
    unclaimed_s: float
    live_queue: int
    admin: Literal["local"] | Iterable[str | bytes]
    id_window: int
    announce: bool
    metrics: str


class _Settings(msgspec.Struct):
    """What a mirror must know when it starts and nobody answers: `mirror.json` beside the copy."""

    promised: int = 0
    candidate: str = ""
    mirrors: list[str] = []
    mirrored: int = 0
    lease_s: float = 0.0
    home: str = ""


class _Copy(Replication):
    """What the mirror's control server tells."""

    copy = True

    def __init__(self, mirror: "Mirror") -> None:
        self._mirror = mirror

    @property
    def addresses(self) -> list[str]:  # type: ignore[override]
        return self._mirror._settings.mirrors

    @property
    def mirrored(self) -> int:  # type: ignore[override]
        return self._mirror._settings.mirrored

    @property
    def lease_s(self) -> float:  # type: ignore[override]
        return self._mirror._settings.lease_s

    def epochs(self) -> list[tuple[int, int]]:
        return self._mirror.journal.epochs()

    def answer(self, address: str, request: messages.Request, now: float) -> messages.Reply | None:
        if isinstance(request, messages.Fence):
            return self._mirror._promise(request)
        if isinstance(request, messages.Challenge):
            self._mirror._challenge = request.number
        return self._mirror._state(request.offset) if isinstance(request, messages.StateRequest) else None


class Mirror(Closing):
    """Keeps a copy of a source's journal (same frames, epochs, offsets) and serves it.

        with Mirror("tcp://a:5556", journal=DiskJournal("var/mirror"), serve="tcp://0.0.0.0:5560") as mirror:
            ...
            publisher = mirror.promote()    # the publisher is gone for good

    Question 1, the publisher is faster than the copy: it catches up by replay; what the publisher's retention drops
    before that is a hole, counted and logged. Question 2, a node crashes: an event that a mirror acknowledged survives
    the publisher's machine, as durably as the mirror's journal is configured (`fsync`).

    Owns the journal and closes it. Its threads need nothing from the caller.
    """

    def __init__(
        self,
        address: str,
        *,
        journal: DiskJournal | str | os.PathLike[str],
        serve: str,
        advertise: str = "",
        heartbeat_s: float = HEARTBEAT_S,
        state_every_s: float = STATE_EVERY_S,
        curve: ServerKeys | None = None,
        allow: Iterable[str | bytes] | None = None,
        client_curve: ClientKeys | None = None,
        announce: bool = True,
    ) -> None:
        """Bind `serve` and follow the publisher at `address`, which need not be there yet.

        `journal` is a DiskJournal or its directory: empty, an earlier copy, or the journal of a publisher that was
        replaced, whose unmirrored end is set aside then. `advertise` is this mirror's address as the publisher's
        `mirrors` has it (default: `serve`, or the entry with its port). `client_curve` is for connecting to the
        publisher and other mirrors, `curve` and `allow` are for serving: consumers expect the publisher's server key.
        `announce=False` keeps it out of `brokerless ps`.

        Raises ConfigError if the address cannot be bound, JournalError if the journal cannot be used.
        """
        with closed_on_error(journal):
            upstream = parse_address(address)
            with address_given_as("serve"):
                wanted = parse_address(serve)
            if upstream == wanted:
                raise ConfigError(
                    "serve", f"is the publisher's address, {serve}: a mirror has one of its own"
                )
            with address_given_as("advertise"):
                self._advertise = str(parse_address(advertise)) if advertise else ""
            self._server_keys, self._allow, self._client_keys = curve, allow_list(allow), client_curve
        opened = as_journal(journal)
        if not isinstance(opened, DiskJournal):
            raise ConfigError("journal", "must be a DiskJournal or a path: a mirror keeps its copy on disk")
        self.journal = opened
        self.counters = MirrorCounters()
        self._loss_log = LossLog("brokerless.direct.mirror")
        self.home = address
        self._heartbeat_s = heartbeat_s
        self._state_every_s = state_every_s
        self._stopping = False
        self._closed = False
        self._close_lock = threading.Lock()
        # Between "appended and acknowledged" and "promised to follow nobody": one comes before the other.
        self._lock = threading.Lock()
        self._echo = 0
        self._awaited = True  # somebody waits for our acknowledgements
        self._acknowledge_at = 0.0
        self._unacknowledged = False
        self._challenge = 0  # the number that the publisher said to our address
        self._asking: threading.Thread | None = None  # a candidate whether it is one
        self._agreed = False  # enough others have promised to follow nobody but us
        self._unrelated = False  # the journal is of something else, and that was reported
        self._dead: DiskJournal | None = None
        self._state_writer: StateWriter | None = None  # of the publisher's state, while it arrives
        self._driver = Driver()
        try:
            self._settings = self._load_settings()
            self._groups = GroupStore(os.path.join(self.journal.path, "groups"), fsync=self.journal.fsync)
            self._states = {name: state for name, state in self._groups.load().items() if state is not None}
            with address_given_as("serve"):
                self._serve(wanted)
        except BaseException:
            self._driver.close()
            self.journal.close()
            raise
        self.own = self._own_address(self._settings.mirrors)
        if self._settings.candidate == self.own and self._settings.promised > self.journal.epoch:
            self._settings.promised, self._settings.candidate = 0, ""  # killed before its promotion was over
        hello = messages.Hello(messages.VERSION, secrets.token_hex(16), start="oldest", mirror=self.own)
        self._protocol = MirrorProtocol(
            hello,
            align=self._align,
            promised=lambda: self._settings.promised,
            time_before=self.journal.time_before,
            differs=self._say_unrelated,
            positions={},
            counters=SubscriberCounters(),
            random=random.random,
            now=time.monotonic(),
            address=address,
        )
        channel = self._driver.add(upstream, self._protocol, client_curve)
        self._failover = Failover(self._driver, channel, client_curve, self._settings.mirrors)
        self._failover.excluded = self.own
        self._driver.failovers = [self._failover]
        self._thread = threading.Thread(target=self._run, name=f"brokerless mirror {address}", daemon=True)
        self._thread.start()

        name = self.journal.source or address
        self._presence = presence.announce(
            "direct.mirror", name, [self.address, address], self._announced, enabled=announce
        )

    def _announced(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        state = {**presence.journal_state(self.journal), "counters": self.counters.snapshot()}
        if self.journal.source:
            state["positions"] = {self.journal.source: [self.journal.epoch, self.journal.next]}
        return state

    # ---- serving ---------------------------------------------------------------------------------------

    def _serve(self, wanted: Address) -> None:
        self._network = open_network(wanted, server_keys=self._server_keys, allow=self._allow)
        try:
            control = self._network.serve_control(wanted)
            self.address = str(control.address)
            live = self._network.serve_live(live_bind(control.address))
            instance = int.from_bytes(os.urandom(6), "big")
            self._live = LiveStream(live, self.journal, instance=instance, counters=PublisherCounters())
            coordinator = GroupCoordinator(self.journal, None, GroupStore(None))
            control_server = ControlServer(
                self.journal,
                coordinator,
                instance=instance,
                live=live_hint(self._live.address),
                beat_s=self._heartbeat_s,
                begin=0,
                replay=True,
                replication=_Copy(self),
            )
            self._server = Server(
                self._network,
                control,
                control_server,
                coordinator,
                beat=self._live.beat,
                beat_s=self._heartbeat_s,
                name=f"mirror {self.address}",
            )
        except BaseException:
            self._network.close()
            raise
        self._serving = False
        if self.journal.source:
            self._start_serving()

    def _start_serving(self) -> None:
        """Once the source's name is known: before that there is nothing to say."""
        if not self._serving:
            self._serving = True
            self.journal.on_frame = self._live.send_frame
            self._server.start()

    def _stop_serving(self) -> None:
        self._live.stop()
        self.journal.on_frame = None
        self._server.stop()
        self._live.close()
        self._network.close()

    # ---- copying ---------------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The source's name; empty until the publisher answered for the first time."""
        return self.journal.source

    @property
    def following(self) -> bool:
        """Whether the publisher, or another mirror, is being followed now."""
        return self._protocol.state is State.FOLLOWING

    @property
    def behind(self) -> int:
        """How many events the copy lacks, as far as is known."""
        return max(0, self._protocol.tail - self.journal.next)

    def status(self) -> dict[str, Any]:
        """What `brokerless mirror status` shows."""
        return {
            "source": self.source,
            "address": self.address,
            "follows": str(self._failover.channel.address) if self.following else "",
            "epoch": self.journal.epoch,
            "oldest": self.journal.oldest,
            "next": self.journal.next,
            "behind": self.behind,
            "promised": self._settings.promised,
            **self.counters.snapshot(),
        }

    def _run(self) -> None:
        state_at = 0.0
        while not self._stopping:
            try:
                wait = self._driver.run(self._driver.step, time.monotonic() + 0.05)
                self._take()
                now = time.monotonic()
                if self.following and self._settings.promised > self._protocol.epoch:
                    self._protocol.leave(now)
                if now >= state_at:
                    state_at = now + self._state_every_s
                    self._ask_state()
                if self._protocol.states:
                    self._keep_state(self._protocol.states.pop())
                self._failover.channel.send()
                self._acknowledge(now)
                if not self._stopping and not self._protocol.ready:
                    due = min(state_at, self._acknowledge_at) if self._unacknowledged else state_at
                    self._driver.run(self._driver.wait, max(0.0, min(wait, due - now)))
            except Closed:
                return
            except BrokerlessError as error:
                # A disk that is full or gone, a publisher that refuses: what is copied stays, and we try again.
                self.counters.failed += 1
                log.error("mirror of %s: %s", self.home, error)
                time.sleep(_RETRY_S)
                self._recover()
            except Exception:
                self.counters.failed += 1
                log.exception("mirror of %s", self.home)
                time.sleep(_RETRY_S)
                self._recover()

    def _recover(self) -> None:
        with contextlib.suppress(BrokerlessError):
            position = Position(self.journal.epoch, self.journal.next)
            self._protocol.go_back_to(position, time.monotonic())

    def _take(self) -> None:
        """Append what has arrived, and say so."""
        ready, frames = self._protocol.ready, []
        while ready:
            item = ready.popleft()
            if isinstance(item, Snapshot):
                self._take_edge(item)
            elif isinstance(item, StateBatch):
                self._take_block(item)
            elif isinstance(item, Batch):
                frames.append(item.frame)
            elif isinstance(item, Lost) and item.epoch == self.journal.epoch:
                self.counters.lost += item.count
                self._loss_log(item)
        if not frames:
            return
        with self._lock:
            if self._settings.promised > self._protocol.epoch:
                return  # promised to another: what an older publisher sends is not ours to acknowledge
            self.journal.append_frames(frames, self._protocol.epochs)
            self.counters.frames += len(frames)
            self.counters.events += sum(frame.count for frame in frames)
            self._unacknowledged = True
        self._acknowledge(time.monotonic())

    def _acknowledge(self, now: float) -> None:
        """Say what was appended: at once if somebody may wait for it, or else with what comes soon after it."""
        if not self._unacknowledged or not (self._awaited or now >= self._acknowledge_at):
            return
        with self._lock:
            self._unacknowledged = False
            if self._settings.promised > self._protocol.epoch:
                return
            self._acknowledge_at = now + _ACKNOWLEDGE_EVERY_S
            self._protocol.acknowledge(self.journal.epoch, self.journal.next)
            self._failover.channel.send()

    def _take_edge(self, edge: Snapshot) -> None:
        """The publisher's state begins to arrive, or is there: the copy goes on from where it ends."""
        writer, self._state_writer = self._state_writer, None
        if not edge.complete:
            if writer is not None:
                writer.abandon()
            self._state_writer = self.journal.state_writer()
        elif writer is not None:
            with self._lock:
                if self._settings.promised > self._protocol.epoch:
                    writer.abandon()
                    return
                self.journal.adopt_state(writer, edge.at, self._protocol.epochs)
                self._protocol.acknowledge(self.journal.epoch, self.journal.next)

    def _take_block(self, batch: StateBatch) -> None:
        if self._state_writer is not None:
            try:
                self._state_writer.add(batch.block, batch.first_offset, batch.next_offset)
            except OSError as error:
                raise JournalError(self.journal.path, f"cannot write a state: {error.strerror}") from None

    def _align(self, welcome: messages.Welcome) -> Position | None:
        """Make the copy a prefix of what is offered there; the position to go on from."""
        journal = self.journal
        theirs = welcome.epochs or [(welcome.epoch, welcome.begin)]
        end = journal.next
        known = {epoch for epoch, _ in theirs}
        if welcome.copy and (journal.epochs() and journal.epoch not in known):
            return None  # an older copy than this one
        at = divergence(journal.epochs(), end, theirs)
        if at < 0:
            self._say_unrelated()
        if self._unrelated:
            return None
        if not self._is_named(welcome):
            return None
        with self._lock:
            if self._settings.promised > welcome.epoch:
                return None
            journal.begin_copy(welcome.source)
            if welcome.state >= 0:
                journal.compact_by_key()
            if at < end:
                self._set_aside(at)
            journal.append_frames([], theirs)
            self._note(welcome)
        self._start_serving()
        if not journal.next and not journal.oldest:
            first = 0 if welcome.state >= 0 else min(welcome.oldest, welcome.begin)
            return Position(welcome.epoch, first)
        if not welcome.copy and welcome.epoch == journal.epoch:
            self._protocol.acknowledge(journal.epoch, journal.next)
        return Position(journal.epoch, journal.next)

    def _say_unrelated(self) -> None:
        """The copy cannot become one of what the publisher has. It stays as it is, and can be promoted."""
        if not self._unrelated:
            self._unrelated = True
            log.error(
                "mirror of %s: %s holds another history of the source than the publisher: promote this mirror, or "
                "use an empty directory",
                self.home,
                self.journal.path,
            )

    def _note(self, welcome: messages.Welcome) -> None:
        """Keep what must be known when nobody answers."""
        if welcome.copy:
            return
        settings, place = self._settings, str(self._failover.channel.address)
        new = (list(welcome.mirrors), welcome.mirrored, welcome.lease_s, place)
        if new != (settings.mirrors, settings.mirrored, settings.lease_s, settings.home):
            settings.mirrors, settings.mirrored, settings.lease_s, settings.home = new
            self._save_settings()

    def _is_named(self, welcome: messages.Welcome) -> bool:
        """Whether our HELLO had the address that the publisher's list has for us; otherwise send another."""
        if not welcome.copy and welcome.mirrors and self.own not in welcome.mirrors:
            own = self._own_address(welcome.mirrors)
            if own != self.own:
                self.own = self._failover.excluded = own
                self._protocol.rename(own)
                return False
            log.warning(
                "mirror %s is not among the publisher's mirrors (%s): give advertise= as it is there",
                own,
                ", ".join(welcome.mirrors),
            )
        return True

    def _own_address(self, mirrors: list[str]) -> str:
        """This mirror's address as the list has it: what was given, or the one with our port and an address of ours."""
        if self._advertise or self.address in mirrors:
            return self._advertise or self.address
        served = parse_address(self.address)
        found = [
            place
            for place in mirrors
            if served.scheme == "tcp" and _is_ours(parse_address(place), served.port)
        ]
        return found[0] if len(found) == 1 else self.address

    def _set_aside(self, at: int) -> None:
        """Move what the present writer never had to a journal of its own, and say which range that is."""
        journal, end = self.journal, self.journal.next
        path = os.path.join(journal.path, _SET_ASIDE, f"{journal.epoch}-{at}-{end - 1}")
        with DiskJournal(path, fsync="batch") as aside:
            if aside.next < end:
                aside.begin_copy(journal.source)
                offset = max(at, journal.oldest, aside.next)
                while offset < end:
                    chunk = journal.read(offset)
                    parts = [f.slice(offset, f.next_offset) for f in chunk.frames if f.next_offset > offset]
                    aside.append_frames(parts, journal.epochs())
                    if chunk.next <= offset:
                        break
                    offset = chunk.next
        dead = os.path.join(journal.path, "dead-letters")
        if self._dead is not None:
            self._dead.close()
            self._dead = None
        if os.path.isdir(dead):
            with contextlib.suppress(OSError):
                os.rename(dead, os.path.join(path, "dead-letters"))
        journal.truncate(at)
        self.counters.set_aside += end - at
        log.error(
            "mirror of %s: offsets %d to %d are not in the journal of the present publisher; they are kept in %s",
            self.home,
            at,
            end - 1,
            path,
        )

    # ---- what is not in the journal ----------------------------------------------------------------------

    def _dead_letters(self) -> DiskJournal:
        if self._dead is None:
            path = os.path.join(self.journal.path, "dead-letters")
            self._dead = DiskJournal(path, fsync=self.journal.fsync)
            self._dead.begin_copy(self.journal.source)
        return self._dead

    def _ask_state(self) -> None:
        """Groups, positions and dead letters are the publisher's to tell; asking also shows that we follow it."""
        protocol = self._protocol
        if protocol.state is State.FOLLOWING and not protocol.at_copy and self.journal.source:
            with self._lock:
                if self._settings.promised <= protocol.epoch:
                    if protocol.proof != self._challenge:
                        protocol.proof = self._challenge
                        protocol.acknowledge(self.journal.epoch, self.journal.next)  # now it counts
                    protocol.ask_state(self._echo, self._dead_letters().next)
                    self._failover.channel.send()

    def _keep_state(self, state: messages.State) -> None:
        self._echo, self._awaited = state.number, state.awaited
        with self._lock:
            if self._settings.promised > self._protocol.epoch:
                return  # what another mirror has told us may be newer
            for name, group in _decoded(state).items():
                if self._states.get(name) != group:
                    self._groups.save(name, group)
                    self._states[name] = group
            for name in set(self._states) - set(state.groups):
                self._groups.forget(name)
                del self._states[name]
            journal = self.journal
            registered = journal.registered()
            for name, at in state.cursors.items():
                if registered.get(name) != at:
                    journal.register(name, at)
                    journal.advance(name, at)
            for name in registered:
                if name.startswith("sub.") and name not in state.cursors:
                    journal.unregister(name)
            self._keep_dead_letters(state)

    def _keep_dead_letters(self, state: messages.State) -> None:
        dead = self._dead_letters()
        try:
            frames = [Frame.parse(raw) for raw in state.dead]
        except FrameError:
            return
        dead.append_frames([f for f in frames if f.first_offset >= dead.next], state.dead_epochs)

    def _state(self, offset: int) -> messages.State:
        """The same for a mirror that is being promoted; called by the server's thread."""
        groups = {name: msgspec.msgpack.encode(state) for name, state in list(self._states.items())}
        cursors = {name: at for name, at in self.journal.registered().items() if name.startswith("sub.")}
        epochs, frames = ([], []) if self._dead is None else dead_letters_from(self._dead, offset)
        return messages.State(0, groups, cursors, epochs, frames)

    def _merge_state(self, state: messages.State) -> None:
        """Take over what another mirror heard later than we did: cursors only rise."""
        for name, group in _decoded(state).items():
            known = self._states.get(name)
            if known is None or (group.cursor, group.acked) > (known.cursor, known.acked):
                self._groups.save(name, group)
                self._states[name] = group
        registered = self.journal.registered()
        for name, at in state.cursors.items():
            if at > registered.get(name, -1):
                self.journal.register(name, at)
                self.journal.advance(name, at)
        self._keep_dead_letters(state)

    # ---- promotion -------------------------------------------------------------------------------------

    def _promise(self, request: messages.Fence) -> messages.Fenced | None:
        """Whether no epoch below the wanted one is followed from here on; called by the server's thread.

        Anybody can say that there is a candidate, so that one is asked, at its address. Until it has answered nothing
        is sent: whoever asked asks again.
        """
        with self._lock:
            settings, journal = self._settings, self.journal
            epoch, candidate = request.epoch, request.candidate
            promised = (settings.promised, settings.candidate)
            refused = ""
            if candidate == self.own:
                refused = "" if (epoch, candidate) == promised else "this mirror is not being promoted"
            elif not epoch:
                if candidate == settings.candidate:
                    self._ask_candidate(*promised)
                    return None
            elif epoch <= journal.epoch:
                refused = f"epoch {journal.epoch} has begun already"
            elif (epoch, candidate) != promised:
                if epoch <= settings.promised or self._agreed:
                    refused = f"promised to {settings.candidate}"
                elif candidate not in settings.mirrors:
                    refused = f"{candidate} is none of the publisher's mirrors"
                elif not self._is_free_for(candidate):
                    # Both would have enough promises, and both begin. It may have given up without our hearing of it.
                    self._ask_candidate(*promised)
                    refused = f"promised to {settings.candidate}"
                else:
                    self._ask_candidate(epoch, candidate)
                    return None
            return messages.Fenced(journal.epoch, journal.next, refused, settings.promised)

    def _is_free_for(self, candidate: str) -> bool:
        """Whether no other one was promised anything that it has not given up. Our own promotion gives way to one with
        a higher epoch until it has its promises."""
        settings = self._settings
        over = settings.promised <= self.journal.epoch
        return over or settings.candidate in ("", self.own, candidate)

    def _ask_candidate(self, epoch: int, candidate: str) -> None:
        """Begin to ask a mirror whether it is being promoted, one at a time."""
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(
                target=self._hear_candidate, args=(epoch, candidate), name="brokerless candidate", daemon=True
            )
            self._asking.start()

    def _hear_candidate(self, epoch: int, candidate: str) -> None:
        try:
            client = ReplayClient(candidate, curve=self._client_keys)
            try:
                reply = client.fence(messages.Fence(epoch, candidate), _PROMISE_S / 2)
            finally:
                client.close()
            with self._lock:
                settings = self._settings
                if reply is None or self._stopping:
                    return
                if not reply.refused:
                    newer = epoch > max(settings.promised, self.journal.epoch)
                    if newer and self._is_free_for(candidate) and not self._agreed:
                        settings.promised, settings.candidate = epoch, candidate
                        self._save_settings()
                elif reply.epoch < epoch and (settings.promised, settings.candidate) == (epoch, candidate):
                    settings.promised, settings.candidate = (
                        0,
                        "",
                    )  # it has not become the publisher, and will not
                    self._save_settings()
        except BrokerlessError as error:
            log.warning("mirror of %s: cannot hear the candidate %s: %s", self.home, candidate, error)

    def _check_rival(self, deadline: float) -> None:
        """Raise NotPromoted if the mirror that we have promised to follow is still being promoted: to go on would only
        take from it what it has, and it would do the same to us."""
        epoch, rival = self._settings.promised, self._settings.candidate
        if epoch <= self.journal.epoch or rival in ("", self.own):
            return
        if not self._ask_promise(rival, epoch, rival, deadline).refused:
            raise NotPromoted(f"{rival} is being promoted")

    def _stand(self, epoch: int) -> None:
        """From here on this mirror is a candidate, and follows nobody below that epoch."""
        with self._lock:
            self._settings.promised, self._settings.candidate = epoch, self.own
            self._save_settings()

    def promote(
        self,
        *,
        force: bool = False,
        mirrors: list[str] | None = None,
        mirrored: int | None = None,
        timeout: float = 30.0,
        lease: PublisherLease | None = None,
        **options: Unpack[PublisherOptions],
    ) -> Publisher:
        """Become the source's publisher, at this address, in a new epoch; the mirror is closed with that.

        Asks the other mirrors to follow the old publisher no more, catches up with the one that has most, and waits
        until the old publisher cannot dispatch any more. `force` does it whatever they say: then you guarantee that
        the old publisher is stopped, and that no other mirror has more. `mirrors` and `mirrored` are the new
        publisher's (default: the others and the old publisher's address; as many as before, as far as they took part).
        `lease` and `options` are further arguments of Publisher.

        Raises NotPromoted if it would not be safe; then everything is as before.
        """
        if self._closed:
            raise Closed("mirror")
        if not self.journal.source:
            raise NotPromoted("this mirror has nothing: it has never reached the publisher")
        if not self._settings.home and not force:
            raise NotPromoted(
                "this mirror has only followed another one, and does not know whose word it needs"
            )
        deadline = time.monotonic() + timeout
        if not force:
            self._check_rival(deadline)
        own = self.own
        epoch = next_term(max(self.journal.epoch, self._settings.promised))
        others = [place for place in self._settings.mirrors if place != own]
        total = max(1, len(self._settings.mirrors))
        mirrored_before = self._settings.mirrored
        before = (self._settings.promised, self._settings.candidate)
        self._stand(epoch)
        try:
            answers = {place: self._ask_promise(place, epoch, own, deadline) for place in others}
            highest = max([answer.promised for answer in answers.values()], default=0)
            # Some mirrors promised a higher epoch to a candidate that is gone. They refuse ours: stand above it.
            if highest > epoch:
                epoch = next_term(highest)
                self._stand(epoch)
                answers = {place: self._ask_promise(place, epoch, own, deadline) for place in others}
            self._catch_up(answers, deadline)
            found = {place: has.refused or (has.epoch, has.next) for place, has in answers.items()}
            problem = objection((self.journal.epoch, self.journal.next), found, total, mirrored_before)
            if problem and not force:
                raise NotPromoted(problem)
            if not force:
                with self._lock:
                    if self._settings.promised != epoch:
                        raise NotPromoted(f"{self._settings.candidate} is being promoted, too")
                    self._agreed = True
                time.sleep(self._settings.lease_s * LEASE_MARGIN)
            if lease is not None and not lease.holds():
                raise NotPromoted("the lease was lost meanwhile")
        except BaseException:
            with self._lock:
                self._agreed = False
                if (self._settings.promised, self._settings.candidate) == (epoch, own):
                    self._settings.promised, self._settings.candidate = before
                    self._save_settings()
            for place in others:
                self._ask_promise(place, 0, own, time.monotonic() + _PROMISE_S)
            raise
        # Those that have promised to somebody else, too: they will follow us.
        there = [p for p, has in answers.items() if not has.refused or 0 < has.promised < epoch]
        if mirrors is None:
            mirrors = list(dict.fromkeys([*others, self._settings.home or self.home]))
        if mirrored is None:
            mirrored = min(mirrored_before, len(there), len(mirrors))
        return self._become_publisher(epoch, mirrors, mirrored, lease, options)

    def promote_when(
        self, lease: PublisherLease, *, timeout: float | None = None, **options: Unpack[PublisherOptions]
    ) -> Publisher | None:
        """Wait for the operator's lease and become the publisher with it; None if it did not come in `timeout` seconds.

        Whoever holds the lease publishes. Other mirrors that answer are asked for the events that this one
        lacks. `options` as in `promote`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._stopping and (deadline is None or time.monotonic() < deadline):
            # An empty mirror would start the source over.
            if self.journal.source and lease.acquire():
                # Its last holder may have looked just before.
                time.sleep(LEASE_S * LEASE_MARGIN)
                if lease.holds():
                    try:
                        return self.promote(force=True, lease=lease, **options)
                    except NotPromoted as error:
                        log.error("mirror of %s: %s", self.home, error)
            time.sleep(_LEASE_EVERY_S)
        return None

    def _ask_promise(self, place: str, epoch: int, candidate: str, deadline: float) -> messages.Fenced:
        """What another mirror has, and why it did not promise, if it did not."""
        left = min(_PROMISE_S, deadline - time.monotonic())
        client = ReplayClient(place, curve=self._client_keys)
        try:
            reply = client.fence(messages.Fence(epoch, candidate), max(0.1, left))
        except BrokerlessError as error:
            return messages.Fenced(-1, 0, str(error))
        finally:
            client.close()
        return reply or messages.Fenced(-1, 0, "does not answer")

    def _catch_up(self, answers: dict[str, messages.Fenced], deadline: float) -> None:
        """Copy from another mirror what it has and we do not, also from one that did not promise (`force`): all are
        copies of one journal."""
        for place, has in answers.items():
            if has.epoch != self.journal.epoch:
                continue
            client = ReplayClient(place, curve=self._client_keys)
            try:
                left = max(0.1, min(_PROMISE_S, deadline - time.monotonic()))
                welcome = client.welcome(left)
                if welcome is None or not welcome.copy:
                    continue
                state = client.state(self._dead_letters().next, left)
                if state is not None:
                    self._merge_state(state)
                while self.journal.next < has.next and time.monotonic() < deadline:
                    client.ask(self.journal.epoch, self.journal.next)
                    chunk = client.answer(max(0.1, min(_PROMISE_S, deadline - time.monotonic())))
                    if chunk is None or not chunk.frames:
                        break
                    frames = [Frame.parse(raw) for raw in chunk.frames]
                    end = self.journal.next
                    new = [f.slice(end, f.next_offset) for f in frames if f.next_offset > end]
                    self.journal.append_frames(new, self.journal.epochs())
            except BrokerlessError as error:
                log.warning("mirror of %s: cannot catch up with %s: %s", self.home, place, error)
            finally:
                client.close()

    def _become_publisher(
        self,
        epoch: int,
        mirrors: list[str],
        mirrored: int,
        lease: PublisherLease | None,
        options: PublisherOptions,
    ) -> Publisher:
        address = parse_address(self.address)
        journal = self.journal
        self._stop(keep_journal=True)
        journal.promote(epoch)
        _wait_until_free(address)
        log.warning(
            "%s: this mirror is the publisher now, in epoch %d from offset %d on",
            journal.source,
            epoch,
            journal.next,
        )
        options.setdefault("heartbeat_s", self._heartbeat_s)
        return Publisher(
            str(address),
            source=journal.source,
            journal=journal,
            curve=self._server_keys,
            allow=self._allow,
            mirrors=mirrors,
            mirrored=mirrored if mirrors else 1,
            mirror_keys=self._client_keys,
            lease=lease,
            **options,
        )

    # ---- settings, closing -----------------------------------------------------------------------------

    def _load_settings(self) -> _Settings:
        try:
            with open(os.path.join(self.journal.path, _SETTINGS), "rb") as file:
                return msgspec.json.decode(file.read(), type=_Settings)
        except FileNotFoundError:
            return _Settings()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                "journal", f"{_SETTINGS} in {self.journal.path} cannot be used: {error}"
            ) from None

    def _save_settings(self) -> None:
        path = os.path.join(self.journal.path, _SETTINGS)
        try:
            atomic_write(path, msgspec.json.encode(self._settings), sync=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    def _stop(self, *, keep_journal: bool = False) -> None:
        self._presence.close()
        self._stopping = True
        self._driver.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._driver.close(self._protocol.close)
        self._loss_log.close()
        if self._serving:
            self._stop_serving()
        else:
            self._live.close()
            self._server.stop()
            self._network.close()
        self._groups.close()
        if self._state_writer is not None:
            self._state_writer.abandon()
        if self._dead is not None:
            self._dead.close()
        if not keep_journal:
            self.journal.close()
        self._closed = True

    def close(self) -> None:
        """Stop following and serving, and close the journal. Closing twice is fine."""
        with self._close_lock:
            if not self._closed:
                self._stop()


def _decoded(state: messages.State) -> dict[str, GroupState]:
    """The groups of a state; one that cannot be read is left out."""
    found = {}
    for name, raw in state.groups.items():
        with contextlib.suppress(msgspec.MsgspecError):
            found[name] = msgspec.msgpack.decode(raw, type=GroupState)
    return found


def _is_ours(address: Address, port: int) -> bool:
    """Whether it is that port of an address of this host."""
    if address.scheme != "tcp" or address.port != port:
        return False
    try:
        found = socket.getaddrinfo(address.host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, where in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(where)  # only an address of ours can be bound
            return True
    return False


def _wait_until_free(address: Address, timeout_s: float = 10.0) -> None:
    """The sockets of the mirror are closed in the background; its address is needed again."""
    if address.scheme != "tcp":
        return
    deadline = time.monotonic() + timeout_s
    family = socket.AF_INET6 if address.ipv6 else socket.AF_INET
    while time.monotonic() < deadline:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host.strip("[]"), address.port))
            return
        time.sleep(0.02)
