"""What a crash of a journal's process would leave: its files and its witness, as they are now."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import msgspec

from brokerless.core.journal import witness


@contextmanager
def crashed(journal: Path, into: Path) -> Iterator[None]:
    """Copy a journal; while the block runs, opening the copy is like opening the original after a crash."""
    salt = json.loads((journal / "meta.json").read_text())["salt"]
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(journal, into)
        name = f"{salt}.journal"
        raw = (Path(witness._directory()) / name).read_bytes()
        # A witness names the directory that it saw: here the copy stands for the original.
        seen = msgspec.structs.replace(
            msgspec.msgpack.decode(raw[8:], type=witness.Testimony), journal=str(into.absolute())
        )
        (Path(directory) / name).write_bytes(raw[:8] + msgspec.msgpack.encode(seen))
        with mock.patch.object(witness, "_directory", return_value=directory):
            yield
