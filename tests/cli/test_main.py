"""The command line as a whole: one shape, one style of errors, one table of exit codes, completion."""

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

ROOT = Path(__file__).resolve().parent.parent.parent
# These print a script, or are flags.
WITHOUT_JSON = {"completion", "install-completion"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    command = [sys.executable, "-m", "brokerless.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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
        (("sub", "tcp://127.0.0.1:1", "--from", "latest"), "brokerless: --from: must be "),
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
        (("journal", "dump", "/nowhere"), "brokerless: PATH: there is no journal at /nowhere"),
        (
            ("spark", "land", "--spool", "/nowhere", "--table", "x"),
            "brokerless: --spool: there is no spool or journal at /nowhere",
        ),
        (("mcast", "sub", "239.255.7.7:30001", "--count=-1"), "brokerless: --count: must be 0 or more"),
        (("losstest", "run", "--transport", "nonsense"), "brokerless: "),
        (("nonsense",), 'brokerless: unknown command "nonsense"'),
        (("--log-format", "xml", "journal", "info", "x"), 'brokerless: invalid value "xml" for --log-format'),
        (("collect", "--config", "/nowhere.toml"), "brokerless: /nowhere.toml: cannot be read"),
    ],
)
def test_an_error_is_one_line_that_names_what_was_typed(arguments: tuple[str, ...], said: str) -> None:
    """Exit code 2, one line on standard error, and nothing on standard output."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, ""), done.stderr
    assert done.stderr.startswith(said), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_directory_that_may_not_be_used_is_named(tmp_path: Path) -> None:
    """An error of the operating system is one line as well."""
    (tmp_path / "file").write_text("")
    done = run("keys", "new", tmp_path / "file" / "key")
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
    done = run("completion", shell)
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
        done = run("ps", *options)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
