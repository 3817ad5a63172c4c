"""Packages of npm for tests: found, or installed once if npm can, or else the test is skipped with the reason."""

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest


def install(folder: Path, wanted: Path, *packages: str) -> None:
    """See to it that `wanted` is there: `npm install` in `folder`, of these packages or those of its package.json."""
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    if wanted.exists():
        return
    if not shutil.which("npm"):
        pytest.skip(f"npm is not installed, and {folder.name} has no node_modules")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".npm-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not wanted.exists():
            options = ["--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
            command = ["npm", "install", *options, *packages]
            try:
                subprocess.run(command, cwd=folder, capture_output=True, timeout=120)
            except subprocess.TimeoutExpired:
                pytest.skip("npm did not answer within 120 s")
    if not wanted.exists():
        pytest.skip(f"npm could not install {' '.join(packages) or 'the packages of ' + folder.name}")
