"""The documentation tells the truth: its code runs as printed, in order and twice; its links work; its table holds."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from brokerless.losstest import resolve, transport_names
from brokerless.losstest.harness.scenarios import MAIN, SCENARIOS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LOSS_TABLE = (ROOT / "docs" / "loss_table.md").read_text()
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("start.md", "console.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
BLOCK = re.compile(r"^```python(?: title=\"([^\"]+)\")?\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


def run_block(code: str, directory: Path) -> None:
    """Run a block in a process of its own; it must print what its comments `# prints …` say."""
    (directory / "block.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=directory,
        env={**os.environ, "BROKERLESS_PRESENCE": str(directory / "presence")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"# prints (.*)$", code, flags=re.MULTILINE)
    expected = [line for line in promised if not line.startswith("nothing")]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


def pages() -> list[object]:
    """Every page with code; those that start Spark are marked as such."""
    return [
        pytest.param(
            page,
            id=page.stem,
            marks=[pytest.mark.spark] if "spark_session" in page.read_text() else [],
        )
        for page in WITH_CODE
    ]


@pytest.mark.parametrize("page", pages())
def test_the_code_of_a_page_runs_in_order_and_twice(page: Path, tmp_path: Path) -> None:
    """Blocks with a title become files; the others run one after the other, and all of them again."""
    for _ in range(2):
        for title, code in BLOCK.findall(page.read_text()):
            if title:
                (tmp_path / title).write_text(code)
            else:
                run_block(code, tmp_path)


@pytest.mark.parametrize("name", ["direct", "multicast", "webhooks", "metrics"])
def test_every_example_runs_with_one_command(name: str, tmp_path: Path) -> None:
    """Each folder of examples/ has a main.py that prints what it says, twice in one directory."""
    for _ in range(2):
        run_block((ROOT / "examples" / name / "main.py").read_text(), tmp_path)


@pytest.mark.spark
def test_the_shop_runs_with_one_command(tmp_path: Path) -> None:
    """From any directory, twice in one; its files are those that the guide prints."""
    shop = ROOT / "examples" / "shop"
    guide = dict(BLOCK.findall((ROOT / "docs" / "guides" / "shop.md").read_text()))
    guide.pop("")
    assert {path.name: path.read_text() for path in shop.glob("*.py") if path.name != "main.py"} == guide
    promised = re.findall(r"# prints (.*)$", (shop / "main.py").read_text(), flags=re.MULTILINE)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(shop / "main.py")],
            cwd=tmp_path,
            env={**os.environ, "BROKERLESS_PRESENCE": str(tmp_path / "presence")},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == promised, done.stdout + done.stderr


def test_there_is_an_example_per_transport() -> None:
    """The first page has one screen for each of them."""
    start = (ROOT / "docs" / "start.md").read_text()
    found = set(re.findall(r"^### (\w+)\n(?:(?!###).)*?```python", start, flags=re.MULTILINE | re.DOTALL))
    assert found == {"direct", "multicast", "webhooks", "metrics", "Spark"}


def test_every_extra_is_in_the_table() -> None:
    """docs/start.md lists what pyproject.toml offers, except what is for the developers of this repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"all", "bench", "dev", "docs"}
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == extras


def test_the_readme_is_short() -> None:
    """What, for whom, install, ten lines that run, one picture, two small tables; the rest by links."""
    assert len(README.splitlines()) < 90
    code = BLOCK.findall(README)
    assert len(code) == 1
    assert len(code[0][1].strip().splitlines()) <= 10
    assert "pip install brokerless" in README
    assert len([line for line in README.splitlines() if line.startswith("| ")]) == 2 + 6 + 2 + 9
    assert README.count("![") == 1


@pytest.mark.parametrize("repository", ["", "https://git.example/brokerless"])
def test_the_links_of_the_readme_work_on_an_index(tmp_path: Path, repository: str) -> None:
    """In the package's description they lead to the repository; without its address they are text, not broken."""
    build = "import setuptools.build_meta as b, sys; b.prepare_metadata_for_build_wheel(sys.argv[1])"
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for name in packages:  # empty folders are enough for the metadata
        place = f"spark_collector/{name}" if name == "pyspark_brokerless" else name.partition(".")[2]
        (copy / place.replace(".", "/")).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=copy,
        env={**os.environ, "BROKERLESS_REPOSITORY": repository, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert "pip install brokerless" in text
    assert "Description-Content-Type: text/markdown" in text
    if not repository:
        assert not links
        return
    assert len(links) > 15
    for link in links:
        place, _, file = link.removeprefix(f"{repository}/").partition("/HEAD/")
        assert place == ("raw" if file.endswith(".svg") else "blob")
        assert (ROOT / file).exists()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    """Every local link is a file."""
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_options_in_shell_blocks_exist() -> None:
    """Every `brokerless …` line of a shell block is accepted by the parser."""
    import shlex

    from brokerless.cli.main import app

    seen = 0
    for page in [*PAGES, ROOT / "docs" / "operations.md"]:
        for block in re.findall(
            r"^```(?:sh|console)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == ["brokerless"]:
                    ends = [i for i, word in enumerate(words) if word in ("<", ">", ">>", "|", "&&", "&")]
                    app.parse_args(
                        words[1 : ends[0] if ends else None], print_error=False, exit_on_error=False
                    )
                    seen += 1
    assert seen > 8


def test_the_reference_shows_constructors_and_the_values_of_defaults(tmp_path: Path) -> None:
    """What the site shows of `Publisher`: its parameters, with values instead of names of constants."""
    griffe = pytest.importorskip("griffe")
    from tools.docs_defaults import Defaults

    site = (ROOT / "mkdocs.yml").read_text()
    assert "tools/docs_defaults.py" in site
    assert "merge_init_into_class: true" in site
    (tmp_path / "brokerless").mkdir()
    (tmp_path / "brokerless" / "direct").symlink_to(ROOT / "direct")  # as the wheel has it
    direct = griffe.load(
        "brokerless.direct", search_paths=[tmp_path], extensions=griffe.load_extensions(Defaults())
    )
    defaults = {p.name: str(p.default) for p in direct["publisher.Publisher.__init__"].parameters}
    assert defaults["max_wait_s"] == "0.001"
    assert defaults["live_queue"] == "64"


def test_every_setting_of_a_file_is_explained() -> None:
    """The page of configuration files has each of them, with its meaning, and its examples are accepted."""
    from brokerless.core.config import parse_toml
    from brokerless.metrics import MetricsConfig
    from brokerless.spark_collector import CollectorConfig
    from brokerless.spark_collector.pipeline.config import PipelineConfig
    from brokerless.webhooks.api.files import LimitsTable
    from tools.docs_hooks import SETTINGS, settings

    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    named = SETTINGS.findall(text)
    assert len(named) == text.count("<!-- settings") > 10
    for module, name in named:
        struct = getattr(importlib.import_module(module), name)
        found = {field: meaning for field, _, _, meaning in settings(struct)}
        assert tuple(sorted(found)) == tuple(sorted(struct.__struct_fields__))
        assert all(found.values()), (name, [field for field, meaning in found.items() if not meaning])
    examples = re.findall(r"^```toml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for example, kind in zip(
        examples, [CollectorConfig, PipelineConfig, MetricsConfig, LimitsTable], strict=True
    ):
        parse_toml(example, kind)


def test_every_logger_is_named() -> None:
    """The guide has each logger of the code, by name or by those above it, and none that there is not."""
    page = (ROOT / "docs" / "guides" / "logging.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    named = re.findall(r"`(brokerless[\w.*]*)`", rows)
    found = set()
    for package in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]:
        folder = ROOT / package.removeprefix("brokerless.").replace(".", "/")
        for file in folder.glob("*.py"):
            text = file.read_text()
            found |= set(re.findall(r"(?:getLogger\(|LossLog\(|_logger = )\"(brokerless\.[\w.]+)\"", text))
            if "getLogger(__name__)" in text:
                found.add(f"{package}.{file.stem}")
    assert len(found) > 30
    assert not [logger for logger in found if not any(fnmatchcase(logger, name) for name in named)]
    assert not [name for name in named if not any(fnmatchcase(logger, name) for logger in found)]


def cells(text: str) -> dict[str, dict[str, str]]:
    """The tables of transports in a text: transport → scenario → what it says."""
    found: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in text.split("\n"):
        row = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [""]
        if row[0] == "transport":
            names = [name.strip("`") for name in row[1:]]
        elif row[0].startswith("`"):
            found.setdefault(row[0].strip("`"), {}).update(zip(names, row[1:], strict=True))
    return found


def table() -> dict[str, dict[str, str]]:
    """The table of the page: transport → scenario → what it says."""
    return cells(LOSS_TABLE.partition("<!-- table:begin")[2].partition("<!-- table:end")[0])


def test_extracts_say_what_the_comparison_says() -> None:
    """The README's table and the page of ours are of the same run as the comparison, cell by cell."""
    whole = cells((ROOT / "docs" / "comparison.md").read_text())
    extract = cells(README.partition("<!-- extract:begin")[2].partition("<!-- extract:end")[0])
    assert len(extract) == 9
    for part in (extract, table()):
        for transport, row in part.items():
            assert row == {scenario: whole[transport][scenario] for scenario in row}, transport


def test_the_table_has_every_transport_and_main_scenario() -> None:
    """Rows are the transports that need nothing installed, columns the scenarios of the quick profile."""
    expected = [name for name in transport_names() if resolve(name).traits.family not in ("broker", "peer")]
    assert list(table()) == expected
    columns = [s for s in MAIN if any(SCENARIOS[s].fits(resolve(name).traits) for name in expected)]
    assert all(list(row) == columns for row in table().values())


@pytest.mark.serial
def test_every_zero_still_is_zero(tmp_path: Path) -> None:
    """The command above the table, run again: what the page says loses nothing, loses nothing."""
    command = re.search(r"^\$ (brokerless losstest run .*)$", LOSS_TABLE, flags=re.MULTILINE)
    assert command is not None
    words = [sys.executable, "-m", "brokerless.cli", *command[1].split()[1:], "--json-file", "now.json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "now.json").read_text())["rows"]
    now = {(row["transport"], row["scenario"]): row for row in rows if not row["control"]}
    assert all(row["balanced"] and row["verdict"] == "pass" for row in rows)
    zeros = [(t, s) for t, row in table().items() for s, cell in row.items() if cell == "**0**"]
    assert len(zeros) > 40
    assert {key: now[key]["lost"] for key in zeros} == dict.fromkeys(zeros, 0)
    # And what has no meaning for a transport was not run.
    assert set(now) == {(t, s) for t, row in table().items() for s, cell in row.items() if cell != "·"}


WALKS = ["direct", "multicast", "webhooks", "metrics", "spark_collector", "losstest"]


def walk_of(page: str) -> list[tuple[list[Path], str]]:
    """The rows of a page's walk: the files of each, and the text that names functions."""
    walk = (ROOT / "docs" / f"{page}.md").read_text().partition("\n## Walk\n")[2].partition("\n## ")[0]
    rows = []
    for cells in (line.split("|") for line in walk.splitlines() if line.startswith("|")):
        at = next((i for i, cell in enumerate(cells) if re.search(r"`[\w/]+\.(py|c|java)`", cell)), None)
        if at is not None:
            files: list[Path] = []
            for name in re.findall(r"`([\w/]+\.(?:py|c|java))`", cells[at]):
                beside = [ROOT, ROOT / page, *(file.parent for file in reversed(files))]
                files.append(next((d / name for d in beside if (d / name).exists()), ROOT / name))
            rows.append((files, cells[at + 1]))
    return rows


@pytest.mark.parametrize("page", ["core", *WALKS])
def test_walks_name_files_and_functions_that_exist(page: str) -> None:
    """Every file in the table of a walk is there, and one of those in its row has each function that it names."""
    rows = walk_of(page)
    assert rows
    for files, functions in rows:
        assert all(file.exists() for file in files), files
        text = "".join(file.read_text() for file in files)
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", re.sub(r"`\w+\.(?:py|c)`", "", functions)):
            assert re.search(rf"\b{name}\b", text), f"{name}: {files}"


def test_the_table_of_walks_agrees_with_the_pages() -> None:
    """docs/architecture.md has the files of each page's walk in their order; direct and StatsD pass at most 15."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Walks\n")[2].partition("\n## ")[0]
    table = {}
    for line in text.splitlines():
        page = re.search(r"\((\w+)\.md#walk\)", line)
        if page:
            table[page[1]] = [ROOT / name for name in re.findall(r"`(\w+/[\w/]+\.py)`", line)]
    assert list(table) == WALKS
    for page, files in table.items():
        in_page = [file for files, _ in walk_of(page) for file in files]
        assert [file for file in dict.fromkeys(in_page) if file in files] == files, page
        assert {row[0] for row, _ in walk_of(page)} - set(files) <= {ROOT / "spark_collector/jobs/report.py"}
    assert len(table["direct"]) <= 15
    assert len(table["metrics"]) <= 15
