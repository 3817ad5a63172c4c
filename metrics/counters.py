"""What the daemon and the client count about themselves."""

from typing import Annotated

from brokerless.core.counters import Counters, count, loss


class ReceiveCounters(Counters):
    """Everything that reached the daemon, and everything that did not get further."""

    component = "metrics.receive"

    datagrams: Annotated[int, count("datagrams read from UDP and Unix datagram sockets")] = 0
    bytes: Annotated[int, count("bytes read, streams included")] = 0
    numbered: Annotated[int, count("datagrams with a client's number, duplicates included")] = 0
    duplicates: Annotated[int, count("numbered datagrams that had already come; dropped")] = 0
    late: Annotated[int, count("numbered datagrams that came after they had been given up; counted")] = 0
    stale: Annotated[int, loss("numbered datagrams too old to tell from duplicates; dropped")] = 0
    implausible: Annotated[int, loss("numbered datagrams too far ahead to be believed; dropped")] = 0
    clients_refused: Annotated[int, loss("clients beyond max_clients, treated as not numbered")] = 0
    unauthenticated: Annotated[
        int,
        count(
            "numbered datagrams without a valid mac line, or a recording, while keys are set; counted as unnumbered"
        ),
    ] = 0
    not_held: Annotated[
        int, count("times a gap was given up early because too many bytes were held back")
    ] = 0
    truncated: Annotated[
        int, loss("datagrams larger than the receive buffer; their last line is dropped")
    ] = 0
    kernel_drops: Annotated[int, loss("datagrams the kernel dropped because a receive buffer was full")] = 0
    stream_connections: Annotated[int, count("stream connections accepted")] = 0
    streams_refused: Annotated[int, loss("stream connections beyond max_streams, closed at once")] = 0
    streams_evicted: Annotated[
        int, count("idle stream connections closed because max_streams was reached")
    ] = 0
    stream_overlong: Annotated[
        int, loss("stream lines longer than the limit; skipped up to their newline")
    ] = 0
    stream_unfinished: Annotated[int, loss("last lines of streams that ended without a newline")] = 0


class AggregateCounters(Counters):
    """What became of the lines, and of the clients' numbers."""

    component = "metrics.aggregate"

    lines: Annotated[int, count("lines received, refused ones included")] = 0
    refused: Annotated[int, loss("lines refused, by all reasons")] = 0
    ignored_fields: Annotated[int, count("fields of lines that were empty or unknown; ignored")] = 0
    timestamped: Annotated[int, count("lines with a time of their own, published with it")] = 0
    faults: Annotated[
        int, loss("exceptions that cost one line, one series or one client; the first is logged")
    ] = 0
    conflicts: Annotated[
        int, count("clients whose numbers or totals contradict each other: forged, or two senders of one id")
    ] = 0
    series_dropped: Annotated[
        int, loss("series of a window that were not published because max_series was reached")
    ] = 0
    misplaced: Annotated[int, count("audit lines not at the start of a datagram; ignored")] = 0
    events: Annotated[int, count("DogStatsD events passed on")] = 0
    checks: Annotated[int, count("DogStatsD service checks passed on")] = 0
    passed_dropped: Annotated[int, loss("events and checks beyond what one window keeps")] = 0
    lost_datagrams: Annotated[int, loss("numbered datagrams that clients sent and that are missing")] = 0
    healed: Annotated[int, count("times a counter was replaced by its client's own total")] = 0
    keys_refused: Annotated[int, loss("counters of clients beyond the limit; counted, not healed")] = 0
    after_end: Annotated[int, count("late datagrams of clients already forgotten; in raw figures only")] = 0
    clients_expired: Annotated[int, count("clients idle for client_ttl_s, forgotten")] = 0
    clients_unresolved: Annotated[
        int,
        count(
            "clients forgotten while datagrams were missing that may hold any counter: no total is exact since"
        ),
    ] = 0
    series_expired: Annotated[int, count("idle series forgotten")] = 0
    timestamped_dropped: Annotated[
        int, loss("points with a time of their own beyond what one window keeps")
    ] = 0
    flushes: Annotated[int, count("windows published")] = 0
    state_errors: Annotated[int, count("windows after which the state file could not be written")] = 0
    worker_crashes: Annotated[
        int, loss("worker processes that ended by themselves; their window is lost")
    ] = 0


class BackendCounters(Counters):
    """One backend's deliveries."""

    component = "metrics.backend"

    flushes: Annotated[int, count("windows delivered (repeater: datagrams)")] = 0
    bytes: Annotated[int, count("bytes delivered")] = 0
    errors: Annotated[int, count("attempts that failed; the window is tried again")] = 0
    dropped: Annotated[int, loss("windows (repeater: datagrams) given up")] = 0


class ClientCounters(Counters):
    """What the client did with what the application gave it."""

    component = "metrics.client"

    lines: Annotated[int, count("lines handed to the client (sampled-out ones are not lines)")] = 0
    datagrams: Annotated[int, count("datagrams sent, audit ones included")] = 0
    failed: Annotated[int, loss("datagrams that the socket refused; the daemon sees them as lost")] = 0
    failed_lines: Annotated[int, loss("lines in those datagrams")] = 0
    oversized: Annotated[int, loss("lines longer than a datagram; dropped")] = 0
    invalid: Annotated[int, loss("calls with arguments of a wrong type; nothing was sent")] = 0
    unreachable: Annotated[int, loss("times the network said that nobody listens at the address")] = 0
    unreported: Annotated[int, count("counters beyond max_counters, which heartbeats leave out")] = 0
