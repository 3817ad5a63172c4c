"""The shape of the project: layering, exports, counters page, file sizes, what importing costs."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRANSPORTS = {"direct", "multicast", "webhooks", "metrics"}
# package → packages of ours that it may import
ALLOWED = {
    "core": set(),
    **{transport: {"core"} for transport in TRANSPORTS},
    "spark_collector": {"core", *TRANSPORTS},
    "losstest": {"core", *TRANSPORTS, "spark_collector"},
    "cli": {"core", *TRANSPORTS, "spark_collector", "losstest"},
}
PACKAGES = sorted(ALLOWED)


def imports_of(path: Path) -> set[str]:
    """Names of our packages that a module imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "brokerless":
                names = [f"brokerless.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("brokerless.")}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    """core imports no sibling, transports only core, and so on up to the command line."""
    for path in (ROOT / package).rglob("*.py"):
        extra = imports_of(path) - ALLOWED[package] - {package}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "cli"])
def test_the_public_surface_is_exact(package: str) -> None:
    """Every name in __all__ exists, is sorted, and nothing else of ours is re-exported."""
    module = importlib.import_module(f"brokerless.{package}")
    names = list(module.__all__)
    assert names == sorted(names)
    for name in names:
        assert hasattr(module, name), name
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("brokerless.")
        for alias in node.names
    }
    assert imported <= set(names), f"imported but not exported: {sorted(imported - set(names))}"


FOREIGN = {
    "core": set(),
    "direct": {"zmq"},
    "multicast": set(),
    "webhooks": {"httpx", "starlette", "aiohttp", "cryptography"},
    "metrics": {"statsd"},
}
HEAVY = {
    "zmq",
    "pynng",
    "httpx",
    "aiohttp",
    "starlette",
    "uvicorn",
    "statsd",
    "pyspark",
    "pyarrow",
    "pandas",
    "numpy",
}


@pytest.mark.parametrize("package", sorted(FOREIGN))
def test_importing_one_transport_does_not_import_the_others_dependencies(package: str) -> None:
    """A fresh interpreter that imports one package has only its own dependencies in sys.modules."""
    code = f"import sys, brokerless.{package}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert not (loaded & HEAVY) - FOREIGN[package]


def test_no_source_file_is_longer_than_600_lines() -> None:
    """Small files: none over 600 lines."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines"


def test_the_counters_page_is_what_the_code_declares() -> None:
    """docs/counters.md lists every declared counter, and nothing else."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "counters.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_every_package_is_in_the_distribution() -> None:
    """pyproject lists each package folder, and each ships its types."""
    text = (ROOT / "pyproject.toml").read_text()
    for package in PACKAGES:
        assert f'"brokerless.{package}" = "{package}"' in text
        assert (ROOT / package / "py.typed").exists()


def test_no_host_names_in_the_constraints() -> None:
    """Pinned versions only: no address of any registry."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert "==" in line
        assert "/" not in line
        assert "@" not in line
