"""The shape of the project: layering, exports, counters page, what importing costs."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from itertools import combinations
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
    "console": {"core", *TRANSPORTS, "spark_collector", "losstest"},
    "cli": {"core", *TRANSPORTS, "spark_collector", "losstest", "console"},
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


def test_the_counters_page_is_what_the_code_declares() -> None:
    """docs/counters.md lists every declared counter, and nothing else."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "counters.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_tests_lie_where_their_sources_do(package: str) -> None:
    """A folder of tests has the name and the place of a folder of sources, and every folder of sources with modules of
    its own has one."""

    def folders(root: Path, pattern: str) -> set[str]:
        found = [path for path in root.rglob(pattern) if path.name != "__init__.py"]
        return {str(path.parent.relative_to(root)) for path in found}

    sources = folders(ROOT / package, "*.py") | folders(ROOT / package, "*.java")
    tests = folders(ROOT / "tests" / package, "test_*.py")
    assert tests == sources


def test_every_package_is_in_the_distribution() -> None:
    """pyproject lists each package folder, and each ships its types."""
    text = (ROOT / "pyproject.toml").read_text()
    for package in PACKAGES:
        assert f'"brokerless.{package}" = "{package}"' in text
        assert (ROOT / package / "py.typed").exists()
        for inner in (ROOT / package).rglob("__init__.py"):
            name = ".".join(inner.parent.relative_to(ROOT).parts)
            if "pyspark_brokerless" not in name:  # a top-level package of its own
                assert f'"brokerless.{name}",' in text, f"{name} is not listed in pyproject.toml"


def test_the_version_is_the_same_everywhere() -> None:
    """`brokerless.core.__version__`, the command and the distribution agree."""
    from brokerless.core import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_no_host_names_in_the_constraints() -> None:
    """Pinned versions only: no address of any registry."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert "==" in line
        assert "/" not in line
        assert "@" not in line


# Words that this project once had for things that the field has a word for: in no identifier, alone or as a part.
BANNED = {
    "desk",
    "follower",
    "labour",
    "speaker",
    "doubts",
    "limbo",
    "books",
    "hand",
    "parcel",
    "bag",
    "intake",
    "ingest",
    "pace",
    "wiring",
    "mischief",
    "sieve",
    "zygote",
    "world",
    "wording",
    "hungry",
    "hurry",
    "torn",
    "upkeep",
}
# A plural is no other word.
BANNED |= {f"{word}s" for word in BANNED if not word.endswith("s")}
# Ordinary words, too, so a variable may have them (a connection that was cut), and a longer name may (a power cut): no
# class, function or module is named by one of them alone, and the first five are in no class name.
BANNED_IN_CLASSES = {"place", "mark", "piece", "train", "slots"}
BANNED_ALONE = BANNED_IN_CLASSES | {"turn", "cut", "grant", "tell", "kept", "management"}


def words_of(name: str) -> set[str]:
    """The words of an identifier: `GsoTrain_kept` has gso, train and kept. A handler is no hand."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower() for part in parts}


def wrong_names(tree: ast.AST, module: str) -> set[str]:
    """Names that a module defines (classes, functions, parameters, variables, attributes) with a banned word."""
    names, concepts, classes = {module}, {module}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes.add(node.name)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            concepts.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
            # `Place = Annotated[…]` names a type, too.
            (classes if re.match(r"_?[A-Z][a-z]", name) else names).add(name)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    found = {name for name in names | concepts | classes if words_of(name) & BANNED}
    found |= {name for name in classes if words_of(name) & BANNED_IN_CLASSES}
    return found | {name for name in concepts | classes if name.strip("_").lower() in BANNED_ALONE}


# `Health` of an endpoint, and what OpenAPI calls the answer of /healthz.
SAME_CLASS = {"webhooks": {"Health": ["webhooks/api/schemas.py", "webhooks/delivery/budget.py"]}}


@pytest.mark.parametrize("package", PACKAGES)
def test_two_things_of_a_package_do_not_share_a_name(package: str) -> None:
    """No two modules define a class of the same name. Messages are not counted: they are written `messages.State`."""
    where: dict[str, list[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and path.stem != "messages":
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == SAME_CLASS.get(package, {})


FOLDERS = (*PACKAGES, "tests", "bench", "tools", "examples")


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_plain_words(folder: str) -> None:
    """No file, class, function or variable has a banned word in its name."""
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        names = wrong_names(ast.parse(path.read_text()), path.stem)
        if folder not in PACKAGES:  # a test may cut a network, and tell an actor something
            names -= BANNED_ALONE
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names)]
    assert not wrong, "\n".join(wrong)


# In comments, docstrings, messages and pages. Not here: words that also mean something ordinary (books, hand, world).
BANNED_IN_PROSE = re.compile(
    r"(?i)\b(desks?|followers?|labour|speakers?|limbo|parcels?|wiring|mischief|sieve|zygote|hungry|hurry|torn|upkeep)\b"
)


def test_prose_is_in_plain_words() -> None:
    """The words of the tree's past are neither in comments and docstrings nor in messages and pages."""
    kinds = (".py", ".pyi", ".c", ".h", ".java", ".js", ".mjs", ".css", ".md")
    paths = [path for folder in (*FOLDERS, "docs", "clients/js/src") for path in (ROOT / folder).rglob("*")]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        if path.suffix in kinds and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BANNED_IN_PROSE.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def modules_of(package: str) -> dict[str, set[str]]:
    """The modules of a package, each with the modules of the same package that it imports, lazily or for types too."""
    paths = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(("brokerless", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        wanted: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                compiled = {name for name in inner if name.endswith("._speed")}  # imports nothing of ours
                wanted |= (inner & set(paths)) or ({node.module} if inner - compiled else set())
        graph[name] = {module for module in wanted if module in paths and module != name}
    return graph


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_an_import_cycle(package: str) -> None:
    """Neither at the top of modules, nor inside functions, nor under TYPE_CHECKING."""
    try:
        tuple(graphlib.TopologicalSorter(modules_of(package)).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_the_checks_of_names_and_cycles_can_fail() -> None:
    """They find what they are made for."""
    tree = ast.parse(
        "class TheDesk:\n  def tell(self, in_hand):\n    self.torn = cut = 1\n    handler = 2\n"
        "class APiece: ...\nPlace = str"
    )
    assert wrong_names(tree, "turn") == {"TheDesk", "tell", "in_hand", "torn", "APiece", "turn", "Place"}
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


SHARED_LINES = 6
# Places that share so many lines all the same, with the reason.
ALIKE = {
    ("direct/worker.py", "direct/worker.py"): "one loop blocks a thread, the other a task",
    (
        "losstest/adapters/http_server.py",
        "losstest/adapters/tcp.py",
    ): "references: each is written as one would without the others",
    (
        "spark_collector/jvm/PythonFrames.java",
        "spark_collector/jvm/SegmentFrames.java",
    ): "accessors of an interface",
    (
        "spark_collector/jvm/Vectors.java",
        "spark_collector/jvm/Vectors.java",
    ): "no generics over primitive arrays",
    ("webhooks/api/schemas.py", "webhooks/models.py"): "JSON has dates where the outbox has numbers",
    (
        "webhooks/models.py",
        "webhooks/outbox/accept.py",
    ): "an event with its number, and one that has none yet",
}


def written_lines(path: Path) -> list[str]:
    """The lines that say something: without imports, signatures, comments, and arguments that are only passed on."""
    text = path.read_text()
    skipped: set[int] = set()
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                skipped.update(range(node.lineno, node.body[0].lineno))
    lines = [" ".join(line.split()) for n, line in enumerate(text.splitlines(), 1) if n not in skipped]
    passed_on = re.compile(r"\w+(=(\w+\.)?\w+)?,|(#|//|\*|/\*|import ).*|\W*")
    return [line for line in lines if not passed_on.fullmatch(line)]


def test_nothing_is_written_twice() -> None:
    """No two places share six lines or more to the letter, unless `ALIKE` has the reason."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for folder in (*PACKAGES, "bench", "tools", "examples", "clients/js/src"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".pyi", ".c", ".h", ".java", ".js", ".css"):
                lines = written_lines(path)
                for i in range(len(lines) - SHARED_LINES + 1):
                    run = tuple(lines[i : i + SHARED_LINES])
                    places.setdefault(run, []).append((str(path.relative_to(ROOT)), i))
    shared = {
        (first, second): run
        for run, where in places.items()
        for (first, i), (second, j) in combinations(where, 2)
        if first != second or j - i >= SHARED_LINES
    }
    new = {
        f"{first} and {second}: {run}"
        for (first, second), run in shared.items()
        if (first, second) not in ALIKE
    }
    assert not new, "\n".join(sorted(new))
    assert not set(ALIKE) - set(shared), "these need no reason any more"
