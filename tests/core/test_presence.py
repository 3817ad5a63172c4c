"""Presence: who is there, who died, and that a stranger's or a broken file costs nothing."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from brokerless.core import presence

CHILD = """
import sys, time
from pathlib import Path
from brokerless.core import presence
presence.announce("test", "child", ["tcp://127.0.0.1:1"], lambda: {"n": 1}, directory=Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(120)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "presence"


def test_a_component_is_there_until_it_is_closed(directory: Path, until: Callable[..., None]) -> None:
    """With its state, which is renewed; the file is for this user alone and goes with the last component."""
    state = {"sent": 1}
    first = presence.announce("test", "a", ["tcp://h:1"], lambda: dict(state), directory=directory)
    second = presence.announce("test", "b", [], dict, directory=directory)
    until(lambda: len(presence.present(directory)) == 2)
    (file,) = directory.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    found = presence.present(directory)[0]
    assert (found.name, found.addresses, found.pid, found.alive) == ("a", ["tcp://h:1"], os.getpid(), True)
    state["sent"] = 2
    until(lambda: presence.present(directory)[0].state == {"sent": 2})
    first.close()
    until(lambda: [c.name for c in presence.present(directory)] == ["b"])
    second.close()
    second.close()
    assert presence.present(directory) == []
    assert not any(thread.name == "presence" for thread in threading.enumerate())


def test_who_was_killed_is_shown_as_dead_and_swept_later(directory: Path, until: Callable[..., None]) -> None:
    """The file outlives the process, says so, and is removed after a while."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(directory)], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: [c.alive for c in presence.present(directory)] == [True])
        (found,) = presence.matching("chi*", ["test"], directory=directory)
        assert (found.name, found.addresses) == ("child", ["tcp://127.0.0.1:1"])
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    finally:
        child.kill()
        child.communicate()
    assert [c.alive for c in presence.present(directory)] == [False]
    assert presence.present(directory, dead=False) == []
    assert presence.matching("*", ["test"], directory=directory) == []
    assert presence.sweep(directory) == 0
    assert presence.sweep(directory, older_than_s=-1) == 1
    assert presence.present(directory) == []


def test_files_that_are_not_ours_are_ignored(directory: Path, tmp_path: Path) -> None:
    """Rubbish, links, pipes and huge files neither fail nor show."""
    directory.mkdir(mode=0o700)
    (directory / "1.1.json").write_bytes(b"rubbish")
    (directory / "2.1.json").symlink_to("/etc/passwd")
    os.mkfifo(directory / "3.1.json")
    (directory / "4.1.json").write_bytes(b'{"pid": "x"}')
    with open(directory / "5.1.json", "wb") as file:
        file.truncate(presence.MAX_BYTES + 1)
    assert presence.present(directory) == []


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """A link in a shared folder is not followed into somebody's directory."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="another user"):
        presence.make_directory(tmp_path / "link")


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the environment; another directory as well."""
    monkeypatch.setenv(presence.ENVIRONMENT, "off")
    assert presence.default_directory() is None
    announced = presence.announce("test", "a", [], dict)
    assert presence.present() == []
    announced.close()
    monkeypatch.setenv(presence.ENVIRONMENT, str(tmp_path))
    assert presence.default_directory() == tmp_path


def test_a_snapshot_that_raises_leaves_the_state_before(directory: Path, until: Callable[..., None]) -> None:
    """And the other components are announced all the same."""
    calls = 0

    def snapshot() -> dict[str, int]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("dictionary changed size")
        return {"calls": calls}

    announced = presence.announce("test", "a", [], snapshot, directory=directory)
    try:
        until(lambda: calls > 1)
        assert presence.present(directory)[0].state == {"calls": 1}
    finally:
        announced.close()


def test_a_forked_child_does_not_speak_for_its_parent(directory: Path, until: Callable[..., None]) -> None:
    """The child ends without removing or rewriting the parent's file."""
    announced = presence.announce("test", "parent", [], dict, directory=directory)
    try:
        until(lambda: len(presence.present(directory)) == 1)
        child = os.fork()
        if child == 0:
            os._exit(0 if not presence._process._announced else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [c.name for c in presence.present(directory)] == ["parent"]
    finally:
        announced.close()


def test_a_lingering_component_is_seen_with_its_last_state(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    """It is announced a while after its end, as it was then, and taken away without anybody waiting for it."""
    figures = {"counters": {"rows": 0}}
    announcement = presence.announce("spark.job", "j", [], lambda: figures, directory=tmp_path / "p")
    until(lambda: presence.present(tmp_path / "p"))
    figures = {"counters": {"rows": 7}}
    announcement.close(linger_s=2.5)
    until(lambda: [c.state for c in presence.present(tmp_path / "p")] == [figures], timeout=20)
    until(lambda: not presence.present(tmp_path / "p"), timeout=20)


def test_a_process_that_ends_takes_lingering_components_along(tmp_path: Path) -> None:
    """They are closed, not killed: nothing stays in the directory."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom brokerless.core import presence\n"
        "where = Path(sys.argv[1])\n"
        "a = presence.announce('spark.job', 'j', [], dict, directory=where)\n"
        "while not presence.present(where): time.sleep(0.01)\n"
        "a.close(linger_s=60)\nprint(len(presence.present(where)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "p")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert presence.present(tmp_path / "p") == []
