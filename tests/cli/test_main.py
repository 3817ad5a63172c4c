"""The command line as a whole: one shape, one style of errors, one table of exit codes, completion."""

import dis
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cyclopts
import pytest

from brokerless.cli import exit_codes
from brokerless.cli.main import app, option_of
from tests.command import run_here

ROOT = Path(__file__).resolve().parent.parent.parent
# These print a script, or are flags.
WITHOUT_JSON = {"completion", "install-completion"}


def commands(
    at: cyclopts.App = app, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], cyclopts.App]]:
    """Every command that does something, with its path."""
    if path and at.default_command is not None:
        yield path, at
    for name in at:
        if not name.startswith("-"):
            yield from commands(at[name], (*path, name))


ALL = dict(commands())


def test_the_walk_finds_the_commands() -> None:
    """So that the tests below are about something."""
    assert {("sub",), ("journal", "dump"), ("webhooks", "endpoints", "add"), ("losstest", "run")} <= set(ALL)
    assert len(ALL) > 35


@pytest.mark.parametrize("path", sorted(ALL), ids=" ".join)
def test_every_command_has_json_and_examples_that_parse(path: tuple[str, ...]) -> None:
    """`--json` is an option of every command, and the examples in its help text are accepted by the parser."""
    command = ALL[path]
    options = {name for argument in command.assemble_argument_collection() for name in argument.names}
    if path[-1] not in WITHOUT_JSON:
        assert "--json" in options
        assert "--no-json" not in options
    examples = re.findall(r"brokerless (.+)", command.help_epilogue or "")
    assert examples, "no example in the help text"
    for example in examples:
        words = shlex.split(example)
        assert tuple(words[: len(path)]) == path
        app.parse_args(words, print_error=False, exit_on_error=False)


# It prints JSON and nothing else; the option is there because every command has it.
ALWAYS_JSON = ("journal", "dump")


@pytest.mark.parametrize("path", sorted(ALL), ids=" ".join)
def test_json_is_not_ignored(path: tuple[str, ...]) -> None:
    """A command that accepts `--json` looks at it."""
    function = ALL[path].default_command
    assert function is not None
    code = function.__code__
    names = [name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if "json" in name]
    names = [name for name in names if name in ("json", "as_json")]
    assert bool(names) == (path[-1] not in WITHOUT_JSON)
    for name in names:
        used = any(
            step.argval == name or (isinstance(step.argval, tuple) and name in step.argval)
            for step in dis.get_instructions(code)
            if step.opname.startswith("LOAD") or step.opname == "MAKE_CELL"
        )
        assert used == (path != ALWAYS_JSON)


def test_groups_of_commands_have_examples_of_their_own() -> None:
    """`brokerless groups --help` does not show how to publish."""
    for path in sorted({each[:length] for each in ALL for length in range(1, len(each))}):
        found = app
        for name in path:
            found = found[name]
        assert f"brokerless {' '.join(path)} " in (found.help_epilogue or ""), path


def test_a_default_is_shown_as_it_would_be_typed() -> None:
    """And none where nothing is given, or a flag is off."""
    text = run_here("sub", "--help").stdout + run_here("spark", "land", "--help").stdout
    text = " ".join(text.replace("│", " ").split())
    assert "[default: 0]" in text
    assert "[default: date]" in text
    for noise in ("[default: False]", '[default: ""]', "[default: ()]"):
        assert noise not in text


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (("loss", "x"), "pyarrow", "arrow"),
        (("counts", "x"), "pyarrow", "arrow"),
        (("export", "x", "--out", "x.csv"), "pyarrow", "arrow"),
        (("losstest", "run", "--quick", "--spark", "--out", "run"), "pandas", "spark"),
    ],
)
def test_a_package_that_is_not_installed_is_named_before_anything_is_done(
    arguments: tuple[str, ...], missing: str, extra: str, tmp_path: Path
) -> None:
    """With the extra that brings it, also where the plain installation has the command."""
    code = f"import sys; sys.modules[{missing!r}] = None; from brokerless.cli.main import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, ""), done.stderr
    assert f"needs the package {missing}: pip install 'brokerless[{extra}]'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(ALL), ids=" ".join)
def test_every_parameter_is_explained(path: tuple[str, ...]) -> None:
    """No option without a help text."""
    silent = [
        a.name for a in ALL[path].assemble_argument_collection(parse_docstring=True) if not a.parameter.help
    ]
    assert not silent


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("sub", "tcp://127.0.0.1:1", "--from", "latest"),
            'brokerless: --from: must be "live", "oldest", "cursor", "snapshot", ',
        ),
        (("sub", "tcp://127.0.0.1:1", "--count=-1"), "brokerless: --count: must be 0 or more"),
        (("sub", "nonsense"), "brokerless: ADDRESS: 'nonsense' is not "),
        (
            ("sub", "tcp://127.0.0.1:1", "--timeout", "soon"),
            "brokerless: --timeout: must be a number, not 'soon'",
        ),
        (("sub", "tcp://127.0.0.1:1", "--fro", "live"), "brokerless: unknown option: --fro"),
        (("pub", "tcp://127.0.0.1:1"), "brokerless: TOPIC: is missing"),
        (("sub", "tcp://127.0.0.1:1", "--count"), "brokerless: --count: needs a value"),
        (("export", "x"), "brokerless: --out: is missing"),
        (
            ("keys", "show", "/nowhere"),
            "brokerless: PATH: /nowhere: cannot be read: No such file or directory",
        ),
        (
            ("console", "--port", "80000"),
            "brokerless: --port: 127.0.0.1:80000 cannot be used: a port is a number",
        ),
        (("journal", "dump", "/nowhere"), "brokerless: PATH: there is no journal at /nowhere"),
        (
            ("spark", "land", "--spool", "/nowhere", "--table", "x"),
            "brokerless: --spool: /nowhere: there is no spool or journal",
        ),
        (("mcast", "sub", "239.255.7.7:30001", "--count=-1"), "brokerless: --count: must be 0 or more"),
        (("losstest", "run", "--transport", "nonsense"), "brokerless: "),
        (("nonsense",), 'brokerless: unknown command "nonsense"'),
        (("--log-format", "xml", "journal", "info", "x"), 'brokerless: invalid value "xml" for --log-format'),
        (("collect", "--config", "/nowhere.toml"), "brokerless: --config: /nowhere.toml: cannot be read"),
        (("pipeline", "run", "/nowhere.toml"), "brokerless: FILE: /nowhere.toml: cannot be read"),
        (("--nonsense",), "brokerless: unknown option: --nonsense"),
        (("ps", "one"), "brokerless: one argument too many: one"),
        (("ps", "--interval", "nan"), "brokerless: --interval: must be a number, not 'nan'"),
        (("ps", "--interval", "inf"), "brokerless: --interval: must be more than 0 and at most 86400"),
        (("sub", "x", "--count", "1", "--count", "2"), "brokerless: --count: was given twice"),
        (
            ("mcast", "serve", "name", "--journal", "j"),
            "brokerless: SESSION: with --journal as an option, give --session name",
        ),
        (("losstest", "run", "--scenario"), "brokerless: --scenario: needs a value"),
        (("pub", "tcp://127.0.0.1:1", "t", "--allow"), "brokerless: --allow: needs a value"),
        (("pub", "tcp://127.0.0.1:1", "t", "--wait-for=-1"), "brokerless: --wait-for: must be 0 or more"),
        (("webhooks", "listen", "--count=-1"), "brokerless: --count: must be 1 or more"),
        (("webhooks", "tail", "--interval=-1"), "brokerless: --interval: must be more than 0"),
        (("counts", "--endpoint", "x"), "brokerless: --endpoint: 'x' is not tcp://"),
        (("losstest", "compare", "/nowhere", "x"), "brokerless: OLD: /nowhere: holds no run"),
        (("sub", "tcp://127.0.0.1:1", "--count", "9" * 20), "brokerless: --count: must fit in 64 bits"),
        (("mcast", "sub", "239.255.7.7:30001", "--from", "9" * 20), "brokerless: --from: must be"),
        (
            ("mcast", "dump", "239.255.7.7:30001", "--interface", "9" * 20),
            "brokerless: --interface: there is no interface number 9",
        ),
        (("mcast", "dump", "239.255.7.7:30001", "--timeout=-1"), "brokerless: --timeout: must be 0 or more"),
        (("mcast", "dump", "239.255.7.7:30001", "--timeout", "inf"), "brokerless: --timeout: must be 0 or"),
        (("mcast", "serve", "/nowhere", "T"), "brokerless: JOURNAL: there is no journal at /nowhere"),
        (("dead-letters", "show", "tcp://127.0.0.1:1"), "brokerless: NUMBERS: is missing"),
        (("mcast", "sub", "239.255.7.7:30001", "--sender", "a\udcff"), "brokerless: not valid UTF-8: "),
        (("console", "--token", "t", "--host", "a\udcff"), "brokerless: --port: "),
        (
            ("spark", "query", "SELECT 1", "--table", "/nowhere"),
            "brokerless: --table: /nowhere is not a landed",
        ),
        (("spark", "metrics", "--table", "/nowhere"), "brokerless: --table: /nowhere is not a landed table"),
    ],
)
def test_an_error_is_one_line_that_names_what_was_typed(arguments: tuple[str, ...], said: str) -> None:
    """Exit code 2, one line on standard error, and nothing on standard output."""
    done = run_here(*arguments)
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, ""), done.stderr
    assert done.stderr.startswith(said), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_directory_that_may_not_be_used_is_named(tmp_path: Path) -> None:
    """An error of the operating system is one line as well."""
    (tmp_path / "file").write_text("")
    done = run_here("keys", "new", tmp_path / "file" / "key")
    assert done.returncode in (exit_codes.FAILED, exit_codes.USAGE)
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "file") in done.stderr


def test_fields_of_the_library_have_the_names_of_options() -> None:
    """`start` is what users know as `--from`; what no command has keeps its name."""
    assert option_of("start", ["sub", "x"]) == "--from"
    assert option_of("address", ["sub", "x"]) == "ADDRESS"
    assert option_of("flush_s", ["metrics", "serve"]) == "--flush"
    assert option_of("schedule.delays_s", ["webhooks", "serve"]) == "schedule.delays_s"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(shell: str) -> None:
    """The script names commands and options, also of commands that are imported late."""
    done = run_here("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "losstest" in done.stdout
    assert "--from" in done.stdout or "from" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True, timeout=30)


def test_the_table_of_exit_codes_is_in_the_documentation() -> None:
    """docs/reference/cli.md has exactly the codes of the code."""
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"| {code} | {meaning} |" in text


def test_logs_can_be_json() -> None:
    """A record has its time, level, logger, text and the fields that were given with it."""
    code = (
        "import logging; from brokerless.cli.logs import configure_logging; configure_logging('json', 'info');"
        "logging.getLogger('brokerless.x').warning('lost %d', 3, extra={'reason': 'evicted'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    import json

    record = json.loads(done.stderr)
    assert record["message"] == "lost 3"
    assert (record["level"], record["logger"], record["reason"]) == ("warning", "brokerless.x", "evicted")


def test_a_lan_needs_interface_and_key(tmp_path: Path) -> None:
    """One without the other, a short key and a wrong interface are named as typed."""
    good, short = tmp_path / "good", tmp_path / "short"
    good.write_bytes(b"0123456789abcdef\n")
    short.write_bytes(b"0123")
    for options, said in (
        (["--lan", "127.0.0.1"], "--lan: needs --lan-key"),
        (["--lan", "127.0.0.1", "--lan-key", str(short)], "holds 4 bytes"),
        (["--lan", "eth0", "--lan-key", str(good)], "IPv4 address of an interface"),
        (["--lan", "127.0.0.1", "--lan-key", str(tmp_path / "none")], "No such file"),
    ):
        done = run_here("ps", *options)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
