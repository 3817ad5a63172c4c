"""What we run is kept where nobody else can write."""

import os
import tempfile
from pathlib import Path

import pytest

from brokerless.spark_collector.session.cache import own_directories
from brokerless.spark_collector.session.java import Java, java_home


@pytest.fixture
def locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's cache, and the fallback in the temporary directory."""
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return cache / "brokerless", temporary / f"brokerless-{os.getuid()}" / "brokerless"


def test_the_cache_then_the_temporary_directory(locations: tuple[Path, Path]) -> None:
    """Both are made, also for a user whose files can be written by a group."""
    before = os.umask(0o002)
    try:
        assert list(own_directories()) == list(locations)
    finally:
        os.umask(before)
    assert list(own_directories()) == list(locations)


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("above", [False, True])
def test_what_others_can_write_is_left_out(locations: tuple[Path, Path], mode: int, above: bool) -> None:
    """By everybody or by a group, it or the folder that it is in."""
    locations[0].mkdir(parents=True)
    (locations[0].parent if above else locations[0]).chmod(mode)
    assert list(own_directories()) == [locations[1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of somebody else")
def test_a_link_of_somebody_else(locations: tuple[Path, Path], tmp_path: Path) -> None:
    """It leads to a folder of ours now, and where its owner likes later."""
    (tmp_path / "ours").mkdir()
    locations[1].parent.symlink_to(tmp_path / "ours")
    os.chown(locations[1].parent, 12345, 12345, follow_symlinks=False)
    assert list(own_directories()) == [locations[0]]


def test_names_that_the_jvm_could_misunderstand(
    locations: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separators of class paths and lists, spaces in options, letters that the C locale lacks."""
    for name in ("a:b", "a,b", "a b", "größe"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        assert list(own_directories()) == [locations[1]]


def test_the_start_script_of_java(locations: tuple[Path, Path], tmp_path: Path) -> None:
    """With a home that cannot be written it does not go to a folder that any user may have made before."""
    locations[0].parent.write_text("a file where the folder should be")
    home = java_home(Java(tmp_path / "java", "PATH", 17))
    assert home.parent == locations[1]
    assert locations[1].stat().st_mode & 0o077 == 0
