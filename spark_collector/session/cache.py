"""Where we keep what we make once and then run: start scripts, the jar, links to Spark."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Means itself in class paths, lists and options, and in every locale.
_PLAIN = re.compile(r"[A-Za-z0-9/._+@=-]+")


def own_directories() -> Iterator[Path]:
    """Folders that can be written by us and by nobody else, the best one first; made if need be.

    The user's cache, and for a home that cannot be written one in the temporary directory. What somebody else could
    change is left out, because code is started from here, and so is a name that the JVM could misunderstand.
    """
    for base in (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"),
        Path(tempfile.gettempdir()) / f"brokerless-{os.getuid()}",
    ):
        directory = base / "brokerless"
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            ours = all(map(_ours, (base, directory)))
        except OSError:
            continue
        if ours and _PLAIN.fullmatch(str(directory)):
            yield directory


def _ours(location: Path) -> bool:
    """Also a link to it has to be: whoever made it can let it lead elsewhere."""
    found = location.stat()
    return found.st_uid == location.lstat().st_uid == os.getuid() and not found.st_mode & 0o022
