"""The publisher: accepts events into its journal, sends them live, and answers who missed some."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, update_wrapper
from time import time_ns
from typing import Any, Literal

import msgspec

from brokerless.core import DiskJournal, Journal, MemoryJournal, Receipt, Retention
from brokerless.core.errors import (
    Closed,
    ConfigError,
    Fault,
    JournalError,
    NotAcknowledged,
    PeerError,
    RolledBack,
    Superseded,
    UsageError,
)
from brokerless.core.exporter import Announced
from brokerless.core.journal.disk import as_journal, closed_on_error
from brokerless.core.presence import journal_state
from brokerless.core.runtime import fork as forks
from brokerless.core.runtime.closing import Closing
from brokerless.core.runtime.nesting import interrupts
from brokerless.direct.address import Address, live_bind, live_connect, live_hint, parse_address
from brokerless.direct.counters import PublisherCounters
from brokerless.direct.groups.coordinator import GroupCoordinator
from brokerless.direct.groups.group import Group
from brokerless.direct.groups.store import GroupStore
from brokerless.direct.ids import ID_WINDOW, PublishedIds
from brokerless.direct.io.base import LIVE_QUEUE, ServerControl, check_live_queue
from brokerless.direct.io.batching import Batcher
from brokerless.direct.io.live import LiveStream
from brokerless.direct.io.network import open_network
from brokerless.direct.io.publisher_mirrors import MirroredPublishing, restore_from_mirrors
from brokerless.direct.io.server import Server
from brokerless.direct.keys import ClientKeys, ServerKeys, allow_list
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.administration import Administration
from brokerless.direct.protocol.promotion import first_after
from brokerless.direct.protocol.server import ControlServer
from brokerless.direct.publisher_lease import PublisherLease

log = logging.getLogger(__name__)
# A lost last message is noticed within this time. A heartbeat has 30 bytes.
HEARTBEAT_S = 0.25
# The longest an event is batched when the publisher is busy. Below what a scheduler guarantees, and
# long enough for frames of hundreds of events at full rate. Kafka's linger.ms is 5.
MAX_WAIT_S = 0.001
# Without a journal: how long an event waits for a worker with room, and how much waits at most. A pause of a
# worker's garbage collector passes, an absence does not; 16 MiB are 100,000 events of 100 bytes.
UNCLAIMED_S = 1.0
_RING_BYTES = 16 * 1024 * 1024
# For publish(wait="acked"): an answer that takes longer than this is usually not coming.
ACK_TIMEOUT_S = 10.0
# How often a publisher that starts looks whether its lease is free.
_LEASE_EVERY_S = 0.2
# The first heartbeats that `drain` asks for are so far apart; then each twice as far as the one before.
_FIRST_BEAT_S = 0.01


class GroupStatus(msgspec.Struct, frozen=True):
    """The accounting of one group: `offered = acked + skipped + dead_lettered + lost + pending`."""

    name: str
    workers: int
    cursor: int
    offered: int
    acked: int
    skipped: int
    dead_lettered: int
    lost: int
    leased: int
    waiting: int
    pending: int
    redelivered: int
    lost_by_reason: dict[str, int]

    @property
    def balanced(self) -> bool:
        """Whether every event since the group began is accounted for."""
        return self.offered == self.acked + self.skipped + self.dead_lettered + self.lost + self.pending


class Publisher(Announced, Closing):
    """Publishes events of one source at one address.

    Question 1, the producer is faster than a consumer: a slow subscriber's live queue overflows and only that
    subscriber has a gap, which it repairs from the journal; when the journal is full, `on_full` of the journal decides
    (evict, block, reject). Question 2, a node crashes: consumers that come back get what they missed from the journal;
    with a DiskJournal that holds for the publisher too. Without a journal nothing is remembered: subscribers' ledgers
    show what they lost, and a group gets each event at most once (`groups()[…].lost_by_reason`).

    Thread-safe. Closes the journal when it is closed.
    """

    # Why nothing more is accepted: a mirror took its place, or has what its journal has lost.
    superseded: Superseded | None = None
    rolled_back: RolledBack | None = None

    def __init__(
        self,
        address: str,
        *,
        source: str,
        journal: Journal | str | os.PathLike[str] | None = None,
        live: str | None = None,
        max_wait_s: float = MAX_WAIT_S,
        heartbeat_s: float = HEARTBEAT_S,
        dead_letters: Journal | None = None,
        unclaimed_s: float = UNCLAIMED_S,
        live_queue: int = LIVE_QUEUE,
        curve: ServerKeys | None = None,
        allow: Iterable[str | bytes] | None = None,
        admin: Literal["local"] | Iterable[str | bytes] = "local",
        id_window: int = ID_WINDOW,
        announce: bool = True,
        metrics: str = "",
        mirrors: Sequence[str] = (),
        mirrored: int = 1,
        mirror_keys: ClientKeys | None = None,
        lease: PublisherLease | None = None,
    ) -> None:
        """Bind and start. `live` fixes the address of the live stream (default: a free port beside `address`).

        `journal` belongs to the publisher from here on: it is closed with it, and also if this raises. A path means
        DiskJournal(path). Without one nothing is sent again: what a consumer misses, or asks for of the past, is lost,
        and it is told. `live_queue` is how many frames wait for one slow subscriber before newer ones are dropped
        for it.
        `unclaimed_s` is how long an event waits for a worker when there is no journal to wait in.
        `admin` says who may administer it from outside (AdminClient, `brokerless top`): programs on this machine, or
        the public CURVE keys given, from wherever; an empty list: nobody. `id_window` is for `publish(id=…)`.
        `announce=False` keeps it out of `brokerless ps`; `metrics` is a host:port where this process serves `/metrics`.
        `mirrors` are the addresses of this source's mirrors, of which consumers are told; `mirrored` is how many of
        them `wait="mirrored"` waits for, and how many must be in contact for groups to be given events (0: none; see
        docs/guides/mirrors.md). `mirror_keys` is how this publisher connects to them if they use CURVE.
        `lease` is taken here and held as long as the publisher lives: without it groups are given nothing.

        Raises ConfigError if the address cannot be bound, JournalError if the journal cannot be used.
        """
        with closed_on_error(journal):
            control_address = parse_address(address)
            messages.check_name("source", source)
            _check_numbers(max_wait_s, heartbeat_s, unclaimed_s, id_window)
            check_live_queue(live_queue)
            admins = _check_keys(curve, allow, admin)
            on_disk = isinstance(journal, (DiskJournal, str, os.PathLike))
            places = _check_mirrors(mirrors, mirrored, on_disk=on_disk)
            _take_lease(lease)
        self.counters = PublisherCounters()
        self._heartbeat_s = heartbeat_s
        self._closed = False
        self._finished = False
        # A signal's handler may close what its own thread is closing.
        self._close_lock = threading.RLock()
        self._replays = journal is not None
        # Without a journal, a small ring: events are numbered and batched, and never sent again.
        try:
            self.journal: Journal = _ring(unclaimed_s) if journal is None else as_journal(journal)
            if self.journal.on_frame is not None:
                raise UsageError("this journal belongs to another publisher; each needs its own")
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        self.instance = int.from_bytes(os.urandom(6), "big")
        try:
            self._ids = PublishedIds(self.journal, id_window, self.counters)
            self.journal.bind(source)
            if places and isinstance(self.journal, DiskJournal):
                restore_from_mirrors(self.journal, places, mirrored, mirror_keys)
            self._began = self.journal.next
            self._network = open_network(
                control_address, server_keys=curve, allow=allow_list(allow), live_queue=live_queue
            )
            control = self._bind(control_address, live, dead_letters, None if self._replays else unclaimed_s)
        except BaseException:
            # It belongs to this publisher, and nobody else may be able to close it: its lock would stay.
            self.journal.close()
            if lease is not None:
                lease.release()
            raise
        self.live_address = str(self._live.address)
        self._mirrored = MirroredPublishing(
            self.journal,
            self._coordinator,
            self.dead_letters,
            places,
            mirrored if places else 0,
            self._replaced,
            self._went_back,
            mirror_keys,
            lease,
        )
        self._control_server = ControlServer(
            self.journal,
            self._coordinator,
            instance=self.instance,
            live=live_hint(self._live.address),
            beat_s=heartbeat_s,
            begin=_epoch_begin(self.journal),
            replay=self._replays,
            replication=self._mirrored,
        )
        self._administration = Administration(
            self.journal, self.dead_letters, self._coordinator, self._control_server, self._statuses
        )
        self._control_server.went_back = self._mirrored.suspect
        self._control_server.administer = partial(self._administer, control.origin, admins)
        if curve is None and not control.address.local:
            log.warning("%s is not a loopback address and has no CURVE: events travel as plain text", address)
        self._server = Server(
            self._network,
            control,
            self._control_server,
            self._coordinator,
            beat=self._live.beat,
            beat_s=heartbeat_s,
            name=source,
        )
        self._batcher = Batcher(
            self.journal,
            max_wait_s,
            self.counters,
            self._publish,
            send_single=self._live.send_single,
            name=source,
        )
        if type(self).publish is Publisher.publish:
            # The same as the method, at a fraction of its cost for ordinary events, and documented as the method.
            self.publish = update_wrapper(self._batcher.lane, self.publish)  # type: ignore[method-assign]
        self._live.sent = self._sent
        self.journal.on_frame = self._live.send_frame
        self._batcher.start()
        self._server.start()
        self._mirrored.start()
        forks.remember(self)
        addresses = [self.address, self.live_address]
        self._announce("direct.publisher", source, addresses, enabled=announce, metrics=metrics)

    def _state(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        state = journal_state(self.journal)
        state["counters"] = {**self.counters.snapshot(), "accepted": self.journal.counters.appended}
        state["began"] = self._began  # the first offset of this process
        state["subscribers"] = self.subscribers
        state["groups"] = {
            name: {
                **msgspec.structs.asdict(group),
                "balanced": group.balanced,
                "unreported": self._coordinator.unreported(name),
            }
            for name, group in self.groups().items()
        }
        return state

    def _bind(
        self,
        address: Address,
        live: str | None,
        dead_letters: Journal | None,
        lossy_after_s: float | None,
    ) -> ServerControl:
        """Bind both sockets and load the groups; nothing stays bound if that fails."""
        try:
            control = self._network.serve_control(address)
            self.address = str(control.address)
            wanted = parse_address(live) if live else live_bind(control.address)
            socket = self._network.serve_live(wanted)
            _check_reachable(control.address, socket.address)
            self._live = LiveStream(socket, self.journal, instance=self.instance, counters=self.counters)
            self._coordinator = self._make_coordinator(dead_letters, lossy_after_s)
            return control
        except BaseException:
            self._network.close()
            raise

    def _make_coordinator(
        self, dead_letters: Journal | None, lossy_after_s: float | None
    ) -> GroupCoordinator:
        store = GroupStore(None)
        if isinstance(self.journal, DiskJournal):
            path, fsync, interval_s = self.journal.path, self.journal.fsync, self.journal.sync_interval_s
            store = GroupStore(os.path.join(path, "groups"), fsync=fsync, sync_interval_s=interval_s)
            if dead_letters is None:
                letters = os.path.join(path, "dead-letters")
                dead_letters = DiskJournal(letters, fsync=fsync, sync_interval_s=interval_s)
        elif dead_letters is None:
            # Small: it is a place to look, not a queue, and it dies with the process anyway.
            dead_letters = MemoryJournal(retention=Retention(max_bytes=4 * 1024 * 1024))
        self.dead_letters = dead_letters
        if not dead_letters.source:
            dead_letters.bind(self.journal.source)
        return GroupCoordinator(self.journal, dead_letters, store, lossy_after_s=lossy_after_s)

    @property
    def source(self) -> str:
        """The producer's name."""
        return self.journal.source

    # ---- publishing ------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        data: bytes,
        *,
        key: str = "",
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
        id: str = "",
        wait: Literal["acked", "mirrored"] | None = None,
        groups: Sequence[str] | None = None,
        timeout: float = ACK_TIMEOUT_S,
    ) -> Receipt:
        """Accept one event; when this returns it is in the journal, and sent or about to be within `max_wait_s`.

        `headers` is a small map of text (at most 64 entries, 8 KiB) that travels with the event: `event.headers`.
        An event with an `id` is accepted once among the last `id_window` events that the journal has, also over
        restarts with a DiskJournal: the next time the receipt of the first is returned, and nothing is published.
        An idle publisher sends at once in the caller's thread. With `wait="acked"` returns only when `groups`
        (default: all there are) have acknowledged the event, or raises NotAcknowledged, which names those that
        have not; the event stays accepted. With `wait="mirrored"` returns only when `mirrored` mirrors have it as
        durably as their journals are configured, or raises NotMirrored, which names those that do not; it stays
        accepted, too. Raises InvalidEvent, JournalFull or JournalError if it was not accepted, Superseded if a mirror
        became the publisher.
        """
        return self._publish(
            time_ns(),
            topic,
            data,
            key=key,
            content_type=content_type,
            headers=headers,
            id=id,
            wait=wait,
            groups=groups,
            timeout=timeout,
        )

    def _publish(
        self,
        now: int,
        topic: str,
        data: bytes,
        *,
        key: str = "",
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
        id: str = "",
        wait: str | None = None,
        groups: Sequence[str] | None = None,
        timeout: float = ACK_TIMEOUT_S,
    ) -> Receipt:
        stage = partial(self._ids.stage, id) if id else self.journal.stage
        if wait is None:
            receipt = stage(topic, data, content_type, key, now // 1000, headers)
            self._batcher.staged(now)
            return receipt
        if wait == "mirrored":
            self._check_mirrored()
            receipt = stage(topic, data, content_type, key, now // 1000, headers)
            self.journal.flush()
            self._mirrored.wait(receipt.offset, timeout)
            return receipt
        if wait != "acked":
            raise UsageError(f"wait={wait!r} is not known; it is 'acked', 'mirrored' or nothing")
        if isinstance(groups, str) or (groups is not None and not groups):
            raise UsageError(f"groups={groups!r} must be a list of names, or nothing for all there are")
        with self._coordinator.watching():
            receipt = stage(topic, data, content_type, key, now // 1000, headers)
            self._batcher.staged(now)
            return self._wait_acked(receipt, groups, timeout)

    def publish_many(
        self,
        topic: str,
        datas: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        content_type: str = "",
        headers: Sequence[Mapping[str, str]] | Mapping[str, str] | None = None,
        wait: Literal["mirrored"] | None = None,
        timeout: float = ACK_TIMEOUT_S,
    ) -> Receipt:
        """Accept many events of one topic, all or none, and send them. The receipt is the first one's.

        `headers` are one mapping for each event, or one for all. `wait="mirrored"` as in `publish`, for all of them.
        """
        if wait is not None:
            self._check_mirrored()
        receipt = self.journal.append_many(topic, datas, content_type, keys=keys, headers=headers)
        if wait is not None:
            self._mirrored.wait(receipt.offset + receipt.count - 1, timeout)
        return receipt

    async def apublish_many(
        self,
        topic: str,
        datas: Sequence[bytes],
        *,
        keys: Sequence[str] | None = None,
        content_type: str = "",
        headers: Sequence[Mapping[str, str]] | Mapping[str, str] | None = None,
        wait: Literal["mirrored"] | None = None,
        timeout: float = ACK_TIMEOUT_S,  # noqa: ASYNC109 - as in publish_many
    ) -> Receipt:
        """`publish_many` for a coroutine that must not block: with `wait`, or a journal with `on_full="block"`."""
        work = partial(self.publish_many, topic, datas, keys=keys, content_type=content_type)
        return await asyncio.to_thread(work, headers=headers, wait=wait, timeout=timeout)

    def _check_mirrored(self) -> None:
        if not self._mirrored.mirrored:
            raise UsageError('wait="mirrored" needs mirrors=[…] and mirrored=1 or more')

    def mirrors(self) -> dict[str, int]:
        """The mirrors, each with the offset before which it has everything of this epoch."""
        return self._mirrored.positions.positions()

    def _replaced(self, welcome: messages.Welcome) -> None:
        """A mirror is the publisher now: accept nothing more, and say what only this journal has."""
        epoch = self.journal.epoch
        first = first_after(welcome.epochs, epoch, welcome.begin)

        def superseded(end: int) -> Superseded:
            return Superseded(self.source, epoch, welcome.epoch, (first, end - 1) if first < end else None)

        self.superseded = self.journal.refuse(superseded)
        self._send_away(self.superseded, f"a mirror became the publisher, in epoch {welcome.epoch}")

    def _send_away(self, fault: Fault, reason: str) -> None:
        log.error("publisher %s: %s", self.source, fault)
        self._server.call(lambda: self._control_server.send_away(reason))

    def _went_back(self, fault: RolledBack | None) -> None:
        """Somebody has what this journal never had. A mirror keeps it: stop, so that it is not lost. If only a consumer
        has it: begin a new epoch, so that nobody takes new events for those that they have had."""
        if fault is not None:
            self.rolled_back = self.journal.refuse(lambda _: fault)
            self._send_away(fault, "the publisher's journal went back behind its mirrors")
            return

        def renew() -> None:
            try:
                epoch = self.journal.begin_epoch()
            except JournalError as error:
                log.error("publisher %s: cannot begin a new epoch: %s", self.source, error)
                return
            log.error(
                "publisher %s: a consumer has had what the journal has not; epoch %d begins at offset %d. What was "
                "published since the journal went back may be missed by consumers that join later",
                self.source,
                epoch,
                self.journal.next,
            )
            self._control_server.new_epoch(self.journal.next)

        self._server.call(renew)

    async def apublish(
        self,
        topic: str,
        data: bytes,
        *,
        key: str = "",
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
        id: str = "",
        wait: Literal["acked", "mirrored"] | None = None,
        groups: Sequence[str] | None = None,
        timeout: float = ACK_TIMEOUT_S,  # noqa: ASYNC109 - as in publish
    ) -> Receipt:
        """`publish` for a coroutine that must not block: with `wait`, or a journal with `on_full="block"`."""
        return await asyncio.to_thread(
            lambda: self.publish(
                topic,
                data,
                key=key,
                content_type=content_type,
                headers=headers,
                id=id,
                wait=wait,
                groups=groups,
                timeout=timeout,
            )
        )

    def flush(self) -> None:
        """Send what is batched now. On JournalError the events stay accepted and batched, and are tried again."""
        self._check_open()
        self.journal.flush()

    def _wait_acked(self, receipt: Receipt, groups: Sequence[str] | None, timeout: float) -> Receipt:
        self.journal.flush()
        names = sorted(self._coordinator.groups) if groups is None else list(groups)
        if not names:
            raise NotAcknowledged(receipt.offset, ["(no group has joined yet)"], 0.0)
        missing = self._coordinator.wait_settled(receipt.offset, names, timeout, self._server.wake)
        if missing:
            raise NotAcknowledged(receipt.offset, missing, timeout)
        return receipt

    def _sent(self) -> None:
        """A frame was sent: workers may be waiting for its events."""
        if self._server.idle:
            self._server.wake()

    # ---- who is there ----------------------------------------------------------------------------------

    def wait_for_subscribers(self, n: int = 1, timeout: float = 10.0) -> bool:
        """Wait until `n` subscribers receive the live stream; return whether they do."""
        return self._wait(lambda: self._control_server.subscribers >= n, timeout)

    def wait_for_workers(self, n: int = 1, timeout: float = 10.0) -> bool:
        """Wait until `n` workers, of any groups, are connected; return whether they are."""
        return self._wait(lambda: self._control_server.workers >= n, timeout)

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until every connected subscriber and every registered group has had everything accepted so far."""
        self.journal.flush()
        end = self.journal.next

        def drained() -> bool:
            behind = [at for at in self.journal.registered().values() if at < end]
            return not behind and not self._control_server.behind(end)

        return self._wait(drained, timeout, beats=True)

    def _wait(self, condition: Callable[[], bool], timeout: float, *, beats: bool = False) -> bool:
        """Wait until a round of the server makes the condition true.

        Subscribers report their position when they get a heartbeat. With `beats` the next ones come sooner, each time
        less so, because each costs a report of everybody.
        """
        self._check_not_nested("wait")
        now = time.monotonic()
        deadline = now + timeout
        beat_at, interval_s = now, _FIRST_BEAT_S
        with self._server.changed:
            while not condition():
                now = time.monotonic()
                if now >= deadline or self._closed:
                    return False
                if beats and now >= beat_at:
                    interval_s = min(self._heartbeat_s, interval_s * 2)
                    beat_at = now + interval_s
                    self._server.call(self._live.beat)
                self._server.changed.wait(min(deadline, beat_at if beats else deadline, now + 0.02) - now)
        return True

    @property
    def subscribers(self) -> int:
        """Subscribers known to receive the live stream."""
        return self._control_server.subscribers

    def groups(self) -> dict[str, GroupStatus]:
        """The accounting of every group, all at one moment."""
        self._check_not_nested("ask for groups")
        return self._server.ask(self._statuses)

    def _statuses(self) -> dict[str, GroupStatus]:
        end = self.journal.next
        return {name: _status(group, end) for name, group in self._coordinator.groups.items()}

    def on_answer(self, handler: Callable[[messages.Answer], None]) -> None:
        """Call this, in the server's thread, with every reply of a worker; see RequestClient."""
        before = self._control_server.answered

        def both(answer: messages.Answer) -> None:
            before(answer)
            handler(answer)

        self._control_server.answered = both

    def withdraw(self, offset: int) -> None:
        """Do not deliver this event again to groups in which nobody holds it; see RequestClient."""
        self._server.call(partial(self._coordinator.withdraw, offset))

    def _administer(
        self,
        origin: Callable[[], tuple[bool, str]],
        admins: frozenset[bytes] | None,
        request: messages.Admin,
    ) -> messages.Report | None:
        """Execute what an administrator asks for; None if whoever asked is none."""
        local, key = origin()
        allowed = local if admins is None else key.encode() in admins
        return self._administration.execute(request) if allowed else None

    def forget_group(self, name: str) -> None:
        """Drop a group that will not come back, so that it no longer holds the journal.

        Workers that are still connected rejoin, and their group begins as a new one does.
        """
        self._check_open()
        self._server.call(lambda: self._control_server.forget_group(name))

    def forget_subscriber(self, durable: str) -> None:
        """Drop a durable subscriber that will not come back."""
        self._check_open()
        self.journal.unregister(f"sub.{durable}")

    # ---- closing ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what is left, stop the threads, close the sockets and the journal.

        Closing twice is fine; of several threads one does it, and the others wait until it is done. A signal handler
        or a finalizer that interrupted this publisher at work cannot wait for that work: then a thread closes it as
        soon as the work is done, and this returns at once.
        """
        if self._nested():
            threading.Thread(target=self._close_once, name=f"brokerless close {self.source}").start()
        else:
            self._close_once()

    def _close_once(self) -> None:
        with self._close_lock:
            if not self._finished:
                self._withdraw()
                self._close()
                self._finished = True

    def _close(self) -> None:
        """Every step may come twice: a signal may have ended the first attempt."""
        self._batcher.stop()
        self._mirrored.stop()
        try:
            self.journal.flush()
        except Exception as error:  # whatever it is, it must not keep threads and sockets
            log.error("publisher %s: %s", self.source, error)
        self._live.beat()
        self._closed = True
        self._live.stop()
        self.journal.on_frame = None
        self._server.stop()
        self._live.close()
        self._coordinator.close()
        self._network.close()
        self.journal.close()
        self.dead_letters.close()
        forks.forget(self)

    def leave_to_parent(self) -> None:
        """In a forked child: there are no threads here that would send anything."""
        self._closed = self._finished = True
        self._close_lock = threading.RLock()
        self._live.leave_to_parent()
        self.journal.on_frame = None
        self.journal.leave_to_parent()
        self.dead_letters.leave_to_parent()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("publisher")

    def _nested(self) -> bool:
        """Whether this thread is in the middle of this publisher's work: a signal handler or a finalizer runs there."""
        parts = (self, self.journal, self._batcher, self._server, self._live)
        return interrupts(lambda owner: any(owner is part for part in parts))

    def _check_not_nested(self, what: str) -> None:
        if self._nested():
            raise UsageError(f"cannot {what}: this thread is in the middle of the publisher's work")


def _status(group: Group, end: int) -> GroupStatus:
    return GroupStatus(
        group.name,
        len(group.members),
        group.cursor,
        max(end, group.next) - group.started,
        group.acked,
        group.skipped,
        group.dead_lettered,
        group.lost,
        group.leased,
        group.waiting,
        max(0, end - group.cursor - group.settled.total),
        group.redelivered,
        {str(reason): n for reason, n in group.lost_by_reason.items()},
    )


def _check_reachable(control: Address, live: Address) -> None:
    """Clients take of a live address only what cannot send them elsewhere."""
    try:
        found = live_connect(control, live_hint(live))
    except PeerError:
        found = None
    if found is None or (found.scheme == "ipc" and found != live):
        problem = f"{live} must lie beside {control}, with a name that begins like its name"
        raise ConfigError("live", problem)


def _check_numbers(max_wait_s: float, heartbeat_s: float, unclaimed_s: float, id_window: int) -> None:
    if max_wait_s < 0 or heartbeat_s <= 0:
        raise ConfigError("max_wait_s", "must not be negative, and heartbeat_s must be more than 0")
    if unclaimed_s <= 0:
        raise ConfigError("unclaimed_s", "must be more than 0")
    if id_window < 1:
        raise ConfigError("id_window", "must be at least 1")


def _check_keys(
    curve: ServerKeys | None, allow: object, admin: Literal["local"] | Iterable[str | bytes]
) -> frozenset[bytes] | None:
    """The keys of administrators, None for programs on this machine. Raises ConfigError for keys without CURVE."""
    admins = None if admin == "local" else allow_list(admin)
    for field, keys in (("allow", allow is not None), ("admin", bool(admins))):
        if keys and curve is None:
            raise ConfigError(
                field, "keys need curve=ServerKeys(…): without encryption nobody can be told apart"
            )
    return admins


def _check_mirrors(mirrors: Sequence[str], mirrored: int, *, on_disk: bool) -> list[str]:
    """Their addresses. Raises ConfigError."""
    if isinstance(mirrors, str):
        raise ConfigError("mirrors", f"must be a list of addresses: [{mirrors!r}]")
    places = [str(parse_address(place)) for place in mirrors]
    if not 0 <= mirrored <= max(1, len(places)) or len(places) > messages.MAX_MIRRORS:
        raise ConfigError("mirrored", f"must be 0 to the number of mirrors, {len(places)}")
    if places and not on_disk:
        raise ConfigError("mirrors", "need a DiskJournal: in memory a restart would begin another history")
    return places


def _take_lease(lease: PublisherLease | None) -> None:
    """Take it; that of a publisher that was killed here may still look held for a while."""
    if lease is None:
        return
    if not callable(getattr(lease, "acquire", None)):
        raise ConfigError("lease", f"must be one, such as FileLease(path), not {lease!r}")
    deadline = time.monotonic() + lease.taken_after_s
    while not lease.acquire():
        if time.monotonic() >= deadline:
            raise UsageError("another process holds the lease of this source, or it cannot be reached")
        time.sleep(_LEASE_EVERY_S)


def _ring(unclaimed_s: float) -> MemoryJournal:
    return MemoryJournal(retention=Retention(max_bytes=_RING_BYTES, max_age_s=unclaimed_s))


def _epoch_begin(journal: Journal) -> int:
    """The offset at which the present epoch began."""
    if isinstance(journal, DiskJournal):
        return next((first for epoch, first in journal.epochs() if epoch == journal.epoch), 0)
    return 0
