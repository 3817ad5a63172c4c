"""What publisher, subscriber and request server count.

A subscriber's accounting, in messages:
`missing_kernel + missing_network = repaired + late + lost + skipped + (what is still open)`; what was received is
`delivered + duplicates + not_held` and what waits behind gaps; `delivered + lost` is how far the stream was followed.
"""

from typing import Annotated, ClassVar

from brokerless.core.counters import Counters, count, loss


class PublisherCounters(Counters):
    """Of one `Publisher`."""

    component: ClassVar[str] = "multicast.publisher"

    published: Annotated[int, count("events accepted by publish() and publish_many()")] = 0
    packets: Annotated[int, count("packets with events sent, per line")] = 0
    sent_bytes: Annotated[int, count("UDP payload bytes of those packets")] = 0
    heartbeats: Annotated[int, count("heartbeats and end-of-session packets sent, per line")] = 0
    paced: Annotated[int, count("times that publishing had to wait for the rate limit")] = 0
    send_errors: Annotated[
        int, loss("packets that the kernel refused to send; receivers get their events by repair")
    ] = 0
    held_back: Annotated[int, count("times that publishing had to wait for subscribers (flow control)")] = 0
    reopened: Annotated[int, count("times that a line was opened again after its interface had failed")] = 0
    lingered: Annotated[
        int, count("subscribers that had not got everything when closing did not wait longer")
    ] = 0
    journal_errors: Annotated[int, count("times that accepted events could not be made frames yet")] = 0
    offload_off: Annotated[int, count("times that segmentation offload was switched off after an error")] = 0


class SubscriberCounters(Counters):
    """Of one `Subscriber`."""

    component: ClassVar[str] = "multicast.subscriber"

    events: Annotated[int, count("events handed to the application")] = 0
    packets: Annotated[int, count("packets received on all lines, heartbeats included")] = 0
    received_bytes: Annotated[int, count("UDP payload bytes received on all lines")] = 0
    delivered: Annotated[int, count("messages handed over in order, each exactly once")] = 0
    duplicates: Annotated[
        int, count("messages that had been received before (on the other line, or repeated)")
    ] = 0
    malformed: Annotated[int, count("datagrams that are not MoldUDP64, or shorter than they say")] = 0
    unauthentic: Annotated[int, count("datagrams without a valid authentication trailer")] = 0
    other_session: Annotated[int, count("packets of a session that is not followed, or not yet believed")] = 0
    implausible: Annotated[int, count("packets too far ahead to be believed from one packet alone")] = 0
    sessions: Annotated[int, count("sessions followed")] = 0
    replayed: Annotated[
        int, count("packets of another session that are signed, but recorded earlier; not followed")
    ] = 0
    stale: Annotated[int, count("times that no packet of a living sender had come for `stale_after_s`")] = 0
    rejoins: Annotated[int, count("times that a group was joined again because nothing came")] = 0
    rewinds: Annotated[
        int, count("times that the sender went back to lower sequence numbers: its journal was restored")
    ] = 0
    statuses: Annotated[int, count("times that a request server was asked for its newest sequence")] = 0
    kernel_drops: Annotated[
        int,
        loss(
            "datagrams, or with receive offload GSO batches of up to 64, that the kernel dropped (SO_MEMINFO)"
        ),
    ] = 0
    gaps: Annotated[int, count("ranges that were still missing after the reorder wait")] = 0
    missing_kernel: Annotated[int, count("messages missing where the kernel had dropped something")] = 0
    missing_network: Annotated[int, count("messages missing for any other reason")] = 0
    repaired: Annotated[int, count("missing messages that a request server sent")] = 0
    late: Annotated[int, count("missing messages that came by multicast after all")] = 0
    lost: Annotated[int, loss("missing messages that were given up; each is in one Lost")] = 0
    skipped: Annotated[
        int, count("messages evicted before a subscriber joined that wanted the oldest there is")
    ] = 0
    seen_before: Annotated[
        int, count("messages of an earlier epoch that were handed out in its session; not handed out again")
    ] = 0
    requests: Annotated[int, count("request packets sent")] = 0
    unanswered: Annotated[int, count("requests and fetches not answered in time")] = 0
    fetches: Annotated[int, count("gaps fetched over TCP")] = 0
    gone: Annotated[int, count("answers that say that the range is no longer in the journal")] = 0
    not_held: Annotated[
        int, count("messages not kept behind a gap because memory was full; asked for later")
    ] = 0


class RequestServerCounters(Counters):
    """Of one `RequestServer`."""

    component: ClassVar[str] = "multicast.request_server"

    requests: Annotated[int, count("datagrams received on the request port")] = 0
    answered: Annotated[int, count("requests answered with messages")] = 0
    messages: Annotated[int, count("messages sent again, by datagram")] = 0
    sent_bytes: Annotated[int, count("bytes of answers, by datagram")] = 0
    shared: Annotated[int, count("requests answered to the whole group, because several lack the same")] = 0
    shared_bytes: Annotated[int, count("bytes of those answers, per line")] = 0
    crossed: Annotated[
        int, count("requests for what had just gone to the whole group; not answered again")
    ] = 0
    gone: Annotated[int, count("requests answered with: no longer in the journal")] = 0
    ahead: Annotated[int, count("requests for what was not sent yet; not answered")] = 0
    malformed: Annotated[int, count("datagrams that are not a request")] = 0
    unauthentic: Annotated[int, count("requests without a valid authentication trailer")] = 0
    refused_session: Annotated[int, count("requests for another session; not answered")] = 0
    refused_client: Annotated[int, count("requests from addresses that are not allowed; not answered")] = 0
    refused_budget: Annotated[int, count("requests over a client's or the total budget; not answered")] = 0
    refused_unproven: Annotated[
        int, count("answers not sent to an address that has not proven to receive them, beyond its start")
    ] = 0
    replayed: Annotated[int, count("signed requests that were recorded earlier; not answered")] = 0
    statuses: Annotated[int, count("questions for the newest sequence answered")] = 0
    kernel_drops: Annotated[int, count("requests that the kernel dropped, because of too many")] = 0
    repeats: Annotated[int, count("repeated requests whose answer is on its way; not answered")] = 0
    send_errors: Annotated[int, count("answers that the kernel refused to send")] = 0
    journal_errors: Annotated[int, count("requests not answered because the journal could not be read")] = 0
    fetches: Annotated[int, count("requests over TCP accepted")] = 0
    fetches_refused: Annotated[int, count("TCP fetches refused: not allowed, or too many at one time")] = 0
    fetched_messages: Annotated[int, count("messages sent again over TCP")] = 0
    fetched_bytes: Annotated[int, count("bytes sent over TCP")] = 0
    restarts: Annotated[
        int, count("times that a server in a process of its own ended by itself, and was started again")
    ] = 0
