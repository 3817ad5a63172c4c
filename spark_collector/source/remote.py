"""A spool's remote tier as a location of the data source: driver and executors need no shared file system."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from brokerless.core import Frame
from brokerless.spark_collector.source.locations import Extent, Location, MissingRange, Replaced, offset_in
from brokerless.spark_collector.tier.object_store import cause, open_store
from brokerless.spark_collector.tier.parts import (
    NEWEST,
    Manifest,
    PartDamaged,
    PartEntry,
    decode_manifest,
    decode_part,
    manifest_key,
    part_key,
)

# Tiers or publishers that are asked at the same time.
MAX_ASKED_AT_ONCE = 32
# Parts that a task fetches while it decodes one: a store far away answers late, and each holds 8 MiB.
READ_AHEAD = 2


class RemoteLocation:
    """The tier at a URL. Picklable; connects when it is asked."""

    def __init__(self, url: str, storage_options: dict[str, str] | None = None) -> None:
        self.key = url.rstrip("/")
        self.storage_options = storage_options or {}
        self._opened: Any = None
        self.problem = ""  # why the store did not answer the last time

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @property
    def _store(self) -> Any:
        """The store's client, kept with its connections."""
        if self._opened is None:
            self._opened = open_store(self.key, self.storage_options)
        return self._opened

    def _get(self, store: Any, key: str) -> Any:
        """Its bytes, where obstore has them; None if there is no such object."""
        import obstore

        try:
            return obstore.get(store, key).bytes()
        except FileNotFoundError:
            return None

    def _manifest(self, store: Any, index: int | None = None) -> Manifest | None:
        name = NEWEST if index is None else manifest_key(index)
        raw = self._get(store, name)
        return None if raw is None else decode_manifest(f"{self.key}/{name}", raw)

    def get(self, key: str) -> bytes | None:
        """An object of the tier; None if there is none."""
        found = self._get(self._store, key)
        return None if found is None else bytes(found)

    def extent(self) -> Extent | None:
        """What was uploaded; None while the store or the tier is not there, and `problem` says why."""
        from obstore.exceptions import BaseError

        try:
            found = self.extent_or_raise()
        except BaseError as error:
            self.problem = cause(error)
            return None
        self.problem = (
            "" if found is not None else f"there is no remote tier, or no such bucket (no object {NEWEST!r})"
        )
        return found

    def extent_or_raise(self) -> Extent | None:
        """What was uploaded; None if there is no tier. Raises what the store's library raises."""
        newest = self._manifest(self._store)
        if newest is None:
            return None
        return Extent(newest.id, newest.oldest, newest.next, list(newest.epochs), newest.source)

    def _parts(self, store: Any, first: int, stop: int, *, id: str = "") -> Iterator[PartEntry]:
        """The parts that hold `[first, stop)`, in order; only the manifests that name them are read.

        With `id` it must be the tier of that journal. Raises Replaced.
        """
        newest = self._manifest(store)
        if id and newest is not None and newest.id != id:
            raise Replaced(self.key)
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
        for part in self._parts(self._store, first, stop):
            yield min(part.next, stop), part.events, part.bytes

    def offset_at(self, time_us: int, extent: Extent) -> int:
        """The first offset at or after a time: by the parts' times, then in one part."""
        store = self._store
        before = [p for p in self._parts(store, extent.oldest, extent.next) if p.time < time_us]
        if not before:
            return extent.oldest
        return offset_in(self.frames(before[-1].first, before[-1].next), time_us, before[-1].next)

    def objects(self, first: int, stop: int, *, id: str = "") -> Iterator[tuple[PartEntry, Any]]:
        """The parts that hold `[first, stop)` with their objects, not checked; None where one was removed.

        While one is used, the next ones are on their way.
        """
        store = self._store
        parts = list(self._parts(store, first, stop, id=id))
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            ahead: list[Future[Any]] = []
            for n, part in enumerate(parts):
                while len(ahead) <= READ_AHEAD and n + len(ahead) < len(parts):
                    ahead.append(pool.submit(self._get, store, part_key(parts[n + len(ahead)].number)))
                yield part, ahead.pop(0).result()

    def frames(
        self, first: int, stop: int, *, id: str = "", epoch: int = 0
    ) -> Iterator[Frame | MissingRange]:
        """Read the parts; those that a lifecycle rule of the store removed are reported as evicted."""
        at = first
        for part, raw in self.objects(first, stop, id=id):
            if part.first > at:
                yield MissingRange(at, part.first - 1, "evicted")
            at = max(at, part.first)
            low, high = at, min(part.next, stop)
            at = high
            if raw is None:
                yield MissingRange(low, high - 1, "evicted")
                continue
            try:
                _, frames = decode_part(f"{self.key}/{part_key(part.number)}", bytes(raw))
            except PartDamaged:
                yield MissingRange(low, high - 1, "corrupt")
                continue
            for frame in frames:
                if frame.first_offset < stop and frame.next_offset > first:
                    yield frame
        if at < stop:
            yield MissingRange(at, stop - 1, "evicted")

    def corruption_error(self, missing: MissingRange) -> Exception:
        """The error that names the damaged part."""
        store = self._store
        number = next((p.number for p in self._parts(store, missing.first, missing.last + 1)), 0)
        return PartDamaged(
            f"{self.key}/{part_key(number)}",
            f"is damaged: offsets {missing.first} to {missing.last} cannot be read; "
            "restore the object, or set onCorrupt=quarantine to go on without them",
        )


def _below(pattern: str, storage_options: dict[str, str] | None) -> list[str]:
    import obstore

    base = pattern.removesuffix("/*")
    found = obstore.list_with_delimiter(open_store(base, storage_options))["common_prefixes"]
    return [f"{base}/{name.strip('/')}" for name in sorted(found)]


def why_no_tier(pattern: str, storage_options: dict[str, str]) -> str:
    """Why `find_tiers` found none."""
    from obstore.exceptions import BaseError

    try:
        below = _below(pattern, storage_options)
    except BaseError as error:
        return cause(error)
    return f"none of the {len(below)} folders there is a remote tier (none has an object {NEWEST!r})"


def find_tiers(
    pattern: str,
    storage_options: dict[str, str] | None = None,
    before: Mapping[str, Location] = MappingProxyType({}),
) -> list[Location]:
    """The tiers below a URL that ends with `/*`: one level is listed. None of them while the store is away.

    Those among `before` are known to be tiers; the others are asked, at the same time.
    """
    from obstore.exceptions import BaseError

    try:
        below = [RemoteLocation(url, storage_options) for url in _below(pattern, storage_options)]
    except BaseError:
        return []
    new = [tier for tier in below if tier.key not in before]
    if new:
        with ThreadPoolExecutor(min(len(new), MAX_ASKED_AT_ONCE)) as pool:
            there = pool.map(lambda tier: tier.extent() is not None, new)
            none = {tier.key for tier, is_there in zip(new, there, strict=True) if not is_there}
        below = [tier for tier in below if tier.key not in none]
    return [before.get(tier.key, tier) for tier in below]
