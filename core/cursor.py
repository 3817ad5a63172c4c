"""A consumer's durable position per source, in one small file that is valid after `kill -9` at any instant."""

import os

import msgspec

from brokerless.core.errors import ConfigError, JournalError
from brokerless.core.runtime.crc import crc32
from brokerless.core.runtime.files import atomic_write, make_directories, remove_leftovers


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Everything of `epoch` before `offset` has been processed."""

    epoch: int
    offset: int


class Saved(msgspec.Struct, array_like=True):
    """The contents of a cursor file: positions by source, the ledger's snapshot, what else its owner keeps, mirrors."""

    positions: dict[str, Position] = {}
    ledger: bytes = b""
    extra: bytes = b""
    # Other addresses at which a source can be read, by the one that was given.
    mirrors: dict[str, list[str]] = {}


class Cursor:
    """The file at `path`; `load` when starting, `save` after the effect of events is recorded."""

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        """`sync` makes every save survive a power cut, at the price of a disk write."""
        self.path = os.fspath(path)
        self._sync = sync

    def prepare(self) -> None:
        """Make its directory. Raises ConfigError if the file could not be written there."""
        directory = os.path.dirname(self.path) or "."
        try:
            make_directories(directory, sync=self._sync)
        except OSError as error:
            raise ConfigError("cursor", f"{self.path}: {error.strerror}") from None
        if not os.access(directory, os.W_OK):
            raise ConfigError("cursor", f"{self.path} lies in a directory that cannot be written")

    def load(self) -> Saved:
        """What was saved last; empty if nothing was. Raises JournalError if the file is not a cursor."""
        try:
            remove_leftovers(self.path)
            with open(self.path, "rb") as file:
                raw = file.read()
        except FileNotFoundError:
            return Saved()
        except OSError as error:
            raise JournalError(
                self.path, f"cursor cannot be read: {error.strerror}", errno=error.errno
            ) from None
        try:
            if len(raw) < 4 or crc32(raw[4:]) != int.from_bytes(raw[:4], "little"):
                raise JournalError(self.path, "is not a cursor, or is damaged; remove it to start over")
            return msgspec.msgpack.decode(raw[4:], type=Saved)
        except msgspec.MsgspecError as error:
            raise JournalError(self.path, f"is not a cursor: {error}") from None

    def save(
        self,
        positions: dict[str, Position],
        ledger: bytes = b"",
        extra: bytes = b"",
        mirrors: dict[str, list[str]] | None = None,
    ) -> None:
        """Replace the file atomically. Raises JournalError, and then the old contents still stand."""
        body = msgspec.msgpack.encode(Saved(positions, ledger, extra, mirrors or {}))
        try:
            make_directories(os.path.dirname(self.path) or ".", sync=self._sync)
            atomic_write(self.path, crc32(body).to_bytes(4, "little") + body, sync=self._sync)
        except OSError as error:
            raise JournalError(
                self.path, f"cursor cannot be written: {error.strerror}", errno=error.errno
            ) from None
