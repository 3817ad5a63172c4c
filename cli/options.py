"""Options that several commands share: the same word, type and help text wherever they appear."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

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
