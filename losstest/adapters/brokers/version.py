"""Which version of a broker is installed."""

import re
import shutil
import subprocess

_NUMBER = re.compile(r"\d+(?:\.\d+)+")
TIMEOUT_S = 20.0


def version_of(words: list[str], name: str) -> str:
    """`name` and the first version number that the command prints; without a number if it prints none."""
    try:
        told = subprocess.run(  # noqa: S603  # the words are ours
            words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return name
    found = _NUMBER.search(told.stdout + told.stderr)
    return f"{name} {found[0]}" if found else name


def package_version(package: str, name: str) -> str:
    """The version of a Debian package, for a server that would have to be started to tell its own."""
    return (
        version_of(["dpkg-query", "-W", "-f", "${Version}", package], name)
        if shutil.which("dpkg-query")
        else name
    )
