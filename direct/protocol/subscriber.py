"""A subscriber's connection to one publisher, without I/O. See protocol/client.py for what the driver must do.

`ready` holds what happened, in order: batches and losses for the application, and EpochStarted and Sent for the
ledger. The driver takes all of it before it feeds more, which bounds this queue.

How nothing is lost: the live socket is connected first, then everything from the start position up to the journal's
end is replayed, the overlap is dropped, and from there each live frame must begin where the last one ended. If one
does not, it is held and the gap is requested. A heartbeat that names a newer end than the last frame shows that the
newest frames were dropped.
"""

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

import msgspec

from brokerless.core import Backoff, Event, Frame, Lost, Position, Reason
from brokerless.core.errors import FrameError, PeerError
from brokerless.core.journal.key_state import StateBlock
from brokerless.core.journal.segment import last_time
from brokerless.core.runtime.accelerated import speed
from brokerless.core.topics import TopicFilter
from brokerless.direct.batch import Batch, Single, StateBatch
from brokerless.direct.counters import SubscriberCounters
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.client import HELLO_BACKOFF, ClientProtocol, SourceOwners, State, reason_of
from brokerless.direct.protocol.loss_accounting import EpochStarted, Snapshot
from brokerless.direct.protocol.promotion import first_after

log = logging.getLogger(__name__)
Item = Batch | Lost | EpochStarted | Snapshot | messages.Sent
# The first chunk of a replay, and the least: what 150 kB/s bring in less than a second, and in a tenth of it.
_FIRST_BYTES = 128 * 1024
_LEAST_BYTES = 16 * 1024
# An answer in less time than the first doubles the next chunk, one in more than the second halves it.
_SOON_S = 0.1
_SLOW_S = 0.5
# Heartbeats that a publisher may promise: in between, silence is noticed in reasonable time, and no sooner.
_LEAST_BEAT_S = 0.01
_MOST_BEAT_S = 3600.0
_WITHOUT_LIVE = 2
_BEAT = messages.encode(messages.Beat(0, 0, 0))[:2]
_read_single = None if speed is None else speed.read_single


class SubscriberSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a subscriber follows a publisher; every default with its reason."""

    # A chunk is a millisecond or two of work for both sides, and hides a round trip of the same length: the next one is
    # asked for before this one is worked on. A quarter of it halves the rate of a replay; more gains nothing. This is
    # the most: it begins with less, and stays there if answers take long.
    chunk_bytes: int = 1024 * 1024
    # Live frames kept while a hole is repaired: enough for a round trip at full rate (8 MiB is 20 ms of
    # 400 MB/s). When full the oldest is dropped: replay brings it again, while the newest joins up with live.
    held_bytes: int = 8 * 1024 * 1024
    # A publisher that has not answered for this long has lost the request (or was replaced): ask again.
    answer_timeout_s: float = 2.0
    # Missed heartbeats until HELLO is sent again. One can be late, three are not.
    missed_beats: int = 3
    # Keeps the publisher's count of us alive; it forgets clients after a minute of silence.
    alive_s: float = 10.0
    # How often HELLO is repeated.
    hello_backoff: Backoff = HELLO_BACKOFF


class SubscriberProtocol(ClientProtocol):
    """One publisher as a subscriber sees it. See the module's docstring for what the driver must do."""

    def __init__(
        self,
        hello: messages.Hello,
        *,
        start: str | int,
        positions: dict[str, Position],
        counters: SubscriberCounters,
        random: Callable[[], float],
        now: float,
        settings: SubscriberSettings | None = None,
        address: str = "",
        names: SourceOwners | None = None,
        sought: bool = False,
    ) -> None:
        """`names` is shared by all connections of one subscriber. `sought`: the position known so far is void."""
        self.settings = settings or SubscriberSettings()
        super().__init__(
            hello,
            counters=counters,
            random=random,
            now=now,
            address=address,
            backoff=self.settings.hello_backoff,
        )
        self.ready: deque[Item] = deque()
        self.position = -1  # next offset wanted
        self.tail = -1  # newest end known
        self.attached = False  # the live stream was seen since it was last connected
        self.can_replay = True
        self.unanswered = 0  # times that we asked how much was sent, and wait for it
        self._names = names or SourceOwners()
        self._start = start
        self._sought = sought
        self._positions = positions
        self._counters = counters
        self._filter = TopicFilter(hello.policy.topics)
        self._everything = self._filter.everything
        self._held: deque[Frame] = deque()
        self._held_bytes = 0
        self._request = 0
        self._asked_until: float | None = None  # a Replay is on its way until then
        self._silence_s = 0.0
        self._silent_at = now
        self._alive_at = now
        self._was_offline = False
        self._without_live = 0  # times in a row that WELCOME came and the live stream did not
        self._recovering = False
        self._late = False
        self._question = b""
        self._asked_at = now
        self._chunk_bytes = min(_FIRST_BYTES, self.settings.chunk_bytes)
        self._begins = 0  # the epoch's first offset
        self._owed: list[tuple[int, Lost]] = []  # losses to be told when that offset is reached
        self._reported = -1
        self._asked_from = 0
        self._restart = 0  # where to go on if our position turns out to be wrong
        self._pages_due = 0  # of what was sent: asked for and not come, whether or not somebody waits
        self._first = 0  # where we began in this epoch, as far as we know
        self._last: Event | Frame | None = None  # what we had before the position
        self._announced = -1  # the newest end that the publisher spoke of, when we read from a mirror
        self._state_end = -1  # of the snapshot that is arriving; -1: none is
        self._since = 0  # what we had had when it began
        self._unstarted = False  # nothing of it has come yet
        self._void = start == "snapshot"  # what we have had does not count: a snapshot is needed

    # ---- what the driver calls -------------------------------------------------------------------------

    def _following_deadline(self) -> float:
        if self._asked_until is None:  # and live messages are wanted
            return min(self._silent_at, self._alive_at)
        soonest = min(self._silent_at, self._alive_at) if self.wants_live else self._alive_at
        return min(soonest, self._asked_until)

    @property
    def wants_live(self) -> bool:
        """Whether live messages are of use now.

        While a hole is repaired they are not: those right after it wait in the socket's queue until it is closed, and
        the newest are dropped there. Reading them all meanwhile would be work for frames that have to be asked for
        again, and a subscriber that has fallen behind would fall behind further. The first heartbeat is waited for,
        because the publisher counts us as soon as we have heard it.
        """
        return self._asked_until is None or not self.attached or self._late

    def _handle_following(self, now: float) -> None:
        """Join again after silence, ask again, or report that we are alive."""
        if now >= self._silent_at and self.wants_live:
            self._was_offline = True
            if not self.attached:
                self._report_no_live()
            self._rejoin(now)
            return
        if self._asked_until is not None and now >= self._asked_until:
            self._ask_again(now)
        if now >= self._alive_at:
            self._report(now)

    def _report_no_live(self) -> None:
        """WELCOME came, and the live stream did not: say so the second time, and then not until it has come."""
        self._without_live += 1
        if self._without_live == _WITHOUT_LIVE:
            self._counters.live_unreachable += 1
            log.warning(
                "%s answers, but its live stream (%s) does not arrive: a firewall? Events come by replay, about a "
                "second late",
                self.address or self.source,
                f"port {self.live[1]}" if self.live[1].isdigit() else self.live[1],
            )

    def receive_live(self, data: bytes, now: float) -> None:
        """A frame or a heartbeat arrived on the live socket."""
        if self.state is not State.FOLLOWING:
            # It is in the journal; whoever is welcome can ask for it. Without a journal it comes but once.
            if self.state is State.JOINING and self.epoch >= 0 and not self.can_replay:
                self._take_next(data)
            return
        if _read_single is not None and not self._held:
            # What an idle publisher sends. None: something else, or something wrong, which is looked at below.
            event = _read_single(data, self.source, self.epoch, self.position, Event)
            if event is not None and (self._everything or self._filter(event.topic)):
                self.ready.append(Single(data, event))
                self._last = event
                self.position = end = self.position + 1
                self.tail = max(self.tail, end)
                self._silent_at = now + self._silence_s
                self._counters.live_frames += 1
                return
        if data[:2] == _BEAT:
            self._receive_beat(data, now)
            return
        try:
            # TCP's checksum lets one damaged segment in 65,536 pass, and a wrong offset here would be a made-up event.
            frame = Frame.parse(data)
            self._check(frame)
        except FrameError:
            self._counters.bad_messages += 1
            return
        if frame.epoch != self.epoch or frame.source != self.source:
            self._rejoin(now)
            return
        self._heard(now)
        end = frame.next_offset
        if self._state_end >= 0 and end > self.position:
            self._hold(frame)  # until the snapshot is complete
            self._ask(now)
        elif frame.first_offset == self.position:
            self._counters.live_frames += 1
            self._accept(frame)
            if self._held:
                self._splice()
        elif end <= self.position:
            self._counters.overlap_frames += 1
        elif frame.first_offset < self.position:
            self._accept(frame.slice(self.position, end))
        else:
            self._hold(frame)
            self._ask(now)
        self.tail = max(self.tail, end)

    def _take_next(self, data: bytes) -> None:
        """A live frame arrived while we greet a publisher without a journal again: take it if it is the next one."""
        try:
            frame = Frame.parse(data)
            self._check(frame)
        except FrameError:
            return  # a heartbeat; or damaged, and WELCOME tells what is missing
        if (frame.epoch, frame.source, frame.first_offset) == (self.epoch, self.source, self.position):
            self._counters.live_frames += 1
            self._accept(frame)

    def _receive_reply(self, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.Chunk):
            self._receive_chunk(reply, now)
        elif isinstance(reply, messages.KeyState):
            self._receive_state(reply, now)
        elif isinstance(reply, messages.Sent):
            self._receive_sent(reply)

    def advance(self, offset: int) -> None:
        """Tell the publisher that everything below `offset` is committed (durable subscribers)."""
        if self.state is State.FOLLOWING and self._hello.durable:
            self.outbox.append(messages.encode(messages.Advance(self.epoch, offset)))

    def ask_sent(self) -> None:
        """Ask how much was sent of each topic; the answer comes as an item for the ledger."""
        if self.state is State.FOLLOWING:
            self.unanswered += 1
            self._ask_page("")

    def recover(self, taken: Position | None, now: float) -> None:
        """One of the calls above was interrupted half-way: rejoin, after what is ready and what was taken.

        What is ready is always appended before the position moves, so the position is never ahead of it.
        """
        ends = [(taken.epoch, taken.offset)] if taken is not None and not self._unstarted else []
        for item in self.ready:
            if isinstance(item, Snapshot):
                ends = [(item.epoch, item.at)] if item.complete else []
            elif isinstance(item, Batch) and item.source == self.source:
                ends.append((item.epoch, item.next_offset))
            elif isinstance(item, Lost) and item.source == self.source:
                ends.append((item.epoch, item.last + 1))
        for epoch, end in ends:
            # Below the epoch's first offset the journal still holds events of older epochs.
            if epoch == self.epoch or end <= self._begins:
                self.position = max(self.position, end)
        self._forget_held()
        self._recovering = True
        self._attempts = 0  # it was not the publisher's doing
        self._rejoin(now)

    def moved(self, now: float) -> None:
        """Join again elsewhere; what was published meanwhile is missing here if there is no journal."""
        self._was_offline = self._was_offline or self.epoch >= 0
        super().moved(now)

    def close(self) -> None:
        """Send BYE; nothing is accepted afterwards."""
        if self.state is State.FOLLOWING:
            self.outbox.append(messages.encode(messages.Bye()))
        self._become(State.CLOSED)

    # ---- joining ---------------------------------------------------------------------------------------

    def _rejoin(self, now: float) -> None:
        if self.state is State.FOLLOWING:
            self.unanswered = 0
            self._asked_until = None
        super()._rejoin(now)

    def _receive_welcome(self, welcome: messages.Welcome, now: float) -> None:
        if self._start == "snapshot" and welcome.state < 0:
            if not welcome.copy:
                self.fail('its journal keeps no state of its keys: it was not made with compact="key"')
            return  # a mirror may have one later; we go on sending HELLO, here and elsewhere
        took_over = self._names.followed_by_other(welcome.source, self)
        if not self._names.claim(welcome.source, self):
            self._counters.bad_messages += 1
            self.unanswered_hellos = 0
            self._rejoin(now)
            return
        self.unanswered_hellos = 0
        if self.state is State.FOLLOWING and welcome.instance == self.instance:
            # The answer to a second HELLO. The journal's end in it may be ahead of the live stream, where nothing
            # is missing; the publisher only waits for Ready again.
            self.attached = False
            return
        self._joined(now)
        # This order maps NaN to the minimum.
        beat_s = min(_MOST_BEAT_S, max(_LEAST_BEAT_S, welcome.beat_s))
        self._silence_s = beat_s * self.settings.missed_beats + 0.5
        self._heard(now)
        self._alive_at = now + self.settings.alive_s
        self._asked_until = None
        self.can_replay = welcome.replay
        if welcome.instance != self.instance or welcome.live != self.live[1]:
            self.live = (self.live[0] + 1, welcome.live)
        self.attached = False  # say Ready again: the publisher may have forgotten us
        self.instance = welcome.instance
        if welcome.copy:
            # It may end before what we have heard of, and even before what we have had.
            self._announced, self.tail = max(self._announced, self.tail), self.position
        began = self.epoch < 0
        if began:
            known = welcome.source in self._positions and self._start != "snapshot"
            if took_over and not self._sought and known:
                self._start = "cursor"  # it moved here: go on where we were at its other address
            self._begin(welcome)
        elif welcome.epoch != self.epoch or welcome.source != self.source:
            self._new_epoch(welcome)
        if self._start == "snapshot" and self._needs_snapshot(welcome):
            self._begin_snapshot(
                welcome.state, max(welcome.begin, self._since if self._state_end >= 0 else self.position)
            )
        # Without a journal only the live stream tells what is missing: what WELCOME counts may be on its way.
        if self.can_replay or self._was_offline or began:
            self.tail = max(self.tail, welcome.next)
        if not self.can_replay and (self._was_offline or began):
            self._give_up(self.position, self.tail, Reason.OFFLINE)
        self._was_offline = False
        if self._recovering:
            # The answer may have been what was interrupted.
            self._recovering = False
            self.ask_sent()
        self._restart = welcome.oldest
        if self._start not in ("oldest", "cursor", "snapshot"):
            self._restart = max(welcome.oldest, min(self._first, welcome.next))
        time = self._last_time()
        ahead = self.position > welcome.next
        if (ahead or time >= 0) and self.can_replay and not welcome.copy:
            # A saved position that cannot be, an old WELCOME, or a publisher that went back: the answer tells which.
            self._send_question(now, time)
        self._ask(now)

    def _last_time(self) -> int:
        """When the event before the position was published; -1 if we have not had it here."""
        last, self._last = self._last, None
        if isinstance(last, Event):
            return last.time if last.offset + 1 == self.position else -1
        return last_time(last) if last is not None and last.next_offset == self.position else -1

    def _seen_of(self, source: str) -> int:
        saved = self._positions.get(source)
        return max(self.newest_epoch, saved.epoch if saved is not None else -1)

    def _begin(self, welcome: messages.Welcome) -> None:
        """First WELCOME: find the position to start from."""
        saved = self._positions.get(welcome.source)
        # For the ledger: the topics that there are, so that one that we hear of later is known to be new.
        self.ask_sent()
        if self._start == "live":
            self._started(welcome, welcome.next, whole=welcome.next == 0)
        elif self._start == "snapshot" and (saved is None or self._sought):
            self._started(welcome, 0, whole=True)
        elif self._start in ("cursor", "snapshot") and saved is not None:
            self._void = False
            self.ready.append(EpochStarted(welcome.source, saved.epoch, False))
            self.source, self.epoch, self.position = welcome.source, saved.epoch, saved.offset
            if saved.epoch != welcome.epoch:
                self._new_epoch(welcome)
        elif self._start == "cursor" and welcome.at >= 0:
            self._started(welcome, welcome.at, whole=welcome.at == 0)
        elif isinstance(self._start, int):
            self._started(welcome, min(self._start, welcome.next), whole=self._start == 0)
        elif self._start.startswith("@") and welcome.at >= 0:
            if welcome.at == welcome.oldest > welcome.begin:
                log.warning(
                    "%s: the journal of %r begins at offset %d; what was published before that and after the time to "
                    "start at is not there any more",
                    self.address,
                    welcome.source,
                    welcome.oldest,
                )
            self._started(welcome, welcome.at, whole=welcome.at == 0)
        else:
            # "oldest", and "cursor" the first time: a consumer that asks to lose nothing wants all there is, and is
            # told what there was: it asks from the epoch's first event on, and the answer says what was evicted.
            position = min(welcome.oldest, welcome.begin)
            self._started(welcome, position, whole=position in (0, welcome.begin))

    def _started(self, welcome: messages.Welcome, position: int, *, whole: bool) -> None:
        at = position if self._sought else -1
        self._sought = False
        self.ready.append(EpochStarted(welcome.source, welcome.epoch, whole, at))
        self.source, self.epoch, self.position = welcome.source, welcome.epoch, position
        self._begins, self._first = welcome.begin, position

    def _new_epoch(self, welcome: messages.Welcome) -> None:
        """The publisher restarted without (all of) its old journal, at offset `begin`.

        Below `begin` it still has the old epoch's events, and we go on with them if we have not had them. What
        the old epoch had from `begin` on is gone, as far as we had heard of it. All of the new epoch is ours,
        as we were here before it began.
        """
        resume = welcome.begin
        self._void = True  # keys may be as they were before the epoch, or not be there any more
        if welcome.source == self.source:
            # There may have been epochs between ours and the present one, and all of those are ours, too.
            begin = first_after(welcome.epochs, self.epoch, welcome.begin)
            resume = min(self.position, begin)
            first, tail = max(self.position, begin), max(self.tail, self._announced)
            if resume == begin:
                self._give_up(first, tail, Reason.PRODUCER_CRASH)
            elif first < tail:
                # Reported in order: when we have had what is still there of the old epoch.
                lost = Lost(self.source, self.epoch, None, first, tail - 1, Reason.PRODUCER_CRASH)
                self._owed = [
                    *[owed for owed in self._owed if owed[1].epoch != lost.epoch],
                    (begin, lost),
                ]
        self._forget_held()
        if resume == welcome.begin:
            self._started(welcome, resume, whole=True)
        else:
            self.source, self.epoch, self.position = welcome.source, welcome.epoch, resume
            self._begins = welcome.begin
        self.tail, self._announced = welcome.next, -1

    # ---- snapshots: the newest event of every key, and then the stream ------------------------------------

    def _needs_snapshot(self, welcome: messages.Welcome) -> bool:
        """Whether what the journal still has does not join up with what we have had."""
        return self._void or (self._state_end < 0 and self.position < welcome.oldest)

    def _begin_snapshot(self, end: int, since: int) -> None:
        """Ask for the state as of `end` from its beginning; the answer tells as of where it really is."""
        self._forget_held()
        self._since, self._unstarted = since, True
        self._state_end, self.position = end, 0
        self._void = False
        if not end:
            self._start_snapshot(end)

    def _start_snapshot(self, end: int) -> None:
        self._counters.snapshots += 1
        self.ready.append(Snapshot(self.source, self.epoch, end, self._since))
        self._state_end, self._unstarted = end, False
        if not end:  # of a journal that has dropped nothing
            self._finish_snapshot()

    def _finish_snapshot(self) -> None:
        end = self._state_end
        self.ready.append(Snapshot(self.source, self.epoch, end, self._since, complete=True))
        self.position = end
        self._state_end = -1
        self.tail = max(self.tail, end)
        self._pay()
        self.ask_sent()

    def _receive_state(self, reply: messages.KeyState, now: float) -> None:
        asked = reply.request == self._request and reply.epoch == self.epoch and self._asked_until is not None
        if not asked or self._state_end < 0:
            return  # the answer to a question we have given up
        self._asked_until = None
        self._adapt(now - self._asked_at)
        self._heard(now)
        if reply.state != self._state_end and not self._unstarted:
            self._begin_snapshot(reply.state, self._since)  # what follows on the one we asked for is gone
        if self._unstarted:
            self._start_snapshot(reply.state)
        if self._state_end < 0:
            self._ask(now)
            return
        start = self.position
        for raw in reply.blocks:
            try:
                block = StateBlock(raw)
            except FrameError:
                self._counters.bad_messages += 1
                return
            if block.frame.source != self.source:
                self._counters.bad_messages += 1
                return
            self._accept_block(block)
        for begin, until in reply.gone:
            first, after = max(begin, self.position), min(until, self._state_end)
            if first < after:
                self._counters.lost += after - first
                self.ready.append(Lost(self.source, self.epoch, None, first, after - 1, Reason.UNATTRIBUTED))
                self.position = after
        self.position = max(self.position, min(reply.next, self._state_end))
        if self.position >= self._state_end:
            self._finish_snapshot()
            self._splice()
        elif self.position == start:
            self._counters.bad_messages += 1
            self._rejoin(now)
            return
        self._ask(now)

    def _accept_block(self, block: StateBlock) -> None:
        wanted = self._filter
        first, after = self.position, min(block.offsets[-1] + 1, self._state_end)
        topics = block.frame.topic_column()[
            bisect_left(block.offsets, first) : bisect_left(block.offsets, after)
        ]
        if topics:
            matching = len(topics) if self._everything else sum(map(wanted, topics))
            self.ready.append(StateBatch(block, matching, wanted, first, after))
            self.position = after

    def _pay(self) -> None:
        """Tell of losses whose place has been reached."""
        while self._owed and self._owed[0][0] <= self.position:
            lost = self._owed[0][1]
            self.ready.append(lost)
            self._counters.lost += lost.count
            self._owed = self._owed[1:]

    def _forget_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _heard(self, now: float) -> None:
        self._silent_at = now + self._silence_s

    # ---- frames ----------------------------------------------------------------------------------------

    def _receive_beat(self, data: bytes, now: float) -> None:
        try:
            beat = messages.decode_beat(data)
        except PeerError:
            self._counters.bad_messages += 1
            return
        if beat.instance != self.instance or beat.epoch != self.epoch:
            self._rejoin(now)
            return
        self._heard(now)
        if not self.attached or self.position != self._reported:
            self.attached = True
            self._without_live = 0
            self._report(now)
        self.tail = max(self.tail, beat.next)
        if beat.next > self.position:
            # Same socket, same order: what this heartbeat speaks of was sent before it, and did not arrive.
            self._ask(now)

    def _report(self, now: float) -> None:
        """Tell the publisher that we are there and how far we are."""
        self._alive_at = now + self.settings.alive_s
        if self.attached:
            self._reported = self.position
            self.outbox.append(messages.encode(messages.Ready(self.epoch, max(0, self.position))))

    def _accept(self, frame: Frame) -> None:
        """The frame begins at the position: hand it on, and move the position."""
        wanted = self._filter
        matching = sum([count for topic, _, count in frame.header.topics if wanted(topic)])
        self.ready.append(Batch(frame, matching, wanted))
        self.position = frame.next_offset
        self._last = frame
        if self._owed:
            self._pay()

    def _check(self, frame: Frame) -> None:
        """Look at what the application will decode, so that a bad frame is our problem and not its."""
        if self._everything or any(self._filter(topic) for topic, _, _ in frame.header.topics):
            frame.check()

    def _hold(self, frame: Frame) -> None:
        if self._held and frame.first_offset < self._held[-1].next_offset:
            return  # a frame from before the newest held one: replay brings it
        if self._held and frame.first_offset != self._held[-1].next_offset:
            # What is held must be one run up to now; the older part comes by replay.
            self._counters.held_dropped += len(self._held)
            self._forget_held()
        self._held.append(frame)
        self._held_bytes += len(frame.raw)
        while self._held_bytes > self.settings.held_bytes and len(self._held) > 1:
            self._held_bytes -= len(self._held.popleft().raw)
            self._counters.held_dropped += 1

    def _splice(self) -> None:
        """Go on with held live frames where replay has reached them."""
        while self._held and self._held[0].first_offset <= self.position:
            frame = self._held.popleft()
            self._held_bytes -= len(frame.raw)
            if frame.first_offset == self.position:
                self._counters.live_frames += 1
                self._accept(frame)
            elif frame.next_offset > self.position:
                self._accept(frame.slice(self.position, frame.next_offset))
            else:
                self._counters.overlap_frames += 1

    # ---- repair ----------------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Ask for what is missing, unless that has been done or nothing is."""
        if self._state_end >= 0:
            end = self._state_end  # what is held comes after it
        else:
            end = self._held[0].first_offset if self._held else self.tail
        if self._asked_until is not None or self.position >= end or self.state is not State.FOLLOWING:
            return
        if not self.can_replay:
            self._counters.gaps += 1
            self._give_up(self.position, end, Reason.OVERFLOW_SENDER)
            self._splice()
            return
        if self._held:
            self._counters.gaps += 1
        self._send_question(now)

    def _send_question(self, now: float, time: int = -1) -> None:
        self._asked_from = self.position
        self._request += 1
        self._late = False
        self._asked_at = now
        self._asked_until = now + self.settings.answer_timeout_s
        self._question = messages.encode(
            messages.Replay(
                self._request, self.epoch, self.position, self._chunk_bytes, time, self._state_end
            )
        )
        self.outbox.append(self._question)

    def _ask_again(self, now: float) -> None:
        """No answer: the question was lost, or the answer takes its time. The same one, so that a late answer is one.

        Heartbeats tell meanwhile whether the publisher is there; until now they were not read.
        """
        self._late = True
        self._heard(now)
        self._asked_until = now + self.settings.answer_timeout_s
        self.outbox.append(self._question)

    def _adapt(self, took_s: float) -> None:
        """Ask for as much as comes in good time: a chunk that takes seconds holds up everything else on the link."""
        if took_s < _SOON_S:
            self._chunk_bytes = min(self.settings.chunk_bytes, self._chunk_bytes * 2)
        elif took_s > _SLOW_S:
            self._chunk_bytes = max(min(_LEAST_BYTES, self.settings.chunk_bytes), self._chunk_bytes // 2)

    def _receive_chunk(self, chunk: messages.Chunk, now: float) -> None:
        if chunk.request != self._request or chunk.epoch != self.epoch or self._asked_until is None:
            return  # the answer to a question we have given up
        self._asked_until = None
        self._adapt(now - self._asked_at)
        self._heard(now)
        if chunk.tail < self._asked_from:
            if not self.at_copy:
                self._go_back(chunk, now)
            return
        self.tail = max(self.tail, chunk.tail)
        start = self.position
        reasons = [(first, after, reason_of(text)) for first, after, text in chunk.gone]
        if self._start == "snapshot" and any(
            after > start and reason is Reason.EVICTED for _, after, reason in reasons
        ):
            self._rejoin(now)  # WELCOME says as of where there is a snapshot
            return
        for raw in chunk.frames:
            try:
                frame = Frame.parse(raw)
                self._check(frame)
            except FrameError:
                self._counters.bad_messages += 1
                return
            if frame.next_offset <= self.position or frame.source != self.source:
                continue
            if frame.first_offset > self.position:
                self._lose(frame.first_offset, reasons)
            self._counters.replayed_frames += 1
            if frame.first_offset < self.position:
                frame = frame.slice(self.position, frame.next_offset)
            self._accept(frame)
        end = min(chunk.next, chunk.tail)
        if end > self.position:
            self._lose(end, reasons)
        self._splice()
        if self.position == start:
            # The journal has nothing there: whatever told us of more was wrong. The next word is a heartbeat's.
            self.tail = self.position
            self._forget_held()
        else:
            # Ask for the next chunk before this one is worked on, so that the round trip costs nothing.
            self._ask(now)

    def _go_back(self, chunk: messages.Chunk, now: float) -> None:
        """The journal has not had what we have had, or something else there: it went back, or somebody made it up.

        So it is unknown what we have had. As without a position, all there is comes, again or for the first time.
        """
        self._counters.bad_messages += 1
        self._counters.rolled_back += 1
        log.error(
            "%s: we have had offsets of %r up to %d, but its journal ends before that in the same epoch, or has "
            "other events there: it was restored from an older copy, or our cursor belongs to another journal. Going "
            "on at %d: events come again, and others may miss events that reuse offsets",
            self.address,
            self.source,
            self.position - 1,
            self._restart,
        )
        self._forget_held()
        self._void = True
        self.ready.append(EpochStarted(self.source, self.epoch, False, self._restart))
        self.tail = self.position = self._restart
        self._rejoin(now)

    def _lose(self, until: int, reasons: list[tuple[int, int, Reason]]) -> None:
        """Everything from the position up to `until` is gone."""
        for first, after, reason in reasons:
            if after > self.position and first < until:
                self._give_up(self.position, min(after, until), reason)
        self._give_up(self.position, until, Reason.UNATTRIBUTED)

    def _give_up(self, first: int, until: int, reason: Reason) -> None:
        if until <= first:
            return
        self._counters.lost += until - first
        self.ready.append(Lost(self.source, self.epoch, None, first, until - 1, reason))
        self.position = until
        self._pay()
        self.ask_sent()

    def _receive_sent(self, sent: messages.Sent) -> None:
        if sent.epoch == self.epoch and self._pages_due > 0:
            self._pages_due -= 1
            self.ready.append(sent)
            if sent.more and sent.seqs:
                self._ask_page(max(sent.seqs))
            else:
                self.unanswered = max(0, self.unanswered - 1)

    def _ask_page(self, after: str) -> None:
        self._pages_due += 1
        self.outbox.append(messages.encode(messages.SentRequest(self._filter.ranges, after)))
