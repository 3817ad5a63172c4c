"""Parquet files of a table, written by the tasks straight from Arrow.

A task writes one file for each combination of partition values, or several if there is much. What it holds in memory,
and how many files it has open, does not grow with the batch.
"""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from brokerless.core.runtime.files import sync_directory, sync_file
from brokerless.spark_collector.tier.object_store import open_store

if TYPE_CHECKING:
    import pyarrow as pa

# What readers take at once: large enough to compress well, small enough for a machine with many cores.
_GROUP_BYTES = 64 << 20
# Rows of all partitions that wait for their group to be full.
_HELD_BYTES = 256 << 20
# A file in an object store is written from memory.
_FILE_BYTES = 128 << 20
# Files that grow at the same time.
_MOST_OPEN = 16
# Texts repeat, and are written once each; other columns seldom do, and looking for it takes longer than writing.
_TEXT = ("string", "large_string")

Key = tuple[str | None, ...]


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that a task wrote: its path within the table, and the values of its partition columns."""

    path: str
    size: int
    rows: int
    values: dict[str, str | None]


class Target(msgspec.Struct, frozen=True):
    """Where and how a task writes; goes to the executors."""

    path: str
    local: bool
    partition_by: tuple[str, ...]
    storage_options: dict[str, str]

    def size(self, name: str) -> int:
        """How large a file is for whoever asks, -1 if there is none."""
        if self.local:
            with contextlib.suppress(OSError):
                return os.path.getsize(os.path.join(self.path, name))
            return -1
        import obstore

        try:
            return int(obstore.head(open_store(self.path, self.storage_options), name)["size"])
        except FileNotFoundError:
            return -1


class _File:
    """A Parquet file that grows."""

    def __init__(self, target: Target, name: str, schema: "pa.Schema") -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._target, self.name, self.rows = target, name, 0
        self._path = os.path.join(target.path, name) if target.local else ""
        self._out: Any = open(self._path, "xb") if target.local else pa.BufferOutputStream()  # noqa: SIM115
        self._writer = pq.ParquetWriter(
            self._out, schema, compression="zstd", use_dictionary=list(_repeating(schema))
        )

    @property
    def bytes(self) -> int:
        return int(self._out.tell())

    def write(self, rows: "pa.Table") -> None:
        self._writer.write_table(rows)
        self.rows += rows.num_rows

    def close(self) -> int:
        """Complete it, so that it survives a power cut; its size."""
        self._writer.close()
        if self._target.local:
            self._out.close()
            sync_file(self._path)
            return os.path.getsize(self._path)
        import obstore

        data = self._out.getvalue()
        obstore.put(open_store(self._target.path, self._target.storage_options), self.name, data.to_pybytes())
        return int(data.size)


def _repeating(schema: "pa.Schema") -> Iterator[str]:
    """The leaves of text, by the names that Parquet has for them."""
    import pyarrow as pa

    for field in leaves(schema):
        if pa.types.is_map(field.type):
            yield from (f"{field.name}.key_value.{part}" for part in ("key", "value"))
        elif str(field.type) in _TEXT:
            yield field.name


def write_files(
    batches: Iterator["pa.RecordBatch"], schema: "pa.Schema", target: Target, folder: str
) -> Iterator[WrittenFile]:
    """Write the rows of one task below `folder`; the files are complete, and synced in a directory."""
    writer = _Writer(schema, target, folder)
    if target.local:
        os.makedirs(os.path.join(target.path, folder), exist_ok=True)
    for batch in batches:
        yield from writer.add(batch)
    yield from writer.end()
    if target.local:
        for directory in (folder, ""):
            sync_directory(os.path.join(target.path, directory))


class _Writer:
    """The rows of one task, by the values of the partition columns."""

    def __init__(self, schema: "pa.Schema", target: Target, folder: str) -> None:
        self._schema, self._target, self._folder = schema, target, folder
        self._held: dict[Key, list[pa.Table]] = {}
        self._bytes: dict[Key, int] = {}
        self._open: dict[Key, _File] = {}  # those that were written longest ago first

    def add(self, batch: "pa.RecordBatch") -> Iterator[WrittenFile]:
        import pyarrow as pa

        rows = pa.table(batch).cast(self._schema)
        for key, part in self._divide(rows):
            self._held.setdefault(key, []).append(part)
            self._bytes[key] = self._bytes.get(key, 0) + part.nbytes
            if self._bytes[key] >= _GROUP_BYTES:
                yield from self._flush(key)
        while sum(self._bytes.values()) >= _HELD_BYTES:
            yield from self._flush(max(self._bytes, key=self._bytes.__getitem__))

    def _divide(self, rows: "pa.Table") -> Iterator[tuple[Key, "pa.Table"]]:
        """The rows with each combination of values."""
        import pyarrow.compute as pc

        names = self._target.partition_by
        if not rows.num_rows:
            return
        if not names:
            yield (), rows
            return
        found = rows.select(names).group_by(list(names)).aggregate([]).to_pylist()
        for values in found:
            part = rows
            for name in names if len(found) > 1 else ():
                column, value = part[name], values[name]
                part = part.filter(pc.is_null(column) if value is None else pc.equal(column, value))
            yield tuple(text(values[name]) for name in names), part

    def _flush(self, key: Key) -> Iterator[WrittenFile]:
        import pyarrow as pa

        rows = pa.concat_tables(self._held.pop(key))
        del self._bytes[key]
        file = self._open.pop(key, None)
        if file is None:
            named = hashlib.sha1(repr(key).encode()).hexdigest()[:16]  # noqa: S324  # whatever the values are
            file = _File(self._target, f"{self._folder}/{named}-{uuid.uuid4().hex}.parquet", self._schema)
        file.write(rows)
        self._open[key] = file
        if file.bytes >= _FILE_BYTES:
            yield self._close(key)
        elif len(self._open) > _MOST_OPEN:
            yield self._close(next(iter(self._open)))

    def _close(self, key: Key) -> WrittenFile:
        file = self._open.pop(key)
        values = dict(zip(self._target.partition_by, key, strict=True))
        return WrittenFile(file.name, file.close(), file.rows, values)

    def end(self) -> Iterator[WrittenFile]:
        """What is left."""
        for key in list(self._held):
            yield from self._flush(key)
        for key in list(self._open):
            yield self._close(key)


def text(value: Any) -> str | None:
    """A partition value as Delta's log has it."""
    if value is None:
        return None
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def leaves(schema: "pa.Schema") -> Iterator[Any]:
    """All fields, those of structs with the names on the way to them."""
    import pyarrow as pa

    for field in schema:
        if pa.types.is_struct(field.type):
            for inner in leaves(pa.schema(list(field.type))):
                yield inner.with_name(f"{field.name}.{inner.name}")
        else:
            yield field
