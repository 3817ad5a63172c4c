"""The counters of publishers, their groups, subscribers and workers."""

from typing import Annotated

from brokerless.core import Counters
from brokerless.core.counters import count, loss


class PublisherCounters(Counters):
    """What a Publisher sent."""

    component = "direct.publisher"

    frames: Annotated[int, count("frames sent on the live socket")] = 0
    live_errors: Annotated[int, count("frames that the live socket refused; subscribers repair them")] = 0
    flush_errors: Annotated[
        int, loss("times the disk refused a batch; it stays accepted and is tried again")
    ] = 0
    beats: Annotated[int, count("heartbeats sent")] = 0
    repeated_ids: Annotated[
        int, count("publishes with an id that was accepted before, and not accepted again")
    ] = 0
    live_renewed: Annotated[
        int, count("times the live socket was recreated, because strangers had filled it with subscriptions")
    ] = 0


class RelayCounters(Counters):
    """What an OutboxRelay did."""

    component = "direct.outbox"

    moved: Annotated[int, count("rows whose event is in the journal, and which were deleted")] = 0
    repeated: Annotated[int, count("of those, rows whose event a relay before this one had published")] = 0
    refused: Annotated[int, loss("rows that the publisher refused; they stay, with their problem")] = 0
    failures: Annotated[int, count("times that the database or the journal failed; it is tried again")] = 0


class ControlCounters(Counters):
    """What a publisher's control socket saw."""

    component = "direct.control"

    hellos: Annotated[int, count("clients welcomed, reconnections included")] = 0
    refused: Annotated[int, count("clients refused: wrong version, wrong name, or too many")] = 0
    replays: Annotated[int, count("replay requests answered")] = 0
    replayed_frames: Annotated[int, count("frames sent again from the journal")] = 0
    snapshots: Annotated[int, count("snapshots begun: of the newest event of every key")] = 0
    ahead: Annotated[
        int, loss("times that a client had seen more of this epoch than the journal has: it is an older copy")
    ] = 0
    repeated: Annotated[int, count("repeated replay requests ignored: their answer is on its way")] = 0
    administered: Annotated[int, count("requests of administrators answered")] = 0
    unauthorised: Annotated[
        int, count("requests of administrators refused: not local, and no key for it")
    ] = 0
    bad_requests: Annotated[int, count("messages that were not the protocol, ignored")] = 0
    rationed: Annotated[int, count("messages ignored because their sender sent too many")] = 0
    unsent: Annotated[int, count("answers dropped because a client does not read; it asks again")] = 0
    failures: Annotated[int, count("rounds of the server that failed, which is a defect: see the log")] = 0
    denied: Annotated[int, count("connections refused because their CURVE key is not allowed")] = 0


class GroupCounters(Counters):
    """What the groups of a publisher did."""

    component = "direct.groups"

    granted: Annotated[int, count("deliveries sent to workers, redeliveries included")] = 0
    acked: Annotated[int, count("events acknowledged")] = 0
    nacked: Annotated[int, count("events given back by workers")] = 0
    expired: Annotated[int, count("events taken back because their lease was over")] = 0
    dead_lettered: Annotated[
        int, count("events moved to the dead-letter journal after max_deliver attempts")
    ] = 0
    evicted: Annotated[int, loss("events that the journal dropped before a group had them")] = 0
    damaged: Annotated[
        int, loss("events that the journal could not read any more when a group wanted them")
    ] = 0
    tail_lost: Annotated[
        int, loss("events that a group had not settled when a power cut took the journal's end with them")
    ] = 0
    state_lost: Annotated[
        int, count("groups whose state was missing or unreadable; what they had settled may come again")
    ] = 0
    unclaimed: Annotated[
        int, loss("without a journal: events that no worker of a group had room for in time")
    ] = 0
    abandoned: Annotated[
        int, loss("without a journal: events that a worker gave back, or held when it was gone")
    ] = 0


class SubscriberCounters(Counters):
    """What a Subscriber counts, over all its publishers."""

    component = "direct.subscriber"

    events: Annotated[int, count("events handed to the application")] = 0
    live_frames: Annotated[int, count("frames that arrived live and in order")] = 0
    replayed_frames: Annotated[int, count("frames that came from the journal, on joining or in repair")] = 0
    overlap_frames: Annotated[int, count("frames dropped because replay had brought them already")] = 0
    held_dropped: Annotated[int, count("live frames dropped while waiting for a repair, asked for again")] = 0
    live_unreachable: Annotated[
        int, count("times that a publisher answered but its live stream did not arrive")
    ] = 0
    rolled_back: Annotated[
        int,
        loss(
            "times that a publisher's journal ended before what we had had of the same epoch: an older copy"
        ),
    ] = 0
    gaps: Annotated[
        int, count("holes in the live stream, each repaired from the journal or declared lost")
    ] = 0
    joins: Annotated[int, count("WELCOMEs received: the first join and every reconnection")] = 0
    snapshots: Annotated[int, count("snapshots begun, with start=snapshot")] = 0
    bad_messages: Annotated[int, count("messages that were not the protocol, ignored")] = 0
    lost: Annotated[int, loss("offsets declared lost: evicted, or dropped with no journal to ask")] = 0


class WorkerCounters(Counters):
    """What a Worker counts, over all its publishers."""

    component = "direct.worker"

    delivered: Annotated[int, count("events handed to the application, redeliveries included")] = 0
    redelivered: Annotated[int, count("events handed to the application with attempt > 1")] = 0
    acked: Annotated[int, count("events acknowledged")] = 0
    nacked: Annotated[int, count("events given back")] = 0
    expired: Annotated[
        int, count("deliveries dropped because their lease was over before they were handed out")
    ] = 0
    over: Annotated[
        int, count("requests passed over: their deadline was over, or they are at most once and were begun")
    ] = 0
    joins: Annotated[int, count("WELCOMEs received: the first join and every reconnection")] = 0
    bad_messages: Annotated[int, count("messages that were not the protocol, ignored")] = 0
    lost: Annotated[int, loss("offsets that the group lost, as the publisher reported")] = 0


class MirrorCounters(Counters):
    """What a Mirror copied."""

    component = "direct.mirror"

    events: Annotated[int, count("events copied")] = 0
    frames: Annotated[int, count("frames copied")] = 0
    lost: Annotated[int, loss("events that the publisher no longer had when the mirror asked: a hole")] = 0
    set_aside: Annotated[
        int, loss("events of a publisher that was replaced which nobody else has; kept beside the copy")
    ] = 0
    failed: Annotated[
        int, count("times that copying failed (the disk, the publisher) and was tried again")
    ] = 0
