"""The jar is compiled where there is a compiler, once, and nothing fails where it cannot be."""

import logging
import zipfile
from pathlib import Path

import pytest

from brokerless.spark_collector.session.jar import FILE_SYSTEM, PROVIDER, JarFailed, find_jar, make_jar
from brokerless.spark_collector.session.java import find_java


@pytest.fixture
def java() -> Path:
    home = find_java().home
    if not (home / "bin" / "javac").is_file():
        pytest.skip("no Java compiler here")
    return home


def test_made_once(java: Path, tmp_path: Path) -> None:
    """It holds the classes and tells Spark of the format; a second call takes what is there."""
    jar = make_jar(java, tmp_path)
    with zipfile.ZipFile(jar) as file:
        names = file.namelist()
        assert {f"{name.replace('.', '/')}.class" for name in (PROVIDER, FILE_SYSTEM)} < set(names)
        service = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"
        assert file.read(service).decode().split() == [PROVIDER]
    made = jar.stat().st_mtime_ns
    assert make_jar(java, tmp_path) == jar
    assert jar.stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [jar], "nothing else is left behind"


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JRE: the session does without, who asks for the jar is told what to install."""
    assert find_jar(tmp_path) is None
    with pytest.raises(JarFailed, match="install a JDK"):
        make_jar(tmp_path, tmp_path)
    monkeypatch.setenv("BROKERLESS_PURE", "1")
    assert find_jar(find_java().home) is None


def test_a_compiler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it said is in the error; a session warns and goes on through Python."""
    compiler = tmp_path / "bin" / "javac"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'Provider.java:1: it is broken' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(JarFailed, match="it is broken") as caught:
        make_jar(tmp_path, tmp_path / "out")
    assert caught.value.problem == "Provider.java:1: it is broken"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert find_jar(tmp_path) is None
    assert "through Python instead" in caplog.text


def test_a_cache_that_others_can_write(java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jar is code: it is neither taken from nor left in a folder that is not ours alone."""
    (tmp_path / "brokerless").mkdir()
    (tmp_path / "brokerless").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jar = find_jar(java)
    assert jar is not None
    assert not jar.is_relative_to(tmp_path)


def test_a_cache_that_cannot_be_written(java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory is used instead."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jar = find_jar(java)
    assert jar is not None
    assert not jar.is_relative_to(tmp_path)
