"""The publisher's side of its mirrors: who has what, who waits for that, and whether one of them took its place."""

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from brokerless.core import DiskJournal, Journal
from brokerless.core.errors import BrokerlessError, Evicted, NotMirrored
from brokerless.core.journal.epoch import is_superseded
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.keys import ClientKeys
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.promotion import LEASE_S, MirrorPositions, Replication
from brokerless.direct.publisher_lease import Lease
from brokerless.direct.replay import ReplayClient

log = logging.getLogger(__name__)
# How often mirrors are asked for their epoch and challenged, sooner if one has not been; the pause between two such
# rounds at least, and how long an answer may take.
_LOOK_EVERY_S = 1.0
_LOOK_LEAST_S = 0.05
_ANSWER_S = 1.0
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
        keys: ClientKeys | None,
        lease: Lease | None = None,
    ) -> None:
        """`superseded` is called, once and in a thread of its own, when a mirror has a higher epoch."""
        self.positions = MirrorPositions(addresses, mirrored)
        self.addresses = list(addresses)
        self.mirrored = mirrored
        self.lease_s = self.positions.lease_s
        self.fenced = False
        self._journal = journal
        self._coordinator = coordinator
        self._dead = dead_letters
        self._superseded = superseded
        self._keys = keys
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, threading.Event]] = []
        self._stopping = False
        self._lease = lease
        self._held_at = time.monotonic()
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
            asked, had = time.monotonic(), held
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
        if not proven and address in self.addresses:
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
        return messages.State(number, groups, cursors, epochs, frames)

    # ---- our place -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping:
            for address in self.addresses:
                if self._stopping or self._asks(address):
                    return
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
            if welcome is not None:
                client.challenge(self.positions.challenges[address])
        except BrokerlessError:
            return False
        finally:
            client.close()
        if welcome is None or welcome.source != self._journal.source:
            return False
        if not is_superseded(self._journal.epoch, welcome.epoch):
            return False
        self.fenced = True
        self._superseded(welcome)
        self._release_all()  # no mirror will acknowledge anything to us any more
        return True

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


def dead_letters_from(dead: Journal, offset: int) -> tuple[list[tuple[int, int]], list[bytes]]:
    """The epochs of a journal of dead letters, and its frames from an offset on, as many as one answer may have."""
    try:
        chunk = dead.read(max(offset, dead.oldest), max_bytes=_DEAD_BYTES)
        frames = [frame.raw for frame in chunk.frames if frame.first_offset >= offset]
    except Evicted:
        frames = []
    epochs = dead.epochs()[-messages.MAX_EPOCHS :] if isinstance(dead, DiskJournal) else []
    return epochs, frames
