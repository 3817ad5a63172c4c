"""What a request server sends again, out of a journal: packets for a request, or that it is gone.

No sockets. The journal is read through `read`, `oldest`, `next` and `epoch`, so it may be a MemoryJournal or
DiskJournal of this process, or a JournalReader on one of another process.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from brokerless.core import Chunk, Frame
from brokerless.core.errors import Evicted, JournalError
from brokerless.multicast.wire.auth import Signer
from brokerless.multicast.wire.moldudp64 import HEADER_BYTES, MAX_SEQUENCE, Gone, gone, wire_session
from brokerless.multicast.wire.packing import frame_blocks, pack_blocks, pack_frame
from brokerless.multicast.wire.pure import TRAILER_BYTES
from brokerless.multicast.wire.status import SHARED_BYTES, Status, shared_repair

# Requests come in clusters: one frame usually answers the next request too. 64 frames are at most 64 MB
# (a frame holds about 1 MB at most), and a frame of one event costs nothing.
CACHED_FRAMES = 64
# The smallest block there is: its length, the fixed part of a message, a topic of one byte.
_MIN_BLOCK_BYTES = 2 + 30 + 1


class Readable(Protocol):
    """What is needed of a journal."""

    @property
    def source(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def oldest(self) -> int: ...
    @property
    def next(self) -> int: ...
    def read(self, offset: int, *, max_bytes: int = ...) -> Chunk: ...


class Retransmitter:
    """Makes answers for one session out of one journal."""

    def __init__(
        self,
        journal: Readable,
        name: str,
        *,
        sign: Signer | None = None,
        sign_shared: Signer | None = None,
    ) -> None:
        """`sign` signs answers to one subscriber, `sign_shared` those to the whole group."""
        self._journal = journal
        self._name = name
        self._sign = sign
        self._sign_shared = sign_shared
        self._cache: OrderedDict[int, Frame] = OrderedDict()
        self._epoch = -1
        self._session = b""

    @property
    def session(self) -> bytes:
        """The wire session that can be asked for: that of the journal's newest epoch."""
        epoch = self._journal.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._session = wire_session(self._name, epoch)
            self._cache.clear()
        return self._session

    @property
    def next_sequence(self) -> int:
        """One more than the newest that can be had."""
        return self._journal.next + 1

    def answer(
        self, first: int, count: int, limit: int, *, shared: bool = False
    ) -> tuple[bytes, int] | Gone | None:
        """One packet of at most `limit` bytes (or one message), and how many messages it holds.

        `shared`: it goes to the whole group, and says so. `Gone` if the journal no longer has `first`; None if it does
        not have it yet.
        """
        offset, asked = first - 1, count
        limit -= SHARED_BYTES if shared else 0
        if not 0 <= offset < MAX_SEQUENCE - 1:
            return None
        room = limit - HEADER_BYTES - (TRAILER_BYTES if self._sign else 0)
        blocks: list[bytes] = []
        try:
            while count > 0 and room > 0:
                frame = self._frame(offset)
                if frame is None:
                    break
                lo = offset - frame.first_offset
                hi = min(frame.count, lo + count, lo + room // _MIN_BLOCK_BYTES + 1)
                for block in frame_blocks(frame, self._name, lo, hi):
                    if blocks and len(block) > room:
                        room = 0
                        break
                    blocks.append(block)
                    room -= len(block)
                    offset += 1
                    count -= 1
        except Evicted:
            if not blocks:
                return self.gone(first)
        except _Corrupt as error:
            if not blocks:
                return self.gone(first, error.last + 2)
        if not blocks:
            return None
        if not shared:
            return next(pack_blocks(self.session, first, blocks, limit, self._sign)).buffer, len(blocks)
        packet = next(pack_blocks(self.session, first, blocks, limit)).buffer + shared_repair(asked)
        return packet + self._sign_shared(packet) if self._sign_shared else packet, len(blocks)

    def stream(self, first: int, count: int, packet_bytes: int) -> Iterator[tuple[bytes, int] | Gone]:
        """Packets for a whole range, as far as the journal has it: what goes over TCP.

        After a Gone the stream goes on at what the journal still has, if that is within the range.
        """
        offset, stop = first - 1, first - 1 + count
        session = self.session
        while offset < stop:
            try:
                frame = self._frame(offset)
            except (Evicted, _Corrupt) as error:
                answer = self.gone(offset + 1, error.last + 2 if isinstance(error, _Corrupt) else None)
                yield answer
                offset = max(offset + 1, answer.oldest - 1)
                continue
            if frame is None:
                return
            lo = offset - frame.first_offset
            hi = min(frame.count, lo + stop - offset)
            batches = pack_frame(session, self._name, frame, packet_bytes, self._sign, lo=lo, hi=hi)
            for batch in batches:
                for packet in batch.split():
                    yield bytes(packet), int.from_bytes(packet[18:20], "big")
            offset = frame.first_offset + hi

    def gone(self, wanted: int, oldest: int | None = None) -> Gone:
        """That `wanted` is gone. `oldest` is given when only a part in the middle is (a corrupt segment)."""
        journal = self._journal
        following = journal.next + 1
        kept = min(following, max(wanted + 1, oldest or journal.oldest + 1))
        first = wanted if oldest else 1
        session = self.session
        return Gone(session, first, min(self._base(), kept), kept, following, self._epoch, journal.source)

    def status(self, cookie: int, requester: int, receivers: int) -> Status:
        """What can be had now."""
        journal, session = self._journal, self.session
        following = journal.next + 1
        oldest = min(following, journal.oldest + 1)
        base = max(1, min(self._base(), oldest))
        return Status(
            session, following, cookie, requester, base, oldest, self._epoch, receivers, journal.source
        )

    def packet(self, answer: Gone) -> bytes:
        """A Gone as it is sent."""
        raw = gone(answer)
        return raw + self._sign(raw) if self._sign else raw

    def _base(self) -> int:
        """The first sequence of the newest epoch; a journal that was cut begins a new one in the middle."""
        epochs = getattr(self._journal, "epochs", None)
        if epochs is None:
            meta = getattr(self._journal, "meta", None)
            known = meta.epochs if meta is not None else []
        else:
            known = epochs()
        return known[-1][1] + 1 if known else 1

    def _frame(self, offset: int) -> Frame | None:
        """The frame with that offset; None if it is not written yet. Raises Evicted or _Corrupt."""
        if offset < self._journal.oldest:
            raise Evicted(offset, self._journal.oldest)
        for first, frame in reversed(self._cache.items()):
            if first <= offset < frame.next_offset:
                self._cache.move_to_end(first)
                return frame
        if offset >= self._journal.next:
            return None
        chunk = self._journal.read(offset, max_bytes=1)
        for a, b in chunk.gone:
            if a <= offset <= b:
                raise _Corrupt(b)
        for frame in chunk.frames:
            if frame.first_offset <= offset < frame.next_offset:
                self._cache[frame.first_offset] = frame
                if len(self._cache) > CACHED_FRAMES:
                    self._cache.popitem(last=False)
                return frame
        return None


class _Corrupt(JournalError):
    """The offsets up to `last` cannot be read."""

    def __init__(self, last: int) -> None:
        super().__init__("", f"offsets up to {last} are corrupt")
        self.last = last
