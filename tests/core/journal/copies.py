"""What a crash of a journal's process would leave: its files and its witness, as they are now."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from brokerless.core.journal import witness


@contextmanager
def crashed(journal: Path, into: Path) -> Iterator[None]:
    """Copy a journal; while the block runs, opening the copy is like opening the original after a crash."""
    salt = json.loads((journal / "meta.json").read_text())["salt"]
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(journal, into)
        shutil.copy(Path(witness._directory()) / f"{salt}.journal", directory)
        with mock.patch.object(witness, "_directory", return_value=directory):
            yield
