"""Entry point of the `brokerless` command.

Each subcommand lives in a module of its own that is imported only when it is called, so that
`brokerless metrics` does not wait for Spark's imports.
"""

import errno
import math
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter
from cyclopts.exceptions import (
    ArgumentOrderError,
    MixedArgumentError,
    RepeatArgumentError,
    UnusedCliTokensError,
)

from brokerless.cli import exit_codes
from brokerless.cli.logs import LogFormat, LogLevel, configure_logging
from brokerless.core import __version__
from brokerless.core.errors import BrokerlessError, ConfigError, InvalidEvent, MissingDependency, UsageError

# command → where it is ("module:attribute", imported only when called), and what `--help` says of it.
COMMANDS = {
    "collect": (
        "brokerless.cli.collect:app",
        "Collect events of every transport into a spool that Spark reads.",
    ),
    "counts": ("brokerless.cli.spools:counts_app", "Count the events of a spool, each once, without Spark."),
    "dead-letters": (
        "brokerless.cli.admin:letters",
        "List, show, retry and drop a publisher's dead letters.",
    ),
    "export": (
        "brokerless.cli.spools:export_app",
        "Write the events of a spool to a Parquet, Arrow or CSV file.",
    ),
    "console": (
        "brokerless.cli.console:app",
        "Serve a live page of what runs on this machine: map, losses, accounting.",
    ),
    "forget": (
        "brokerless.cli.admin:forget",
        "Forget a group or a durable subscriber that will not come back.",
    ),
    "groups": ("brokerless.cli.admin:groups", "Show a publisher's groups."),
    "journal": ("brokerless.cli.journal:app", "Look into a disk journal: info, dump, verify."),
    "keys": ("brokerless.cli.direct:keys", "Make and show CURVE keys."),
    "lag": ("brokerless.cli.admin:lag", "How far a publisher's consumers are behind."),
    "loss": ("brokerless.cli.spools:loss_app", "Show what was lost, from a spool, without Spark."),
    "losstest": ("brokerless.cli.losstest:app", "Measure what is lost when consumers go offline."),
    "mcast": (
        "brokerless.cli.mcast:app",
        "UDP multicast (MoldUDP64): publish, subscribe, serve requests, dump.",
    ),
    "metrics": ("brokerless.cli.metrics:app", "StatsD daemon that knows how wrong its counters are."),
    "mirror": ("brokerless.cli.mirror:app", "Keep a copy of a publisher's journal: run, status, promote."),
    "pipeline": (
        "brokerless.cli.pipeline:app",
        "Run collectors and Spark jobs from one TOML file, or print them for a cluster.",
    ),
    "ps": ("brokerless.cli.ps:app", "List the components that run on this machine: rate, lag, loss."),
    "pub": ("brokerless.cli.direct:pub", "Publish events at an address."),
    "spark": ("brokerless.cli.spark:app", "Land, count and query events in Spark; loss as a table."),
    "sub": ("brokerless.cli.direct:sub", "Print events of a publisher, as they come."),
    "top": ("brokerless.cli.admin:top", "A live table of a publisher's subscribers and groups."),
    "webhooks": ("brokerless.cli.webhooks:app", "Serve, inspect and receive webhooks."),
}
# Fields of the library that an option has under another name.
OPTIONS = {
    "flush_s": "--flush",
    "offline_s": "--offline",
    "drain_s": "--drain",
    "backends": "--backend",
    "percentiles": "--percentile",
}


def _default_text(value: object) -> str | None:
    """A default as it would be typed; that a flag is off, or that nothing is given, needs no words."""
    if value is None or value is False or value in ("", ()):
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_number(_type: object, value: object) -> None:
    """`nan` is a float to Python, and neither a duration nor a rate: comparisons with it are all false."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("must be a number, not 'nan'")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError(f"must fit in 64 bits, not {value}")


app = cyclopts.App(
    name="brokerless",
    exit_on_error=False,  # main() prints errors, and decides on the exit code
    print_error=False,
    help="Events straight from producers to consumers, with no broker between them, and what was lost.",
    help_epilogue=(
        "Examples:\n\n"
        "brokerless pub tcp://127.0.0.1:5555 orders.eu hello --journal var/orders\n\n"
        "brokerless sub tcp://127.0.0.1:5555 --from oldest\n\n"
        "brokerless losstest run --quick"
    ),
    version=__version__,
    default_parameter=Parameter(
        negative_iterable=(),  # an option that may be repeated needs no --empty-…
        show_default=_default_text,
        validator=_check_number,
    ),
)
# Below the command's own parameters.
EVERYWHERE = cyclopts.Group("Options of every command", sort_key=99)
for _name, (_target, _text) in COMMANDS.items():
    app.command(_target, name=_name, help=_text)
app.register_install_completion_command(help="Install completion for the shell that runs this.")


@app.meta.default
def _with_logging(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    log_format: Annotated[
        LogFormat, Parameter(env_var="BROKERLESS_LOG_FORMAT", help="of the log on stderr", group=EVERYWHERE)
    ] = "text",
    log_level: Annotated[
        LogLevel, Parameter(env_var="BROKERLESS_LOG_LEVEL", help="least level to show", group=EVERYWHERE)
    ] = "warning",
    lan: Annotated[
        str,
        Parameter(
            env_var="BROKERLESS_LAN",
            help="announce on the LAN of this interface (IPv4 address), too",
            group=EVERYWHERE,
        ),
    ] = "",
    lan_key: Annotated[
        Path | None,
        Parameter(
            env_var="BROKERLESS_LAN_KEY", help="file with the key that the LAN shares", group=EVERYWHERE
        ),
    ] = None,
) -> object:
    """Options of every command; they may stand anywhere."""
    configure_logging(log_format, log_level)
    if lan or lan_key is not None:
        if not lan or lan_key is None:
            raise ConfigError("--lan", "needs --lan-key, and --lan-key needs --lan")
        from brokerless.core.beacons import join_lan, read_key

        join_lan(lan, key=read_key(lan_key))
    return app(tokens)


@app.command(help_epilogue="Example: brokerless completion bash")
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the completion script of a shell.

    Parameters
    ----------
    shell
        The shell that will read it.
    """
    print(app.generate_completion(shell=shell))


def main(argv: list[str] | None = None) -> None:
    """Run the command line. The exit codes are those of `brokerless.cli.exit_codes`."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        app.meta(arguments)
    except cyclopts.CycloptsError as error:
        sys.exit(_complain(_parser_error(error), exit_codes.USAGE))
    except (UsageError, MissingDependency) as error:
        sys.exit(_complain(_named(error, arguments), exit_codes.USAGE))
    except BrokerlessError as error:
        sys.exit(_complain(str(error), exit_codes.FAILED))
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    except BrokenPipeError:  # `brokerless sub … | head`: the reader left
        _forget_stdout()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        sys.exit(_complain(_system_error(error), exit_codes.FAILED))
    except UnicodeEncodeError as error:  # bytes of the command line that are not text
        sys.exit(_complain(f"not valid UTF-8: {error.object!r}", exit_codes.USAGE))
    except Exception as error:
        if os.environ.get("BROKERLESS_TRACEBACK"):
            raise
        kind = type(error).__name__
        text = f"defect: {kind}: {error} (BROKERLESS_TRACEBACK=1 shows where; please report it)"
        sys.exit(_complain(text, exit_codes.INTERNAL))


def _parser_error(error: cyclopts.CycloptsError) -> str:
    """What the parser has to say, in the style of all other errors."""
    error.verbose = False
    chain = " ".join(["brokerless", *(error.command_chain or ())])
    argument, token = error.argument, getattr(error, "token", None)
    text = str(error).rstrip(". ")
    if isinstance(error, cyclopts.MissingArgumentError) and argument is not None:
        text = f"{error.keyword}: needs a value" if error.keyword else f"{_shown(argument)}: is missing"
    elif isinstance(error, cyclopts.CoercionError) and token is not None and error.target_type in _KINDS:
        name = token.keyword or (_shown(argument) if argument is not None else "")
        text = f"{name}: must be {_KINDS[error.target_type]}, not {token.value!r}"
    elif isinstance(error, ArgumentOrderError) and argument is not None:
        earlier = " and ".join(
            each.tokens[0].keyword or ""
            for each in error.prior_positional_or_keyword_supplied_as_keyword_arguments
        )
        text = f"{_shown(argument)}: with {earlier} as an option, give {argument.name} {error.token}"
    elif isinstance(error, MixedArgumentError) and argument is not None:
        text = f"{_shown(argument)}: was given twice, also as {argument.name}"
    elif isinstance(error, cyclopts.ValidationError) and argument is not None:
        text = f"{_shown(argument)}: {error.exception_message}"
    elif isinstance(error, RepeatArgumentError) and token is not None:
        text = f"{token.keyword}: was given twice"
    elif isinstance(error, UnusedCliTokensError):
        text = f"one argument too many: {' '.join(error.unused_tokens or ())}"
    elif isinstance(error, cyclopts.UnknownCommandError):  # all of them, or none, but not the first eight
        text = text.partition(" Available commands")[0].rstrip(". ")
        if error.unused_tokens and error.unused_tokens[0].startswith("-"):
            text = f"unknown option: {error.unused_tokens[0]}"
    if not text.startswith("-") and text[1:2].islower():
        text = f"{text[:1].lower()}{text[1:]}"
    return f"{text} (see {chain} --help)"


# What the parser cannot make of a word, in words.
_KINDS: dict[object, str] = {int: "a whole number", float: "a number"}


def _shown(argument: cyclopts.Argument) -> str:
    """What help texts call an argument: `ADDRESS`, or `--out`."""
    return argument.name.lstrip("-").upper() if argument.index is not None else argument.name


def _system_error(error: OSError) -> str:
    if error.errno == errno.ENOSPC and error.filename is None:
        _forget_stdout()
        return "the output cannot be written: no space left"
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename is not None else text


def _forget_stdout() -> None:
    """Python would complain once more while closing it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _named(error: BrokerlessError, arguments: list[str]) -> str:
    """The error's text, with the option that the user typed instead of the library's name for it."""
    if not isinstance(error, (ConfigError, InvalidEvent)):
        return str(error)
    return f"{option_of(error.field, arguments)}: {error.problem}"


def option_of(field: str, arguments: list[str]) -> str:
    """What the command in `arguments` calls the library's `field`: an option, an argument, or the field itself."""
    if field.startswith("-"):
        return field
    try:
        _, apps, _ = app.parse_commands(arguments)
        found = apps[-1].assemble_argument_collection()
    except (cyclopts.CycloptsError, ValueError):
        return field
    try:
        given = app.parse_known_args(arguments)[1].arguments
    except cyclopts.CycloptsError:
        given = {}
    for argument in found:
        # A file that is wrong is called by its name: say which option it was given to.
        if str(given.get(argument.field_info.name)) == field:
            return f"{_shown(argument)}: {field}"
        if field in (argument.field_info.name, argument.field_info.name.removesuffix("s")):
            return _shown(argument)
    return OPTIONS.get(field, field)


def _complain(text: str, code: int) -> int:
    """Print an error as one line."""
    print(f"brokerless: {' '.join(text.split())}", file=sys.stderr)
    return code
