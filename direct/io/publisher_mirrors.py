"""The publisher's side of its mirrors: who has what, who waits for that, and whether one of them took its place."""

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from brokerless.core import DiskJournal, Frame, Journal
from brokerless.core.errors import BrokerlessError, Evicted, JournalError, NotMirrored, PeerError, RolledBack
from brokerless.core.journal.epoch import is_superseded
from brokerless.core.journal.segment import last_time
from brokerless.core.runtime.clock import elapsed_s
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.promotion import LEASE_S, MirrorPositions, Replication
from brokerless.direct.publisher_lease import PublisherLease
from brokerless.direct.replay import ReplayClient

log = logging.getLogger(__name__)
# How often mirrors are asked for their epoch and challenged, sooner if one has not been; the pause between two such
# rounds at least, and how long an answer may take.
_LOOK_EVERY_S = 1.0
_LOOK_LEAST_S = 0.05
_ANSWER_S = 1.0
# How long a publisher that starts looks for mirrors that have more than its journal: if nothing speaks for that, and
# if the journal cannot prove that it is the newest (hosts that start at once need a while).
_GLANCE_S = 0.2
_RESTORE_S = 10.0
# A new epoch because of what a consumer says: not more often, because anybody can say it.
_RENEW_EVERY_S = 60.0
# Mirrors acknowledge each batch at once as long as somebody waits for it, and so long after that.
_AWAITED_S = 0.2
# How often a lease is looked at: several times in LEASE_S.
_HOLD_EVERY_S = 0.4
_STOP_S = 5.0
# Dead letters in one answer.
_DEAD_BYTES = 256 * 1024


class MirroredPublishing(Replication):
    """What a publisher knows of its mirrors. Acknowledgements come in the server's thread, waiting is for any other."""

    def __init__(
        self,
        journal: Journal,
        coordinator: GroupCoordinator,
        dead_letters: Journal,
        addresses: Sequence[str],
        mirrored: int,
        superseded: Callable[[messages.Welcome], None],
        rolled_back: Callable[[RolledBack | None], None],
        keys: ClientKeys | None,
        lease: PublisherLease | None = None,
    ) -> None:
        """`superseded` is called, once and in a thread of its own, when a mirror has a higher epoch; `rolled_back` when
        a mirror has more than this journal, or with None if only a consumer has."""
        self.positions = MirrorPositions(addresses, mirrored)
        self.addresses = list(addresses)
        self.mirrored = mirrored
        self.lease_s = self.positions.lease_s
        self.fenced = False
        self._journal = journal
        self._coordinator = coordinator
        self._dead = dead_letters
        self._superseded = superseded
        self._rolled_back = rolled_back
        self._unproven: dict[
            str, bool
        ] = {}  # who says to be a mirror and was not reached there; whether that was said
        self._unrelated: set[str] = set()  # mirrors with another history, of which that was said
        self._suspected = False
        self._renewed_at = -_RENEW_EVERY_S
        self._keys = keys
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, threading.Event]] = []
        self._waited_at = float("-inf")
        self._stopping = False
        self._lease = lease
        self._held_at = elapsed_s()
        self._stop = threading.Event()
        self._holder = threading.Thread(
            target=self._hold, name=f"brokerless lease of {journal.source}", daemon=True
        )
        self._look = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"brokerless mirrors of {journal.source}", daemon=True
        )

    def start(self) -> None:
        """Begin to look whether a mirror took our place."""
        if self.addresses:
            self._thread.start()
        if self._lease is not None:
            self._holder.start()

    def _hold(self) -> None:
        """Show all the time that the lease is ours: what was shown counts from when it was asked for."""
        assert self._lease is not None
        held = True
        while not self._stop.wait(_HOLD_EVERY_S):
            asked, had = elapsed_s(), held
            held = self._lease.holds()
            if held:
                self._held_at = asked
            elif had:
                log.error("publisher %s: its lease is gone; groups are given nothing", self._journal.source)

    def epochs(self) -> list[tuple[int, int]]:
        return self._journal.epochs() if isinstance(self._journal, DiskJournal) else []

    def may_dispatch(self, now: float) -> bool:
        held = self._lease is None or now - self._held_at < LEASE_S
        return held and not self.fenced and self.positions.may_dispatch(now)

    # ---- waiting ---------------------------------------------------------------------------------------

    def acknowledged(self, address: str, offset: int, proof: int) -> None:
        if self._proven(address, proof) and self.positions.acknowledged(address, offset, proof):
            self._release(self.positions.reached)

    def _proven(self, address: str, proof: int) -> bool:
        """Whether it is the mirror at that address. If it has not had our challenge, it will soon."""
        proven = self.positions.proven(address, proof)
        if proven:
            self._unproven.pop(address, None)
        elif address in self.addresses:
            self._unproven.setdefault(address, False)
            self._look.set()
        return proven

    def _release(self, reached: int) -> None:
        with self._lock:
            while self._waiting and self._waiting[0][0] < reached:
                heapq.heappop(self._waiting)[2].set()

    def _release_all(self) -> None:
        with self._lock:
            for _, _, done in self._waiting:
                done.set()
            self._waiting = []

    def wait(self, offset: int, timeout_s: float) -> None:
        """Wait until enough mirrors have the event at `offset`. Raises NotMirrored."""
        done = threading.Event()
        entry = (offset, next(self._numbers), done)
        with self._lock:
            heapq.heappush(self._waiting, entry)
            self._waited_at = time.monotonic()
        if (
            self.positions.reached <= offset and not self.fenced
        ):  # it may have come before we were on the list
            done.wait(timeout_s)
        if not done.is_set():
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
        if self.positions.reached <= offset:
            raise NotMirrored(offset, self.positions.missing(offset), self.mirrored, timeout_s)

    # ---- what mirrors ask ------------------------------------------------------------------------------

    def answer(self, address: str, request: messages.Request, now: float) -> messages.Reply | None:
        if isinstance(request, messages.Superseded):
            if is_superseded(self._journal.epoch, request.epoch):
                self._look.set()  # anybody can say so: a mirror of ours must confirm it
        elif isinstance(request, messages.Fence):
            return messages.Fenced(self._journal.epoch, self._journal.next, "this is the publisher")
        elif isinstance(request, messages.StateRequest) and address in self.addresses and not self.fenced:
            number = 0
            if self._proven(address, request.proof):
                self.positions.echoed(address, request.echo)
                number = self.positions.answering(address, now)
            return self._state(number, request.offset)
        return None

    def _state(self, number: int, offset: int) -> messages.State:
        journal = self._journal
        groups = {
            name: msgspec.msgpack.encode(group.state(journal.epoch))
            for name, group in self._coordinator.groups.items()
        }
        cursors = {name: at for name, at in journal.registered().items() if name.startswith("sub.")}
        epochs, frames = dead_letters_from(self._dead, offset)
        awaited = bool(self._waiting) or time.monotonic() - self._waited_at < _AWAITED_S
        return messages.State(number, groups, cursors, epochs, frames, awaited)

    # ---- our place -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping:
            suspected = self._suspected  # before they are asked
            for address in self.addresses:
                if self._stopping or self._asks(address):
                    return
            if suspected:
                self._suspected = False
                self._rolled_back(None)
            self._look.wait(_LOOK_EVERY_S)
            self._look.clear()
            self._stop.wait(_LOOK_LEAST_S)  # whoever makes us look, it is not all that we do

    def _asks(self, address: str) -> bool:
        """Whether a mirror has a higher epoch than ours, which then was told."""
        try:
            client = ReplayClient(address, curve=self._keys)
        except BrokerlessError as error:
            log.error("mirror %s cannot be asked: %s", address, error)
            return False
        try:
            welcome = client.welcome(_ANSWER_S)
            behind = False
            if welcome is not None:
                client.challenge(self.positions.challenges[address])
                behind = self._is_behind(welcome, client)
        except BrokerlessError:
            return False
        finally:
            client.close()
        if welcome is None and self._unproven.get(address) is False:
            self._unproven[address] = True
            log.warning(
                "publisher %s: somebody says to be the mirror %s, but nobody answers there: it does not count",
                self._journal.source,
                address,
            )
        if welcome is None or welcome.source != self._journal.source:
            return False
        journal = self._journal
        self._say_unrelated(address, welcome)
        if is_superseded(journal.epoch, welcome.epoch):
            self.fenced = True
            self._superseded(welcome)
        elif behind:
            self.fenced = True
            self._rolled_back(
                RolledBack(journal.source, journal.epoch, journal.next, welcome.next - 1, address)
            )
        else:
            return False
        self._release_all()  # no mirror will acknowledge anything to us any more
        return True

    def _say_unrelated(self, address: str, welcome: messages.Welcome) -> None:
        """Say once that a mirror will not follow, because its copy is of a journal of which ours knows nothing."""
        known = dict(self.epochs())
        superseded = is_superseded(self._journal.epoch, welcome.epoch)
        if not welcome.copy or not welcome.next or welcome.epoch in known or superseded:
            self._unrelated.discard(address)
        elif address not in self._unrelated:
            self._unrelated.add(address)
            log.error(
                "publisher %s: the mirror %s holds another history of this source, up to offset %d of epoch %d, and "
                "does not follow: promote it, or empty it",
                self._journal.source,
                address,
                welcome.next - 1,
                welcome.epoch,
            )

    def _is_behind(self, welcome: messages.Welcome, client: ReplayClient) -> bool:
        """Whether a mirror has events of our epoch that our journal never had."""
        journal = self._journal
        if (welcome.source, welcome.epoch) != (journal.source, journal.epoch):
            return False
        if welcome.next > _end(journal):
            return True
        return self._suspected and not _same_before(journal, welcome.next, welcome.epoch, client)

    def suspect(self) -> None:
        """A consumer says that it has had what this journal never had. Anybody can say so, so mirrors are asked whether
        they have it; if there are none that do, a new epoch makes sure that nobody misses an event. That costs
        consumers little, and happens once a minute at most."""
        now = time.monotonic()
        if now - self._renewed_at >= _RENEW_EVERY_S and not self.fenced:
            self._renewed_at = now
            if self.addresses:
                self._suspected = True
                self._look.set()
            else:
                self._rolled_back(None)

    def stop(self) -> None:
        """End the thread, and let nobody wait any longer."""
        self._stopping = True
        self._look.set()
        self._release_all()
        self._stop.set()
        for thread in (self._thread, self._holder):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(_STOP_S)  # a lease's server may hang
        if self._lease is not None:
            self._lease.release()


def _end(journal: Journal) -> int:
    """Up to where anybody can have had events."""
    try:
        journal.flush()
    except JournalError:
        return journal.next + journal.staged
    return journal.next


def restore_from_mirrors(
    journal: DiskJournal, places: Sequence[str], mirrored: int, keys: ClientKeys | None
) -> None:
    """What mirrors kept of a journal that is opened and this journal has not, because its disk or machine lost it.

    A journal that cannot prove that it is the newest waits for so many mirrors that each mirrored event is known to one
    of them. Raises RolledBack if a mirror has other events than this journal at the same offsets, or if this one is
    empty and does not know the epoch of what a mirror has; JournalError.
    """
    epoch, start = journal.last_epoch, journal.uncertain_from
    proven = not journal.recovered.epoch_raised
    needed = min(len(places), len(places) - mirrored + 1)
    deadline = time.monotonic() + (_GLANCE_S if proven else _RESTORE_S)
    clients: dict[str, ReplayClient] = {}
    found: dict[str, messages.Welcome] = {}
    try:
        for place in places:
            clients[place] = ReplayClient(place, curve=keys)
        while time.monotonic() < deadline and len(found) < (len(places) if proven else needed):
            for place, client in clients.items():
                if place not in found:
                    with contextlib.suppress(PeerError):
                        welcome = client.welcome(_GLANCE_S / len(places))
                        if welcome is not None and welcome.source in ("", journal.source):
                            found[place] = welcome
        if len(found) < needed and not proven:
            log.error(
                "publisher %s: its journal may have lost events, and only %d of the %d mirrors that would know answer: "
                "a mirror that has more keeps it aside",
                journal.source,
                len(found),
                needed,
            )
        known = dict(journal.epochs())
        for place, has in found.items():
            if not journal.next and has.next and has.epoch not in known:
                # To begin anew would leave them to nobody: consumers go on in the new epoch.
                raise RolledBack(journal.source, has.epoch, 0, has.next - 1, place)
        ends = {place: has.next for place, has in found.items() if has.epoch == epoch}
        for place, end in ends.items():
            if not _same_before(journal, min(start, end), epoch, clients[place]):
                raise RolledBack(journal.source, epoch, start, end - 1, place)
        ahead = {place: end for place, end in ends.items() if end > start}
        if not ahead:
            return
        place = max(ahead, key=lambda name: ahead[name])
        restored = journal.restore(_tail(clients[place], epoch, start, ahead[place]))
        log.warning("publisher %s: restored %d events from the mirror %s", journal.source, restored, place)
    finally:
        for client in clients.values():
            client.close()


def _same_before(journal: Journal, start: int, epoch: int, client: ReplayClient) -> bool:
    """Whether the mirror has the same event before that offset; also if one of both has not got it any more."""
    if not start:
        return True
    client.ask(epoch, start - 1)
    chunk = client.answer(_ANSWER_S)
    theirs = Frame.parse(chunk.frames[0]) if chunk is not None and chunk.frames else None
    if theirs is None or not theirs.first_offset < start <= theirs.next_offset:
        return True
    return journal.time_before(start) in (-1, last_time(theirs.slice(start - 1, start)))


def _tail(client: ReplayClient, epoch: int, start: int, end: int) -> Iterator[list[Frame]]:
    """Frames of the mirror from an offset on; fewer if it goes away meanwhile."""
    while start < end:
        client.ask(epoch, start)
        chunk = client.answer(_ANSWER_S)
        frames = [Frame.parse(raw) for raw in chunk.frames] if chunk is not None else []
        frames = [f.slice(start, f.next_offset) for f in frames if f.next_offset > start]
        if not frames or frames[0].first_offset != start:
            return
        yield frames
        start = frames[-1].next_offset


def dead_letters_from(dead: Journal, offset: int) -> tuple[list[tuple[int, int]], list[bytes]]:
    """The epochs of a journal of dead letters, and its frames from an offset on, as many as one answer may have."""
    try:
        chunk = dead.read(max(offset, dead.oldest), max_bytes=_DEAD_BYTES)
        frames = [frame.raw for frame in chunk.frames if frame.first_offset >= offset]
    except Evicted:
        frames = []
    epochs = dead.epochs()[-messages.MAX_EPOCHS :] if isinstance(dead, DiskJournal) else []
    return epochs, frames
