"""`brokerless journal`: look into a disk journal, without disturbing its writer."""

import os
import time
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from brokerless.cli.exit_codes import LOST
from brokerless.cli.options import Count, Json
from brokerless.cli.output import event_fields, facts_text, print_json, result
from brokerless.core import JournalReader
from brokerless.core.errors import ConfigError
from brokerless.core.journal.cursor_table import read_positions
from brokerless.core.journal.key_state import newest_state
from brokerless.core.journal.meta import META
from brokerless.direct.groups.store import GroupStore

app = cyclopts.App(
    name="journal",
    help="Look into a disk journal: info, dump, verify.",
    help_epilogue="Example: brokerless journal info var/orders",
)

# More topics than this are for --json, not for eyes.
_TOPICS_SHOWN = 20


def _open(path: str) -> JournalReader:
    if not os.path.exists(os.path.join(path, META)):
        raise ConfigError("path", f"there is no journal at {path}")
    return JournalReader(path)


@app.command(help_epilogue="Example: brokerless journal info var/orders --json")
def info(path: str, *, as_json: Json = False) -> None:
    """Print what a journal holds: source, epochs, offsets, topics, and who has had how much: cursors and groups.

    Parameters
    ----------
    path
        The journal's directory.
    """
    with _open(path) as reader:
        facts: dict[str, Any] = {
            "path": path,
            "source": reader.source,
            "epoch": reader.epoch,
            "epochs": reader.meta.epochs,  # each with its first offset
            "oldest": reader.oldest,
            "next": reader.next,
            "events": reader.next - reader.oldest,
            "clean": reader.meta.clean,
            "topics": reader.sent(),
        }
        end = reader.next
        state = newest_state(path, bytes.fromhex(reader.meta.salt)) if reader.meta.compact else None
    if state is not None:
        facts["compacted"] = {
            "before": state.end,
            "keys": state.count,
            "bytes": state.size,
            "complete": state.complete,
        }
        state.close()
    cursors = read_positions(os.path.join(path, "cursors"))
    facts["cursors"] = {name: {"position": at, "lag": max(0, end - at)} for name, at in cursors.items()}
    facts["groups"] = _groups(os.path.join(path, "groups"), end)
    shown = dict(sorted(facts["topics"].items(), key=lambda t: -t[1])[:_TOPICS_SHOWN])
    if more := len(facts["topics"]) - len(shown):
        shown[f"… and {more} more"] = "see --json"
    result(facts, facts_text(facts | {"topics": shown}), as_json=as_json)


def _groups(directory: str, end: int) -> dict[str, dict[str, object]]:
    """What is stored of the groups beside a journal."""
    if not os.path.isdir(directory):
        return {}
    store = GroupStore(directory)
    try:
        states = store.load()
    finally:
        store.close()
    return {
        name: {
            "cursor": state.cursor,
            "pending": max(0, end - state.cursor - sum(b - a + 1 for a, b in state.settled)),
            "acked": state.acked,
            "dead_lettered": state.dead,
            "lost": state.lost,
            "topics": list(state.policy.topics),
        }
        for name, state in states.items()
        if state is not None
    }


@app.command(help_epilogue="Example: brokerless journal dump var/orders --from 100 --count 10")
def dump(
    path: str,
    *,
    start: Annotated[int | None, Parameter("--from")] = None,
    count: Count = 0,
    follow: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = True,  # the only form; the option is there because every command has it
) -> None:
    """Print events, one JSON object per line, and `{"gone": [first, last]}` for what is no longer there.

    Parameters
    ----------
    path
        The journal's directory.
    start
        First offset, the oldest if not given.
    follow
        Wait for more at the end, until Ctrl-C.
    """
    if count < 0 or (start or 0) < 0:
        raise ConfigError("count" if count < 0 else "start", "must be 0 or more")
    remaining = count or -1
    with _open(path) as reader:
        at = reader.oldest if start is None else start
        while remaining:
            if at >= reader.next and not (follow and reader.wait(at, 3600)):
                return
            chunk = reader.read(at)
            for first, last in chunk.gone:
                print_json({"gone": [first, last]})
            for event in (e for f in chunk.frames for e in f.events() if e.offset >= at):
                if not remaining:
                    return
                remaining -= 1
                print_json(event_fields(event))
            at = chunk.next


@app.command(help_epilogue="Example: brokerless journal verify var/orders")
def verify(path: str, *, as_json: Json = False) -> None:
    """Read everything, check every CRC, and name what is gone. Exit code 3 if anything is.

    Parameters
    ----------
    path
        The journal's directory.
    """
    began = time.monotonic()
    gone: list[tuple[int, int]] = []
    events = size = 0
    with _open(path) as reader:
        at, end = reader.oldest, reader.next
        while at < end:
            chunk = reader.read(at)
            gone += chunk.gone
            events += sum(f.count for f in chunk.frames)
            size += sum(len(f.raw) for f in chunk.frames)
            if chunk.next == at:
                break
            at = chunk.next
    seconds = time.monotonic() - began
    lines = [f"{events} events, {size} bytes read in {seconds:.1f} s"]
    lines += [f"gone: offsets {first} to {last} ({last - first + 1} events)" for first, last in gone]
    if not gone:
        lines.append("everything is intact")
    fields = {"events": events, "bytes": size, "seconds": seconds, "gone": gone, "intact": not gone}
    result(fields, "\n".join(lines), as_json=as_json)
    if gone:
        raise SystemExit(LOST)
