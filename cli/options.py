"""Options that several commands share: the same word, type and help text wherever they appear."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from brokerless.core.errors import ConfigError

Json = Annotated[
    bool, Parameter("--json", negative="", help="Print JSON on standard output, one object per line.")
]
Data = Annotated[
    str, Parameter(allow_leading_hyphen=True, help="The event's data; `-` reads stdin, one event per line.")
]
Topics = Annotated[
    str,
    Parameter(
        help="Topic patterns (orders.*, orders.**) or prefixes (orders., prefix:sensor-); all if none."
    ),
]
Also = Annotated[
    tuple[str, ...],
    Parameter("--also", negative="", help="A further address, next to the first; repeatable."),
]
JournalDirectory = Annotated[
    Path | None, Parameter("--journal", help="Keep the events in this directory; in memory if not given.")
]
Key = Annotated[str, Parameter("--key", help="The key of all events, for workers with key affinity.")]
ContentType = Annotated[str, Parameter("--content-type", help="The content type of all events.")]
Start = Annotated[str, Parameter("--from", help="live, oldest, cursor, or an offset.")]
StartOrTime = Annotated[
    str, Parameter("--from", help="live, oldest, cursor, snapshot, an offset, or a time in ISO 8601.")
]
CursorFile = Annotated[Path | None, Parameter("--cursor", help="Remember the position in this file.")]
Count = Annotated[int, Parameter("--count", help="End after so many events; 0 means never.")]
IdleTimeout = Annotated[
    float, Parameter("--timeout", help="End after so many seconds without an event; 0 means never.")
]
# Of tables that are refreshed in place.
Interval = Annotated[float, Parameter(help="Seconds between looks.")]
Looks = Annotated[int, Parameter("--count", help="End after so many looks; 0 goes on until Ctrl-C.")]
Rows = Annotated[int, Parameter(help="Rows per table.")]
# Of the tables over spools, with Spark and without.
Window = Annotated[float, Parameter(help="seconds")]
LateAfter = Annotated[float, Parameter(help="seconds after its window that an event counts as late")]
Settle = Annotated[float, Parameter(help="seconds that a gap is pending before it is lost")]
By = Annotated[Literal["window", "topic"], Parameter(help="one row per window, or sums per topic")]
Endpoints = Annotated[tuple[str, ...], Parameter(name="--endpoint", help="a publisher's address; repeatable")]
DataLoss = Annotated[
    bool, Parameter(name="--fail-on-data-loss", help="stop if retention passed what is wanted")
]
Quarantine = Annotated[bool, Parameter(help="go on over damaged segments, with a row that says so")]

# A view that is refreshed less often than daily is none.
_MAX_INTERVAL_S = 86_400.0


def check_interval(interval: float) -> None:
    """Seconds between two looks at something; raises ConfigError."""
    if not 0 < interval <= _MAX_INTERVAL_S:  # neither is NaN
        raise ConfigError("--interval", f"must be more than 0 and at most {_MAX_INTERVAL_S:.0f} seconds")


def check_live_table(interval: float, rows: int, count: int) -> None:
    """What `top` of a publisher and of a metrics daemon accept; raises ConfigError."""
    check_interval(interval)
    if rows < 1 or count < 0:
        raise ConfigError("--rows", "must be positive, and --count not negative")
