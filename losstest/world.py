"""From the supervisor's notes to spans of time in which a subscription could not have received. Pure."""

from brokerless.losstest.attribute import FOREVER, World
from brokerless.losstest.books import Got, Sent
from brokerless.losstest.evidence import ConsumerLog, Evidence
from brokerless.losstest.witness import Kind

NS = 1_000_000_000
# After a stop or a slow time the backlog still has to be worked off; if no later event ever arrives, the
# span ends here.
CATCH_UP_NS = 3 * NS
# What a client still holds for its next datagram when the filter begins to drop.
BEFORE_NS = NS // 10


def fault_span(evidence: Evidence) -> tuple[int, int] | None:
    """When the fault began and ended, or None if there was none (or it never began)."""
    begin = next((w["t"] for w in evidence.world if w["what"] == "fault-begin"), None)
    end = next((w.get("healed") or w["t"] for w in evidence.world if w["what"] == "fault-end"), None)
    if begin is None:
        return None
    return begin, end if end is not None else FOREVER


def quiescent(evidence: Evidence) -> bool:
    """True if the supervisor saw the run come to rest, and nothing was delivered after that."""
    rested = next((w["t"] for w in evidence.world if w["what"] == "quiescent"), None)
    if rested is None:
        return False
    return not any(
        r.t > rested and r.kind == Kind.DELIVERED for log in evidence.consumers for r in log.records
    )


def world_of(evidence: Evidence, got: Got, books: Sent) -> World:
    """What happened to one subscription."""
    traits = evidence.cell.traits
    members = [log for log in evidence.consumers if log.subscription == got.name]
    indexes = {log.index for log in members}
    tcp = traits.link in ("", "tcp")
    world = World(
        overflow=f"overflow_{traits.overflow_at}",
        cut_reason="overflow_sender" if tcp and traits.overflow_at == "sender" else "in_flight",
    )
    present: list[tuple[int, int]] = []
    for log in members:
        down = _down(evidence, log)
        # An orderly stop takes a moment in which it still receives; its last record tells when it still lived.
        gone = down if down == FOREVER else max([down, *(r.t for r in log.records[-1:])])
        if down < FOREVER:
            world.deaths.append((down, gone))
        begin = _effective(log, max(books.accepted.values(), default=0), int(traits.quiet_s * NS))
        if begin < gone:
            present.append((begin, gone))
    world.absent = _complement(present)
    world.backlog = _backlog(got, books, max(2, evidence.cell.buffer_events // 4))
    world.dropping = _filtered(evidence, begin=("loss", "burst"), end=("pass",))
    world.cut = _filtered(evidence, begin=("cut",), end=("uncut",))
    ends = {"pause": "resume", "slow": "fast"}
    for note in evidence.world:
        if note["what"] in ends and note.get("consumer") in indexes:
            world.stalled.append((note["t"], _caught_up(evidence, got, books, note, ends[note["what"]])))
        elif note["what"] == "cut" and not evidence.filters:
            world.cut.append((note["t"], _following(evidence, note["t"], "uncut")))
        elif note["what"] == "producer-down":
            world.producer_deaths.append(note["t"])
        elif note["what"] == "broker-down":
            world.broker_deaths.append(note["t"])
        elif note["what"] == "producer-up":
            # A new producer has no consumers until they have found it again.
            world.absent.append((note["t"], _first_after(got, books, note["t"])))
    return world


def _filtered(evidence: Evidence, begin: tuple[str, ...], end: tuple[str, ...]) -> list[tuple[int, int]]:
    """Spans in which the kernel's filter may have dropped packets; which ones, it does not tell."""
    spans, since = [], 0
    for note in evidence.filters:
        word = str(note["order"]).split()[0]
        if word in begin and not since:
            since = note["begun"] - BEFORE_NS
        elif word in end and since:
            spans.append((since, note["t"]))
            since = 0
    return [*spans, *([(since, FOREVER)] if since else [])]


def _down(evidence: Evidence, log: ConsumerLog) -> int:
    for note in evidence.world:
        if note["what"] == "down" and (note["consumer"], note["incarnation"]) == (log.index, log.incarnation):
            return int(note["t"])
    return FOREVER


def _backlog(got: Got, books: Sent, limit: int) -> list[tuple[int, int]]:
    """Spans in which at least `limit` accepted events were still to be delivered: the consumer was behind."""
    changes = []
    for n, delivered in got.delivered.items():
        if n in books.accepted and delivered > books.accepted[n]:
            changes += [(books.accepted[n], 1), (delivered, -1)]
    spans, under_way, since = [], 0, 0
    for t, change in sorted(changes):
        under_way += change
        if under_way >= limit and not since:
            since = t
        elif under_way < limit and since:
            spans.append((since, t))
            since = 0
    return spans


def _effective(log: ConsumerLog, last_accepted: int, connecting_ns: int) -> int:
    """From when an incarnation really received: its first delivery.

    One that never got any is taken at its word, unless the last event came while it may still have been
    connecting: `ready` is said before a connection that is made in the background is there.
    """
    ready = FOREVER
    for r in log.records:
        if r.kind in (Kind.PROBE, Kind.DELIVERED):
            return r.t
        if r.kind == Kind.READY:
            ready = r.t
    return FOREVER if last_accepted - ready < connecting_ns else ready


def _complement(present: list[tuple[int, int]]) -> list[tuple[int, int]]:
    absent = []
    at = 0
    for begin, end in sorted(present):
        if begin > at:
            absent.append((at, begin))
        at = max(at, end)
    if at < FOREVER:
        absent.append((at, FOREVER))
    return absent


def _following(evidence: Evidence, t: int, what: str, consumer: int | None = None) -> int:
    for note in evidence.world:
        if note["what"] == what and note["t"] >= t and consumer in (None, note.get("consumer")):
            return int(note["t"])
    return FOREVER


def _caught_up(evidence: Evidence, got: Got, books: Sent, note: dict[str, object], ends: str) -> int:
    """When an event accepted after the end of a stall was first delivered: the buffers were empty again."""
    consumer = note["consumer"]
    assert isinstance(consumer, int)
    t = note["t"]
    assert isinstance(t, int)
    end = _following(evidence, t, ends, consumer)
    if end == FOREVER:
        return FOREVER
    return min(_first_after(got, books, end), end + CATCH_UP_NS)


def _first_after(got: Got, books: Sent, t: int) -> int:
    """When an event accepted after `t` was first delivered; FOREVER if none was."""
    times = (delivered for n, delivered in got.delivered.items() if books.accepted.get(n, -1) > t)
    return min(times, default=FOREVER)
