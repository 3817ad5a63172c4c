"""The file `meta.json` of a disk journal: whose it is, which epochs it has seen, and how it was left."""

import os

import msgspec

from brokerless.core.errors import JournalError
from brokerless.core.journal.segment import SALT_BYTES
from brokerless.core.runtime.files import atomic_write

# 2: the journal compacts. A writer that does not know would drop segments and leave the state of their keys behind.
FORMAT = 2
META = "meta.json"


class Meta(msgspec.Struct):
    """`epochs` has `(epoch, first offset)`, oldest first; `clean` tells whether the writer closed it.

    `synced` says that it also waited for the disk when closing. `instance` is new with every opening: see `witness.py`.
    """

    salt: str
    format: int = 1
    source: str = ""
    epochs: list[tuple[int, int]] = []
    boot_id: str = ""
    instance: str = ""
    clean: bool = False
    synced: bool = False
    # A copy that another writer's frames are appended to: it never begins an epoch of its own.
    replica: bool = False
    # "key": retention keeps the newest event of every key (see key_state.py).
    compact: str = ""

    @property
    def epoch(self) -> int:
        """The newest epoch, 0 if nothing was ever bound."""
        return self.epochs[-1][0] if self.epochs else 0


def load_meta(directory: str) -> Meta | None:
    """Read it; None if there is none. Raises JournalError if it cannot be used."""
    try:
        with open(os.path.join(directory, META), "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise JournalError(directory, "is a file, a journal needs a directory of its own") from None
    except OSError as error:
        raise JournalError(directory, f"cannot be read: {error.strerror}", errno=error.errno) from None
    try:
        found = msgspec.json.decode(raw)
        version = found["format"]
        if isinstance(version, int) and version > FORMAT:
            raise JournalError(
                directory,
                f"has format {version}, this software knows formats up to {FORMAT}: use a newer brokerless",
            )
        meta = msgspec.convert(found, Meta)
        if len(bytes.fromhex(meta.salt)) != SALT_BYTES:
            raise ValueError(f"the salt has not {SALT_BYTES} bytes")
        return meta
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise JournalError(directory, f"{META} is damaged: {error}") from None


def save_meta(directory: str, meta: Meta, *, sync: bool = False) -> None:
    """Replace it atomically. Raises OSError."""
    meta.format = FORMAT if meta.compact else 1
    atomic_write(os.path.join(directory, META), msgspec.json.encode(meta), sync=sync)
