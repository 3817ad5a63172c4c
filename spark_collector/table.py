"""A folder of Parquet files to which batches are added exactly once, whatever is killed when.

Any Parquet reader can read the folder: a file appears in it by one atomic rename, after the commit that it
belongs to was decided, and never twice. Readers that want a consistent snapshot while a writer or a
compaction is at work use `files()`.

    <path>/date=2026-01-31/topic=orders/00000012-0000.parquet
    <path>/_brokerless/log/00000012.json      commit 12: files added and removed, last batch of each query
    <path>/_brokerless/staging/…              files of commits that are not decided yet

Creating `log/N.json` with a hard link is the moment of commit: it fails if N exists, so two writers cannot
both be N. The log's names are dense and its newest entry is found by probing, never by listing. Every
`CHECKPOINT_EVERY` commits the entry carries the whole list of files, so that reading it stays cheap.
Needs a file system with rename and hard links (local disk, NFS); for object stores use the Delta sink.
"""

import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

import msgspec

from brokerless.core.errors import Fault, UsageError

# A reader opens at most so many small files; every so many commits the whole list is written once.
CHECKPOINT_EVERY = 50
# Two writers of one table (a job and a compaction) may collide on a version now and then.
COMMIT_ATTEMPTS = 50


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of the table: `path` relative to it.

    `staged` where it lies until the commit has been carried out.
    """

    path: str
    bytes: int
    staged: str = ""


class Commit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the log. `batches` has the last batch id of every query that ever wrote.

    `notes` are running sums of the numbers given with the commits (rows landed, rows quarantined).
    """

    version: int
    batches: dict[str, int]
    add: list[File] = []
    remove: list[str] = []
    snapshot: list[File] | None = None
    notes: dict[str, int] = {}


class TableError(Fault):
    """The table's files are not as its log says; `path` names the one."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"table file {path}: {problem}")
        self.path = path
        self.problem = problem


class Table:
    """The table at `path`; made when the first batch is committed. Not thread-safe: one object per writer."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(local_path(str(path))).absolute()
        self._own = self.path / "_brokerless"
        self._log = self._own / "log"
        self._staging = self._own / "staging"

    @property
    def checkpoint(self) -> str:
        """Where a streaming query that writes this table keeps its checkpoint.

        With the table, so that they stay together.
        """
        return str(self._own / "checkpoint")

    def exists(self) -> bool:
        """Whether anything was ever committed."""
        return self._entry(0).exists()

    def _entry(self, version: int) -> Path:
        return self._log / f"{version:08d}.json"

    def _read_entry(self, version: int) -> Commit:
        path = self._entry(version)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Commit)
        except (OSError, msgspec.DecodeError) as error:
            raise TableError(str(path), f"cannot be read: {error}") from None

    def version(self) -> int:
        """The newest commit, -1 if there is none: found by probing names, in O(log n) calls."""
        low, step = 0, 1
        while self._entry(low + step - 1).exists():
            low += step
            step *= 2
        high = low + step - 1
        while low < high:
            middle = (low + high) // 2
            if self._entry(middle).exists():
                low = middle + 1
            else:
                high = middle
        return low - 1

    def batches(self) -> dict[str, int]:
        """The last committed batch id by query."""
        newest = self.version()
        return self._read_entry(newest).batches if newest >= 0 else {}

    def files(self, version: int | None = None) -> list[File]:
        """The files of the newest (or the given) version: the exact content of the table."""
        newest = self.version() if version is None else version
        entries = []
        for v in range(newest, -1, -1):
            entries.append(self._read_entry(v))
            if entries[-1].snapshot is not None:
                break
        held: dict[str, File] = {}
        for entry in reversed(entries):
            if entry.snapshot is not None:
                held = {f.path: f for f in entry.snapshot}
            else:
                _apply(held, entry)
        return list(held.values())

    def paths(self, version: int | None = None) -> list[str]:
        """Absolute paths of the files of a version, wherever they are at this moment."""
        found = []
        for file in self.files(version):
            final = self.path / file.path
            found.append(str(final if final.exists() or not file.staged else self.path / file.staged))
        return found

    def notes(self) -> dict[str, int]:
        """The sums of the numbers that were given with the commits (rows landed, rows quarantined)."""
        newest = self.version()
        return self._read_entry(newest).notes if newest >= 0 else {}

    def stage(self) -> str:
        """A new empty place for the files of one commit; on the table's file system, so that rename works."""
        place = self._staging / uuid.uuid4().hex
        place.mkdir(parents=True)
        return str(place)

    def commit(
        self,
        staged: str,
        *,
        query: str = "",
        batch: int = -1,
        remove: Iterable[str] = (),
        notes: dict[str, int] | None = None,
    ) -> bool:
        """Add the Parquet files under `staged` and remove others, all or nothing; False if the batch was in.

        When it returns, the commit is decided and carried out. If the process dies in between, the next
        `recover()` or `commit()` carries it out.
        """
        self._log.mkdir(parents=True, exist_ok=True)
        source = Path(staged)
        found = sorted(f for f in source.rglob("*.parquet") if not f.name.startswith((".", "_")))
        removed = list(remove)
        for _ in range(COMMIT_ATTEMPTS):
            newest = self.version()
            self._finish(newest)  # each commit is carried out before the next is decided
            previous = self._read_entry(newest) if newest >= 0 else Commit(-1, {})
            batches = dict(previous.batches)
            if query and batches.get(query, -1) >= batch:
                shutil.rmtree(staged, ignore_errors=True)
                return False
            if query:
                batches[query] = batch
            if removed and not set(removed) <= {f.path for f in self.files(newest)}:
                shutil.rmtree(staged, ignore_errors=True)
                raise TableError(removed[0], "was removed by another compaction; nothing was changed")
            sums = dict(previous.notes)
            for name, value in (notes or {}).items():
                sums[name] = sums.get(name, 0) + value
            entry = self._make(newest + 1, source, found, removed, batches, sums)
            if self._publish(entry):
                self._finish(entry.version)
                shutil.rmtree(staged, ignore_errors=True)
                return True
        raise TableError(
            str(self._log), f"{COMMIT_ATTEMPTS} commits in a row were overtaken by another writer"
        )

    def _make(
        self,
        version: int,
        source: Path,
        found: list[Path],
        removed: list[str],
        batches: dict[str, int],
        notes: dict[str, int],
    ) -> Commit:
        add = []
        for n, file in enumerate(found):
            folder = file.parent.relative_to(source)
            name = f"{version:08d}-{n:04d}.parquet"
            add.append(File(str(folder / name), file.stat().st_size, str(file.relative_to(self.path))))
        entry = Commit(version, batches, add, removed, None, notes)
        if version % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            held = {f.path: f for f in self.files(version - 1)}
            _apply(held, entry)
            entry = msgspec.structs.replace(entry, snapshot=list(held.values()))
        return entry

    def _publish(self, entry: Commit) -> bool:
        """Decide the commit; False if another writer took the version."""
        aside = self._log / f".{uuid.uuid4().hex}"
        try:
            with aside.open("wb") as file:
                file.write(msgspec.json.encode(entry))
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, self._entry(entry.version))
        except FileExistsError:
            return False
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _finish(self, version: int) -> None:
        """Carry out a decided commit: idempotent, so that it can be done again after a crash."""
        if version < 0:
            return
        entry = self._read_entry(version)
        for path in entry.remove:
            (self.path / path).unlink(missing_ok=True)
        for file in entry.add:
            final = self.path / file.path
            if final.exists():
                continue
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(self.path / file.staged, final)
            except FileNotFoundError:
                if not final.exists() and self._held(file.path):
                    raise TableError(str(final), "is missing, and so is its staged file") from None

    def _held(self, path: str) -> bool:
        return any(f.path == path for f in self.files())

    def recover(self) -> None:
        """Carry out what was decided, throw away what was not: call it before a writer starts.

        Only one writer at a time may call it, because it deletes the staged files of all.
        """
        self._finish(self.version())
        shutil.rmtree(self._staging, ignore_errors=True)


def _apply(held: dict[str, File], entry: Commit) -> None:
    for path in entry.remove:
        held.pop(path, None)
    for file in entry.add:
        held[file.path] = file


def local_path(path: str) -> str:
    """The path without `file:`; other schemes are refused, because rename is not atomic there."""
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    if "://" in path:
        raise UsageError(
            f"{path}: tables need a file system with atomic rename; for object stores use --format delta"
        )
    return path
