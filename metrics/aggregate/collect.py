"""Where datagrams and stream lines go first: sorted by client, collected raw. Pure: no sockets, no clock.

Nothing is parsed here; `snapshot` hands over what has been collected, to be aggregated elsewhere while receiving
goes on.
"""

from collections.abc import Callable

import msgspec

from brokerless.metrics.aggregate.line_counts import LineCounts, new_line_counts
from brokerless.metrics.aggregate.reorder import Reorder, SegmentLines
from brokerless.metrics.aggregate.window import MAX_UNNUMBERED
from brokerless.metrics.counters import ReceiveCounters
from brokerless.metrics.limits import (
    MAX_COLLECTED_BYTES,
    MAX_DISTINCT_LINES,
    MAX_HELD_BYTES,
    MAX_RANGES,
    MAX_RANGES_TOTAL,
    MIN_RANGES,
)
from brokerless.metrics.sequence_lines import PREFIX, Heartbeat, signed_at_ms, split_datagram, split_mac
from brokerless.metrics.speed import speed

# Payloads per client that wait to be counted together; joining 64 is as fast as joining more.
READY = 64
# A client that is new signed its first datagram just now, as far as hosts' clocks agree: an older one is a recording.
MAX_AGE_MS = 300_000
# Sent by Datadog's clients with their own figures: what comes by this listener is DogStatsD.
TELEMETRY = b"datadog.dogstatsd.client."


def _look_through(batch: list[bytes]) -> tuple[int, bool]:
    return sum(map(len, batch)), any(datagram.startswith(PREFIX) for datagram in batch)


# Bytes of all, and whether any of them begins like a numbered one.
look_through: Callable[[list[bytes]], tuple[int, bool]]
look_through = _look_through if speed is None else speed.look_through


class ClientSnapshot(msgspec.Struct):
    """One client's part of a snapshot. `seen` are the numbers that are new, as ranges."""

    client: str
    first: int
    newest: int
    heartbeats_before: int
    heartbeats: int
    seen: list[tuple[int, int]]
    duplicates: int
    late: int
    lossy: bool
    segments: list[SegmentLines]
    beats: list[Heartbeat]
    newest_payload: bytes


class Snapshot(msgspec.Struct):
    """What was collected since the last snapshot.

    `marks` are (index in `ordered`, time, dialect), to date gauges and to read their signs.
    """

    unnumbered: LineCounts
    lossless: LineCounts
    ordered: list[bytes]
    marks: list[tuple[int, float, str]]
    clients: list[ClientSnapshot]
    # Ids of clients that were refused because there are too many: their lines were counted as unnumbered.
    unnumbered_clients: set[bytes]


class Collector:
    """Collects; owned by one thread. With `auth_keys`, only who holds one of them is a numbered client, and only who
    signed its first datagram after `since_ms`, when the daemon's accounts begin.

    `heard` is called with each client that is new, before anything is counted of it.
    """

    def __init__(
        self,
        *,
        max_clients: int = 10_000,
        counters: ReceiveCounters | None = None,
        auth_keys: list[bytes] | None = None,
        since_ms: int = 0,
        heard: Callable[[bytes], None] | None = None,
    ) -> None:
        self._heard = heard
        self.counters = counters or ReceiveCounters()
        self.max_clients = max_clients
        self._auth_keys = auth_keys or []
        self._since_ms = since_ms
        self._clients: dict[bytes, Reorder] = {}
        self._active: set[Reorder] = set()
        self._touched: set[Reorder] = set()
        self._snapshot_at = 0
        self._held_bytes = 0
        self._now = 0.0
        self._dialect = "auto"
        self._begin()

    def _begin(self) -> None:
        self._ordered: list[bytes] = []
        self._marks: list[tuple[int, float, str]] = []
        self._unnumbered = new_line_counts(self._ordered)
        self._lossless = new_line_counts(self._ordered)
        self._crowded = False
        self._unnumbered_clients: set[bytes] = set()

    def datagrams(
        self,
        batch: list[bytes],
        now: float,
        *,
        lossless: bool = False,
        dialect: str = "auto",
    ) -> None:
        """Take what one read of a datagram socket gave; `lossless` for Unix sockets, which do not drop."""
        counters = self.counters
        counters.datagrams += len(batch)
        size, marked = look_through(batch)
        counters.bytes += size
        plain = batch
        if marked:
            # In order, because gauges are: what only looks numbered stays where it was.
            taken = (self._numbered(d, now) if d.startswith(PREFIX) else d for d in batch)
            plain = [payload for payload in taken if payload is not None]
        if self._touched:
            for reorder in self._touched:
                reorder.drain()
                if reorder.distinct > MAX_DISTINCT_LINES:
                    self._crowded = True
            self._touched.clear()
            # Our own client speaks StatsD's dialect, with tags.
            self._note_position(now, "statsd")
        if plain:
            (self._lossless if lossless else self._unnumbered).add(plain)
            self._note_position(now, dialect)

    def lines(self, payload: bytes, now: float, *, dialect: str = "auto") -> None:
        """Take complete lines of a stream, which neither loses nor repeats."""
        self.counters.bytes += len(payload)
        self._lossless.add([payload])
        self._note_position(now, dialect)

    def _note_position(self, now: float, dialect: str) -> None:
        self._now, self._dialect = now, dialect
        if self._ordered and (not self._marks or self._marks[-1][0] < len(self._ordered)):
            self._marks.append((len(self._ordered), now, dialect))

    def _numbered(self, datagram: bytes, now: float) -> bytes | None:
        """Take a datagram of a numbered client; returned is what must be counted as unnumbered, if it is none."""
        body, mac = split_mac(datagram)
        found = split_datagram(body)
        if found is None:
            return datagram
        client, number, payload, heartbeats = found
        counters = self.counters
        reorder = self._clients.get(client)
        if self._auth_keys:
            signed_ms = signed_at_ms(body, mac, self._auth_keys)
            # Of a client that is there, a recording is a repeat.
            oldest_ms = max(self._since_ms, now * 1000 - MAX_AGE_MS) if reorder is None else 0
            if signed_ms is None or signed_ms < oldest_ms:
                counters.unauthenticated += 1
                return payload
        if reorder is None:
            if len(self._clients) >= self.max_clients:
                counters.clients_refused += 1
                if len(self._unnumbered_clients) <= MAX_UNNUMBERED:
                    self._unnumbered_clients.add(client)
                return payload
            if self._heard is not None:
                self._heard(client)
            reorder = self._clients[client] = Reorder(client, number, self._ordered)
            reorder.heartbeats_before = heartbeats - payload.startswith(PREFIX)
            self._share_ranges()
        counters.numbered += 1
        self._active.add(reorder)
        self._touched.add(reorder)
        held = reorder.held_bytes
        if not reorder.offer(number, payload, heartbeats):
            return None
        self._held_bytes += reorder.held_bytes - held
        if self._held_bytes > MAX_HELD_BYTES:
            counters.not_held += 1
            held = reorder.held_bytes
            reorder.release_held()
            self._held_bytes += reorder.held_bytes - held
        if len(reorder.ready) >= READY:
            reorder.drain()
        return None

    def _share_ranges(self) -> None:
        """With many clients each remembers fewer ranges of numbers; looked at when their number doubles."""
        clients = len(self._clients)
        share = MAX_RANGES_TOTAL // clients
        if share < MAX_RANGES and not clients & (clients - 1):
            for reorder in self._clients.values():
                reorder.max_ranges = max(MIN_RANGES, share // 2)
        elif share < MAX_RANGES:
            next(reversed(self._clients.values())).max_ranges = max(MIN_RANGES, share // 2)

    @property
    def wants_snapshot(self) -> bool:
        """So much has been collected that it should be aggregated before the window ends."""
        return (
            self._crowded
            or self.counters.bytes - self._snapshot_at > MAX_COLLECTED_BYTES
            or self._unnumbered.distinct > MAX_DISTINCT_LINES
            or self._lossless.distinct > MAX_DISTINCT_LINES
            or len(self._ordered) > MAX_DISTINCT_LINES
        )

    def snapshot(self, *, end_window: bool) -> Snapshot:
        """Hand over the collection and start over. Only the end of a window gives up on what may be late."""
        self._snapshot_at = self.counters.bytes
        clients = [self._snapshot_client(reorder, end_window=end_window) for reorder in self._active]
        if end_window:
            self._active.clear()
        # What clients had held back is ordered too.
        self._note_position(self._now, "statsd")
        snapshot = Snapshot(
            *(self._unnumbered, self._lossless, self._ordered, self._marks, clients, self._unnumbered_clients)
        )
        self._begin()
        for reorder in self._clients.values():
            reorder.collect_into(self._ordered)
        return snapshot

    def _snapshot_client(self, reorder: Reorder, *, end_window: bool) -> ClientSnapshot:
        lossy = reorder.lossy
        if end_window:
            self._held_bytes -= reorder.held_bytes
            reorder.close_window()
        else:
            reorder.drain()
        lossy = lossy or reorder.lossy
        counters = self.counters
        counters.duplicates += reorder.duplicates
        counters.late += reorder.late
        counters.stale += reorder.stale
        counters.implausible += reorder.implausible
        snapshot = ClientSnapshot(
            reorder.client.decode(),
            reorder.first,
            reorder.newest,
            reorder.heartbeats_before,
            reorder.heartbeats,
            list(reorder.fresh),
            reorder.duplicates,
            reorder.late,
            lossy,
            reorder.segments,
            reorder.beats,
            reorder.newest_payload,
        )
        reorder.taken()
        return snapshot

    def forget(self, clients: list[str]) -> None:
        """Drop the state of clients that have expired or said that they end."""
        for name in clients:
            reorder = self._clients.pop(name.encode(), None)
            if reorder is not None:
                self._active.discard(reorder)
                self._held_bytes -= reorder.held_bytes
