"""The settings of sender, receiver and request server, each default with its reason."""

from typing import Literal

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.core.rate_limit import Backoff


class RepairPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a receiver gets back what it missed. Times in seconds."""

    # Packets overtake each other by tens of microseconds in a LAN switch; asking at once would ask for
    # packets that are already here. 2 ms is far above that and far below what a person or a retry notices.
    reorder_wait_s: float = 0.002
    # Two lines (A/B) differ by their paths; exchanges publish skews of up to a few milliseconds.
    line_wait_s: float = 0.01
    # A request server in Python that is busy publishing answers within some tens of milliseconds. Asking
    # again sooner would only double its work.
    retry: Backoff = Backoff(first_s=0.1, factor=2.0, limit_s=2.0, jitter=0.5)
    # A packet that several subscribers lack is asked for by one of them, if the others wait until its answer has come
    # to all. Each waits for a random time, of up to this per subscriber that the publisher knows of (an answer takes a
    # few milliseconds on a busy machine) and up to the limit; mostly long, seldom short (RFC 5401). A lone subscriber
    # does not wait, nor does anybody while losses are usually those of single subscribers, or with a limit of 0.
    share_slot_s: float = 0.008
    share_wait_s: float = 0.1
    # Delivery waits behind a gap, so this is the longest silence that a dead request server can cause.
    give_up_s: float = 10.0
    # Requests in flight. 256 answers of a 1,400-byte packet are 360 kB: less than a default socket buffer.
    max_outstanding: int = 256
    # More missing messages than this in one gap are fetched over TCP. 2,000 are a few hundred datagrams,
    # about what the requests in flight bring in one round trip.
    tcp_threshold: int = 2000
    # How long a TCP fetch may bring nothing before it is given up and tried elsewhere.
    tcp_idle_s: float = 2.0
    # What is kept behind gaps. Over it, new packets are not kept and are asked for later: nothing is lost.
    # 64 MiB are half a second of a 1 Gbit/s feed.
    max_held_bytes: int = 64 * 1024 * 1024
    # Gaps kept apart; over it, neighbouring ones are asked for as one.
    max_gaps: int = 10_000
    # A new session is followed when the old one was silent for this long: packets of an old sender that are
    # still on their way must not close the session of the new one. What is missed meanwhile is asked for.
    session_switch_s: float = 0.1
    # A session that was closed is followed again when the newer one was silent for three heartbeats.
    session_silence_s: float = 3.0
    # Heartbeats come once a second at least: after three that did not come, the subscriber says that it is stale,
    # joins again, and asks the request servers for the newest sequence.
    stale_after_s: float = 3.0
    # How often a stale subscriber joins and asks again.
    stale_retry: Backoff = Backoff(first_s=1.0, factor=2.0, limit_s=5.0, jitter=0.2)
    # How often servers are told our position and asked for theirs when all is well: cookies last for a minute.
    status_every_s: float = 25.0
    # A sender whose packets are all behind what it had sent for this long has gone back: it was restored from a
    # copy. Packets that overtake each other, and the slower of two lines, never take a second.
    rewind_after_s: float = 1.0
    # A sequence further ahead than this is believed only when a second packet says the same: one
    # corrupted header must not end a stream. 10 million are many seconds of the fastest stream.
    max_jump: int = 10_000_000

    def __post_init__(self) -> None:
        waits = ("reorder_wait_s", "line_wait_s", "share_slot_s", "share_wait_s")
        for name in (*waits, "session_switch_s", "session_silence_s", "max_held_bytes"):
            if not getattr(self, name) >= 0:  # NaN is not
                raise ConfigError(name, "must not be negative")
        for name in ("stale_after_s", "status_every_s", "rewind_after_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, "must be greater than 0")
        for name in ("give_up_s", "tcp_idle_s", "max_outstanding", "tcp_threshold", "max_gaps", "max_jump"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, "must be greater than 0")


class HeartbeatPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeats after the last packet: fast at first, so that a lost tail is noticed soon, then slowly."""

    # The tail of a burst is repaired within about this and the reorder wait.
    first_s: float = 0.01
    factor: float = 2.0
    # What the MoldUDP64 specification says: one per second when nothing else is sent.
    limit_s: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.first_s <= self.limit_s and self.factor >= 1):
            raise ConfigError("heartbeat", "needs 0 < first_s <= limit_s and factor >= 1")


class FlowControl(msgspec.Struct, frozen=True, kw_only=True):
    """How far a publisher may be ahead of its subscribers before it holds back its caller."""

    # "slowest": of all subscribers. "tagged": of those with `tag`; the others repair, or lose, as without it.
    mode: Literal["slowest", "tagged"] = "slowest"
    tag: int = 1
    # Events between the newest and the position of the slowest: a tenth of a second of a fast stream, and well within
    # what a subscriber keeps (64 MiB) for events of some hundred bytes.
    window_events: int = 100_000
    # A subscriber that has not told its position for this long is not waited for any more.
    timeout_s: float = 5.0
    # Events per second that are published in any case; 0: none.
    floor_events_s: float = 0

    def __post_init__(self) -> None:
        if self.mode not in ("slowest", "tagged"):
            raise ConfigError("flow_control", f"mode must be slowest or tagged, not {self.mode!r}")
        if not 1 <= self.tag <= 255:
            raise ConfigError("flow_control", "tag must be 1 to 255")
        if not (self.window_events >= 1 and self.timeout_s > 0 and self.floor_events_s >= 0):
            raise ConfigError("flow_control", "needs window_events >= 1, timeout_s > 0, floor_events_s >= 0")


class AnswerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a request server gives to whom. Rates per second; 0 means no limit."""

    # One client (a host) may have 4,000 answers a second, with bursts of 2,000: what several subscribers on
    # it have in flight.
    client_requests_s: float = 4_000
    client_burst: float = 2_000
    # And so many bytes of answers, TCP included: two Gbit/s to one client.
    client_bytes_s: float = 250_000_000
    # In total, so that repairs cannot starve the live stream of the same process: an answer costs 40 µs in Python.
    # Requests beyond it are not even read: the kernel drops them.
    total_requests_s: float = 5_000
    total_burst: float = 5_000
    total_bytes_s: float = 500_000_000
    # To an address that has not proven to receive our answers (by a cookie, or by TCP): a stranger
    # can write it into a request, and have us send there. The start is 64 kB, so that receivers of other makes work.
    unproven_bytes_s: float = 65_536
    unproven_total_bytes_s: float = 1_000_000
    # What several subscribers lack goes to the whole group, up to so many bytes per second: a twentieth of a gigabit
    # link, because those who have it get it, too. Beyond it everybody is answered alone.
    share_repairs: bool = True
    shared_bytes_s: float = 5_000_000
    # The same request by the same client within this is a repeat of one whose answer is on its way.
    repeat_window_s: float = 0.005
    # Clients remembered; the one not heard of for longest is forgotten first.
    max_clients: int = 4096
    # TCP fetches at one time, of all and of one client, and how long one may be idle. A subscriber has one.
    max_fetches: int = 64
    client_fetches: int = 32
    fetch_idle_s: float = 10.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not getattr(self, field) >= 0:
                raise ConfigError(field, "must not be negative")
        if self.max_clients < 1:
            raise ConfigError("max_clients", "must be at least 1")
