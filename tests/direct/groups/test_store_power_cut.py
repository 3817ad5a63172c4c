"""Group files after a power cut: the state that was saved last, or an older one, as `fsync` promised."""

import random
from pathlib import Path

import pytest

from brokerless.direct.groups.members import GroupState
from brokerless.direct.groups.store import GroupStore
from tests.power import Disk


@pytest.mark.parametrize("fsync", ["never", "interval", "batch"])
def test_group_files_after_power_cuts(tmp_path: Path, fsync: str) -> None:
    """With fsync=batch the last state that was saved is there; otherwise an older one, or a file that says nothing."""
    for seed in range(40):
        rolls = random.Random(seed)
        root = tmp_path / f"disk{seed}"
        root.mkdir()
        disk = Disk(root)
        with disk.watching():
            store = GroupStore(str(root / "journal" / "groups"), fsync=fsync)  # type: ignore[arg-type]
            last = 0
            for _ in range(rolls.randint(1, 12)):
                last += rolls.randint(1, 5)
                settled = [(last + 2 * i, last + 2 * i) for i in range(rolls.choice([0, 3, 2000]))]
                store.save("g", GroupState(last, last, settled))
            disk.cut(rolls, tmp_path / f"cut{seed}")
            store.close()
        groups = tmp_path / f"cut{seed}" / "journal" / "groups"
        if fsync != "never":
            assert groups.is_dir(), "a new directory was lost"
        elif not groups.is_dir():
            continue
        again = GroupStore(str(groups))
        found = again.load()
        again.close()
        if fsync == "batch":
            assert found["g"] is not None
            assert found["g"].cursor == last
        elif fsync == "interval":
            assert "g" in found, "a group of which nothing is known would start over"
        state = found.get("g")
        assert state is None or 0 < state.cursor <= last
