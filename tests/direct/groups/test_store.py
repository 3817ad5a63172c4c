"""Group state on disk: always one valid version, whatever is cut off."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import JournalError
from brokerless.direct.groups.members import GroupState
from brokerless.direct.groups.store import GroupFile, GroupStore


@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=8))
def test_the_last_saved_state_is_loaded(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    """States that grow and shrink, beyond the size of a slot: the newest is what comes back."""
    path = str(tmp_path_factory.mktemp("store") / "g.group")
    for i, size in enumerate(sizes):
        file = GroupFile(path)
        state = GroupState(i, 10**6, [(2 * k, 2 * k) for k in range(size)], {k: k for k in range(size % 7)})
        file.save(state)
        file.close()
        again = GroupFile(path)
        assert again.state == state
        again.close()


@given(cut=st.floats(0, 1), sizes=st.lists(st.integers(0, 2000), min_size=2, max_size=6))
def test_a_write_cut_short_leaves_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, cut: float, sizes: list[int]
) -> None:
    """Whatever part of the last write arrived, the state is the last or the one before it."""
    path = tmp_path_factory.mktemp("store") / "g.group"
    states = [GroupState(i, 10**6, [(2 * k, 2 * k) for k in range(size)]) for i, size in enumerate(sizes)]
    file = GroupFile(str(path))
    for state in states[:-1]:
        file.save(state)
    before = path.read_bytes()
    file.save(states[-1])
    after = path.read_bytes()
    file.close()
    before = before.ljust(len(after), b"\0")
    changed = [i for i in range(len(after)) if before[i] != after[i]]
    kept = changed[: int(cut * len(changed))]
    damaged = bytearray(before)
    for i in kept:
        damaged[i] = after[i]
    path.write_bytes(bytes(damaged))
    again = GroupFile(str(path))
    assert again.state in states[-2:]
    again.close()


def test_a_store_without_a_directory_keeps_nothing() -> None:
    """With a MemoryJournal groups die with their publisher."""
    store = GroupStore(None)
    store.save("g", GroupState(1, 2))
    assert store.load() == {}


def test_names_are_files_safely(tmp_path: Path) -> None:
    """A group's name cannot leave the directory, and comes back as it was; forgetting removes the file."""
    store = GroupStore(str(tmp_path / "groups"))
    for name in ("a", "../b", "ü ."):
        store.save(name, GroupState(1, 2))
    store.close()
    assert sorted(GroupStore(str(tmp_path / "groups")).load()) == sorted(["a", "../b", "ü ."])
    store = GroupStore(str(tmp_path / "groups"))
    store.forget("../b")
    assert sorted(store.load()) == ["a", "ü ."]
    assert {p.parent for p in tmp_path.rglob("*.group")} == {tmp_path / "groups"}
    store.close()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A file in the way is told as JournalError."""
    (tmp_path / "x").write_text("")
    with pytest.raises(JournalError):
        GroupStore(str(tmp_path / "x" / "groups"))
