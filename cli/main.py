"""Entry point of the `brokerless` command.

Each subcommand lives in a module of its own that is imported only when it is called, so that
`brokerless metrics` does not wait for Spark's imports.
"""

import errno
import os
import signal
import sys

import cyclopts

from brokerless.core.errors import BrokerlessError, UsageError

# command → where it is ("module:attribute", imported only when called), and what `--help` says of it.
COMMANDS = {
    "collect": (
        "brokerless.cli.collect:app",
        "Collect events of every transport into a spool that Spark reads.",
    ),
    "journal": ("brokerless.cli.journal:app", "Look into a disk journal: info, dump, verify."),
    "keys": ("brokerless.cli.direct:keys", "Make and show CURVE keys."),
    "losstest": ("brokerless.cli.losstest:app", "Measure what is lost when consumers go offline."),
    "mcast": (
        "brokerless.cli.mcast:app",
        "UDP multicast (MoldUDP64): publish, subscribe, serve requests, dump.",
    ),
    "metrics": ("brokerless.cli.metrics:app", "StatsD daemon that knows how wrong its counters are."),
    "pub": ("brokerless.cli.direct:pub", "Publish events at an address."),
    "spark": ("brokerless.cli.spark:app", "Land, count and query events in Spark; loss as a table."),
    "sub": ("brokerless.cli.direct:sub", "Print events of a publisher, as they come."),
    "webhooks": ("brokerless.cli.webhooks:app", "Serve, inspect and receive webhooks."),
}
# Exit code for wrong arguments, where a command promises another one than 2.
USAGE_CODES = {"losstest": 3}


def _version() -> str:
    from importlib.metadata import version

    return version("brokerless")


app = cyclopts.App(
    name="brokerless",
    exit_on_error=False,  # main() decides on the exit code
    help="Events straight from producers to consumers, with no broker between them, and what was lost.",
    version=_version,
)
for _name, (_target, _text) in COMMANDS.items():
    app.command(_target, name=_name, help=_text)


def main(argv: list[str] | None = None) -> None:
    """Run the command line: 0 done, 1 a fault, 2 wrong arguments, 130 interrupted.

    Commands that promise other codes raise SystemExit themselves.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        app(arguments)
    except cyclopts.CycloptsError:  # it has already been printed
        sys.exit(_usage_code(arguments))
    except UsageError as error:
        sys.exit(_complain(error, _usage_code(arguments)))
    except BrokerlessError as error:
        sys.exit(_complain(error, 1))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # `brokerless sub … | head`: the reader left
        _forget_stdout()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _forget_stdout()
        print("brokerless: the output cannot be written: no space left", file=sys.stderr)
        sys.exit(1)


def _forget_stdout() -> None:
    """Python would complain once more while closing it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_code(arguments: list[str]) -> int:
    return USAGE_CODES.get(arguments[0], 2) if arguments else 2


def _complain(error: BrokerlessError, code: int) -> int:
    print(f"brokerless: {error}", file=sys.stderr)
    return code
