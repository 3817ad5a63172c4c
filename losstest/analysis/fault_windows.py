"""When a subscription could not have received, from what the supervisor and both ends saw. Pure."""

from typing import Any

import msgspec

from brokerless.losstest.analysis.observations import FOREVER, Presence, ReceivedEvents, SentEvents
from brokerless.losstest.evidence.evidence import Evidence
from brokerless.losstest.model import Promise

NS = 1_000_000_000
# After a stop or a slow time the backlog still has to be worked off, what has come meanwhile as well: until an event
# is delivered this soon after it was accepted. If that never happens, the span ends here.
PROMPT_NS = NS // 20
CATCH_UP_NS = 3 * NS
# What a client still holds for its next datagram when the filter begins to drop.
BEFORE_NS = NS // 10
# A sender notices by missed heartbeats at the latest that a worker has died; ours take 0.75 s.
NOTICE_NS = NS
# What a relay does to a connection that holds events back, so that buffers before it may overflow
_HOLDING = ("bandwidth", "latency")
Span = tuple[int, int]


class FaultWindows(msgspec.Struct, kw_only=True):
    """What happened to one subscription, as spans of time [begin, end) in ns."""

    absent: list[Span] = []  # no consumer of the subscription was there
    broker_keeps: int = 0  # events that a broker keeps for an absent consumer; 0: no broker, or no such limit
    stalled: list[Span] = []  # consumer stopped or slow, until it had caught up
    cut: list[Span] = []  # the network was cut
    broken: list[int] = []  # a connection was reset, or an end closed one because another had been reset
    dropping: list[Span] = []  # the kernel's filter dropped packets, or the relay reset connections
    refusing: list[Span] = []  # the receiver answered with errors, or not at all
    # (end of a process, number of the last event that it was given): what came after was under way to it
    deaths: list[tuple[int, int]] = []
    # One worker of a group had died, and the others were there: what was given to it before that was noticed
    unnoticed: list[Span] = []
    producer_deaths: list[int] = []
    journal_in_memory: bool = False  # it dies with its producer
    broker_deaths: list[int] = []
    power_cuts: list[int] = []  # of the broker
    overflow: str = "overflow_sender"
    cut_reason: str = "in_flight"

    @property
    def hindrances(self) -> list[Span]:
        """All spans in which something kept events from the subscription."""
        ends = [(time, time + 1) for time, _ in self.deaths]
        return [*self.absent, *self.stalled, *self.cut, *self.dropping, *self.refusing, *ends]


def fault_span(evidence: Evidence) -> Span | None:
    """When the fault began and ended, or None if there was none (or it never began)."""
    begin = next((w["t"] for w in evidence.supervisor if w["what"] == "fault-begin"), None)
    end = next((w.get("healed") or w["t"] for w in evidence.supervisor if w["what"] == "fault-end"), None)
    if begin is None:
        return None
    return begin, end if end is not None else FOREVER


def quiescent_since(evidence: Evidence) -> int | None:
    """When the supervisor saw the run come to rest, or None."""
    return next((int(w["t"]) for w in evidence.supervisor if w["what"] == "quiescent"), None)


def find_fault_windows(evidence: Evidence, received: ReceivedEvents, sent: SentEvents) -> FaultWindows:
    """What happened to one subscription."""
    traits = evidence.cell.traits
    tcp = traits.link in ("", "tcp")
    windows = FaultWindows(
        overflow=f"overflow_{traits.overflow_at}",
        journal_in_memory=traits.journal == "memory",
        cut_reason="overflow_sender" if tcp and traits.overflow_at == "sender" else "in_flight",
    )
    last_accepted = int(sent.accepted.max(initial=0))
    present: list[Span] = []
    for presence in received.presences:
        down = _down(evidence, presence)
        # An orderly stop takes a moment in which it still receives; its last record tells when it still lived.
        gone = down if down == FOREVER else max(down, presence.last_record)
        if down < FOREVER:
            windows.deaths.append((gone, presence.highest))
            if traits.group:
                windows.unnoticed.append((gone, gone + NOTICE_NS))
        begin = _receives_from(presence, last_accepted, int(traits.quiet_s * NS))
        if begin < gone:
            present.append((begin, gone))
    windows.absent = _complement(present)
    if traits.journal == "broker":
        # Only a transport whose broker has a limit says what happens beyond it.
        if "evicted" in traits.promises.get("beyond-retention", Promise()).reasons:
            windows.broker_keeps = evidence.cell.retention_events
        # A queue that filled up meanwhile stays full until the consumer has worked it off.
        room = evidence.cell.retention_events * 3 // 4
        for _, back in windows.absent:
            if back < FOREVER and _waiting(received, sent, back) >= room:
                windows.stalled.append((back, _caught_up(received, sent, back)))
    windows.dropping = _filtered(evidence, begin=("loss", "burst"), end=("pass",))
    windows.cut = _filtered(evidence, begin=("cut",), end=("uncut",))
    for entry in evidence.supervisor:
        _add_entry(windows, evidence, entry, received, sent)
    return windows


def _add_entry(
    windows: FaultWindows,
    evidence: Evidence,
    entry: dict[str, Any],
    received: ReceivedEvents,
    sent: SentEvents,
) -> None:
    what, t = entry["what"], int(entry["t"])
    link = evidence.cell.traits.link
    ours = entry.get("consumer") in {presence.index for presence in received.presences}
    ends = {"pause": "resume", "slow": "fast"}
    if what in ends and ours:
        end = _following(evidence, t, ends[what], entry["consumer"])
        windows.stalled.append((t, _caught_up(received, sent, end)))
    elif what == "relay" and str(entry["instruction"]).startswith("reset"):
        end = _last_reset(evidence, t, _following(evidence, t, "relay", None, "pass"))
        windows.dropping.append((t, end))
        windows.broken += [at for at in evidence.resets if t <= at <= end]
        windows.absent.append((end, _first_after(received, sent, end)))  # until it has connected again
        # An end that lost one connection closes its others when it notices, and connects them again, too.
        for closed in evidence.closed:
            connected = min((at for at in evidence.connected if at > closed), default=FOREVER)
            if end <= closed < end + CATCH_UP_NS and connected < FOREVER:
                windows.broken.append(closed)
                windows.absent.append((closed, _first_after(received, sent, connected)))
    elif what == "relay" and str(entry["instruction"]).startswith(_HOLDING) and link == "tcp":
        end = _following(evidence, t, "relay", None, "pass")
        windows.stalled.append((t, _caught_up(received, sent, end)))
    elif what == "cut" and not evidence.filters:
        end = _following(evidence, t, "uncut")
        windows.cut.append((t, end))
        if link == "tcp":  # until it has connected again, and then has taken what had piled up
            windows.absent.append((end, min(_first_after(received, sent, end), end + CATCH_UP_NS)))
            windows.stalled.append((end, _caught_up(received, sent, end)))
    elif what == "instruction" and ours and entry["instruction"] in ("answer-500", "hang"):
        end = _following(evidence, t, "instruction", entry["consumer"], "answer-200")
        windows.refusing.append((t, _first_after(received, sent, end)))
    elif what == "producer-down":
        windows.producer_deaths.append(t)
    elif what == "power-cut":
        windows.power_cuts.append(t)
    elif what == "broker-down":
        windows.broker_deaths.append(t)
    elif what in ("producer-up", "broker-up"):
        # A new one has no consumers until they have found it again.
        windows.absent.append((t, _first_after(received, sent, t)))


def _last_reset(evidence: Evidence, begin: int, end: int) -> int:
    """When the relay last reset a connection: it may have heard of the end later than the supervisor said it."""
    again = min(
        (
            entry["t"]
            for entry in evidence.supervisor
            if entry["t"] > end and str(entry.get("instruction", "")).startswith("reset")
        ),
        default=FOREVER,
    )
    return max([end, *(t for t in evidence.resets if begin <= t < again)])


def _filtered(evidence: Evidence, begin: tuple[str, ...], end: tuple[str, ...]) -> list[Span]:
    """Spans in which the kernel's filter may have dropped packets; which ones, it does not tell."""
    spans, since = [], 0
    for entry in evidence.filters:
        word = str(entry["instruction"]).split()[0]
        if word in begin and not since:
            since = entry["begun"] - BEFORE_NS
        elif word in end and since:
            spans.append((since, entry["t"]))
            since = 0
    return [*spans, *([(since, FOREVER)] if since else [])]


def _down(evidence: Evidence, presence: Presence) -> int:
    who = (presence.index, presence.incarnation)
    for entry in evidence.supervisor:
        if entry["what"] == "down" and (entry["consumer"], entry["incarnation"]) == who:
            return int(entry["t"])
    return FOREVER


def _receives_from(presence: Presence, last_accepted: int, connecting_ns: int) -> int:
    """From when an incarnation really received: its first delivery.

    One that never got any is believed to have been ready when it said so, unless the last event came while it may
    still have been connecting: `ready` is reported before a connection that is made in the background is there.
    """
    if presence.received < FOREVER:
        return presence.received
    return FOREVER if last_accepted - presence.ready < connecting_ns else presence.ready


def _complement(present: list[Span]) -> list[Span]:
    absent = []
    at = 0
    for begin, end in sorted(present):
        if begin > at:
            absent.append((at, begin))
        at = max(at, end)
    if at < FOREVER:
        absent.append((at, FOREVER))
    return absent


def _following(
    evidence: Evidence, t: int, what: str, consumer: int | None = None, instruction: str | None = None
) -> int:
    for entry in evidence.supervisor:
        if (
            entry["what"] == what
            and entry["t"] >= t
            and consumer in (None, entry.get("consumer"))
            and instruction in (None, entry.get("instruction"))
        ):
            return int(entry["t"])
    return FOREVER


def _waiting(received: ReceivedEvents, sent: SentEvents, t: int) -> int:
    """How many events were accepted by `t` and not delivered by then."""
    accepted = (sent.accepted > 0) & (sent.accepted <= t)
    return int((accepted & ~((received.delivered > 0) & (received.delivered <= t))).sum())


def _first_after(received: ReceivedEvents, sent: SentEvents, t: int) -> int:
    """When an event accepted after `t` was first delivered; FOREVER if none was."""
    if t == FOREVER:
        return FOREVER
    later = (sent.accepted > t) & (received.delivered > 0)
    return int(received.delivered.min(initial=FOREVER, where=later))


def _caught_up(received: ReceivedEvents, sent: SentEvents, t: int) -> int:
    """When the backlog of a hindrance that ended at `t` was worked off."""
    if t == FOREVER:
        return FOREVER
    prompt = (sent.accepted > t) & (received.delivered > 0)
    prompt &= received.delivered < sent.accepted + PROMPT_NS
    return min(int(received.delivered.min(initial=FOREVER, where=prompt)), t + CATCH_UP_NS)
