"""Copies a journal into a remote tier, part by part, while it is written.

**The journal is faster than the store**: the journal keeps what was not uploaded, up to its retention, and then refuses
to append, so producers hold it. **The store is away**: the same, with retries. **The process is killed**: the next one
goes on after the last part; a part that was written and not yet listed is recognised. **The power fails**: the journal
may go on at offsets that were uploaded with other events; those that it gives now come after the tier's end.
"""

import logging
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec

from brokerless.core import Backoff, Frame, JournalReader, encode_frame
from brokerless.core.errors import UsageError
from brokerless.spark_collector.collector.seen import SeenOffsets
from brokerless.spark_collector.collector.spool import as_items
from brokerless.spark_collector.source.locations import MissingRange
from brokerless.spark_collector.source.remote import RemoteLocation
from brokerless.spark_collector.source.schema import KIND_EVENT
from brokerless.spark_collector.source.selection import frame_times
from brokerless.spark_collector.tier.object_store import open_store
from brokerless.spark_collector.tier.parts import (
    NEWEST,
    PARTS_PER_MANIFEST,
    STATE,
    Manifest,
    PartEntry,
    PartHeader,
    TierState,
    decode_header,
    decode_manifest,
    encode_part,
    manifest_key,
    part_key,
)

log = logging.getLogger(__name__)
RETRY = Backoff(first_s=0.5, limit_s=30.0)
# How often a waiting uploader looks whether it should stop.
_WAIT_S = 0.2
# And one that waits for the disk.
_SYNC_WAIT_S = 0.02
# A machine that takes over reads so many seconds of parts again.
_STATE_EVERY_S = 5.0
_READ_BYTES = 1024 * 1024


class Fenced(UsageError):
    """Another process writes this remote tier; `url` names it."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url


class UploadCounters(Protocol):
    """What an uploader counts."""

    uploaded: int
    upload_failures: int


class TierUploader:
    """Follows the journal at `path` into the tier at `url`, in a thread between `start` and `stop`.

    `close_after_s`: a part is closed after this time, even if it is small (how far the tier may be behind).
    `part_bytes`: and when it is so large. `on_uploaded(offset)`: everything before that offset is in the tier.
    `snapshot(id)`: the journal's end, and what was seen up to it, kept in the tier for a machine that takes over.
    `take_over`: go on with the tier of another journal, after its last part; whoever wrote it is refused from then on.
    `durable()`: only what lies before this offset is uploaded (default: all that is there).
    """

    def __init__(
        self,
        path: str,
        url: str,
        *,
        counters: UploadCounters,
        close_after_s: float = 5.0,
        part_bytes: int = 8 * 1024 * 1024,
        storage_options: dict[str, str] | None = None,
        on_uploaded: Callable[[int], None] | None = None,
        snapshot: Callable[[str], tuple[int, bytes]] | None = None,
        take_over: bool = False,
        durable: Callable[[], int] | None = None,
    ) -> None:
        self.url = url
        self.path = path
        self.counters = counters
        self.error = ""
        self.fenced = False
        self._close_after_s = close_after_s
        self._part_bytes = part_bytes
        self._on_uploaded = on_uploaded
        self._snapshot = snapshot
        self._take_over = take_over
        self._durable = durable
        self._pending: tuple[int, bytes] | None = None
        self._state_at = 0.0
        self._writer = uuid.uuid4().hex
        self._store = open_store(url, storage_options, make=True)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._manifest: Manifest | None = None
        self.uploaded = -1  # the offset up to which everything is in the tier

    def start(self) -> None:
        """Begin uploading; the store need not be reachable yet."""
        self._thread = threading.Thread(target=self._run, name=f"upload {self.url}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Upload what is there, if the store answers, and end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        attempt = 0
        while True:
            try:
                with JournalReader(self.path) as reader:
                    if self._manifest is None:
                        self._manifest = self._resume(reader)
                    self._follow(reader)
                return
            except Fenced as error:
                self.error, self.fenced = str(error), True
                log.error("%s; nothing is uploaded any more", error)
                return
            except Exception as error:  # the store's library has errors of its own
                self.error = str(error)
                self.counters.upload_failures += 1
                log.warning("upload to %s failed: %s", self.url, error)
                attempt += 1
                self._manifest = None  # what was written is looked up again
                if self._stopping.wait(RETRY.delay_s(attempt, random.random)):
                    return

    # ---- beginning -------------------------------------------------------------------------------------

    def _resume(self, reader: JournalReader) -> Manifest:
        """The newest manifest, with a part that was written after it; a new one if the tier is empty."""
        raw = self._get(NEWEST)
        if raw is None:
            meta = reader.meta
            return Manifest(meta.salt, meta.source, list(meta.epochs), 0, reader.oldest)
        manifest = decode_manifest(f"{self.url}/{NEWEST}", raw)
        if manifest.local_id != reader.meta.salt and not self._take_over:
            raise Fenced(
                self.url,
                f"this is the tier of another spool (of {manifest.source}); use another URL, or take_over "
                "if the machine that wrote it is gone",
            )
        while (head := self._get(part_key(self._next_number(manifest)))) is not None:
            header, at = decode_header(part_key(self._next_number(manifest)), head)
            if header.id != manifest.id or header.first != manifest.next:
                raise Fenced(self.url, "a part was written by another spool")
            manifest = self._with(manifest, header, len(head) - at)
        if manifest.local_id == reader.meta.salt:
            known = {epoch for epoch, _ in manifest.epochs}
            cut = min(
                (first for epoch, first in reader.meta.epochs if epoch not in known), default=reader.next
            )
            if cut + manifest.shift >= manifest.next:
                return manifest
            log.warning(
                "%s: the spool was cut back to offset %d; it goes on after the tier's end", self.url, cut
            )
        else:
            cut = min(reader.oldest, reader.next)
            log.warning("%s: taken over from another spool after offset %d", self.url, manifest.next)
        return msgspec.structs.replace(
            manifest,
            local=reader.meta.salt,
            shift=manifest.next - cut,
            joined=manifest.next,
            inherited=manifest.epochs,
        )

    def _get(self, key: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(self._store, key).bytes())
        except FileNotFoundError:
            return None

    # ---- following -------------------------------------------------------------------------------------

    def _follow(self, reader: JournalReader) -> None:
        assert self._manifest is not None
        self._done(self._manifest.next - self._manifest.shift)
        while True:
            first = max(self._manifest.next - self._manifest.shift, min(reader.oldest, reader.next))
            frames = self._gather(reader, first)
            if frames:
                self._upload(reader, frames)
                self.error = ""
            self._save_state()
            if not frames and self._stopping.is_set():
                return

    def _save_state(self) -> None:
        """Keep what was seen, once everything of it is in the tier; every few seconds, and at the end."""
        import obstore

        if self._snapshot is None or self._manifest is None:
            return
        now = time.monotonic()
        if self._pending is None and (now - self._state_at >= _STATE_EVERY_S or self._stopping.is_set()):
            self._pending = self._snapshot(self._manifest.id)
        if self._pending is not None and self._pending[0] <= self.uploaded:
            state = TierState(self._pending[0] + self._manifest.shift, self._pending[1])
            obstore.put(self._store, STATE, msgspec.msgpack.encode(state))
            self._pending, self._state_at = None, now

    def _gather(self, reader: JournalReader, at: int) -> list[Frame]:
        """The frames of the next part: when it is full, or old enough."""
        frames: list[Frame] = []
        size = 0
        close_at = 0.0
        while size < self._part_bytes:
            stop = reader.next if self._durable is None else min(reader.next, self._durable())
            if stop <= at:
                if self._stopping.is_set() or (frames and time.monotonic() >= close_at):
                    return frames
                if reader.next <= at:
                    reader.wait(at, _WAIT_S)
                else:
                    self._stopping.wait(_SYNC_WAIT_S)
                continue
            chunk = reader.read(at, max_bytes=min(_READ_BYTES, self._part_bytes - size))
            if not frames:
                close_at = time.monotonic() + self._close_after_s
            new = [frame for frame in chunk.frames if frame.next_offset <= stop]
            frames += new
            size += sum(len(frame.raw) for frame in new)
            after = chunk.next if len(new) == len(chunk.frames) else max([at, *(f.next_offset for f in new)])
            if after <= at:
                return frames
            at = after
        return frames

    def _upload(self, reader: JournalReader, frames: list[Frame]) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        assert self._manifest is not None
        shift = self._manifest.shift
        manifest = msgspec.structs.replace(self._manifest, epochs=_epochs(self._manifest, reader.meta.epochs))
        if shift:
            frames = [_shifted(frame, shift) for frame in frames]
        events = sum(
            item.frame.count
            for frame in frames
            for item in as_items(frame, frame.first_offset, frame.next_offset)
            if item.kind == KIND_EVENT
        )
        number = self._next_number(manifest)
        header = PartHeader(
            number,
            manifest.id,
            self._writer,
            frames[0].first_offset,
            frames[-1].next_offset,
            events,
            frame_times(frames[0])[0],
        )
        size = sum(len(frame.raw) for frame in frames)
        try:
            obstore.put(self._store, part_key(number), encode_part(header, frames), mode="create")
        except AlreadyExistsError:
            raw = self._get(part_key(number)) or b""
            there, at = decode_header(part_key(number), raw)
            if there.writer != self._writer:
                raise Fenced(
                    self.url, "another process writes this tier: one spool has one collector"
                ) from None
            header, size = there, len(raw) - at  # ours after all: the answer to an earlier attempt was lost
        manifest = self._with(manifest, header, size)
        raw = msgspec.json.encode(manifest)
        if len(manifest.parts) == PARTS_PER_MANIFEST:
            obstore.put(self._store, manifest_key(manifest.index), raw)
        obstore.put(self._store, NEWEST, raw)
        self._manifest = manifest
        self.counters.uploaded += header.events
        self._done(manifest.next - manifest.shift)

    def _done(self, offset: int) -> None:
        self.uploaded = offset
        if self._on_uploaded is not None:
            self._on_uploaded(offset)

    @staticmethod
    def _next_number(manifest: Manifest) -> int:
        if manifest.parts:
            return manifest.parts[-1].number + 1
        return manifest.index * PARTS_PER_MANIFEST

    @staticmethod
    def _with(manifest: Manifest, header: PartHeader, size: int) -> Manifest:
        """The manifest that lists this part, too: the next one if this one is full."""
        entry = PartEntry(header.number, header.first, header.next, header.events, header.time, size)
        if len(manifest.parts) == PARTS_PER_MANIFEST:
            return msgspec.structs.replace(manifest, index=manifest.index + 1, parts=[entry])
        return msgspec.structs.replace(manifest, parts=[*manifest.parts, entry])


def _epochs(manifest: Manifest, local: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where the epochs begin in the tier: those from before the local journal, then its own."""
    begins = [(epoch, first + manifest.shift) for epoch, first in local]
    ends = [first for _, first in begins[1:]] + [sys.maxsize]
    own = [(e, max(first, manifest.joined)) for (e, first), end in zip(begins, ends, strict=True)
           if end > manifest.joined]  # fmt: skip
    return manifest.inherited + own


def _shifted(frame: Frame, shift: int) -> Frame:
    """The same events at later offsets."""
    columns = frame.columns()
    return encode_frame(
        frame.source,
        frame.epoch,
        frame.first_offset + shift,
        topics=[(topic, first) for topic, first, _ in frame.topics],
        topic_index=memoryview(columns.topic_index).cast("H").tolist() if columns.topic_index else None,
        times=columns.times,
        datas=columns.datas,
        content_types=frame.content_type_column(),
        keys=columns.keys or None,
        headers=columns.headers or None,
    )


def load_seen(url: str, storage_options: dict[str, str] | None = None) -> SeenOffsets | None:
    """Which events the parts of a tier hold, for a collector that goes on with it; None if there is no tier.

    Raises Fault if a part that is needed for this cannot be read, and what the store's library raises.
    """
    tier = RemoteLocation(url, storage_options)
    extent = tier.extent_or_raise()
    if extent is None:
        return None
    raw = tier.get(STATE)
    seen, at = SeenOffsets(), extent.oldest
    if raw is not None:
        state = msgspec.msgpack.decode(raw, type=TierState)
        restored = SeenOffsets.restore(state.seen, extent.id, [])
        if restored is not None:
            seen, at = restored[0], state.next
    for part in tier.frames(at, extent.next):
        if isinstance(part, MissingRange):
            if part.reason == "corrupt":
                raise tier.corruption_error(part)
            continue
        for item in as_items(part, part.first_offset, part.next_offset):
            if item.kind == KIND_EVENT:
                seen.add(item.frame)
    return seen
