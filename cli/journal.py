"""`brokerless journal`: look into a disk journal, without disturbing its writer."""

import json
import time
from datetime import UTC, datetime
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from brokerless.core import JournalReader

app = cyclopts.App(name="journal", help="Look into a disk journal: info, dump, verify.")


@app.command
def info(path: str, *, as_json: Annotated[bool, Parameter("--json")] = False) -> None:
    """What a journal holds: source, epochs, offsets, topics, size.

    Parameters
    ----------
    path
        The journal's directory.
    as_json
        Print one JSON object instead of a table.
    """
    with JournalReader(path) as reader:
        facts = {
            "path": path,
            "source": reader.source,
            "epoch": reader.epoch,
            "epochs": reader.meta.epochs,
            "oldest": reader.oldest,
            "next": reader.next,
            "events": reader.next - reader.oldest,
            "clean": reader.meta.clean,
            "topics": reader.sent(),
        }
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        if name == "topics":
            shown = sorted(facts["topics"].items(), key=lambda t: -t[1])  # type: ignore[attr-defined]
            value = "\n".join(f"{topic}: {seq}" for topic, seq in shown[:20])  # noqa: PLW2901
            if len(shown) > 20:
                value += f"\n… and {len(shown) - 20} more"  # noqa: PLW2901
        table.add_row(name, str(value))
    Console().print(table)


@app.command
def dump(
    path: str,
    *,
    start: Annotated[int | None, Parameter("--from")] = None,
    count: int = 0,
    follow: bool = False,
) -> None:
    """Print events, one JSON object a line.

    Parameters
    ----------
    path
        The journal's directory.
    start
        First offset, the oldest if not given.
    count
        Stop after so many events; 0 means all.
    follow
        Wait for more at the end, until Ctrl-C.
    """
    left = count or -1
    with JournalReader(path) as reader:
        at = reader.oldest if start is None else start
        while left:
            if at >= reader.next and not (follow and reader.wait(at, 3600)):
                return
            chunk = reader.read(at)
            for first, last in chunk.gone:
                print(json.dumps({"gone": [first, last]}))
            for event in (e for f in chunk.frames for e in f.events() if e.offset >= at):
                if not left:
                    return
                left -= 1
                print(
                    json.dumps(
                        {
                            "offset": event.offset,
                            "epoch": event.epoch,
                            "topic": event.topic,
                            "seq": event.seq,
                            "time": datetime.fromtimestamp(event.time / 1e6, UTC).isoformat(),
                            "content_type": event.content_type,
                            "key": event.key,
                            "data": event.data.decode("utf-8", "backslashreplace"),
                        }
                    )
                )
            at = chunk.next


@app.command
def verify(path: str) -> None:
    """Read everything, check every CRC, say what is gone. Exit code 1 if anything is.

    Parameters
    ----------
    path
        The journal's directory.
    """
    began = time.monotonic()
    gone: list[tuple[int, int]] = []
    events = size = 0
    with JournalReader(path) as reader:
        at, end = reader.oldest, reader.next
        while at < end:
            chunk = reader.read(at)
            gone += chunk.gone
            events += sum(f.count for f in chunk.frames)
            size += sum(len(f.raw) for f in chunk.frames)
            if chunk.next == at:
                break
            at = chunk.next
    print(f"{events} events, {size} bytes read in {time.monotonic() - began:.1f} s")
    for first, last in gone:
        print(f"gone: offsets {first} to {last} ({last - first + 1} events)")
    if gone:
        raise SystemExit(1)
    print("everything is intact")
