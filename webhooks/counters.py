"""What the dispatcher and the receiver count."""

from typing import Annotated

from brokerless.core.counters import Counters, count, loss


class DispatcherCounters(Counters):
    """Since this process started; `Dispatcher.account` counts over restarts, from the outbox."""

    component = "webhooks.dispatcher"

    published: Annotated[int, count("events accepted by publish()")] = 0
    rejected: Annotated[int, count("events refused because the outbox was full")] = 0
    routed: Annotated[int, count("deliveries created, one per event and matching endpoint")] = 0
    delivered: Annotated[int, count("deliveries answered with 2xx")] = 0
    attempts: Annotated[int, count("HTTP attempts finished, whatever came of them")] = 0
    failures: Annotated[int, count("attempts that failed and are followed by another")] = 0
    blocked: Annotated[int, count("attempts refused by the SSRF guard")] = 0
    local_failures: Annotated[
        int, count("attempts not made for lack of descriptors, memory or ports; made later")
    ] = 0
    gave_up: Annotated[int, loss("deliveries that became dead letters: schedule exhausted, 410 or 415")] = 0
    evicted: Annotated[int, loss("undelivered deliveries dropped because the outbox was full")] = 0
    skipped: Annotated[
        int, loss("deliveries not attempted because the endpoint was disabled; replayable")
    ] = 0
    withdrawn: Annotated[int, count("pending deliveries of endpoints that were deleted")] = 0
    disabled: Annotated[int, count("endpoints disabled by 410 or after failing for too long")] = 0
    recovered: Annotated[int, count("undelivered deliveries of endpoints that this process took over")] = 0
    takeovers: Annotated[int, count("times this process took over endpoints")] = 0
    commits: Annotated[int, count("transactions of the writer thread")] = 0
    write_failures: Annotated[int, count("transactions that failed; their results are tried again")] = 0
    repeated_transactions: Annotated[
        int, count("transactions repeated because of a deadlock or serialisation failure")
    ] = 0


class ReceiverCounters(Counters):
    """Of one `receiver_app`."""

    component = "webhooks.receiver"

    received: Annotated[int, count("requests with a valid signature")] = 0
    accepted: Annotated[int, count("events appended to the journal or given to the handler")] = 0
    duplicates: Annotated[int, count("events dropped because their id had been accepted before")] = 0
    unverified: Annotated[int, count("requests refused because of their signature or time")] = 0
    malformed: Annotated[int, count("requests with a valid signature that are not CloudEvents")] = 0
    failures: Annotated[int, count("requests answered 5xx because journal or handler failed; sent again")] = 0
