"""A spool's remote tier as a location of the data source: driver and executors need no shared file system."""

from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from brokerless.core import Frame
from brokerless.spark_collector.source.locations import Extent, MissingRange, Replaced, offset_in
from brokerless.spark_collector.tier.object_store import open_store
from brokerless.spark_collector.tier.parts import (
    NEWEST,
    Manifest,
    PartDamaged,
    PartEntry,
    decode_part,
    manifest_key,
    part_key,
)


class RemoteLocation:
    """The tier at a URL. Picklable; connects when it is asked."""

    def __init__(self, url: str, storage_options: dict[str, str] | None = None) -> None:
        self.key = url.rstrip("/")
        self.storage_options = storage_options or {}

    def _get(self, store: Any, key: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(store, key).bytes())
        except FileNotFoundError:
            return None

    def _manifest(self, store: Any, index: int | None = None) -> Manifest | None:
        raw = self._get(store, NEWEST if index is None else manifest_key(index))
        return None if raw is None else msgspec.json.decode(raw, type=Manifest)

    def get(self, key: str) -> bytes | None:
        """An object of the tier; None if there is none."""
        return self._get(open_store(self.key, self.storage_options), key)

    def extent(self) -> Extent | None:
        """What was uploaded; None while the store or the tier is not there."""
        from obstore.exceptions import BaseError

        try:
            return self.extent_or_raise()
        except BaseError:
            return None

    def extent_or_raise(self) -> Extent | None:
        """What was uploaded; None if there is no tier. Raises what the store's library raises."""
        newest = self._manifest(open_store(self.key, self.storage_options))
        if newest is None:
            return None
        return Extent(newest.id, newest.oldest, newest.next, list(newest.epochs), newest.source)

    def _parts(self, store: Any, first: int, stop: int) -> Iterator[PartEntry]:
        """The parts that hold `[first, stop)`, in order; only the manifests that name them are read."""
        newest = self._manifest(store)
        if newest is None:
            return
        manifests = [newest]
        while manifests[0].index > 0 and manifests[0].parts and manifests[0].parts[0].first > first:
            before = self._manifest(store, manifests[0].index - 1)
            if before is None:
                break
            manifests.insert(0, before)
        parts = [part for manifest in manifests for part in manifest.parts]
        at = max(0, bisect_right(parts, first, key=lambda part: part.first) - 1)
        for part in parts[at:]:
            if part.first >= stop:
                return
            if part.next > first:
                yield part

    def sizes(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """`(offset after it, events, bytes)` of each part in `[first, stop)`."""
        for part in self._parts(open_store(self.key, self.storage_options), first, stop):
            yield min(part.next, stop), part.events, part.bytes

    def offset_at(self, time_us: int, extent: Extent) -> int:
        """The first offset at or after a time: by the parts' times, then in one part."""
        store = open_store(self.key, self.storage_options)
        before = [p for p in self._parts(store, extent.oldest, extent.next) if p.time < time_us]
        if not before:
            return extent.oldest
        return offset_in(self.frames(before[-1].first, before[-1].next), time_us, before[-1].next)

    def frames(
        self, first: int, stop: int, *, id: str = "", epoch: int = 0
    ) -> Iterator[Frame | MissingRange]:
        """Read the parts; those that a lifecycle rule of the store removed are reported as evicted."""
        store = open_store(self.key, self.storage_options)
        newest = self._manifest(store)
        if id and newest is not None and newest.id != id:
            raise Replaced(self.key)
        at = first
        parts = list(self._parts(store, first, stop))
        for part, raw in self._fetched(store, parts):
            if part.first > at:
                yield MissingRange(at, part.first - 1, "evicted")
            at = max(at, part.first)
            low, high = at, min(part.next, stop)
            at = high
            if raw is None:
                yield MissingRange(low, high - 1, "evicted")
                continue
            try:
                _, frames = decode_part(f"{self.key}/{part_key(part.number)}", raw)
            except PartDamaged:
                yield MissingRange(low, high - 1, "corrupt")
                continue
            for frame in frames:
                if frame.first_offset < stop and frame.next_offset > first:
                    yield frame
        if at < stop:
            yield MissingRange(at, stop - 1, "evicted")

    def _fetched(self, store: Any, parts: list[PartEntry]) -> Iterator[tuple[PartEntry, bytes | None]]:
        """The parts with their objects; while one is used, the next one is on its way."""
        with ThreadPoolExecutor(1) as pool:
            ahead: list[Future[bytes | None]] = []
            for n, part in enumerate(parts):
                while len(ahead) < 2 and n + len(ahead) < len(parts):
                    ahead.append(pool.submit(self._get, store, part_key(parts[n + len(ahead)].number)))
                yield part, ahead.pop(0).result()

    def corruption_error(self, missing: MissingRange) -> Exception:
        """The error that names the damaged part."""
        store = open_store(self.key, self.storage_options)
        number = next((p.number for p in self._parts(store, missing.first, missing.last + 1)), 0)
        return PartDamaged(
            f"{self.key}/{part_key(number)}",
            f"is damaged: offsets {missing.first} to {missing.last} cannot be read; "
            "restore the object, or set onCorrupt=quarantine to go on without them",
        )


def find_tiers(pattern: str, storage_options: dict[str, str] | None = None) -> list[RemoteLocation]:
    """The tiers below a URL that ends with `/*`: one level is listed. None of them while the store is away."""
    import obstore
    from obstore.exceptions import BaseError

    base = pattern.removesuffix("/*")
    try:
        found = obstore.list_with_delimiter(open_store(base, storage_options))["common_prefixes"]
    except BaseError:
        return []
    tiers = [RemoteLocation(f"{base}/{name.strip('/')}", storage_options) for name in sorted(found)]
    return [tier for tier in tiers if tier.extent() is not None]
