"""The publisher: accepts events into its journal, sends them live, and answers who missed some."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from time import time_ns
from types import TracebackType
from typing import Literal

import msgspec

from brokerless.core import DiskJournal, Frame, Journal, MemoryJournal, Receipt, Retention, forks
from brokerless.core.errors import Closed, ConfigError, NotAcknowledged, PeerError, UsageError
from brokerless.direct import address as addresses
from brokerless.direct import wire
from brokerless.direct.address import Address
from brokerless.direct.counters import PublisherCounters
from brokerless.direct.desk import Desk
from brokerless.direct.dispatch import Dispatcher
from brokerless.direct.flusher import Flusher
from brokerless.direct.groups import Group
from brokerless.direct.keys import ServerKeys, allow_list
from brokerless.direct.server import Server
from brokerless.direct.sockets import LIVE_QUEUE, check_live_queue, open_network
from brokerless.direct.store import GroupStore

log = logging.getLogger(__name__)
# A lost last message is noticed within this time. A heartbeat has 30 bytes.
HEARTBEAT_S = 0.25
# The longest an event waits for company when the publisher is busy. Below what a scheduler guarantees, and
# long enough for frames of hundreds of events at full rate. Kafka's linger.ms is 5.
MAX_WAIT_S = 0.001
# Without a journal: how long an event waits for a worker with room, and how much waits at most. A pause of a
# worker's garbage collector passes, an absence does not; 16 MiB are 100,000 events of 100 bytes.
UNCLAIMED_S = 1.0
_RING_BYTES = 16 * 1024 * 1024
# For publish(wait="acked"): an answer that takes longer than this is usually not coming.
ACK_TIMEOUT_S = 10.0


class GroupStatus(msgspec.Struct, frozen=True):
    """The books of one group: `offered = acked + skipped + dead_lettered + lost + pending`."""

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


class Publisher:
    """Publishes events of one source at one address.

    Question 1, the producer is faster than a consumer: a slow subscriber's live queue overflows and only that
    subscriber has a gap, which it repairs from the journal; when the journal is full, `on_full` of the journal
    decides (evict, block, reject). Question 2, a node crashes: consumers that come back get what they missed
    from the journal; with a DiskJournal that holds for the publisher too. Without a journal nothing is
    remembered: subscribers' ledgers show what they lost, and a group gets each event at most once
    (`groups()[…].lost_by_reason`).

    Thread-safe. Closes the journal when it is closed.
    """

    def __init__(
        self,
        address: str,
        *,
        source: str,
        journal: Journal | None = None,
        live: str | None = None,
        max_wait_s: float = MAX_WAIT_S,
        heartbeat_s: float = HEARTBEAT_S,
        dead_letters: Journal | None = None,
        unclaimed_s: float = UNCLAIMED_S,
        live_queue: int = LIVE_QUEUE,
        curve: ServerKeys | None = None,
        allow: Iterable[str | bytes] | None = None,
    ) -> None:
        """Bind and start. `live` fixes the address of the live stream (default: a free port beside `address`).

        `live_queue` is how many frames wait for one slow subscriber before newer ones are dropped for it.
        `unclaimed_s` is how long an event waits for a worker when there is no journal to wait in.

        Raises ConfigError if the address cannot be bound, JournalError if the journal cannot be used.
        """
        control_address = addresses.parse(address)
        wire.check_name("source", source)
        if max_wait_s < 0 or heartbeat_s <= 0:
            raise ConfigError("max_wait_s", "must not be negative, and heartbeat_s must be more than 0")
        if unclaimed_s <= 0:
            raise ConfigError("unclaimed_s", "must be more than 0")
        check_live_queue(live_queue)
        if allow is not None and curve is None:
            raise ConfigError(
                "allow", "needs curve=ServerKeys(…): without encryption nobody can be told apart"
            )
        self.counters = PublisherCounters()
        self._closed = False
        self._finished = False
        # A signal's handler may close what its own thread is closing.
        self._close_lock = threading.RLock()
        self._replays = journal is not None
        # Without a journal, a small ring: events are numbered and batched, and never sent again.
        self.journal = journal if journal is not None else _ring(unclaimed_s)
        if self.journal.on_frame is not None:
            raise UsageError("this journal belongs to another publisher; each needs its own")
        self.journal.bind(source)
        self.instance = int.from_bytes(os.urandom(6), "big")
        self._send_lock = threading.Lock()
        self._sent_next = self.journal.next
        self._network = open_network(
            control_address, server_keys=curve, allow=allow_list(allow), live_queue=live_queue
        )
        try:
            control = self._network.serve_control(control_address)
            self.address = str(control.address)
            wanted = addresses.parse(live) if live else addresses.live_bind(control.address)
            self._live = self._network.serve_live(wanted)
            _check_reachable(control.address, self._live.address)
            self._send = self._live.send
            self._dispatcher = self._make_dispatcher(dead_letters, None if self._replays else unclaimed_s)
        except BaseException:
            self._network.close()
            raise
        self.live_address = str(self._live.address)
        self._desk = Desk(
            self.journal,
            self._dispatcher,
            instance=self.instance,
            live=addresses.live_hint(self._live.address),
            beat_s=heartbeat_s,
            begin=_epoch_begin(self.journal),
            replay=self._replays,
        )
        if curve is None and not control.address.local:
            log.warning("%s is not a loopback address and has no CURVE: events travel as plain text", address)
        self._server = Server(
            self._network,
            control,
            self._desk,
            self._dispatcher,
            beat=self._beat,
            beat_s=heartbeat_s,
            name=source,
        )
        self._flusher = Flusher(
            self.journal, max_wait_s, self.counters, self._publish, tell=self._tell, name=source
        )
        # The same as the method, at a fraction of its cost for ordinary events.
        self.publish = self._flusher.lane  # type: ignore[method-assign]
        self.journal.on_frame = self._on_frame
        self._flusher.start()
        self._server.start()
        forks.remember(self)

    def _make_dispatcher(self, dead_letters: Journal | None, lossy_after_s: float | None) -> Dispatcher:
        directory = None
        if isinstance(self.journal, DiskJournal):
            directory = os.path.join(self.journal.path, "groups")
            if dead_letters is None:
                dead_letters = DiskJournal(os.path.join(self.journal.path, "dead-letters"))
        elif dead_letters is None:
            # Small: it is a place to look, not a queue, and it dies with the process anyway.
            dead_letters = MemoryJournal(retention=Retention(max_bytes=4 * 1024 * 1024))
        self.dead_letters = dead_letters
        if not dead_letters.source:
            dead_letters.bind(self.journal.source)
        return Dispatcher(self.journal, dead_letters, GroupStore(directory), lossy_after_s=lossy_after_s)

    @property
    def source(self) -> str:
        """The producer's name."""
        return self.journal.source

    # ---- publishing ------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        data: bytes,
        key: str = "",
        content_type: str = "",
        wait: Literal["acked"] | None = None,
        groups: Sequence[str] | None = None,
        timeout: float = ACK_TIMEOUT_S,
    ) -> Receipt:
        """Accept one event; when this returns it is in the journal, and sent or about to be within `max_wait_s`.

        An idle publisher sends at once in the caller's thread. With `wait="acked"` returns only when `groups`
        (default: all there are) have acknowledged the event, or raises NotAcknowledged, which names those that
        have not; the event stays accepted. Raises InvalidEvent, JournalFull or JournalError if it was not
        accepted.
        """
        return self._publish(time_ns(), topic, data, key, content_type, wait, groups, timeout)

    def _publish(
        self,
        now: int,
        topic: str,
        data: bytes,
        key: str = "",
        content_type: str = "",
        wait: str | None = None,
        groups: Sequence[str] | None = None,
        timeout: float = ACK_TIMEOUT_S,
    ) -> Receipt:
        if wait is None:
            receipt = self.journal.stage(topic, data, content_type, key, now // 1000)
            self._flusher.staged(now)
            return receipt
        if wait != "acked":
            raise UsageError(f"wait={wait!r} is not known; it is 'acked' or nothing")
        if isinstance(groups, str) or (groups is not None and not groups):
            raise UsageError(f"groups={groups!r} must be a list of names, or nothing for all there are")
        with self._dispatcher.watching():
            receipt = self.journal.stage(topic, data, content_type, key, now // 1000)
            self._flusher.staged(now)
            return self._wait_acked(receipt, groups, timeout)

    def publish_many(
        self, topic: str, datas: Sequence[bytes], *, keys: Sequence[str] | None = None, content_type: str = ""
    ) -> Receipt:
        """Accept many events of one topic, all or none, and send them. The receipt is the first one's."""
        return self.journal.append_many(topic, datas, content_type, keys=keys)

    async def apublish(
        self,
        topic: str,
        data: bytes,
        *,
        key: str = "",
        content_type: str = "",
        wait: Literal["acked"] | None = None,
        groups: Sequence[str] | None = None,
        timeout: float = ACK_TIMEOUT_S,  # noqa: ASYNC109 - as in publish
    ) -> Receipt:
        """`publish` for a coroutine that must not block: with `wait`, or a journal with `on_full="block"`."""
        return await asyncio.to_thread(
            lambda: self.publish(
                topic, data, key=key, content_type=content_type, wait=wait, groups=groups, timeout=timeout
            )
        )

    def flush(self) -> None:
        """Send what waits for company now."""
        self._check_open()
        self.journal.flush()

    def _wait_acked(self, receipt: Receipt, groups: Sequence[str] | None, timeout: float) -> Receipt:
        self.journal.flush()
        names = sorted(self._dispatcher.groups) if groups is None else list(groups)
        if not names:
            raise NotAcknowledged(receipt.offset, ["(no group has joined yet)"], 0.0)
        missing = self._dispatcher.wait_settled(receipt.offset, names, timeout, self._server.wake)
        if missing:
            raise NotAcknowledged(receipt.offset, missing, timeout)
        return receipt

    def _tell(self, raw: bytes) -> None:
        """Called by the lane, with the journal's lock held, for a single event that is in the journal.

        The shortest way to the socket: both processes have slept since the last one, and find their caches cold.
        """
        with self._send_lock:
            if self._closed:
                return
            try:
                self._send(raw)
                self.counters.frames += 1
            except Exception:
                self._not_sent()
            self._sent_next += 1
        if self._server.hungry:
            self._server.wake()

    def _not_sent(self) -> None:
        """The event is accepted and in the journal whatever the socket says: subscribers will ask."""
        self.counters.live_errors += 1
        log.exception("live frame not sent")

    def _on_frame(self, frame: Frame) -> None:
        """Called by the journal, under its lock, for every frame that becomes readable."""
        with self._send_lock:
            if self._closed:
                return
            self._sent_next = frame.next_offset
            try:
                self._send(frame.raw)
                self.counters.frames += 1
            except Exception:
                self._not_sent()
        if self._server.hungry:
            self._server.wake()

    def _beat(self) -> None:
        self.journal.settle()
        with self._send_lock:
            if self._closed:
                return
            if self._live.renew_if_crowded():
                self._send = self._live.send
                self.counters.live_renewed += 1
                log.warning(
                    "%s: strangers have made thousands of subscriptions; all connections to it were ended",
                    self.live_address,
                )
            try:
                self._live.send(wire.encode(wire.Beat(self.instance, self.journal.epoch, self._sent_next)))
                self.counters.beats += 1
            except Exception:
                self._not_sent()

    # ---- who is there ----------------------------------------------------------------------------------

    def wait_for_subscribers(self, n: int = 1, timeout: float = 10.0) -> bool:
        """Wait until `n` subscribers receive the live stream; return whether they do."""
        return self._wait(lambda: self._desk.subscribers >= n, timeout)

    def wait_for_workers(self, n: int = 1, timeout: float = 10.0) -> bool:
        """Wait until `n` workers, of whatever group, are there; return whether they are."""
        return self._wait(lambda: self._desk.workers >= n, timeout)

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until every connected subscriber and every registered group has had everything accepted so far."""
        self.journal.flush()
        end = self.journal.next

        def drained() -> bool:
            behind = [at for at in self.journal.registered().values() if at < end]
            return not behind and not self._desk.behind(end)

        return self._wait(drained, timeout, eager=True)

    def _wait(self, condition: Callable[[], bool], timeout: float, *, eager: bool = False) -> bool:
        deadline = time.monotonic() + timeout
        with self._server.changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return False
                if eager:
                    self._server.call(self._beat)
                self._server.changed.wait(min(left, 0.02))
        return True

    @property
    def subscribers(self) -> int:
        """Subscribers known to receive the live stream."""
        return self._desk.subscribers

    def groups(self) -> dict[str, GroupStatus]:
        """The books of every group, all at one moment."""
        return self._server.ask(self._statuses)

    def _statuses(self) -> dict[str, GroupStatus]:
        end = self.journal.next
        return {name: _status(group, end) for name, group in self._dispatcher.groups.items()}

    def forget_group(self, name: str) -> None:
        """Drop a group that will not come back, so that it no longer holds the journal.

        Workers that are there all the same join anew, and their group begins as a new one does.
        """
        self._check_open()
        self._server.call(lambda: self._desk.forget_group(name))

    def forget_subscriber(self, durable: str) -> None:
        """Drop a durable subscriber that will not come back."""
        self._check_open()
        self.journal.unregister(f"sub.{durable}")

    # ---- closing ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what is left, stop the threads, close the sockets and the journal.

        Closing twice is fine; of several threads one does it, and the others wait until it is done.
        """
        with self._close_lock:
            if not self._finished:
                self._close()
                self._finished = True

    def _close(self) -> None:
        """Every step may come twice: a signal may have ended the first attempt."""
        self._flusher.stop()
        try:
            self.journal.flush()
        except Exception as error:  # whatever it is, it must not keep threads and sockets
            log.error("publisher %s: %s", self.source, error)
        self._beat()
        with self._send_lock:
            self._closed = True
        self.journal.on_frame = None
        self._server.stop()
        self._live.close()
        self._dispatcher.close()
        self._network.close()
        self.journal.close()
        self.dead_letters.close()
        forks.forget(self)

    def leave_to_parent(self) -> None:
        """In a forked child: there are no threads here that would send anything."""
        self._closed = self._finished = True
        self._close_lock, self._send_lock = threading.RLock(), threading.Lock()
        self.journal.on_frame = None
        self.journal.leave_to_parent()
        self.dead_letters.leave_to_parent()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("publisher")

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "Publisher":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


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
        found = addresses.live_connect(control, addresses.live_hint(live))
    except PeerError:
        found = None
    if found is None or (found.scheme == "ipc" and found != live):
        problem = f"{live} must lie beside {control}, with a name that begins like its name"
        raise ConfigError("live", problem)


def _ring(unclaimed_s: float) -> MemoryJournal:
    return MemoryJournal(retention=Retention(max_bytes=_RING_BYTES, max_age_s=unclaimed_s))


def _epoch_begin(journal: Journal) -> int:
    """The offset at which the present epoch began."""
    if isinstance(journal, DiskJournal):
        return next((first for epoch, first in journal.epochs() if epoch == journal.epoch), 0)
    return 0
