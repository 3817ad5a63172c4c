"""Where datagrams and stream lines go first: sorted by client, collected raw. Pure: no sockets, no clock.

Nothing is parsed here; `cut` hands over what has been collected, to be digested elsewhere while receiving
goes on.
"""

import msgspec

from brokerless.metrics.audit import PREFIX, Heartbeat, split_datagram
from brokerless.metrics.bag import LineBag, new_bag
from brokerless.metrics.counters import IngestCounters
from brokerless.metrics.intake import Intake, Segment

# Distinct lines of one origin before they must be digested: 200,000 series fit, lines that never repeat cost
# 50 MB.
CUT_DISTINCT = 262_144
# Raw bytes collected before they must be digested: bounds the memory of distinct lines (worst case some 100
# MB) and what a flush finds undigested.
CUT_BYTES = 16 * 1024 * 1024
# Payloads per client that wait to be counted together; joining 64 is as fast as joining more.
READY = 64


class ClientCut(msgspec.Struct):
    """One client's part of a cut. `seen` are the numbers that are new, as ranges."""

    client: str
    first: int
    newest: int
    heartbeats_before: int
    heartbeats: int
    seen: list[tuple[int, int]]
    duplicates: int
    late: int
    lossy: bool
    segments: list[Segment]
    beats: list[Heartbeat]


class Cut(msgspec.Struct):
    """What was collected since the last cut. `marks` are (index in `ordered`, time), to date gauges."""

    lossy_bag: LineBag
    exact_bag: LineBag
    ordered: list[bytes]
    marks: list[tuple[int, float]]
    clients: list[ClientCut]


class Ingest:
    """Collects; owned by one thread."""

    def __init__(self, *, max_clients: int = 10_000, counters: IngestCounters | None = None) -> None:
        self.counters = counters or IngestCounters()
        self.max_clients = max_clients
        self._clients: dict[bytes, Intake] = {}
        self._active: set[Intake] = set()
        self._touched: set[Intake] = set()
        self._cut_at = 0
        self._now = 0.0
        self._fresh_collection()

    def _fresh_collection(self) -> None:
        self._ordered: list[bytes] = []
        self._marks: list[tuple[int, float]] = []
        self._lossy = new_bag(self._ordered)
        self._exact = new_bag(self._ordered)
        self._crowded = False

    def datagrams(self, batch: list[bytes], now: float, *, lossless: bool = False) -> None:
        """Take what one read of a datagram socket gave; `lossless` for Unix sockets, which do not drop."""
        counters = self.counters
        counters.datagrams += len(batch)
        counters.bytes += sum(map(len, batch))
        # In order, because gauges are: what only looks numbered stays where it was.
        plain = [d for d in batch if not (d.startswith(PREFIX) and self._numbered(d))]
        if self._touched:
            for intake in self._touched:
                intake.drain()
                if intake.distinct > CUT_DISTINCT:
                    self._crowded = True
            self._touched.clear()
        if plain:
            (self._exact if lossless else self._lossy).add(plain)
        self._mark(now)

    def lines(self, payload: bytes, now: float) -> None:
        """Take complete lines of a stream, which neither loses nor repeats."""
        self.counters.bytes += len(payload)
        self._exact.add([payload])
        self._mark(now)

    def _mark(self, now: float) -> None:
        self._now = now
        if self._ordered and (not self._marks or self._marks[-1][0] < len(self._ordered)):
            self._marks.append((len(self._ordered), now))

    def _numbered(self, datagram: bytes) -> bool:
        found = split_datagram(datagram)
        if found is None:
            return False
        client, number, payload, heartbeats = found
        intake = self._clients.get(client)
        if intake is None:
            if len(self._clients) >= self.max_clients:
                self.counters.clients_refused += 1
                self._lossy.add([payload])
                return True
            intake = self._clients[client] = Intake(client, number, self._ordered)
            intake.heartbeats_before = heartbeats - payload.startswith(PREFIX)
        counters = self.counters
        counters.numbered += 1
        self._active.add(intake)
        self._touched.add(intake)
        if not intake.offer(number, payload, heartbeats):
            return True
        if len(intake.ready) >= READY:
            intake.drain()
        return True

    @property
    def wants_cut(self) -> bool:
        """So much has been collected that it should be digested before the window ends."""
        return (
            self._crowded
            or self.counters.bytes - self._cut_at > CUT_BYTES
            or self._lossy.distinct > CUT_DISTINCT
            or self._exact.distinct > CUT_DISTINCT
        )

    def cut(self, *, end_window: bool) -> Cut:
        """Hand over the collection and begin anew. Only the end of a window gives up on what may be late."""
        self._cut_at = self.counters.bytes
        clients = [self._cut_client(intake, end_window=end_window) for intake in self._active]
        if end_window:
            self._active.clear()
        # What clients had held back is ordered too.
        self._mark(self._now)
        cut = Cut(self._lossy, self._exact, self._ordered, self._marks, clients)
        self._fresh_collection()
        for intake in self._clients.values():
            intake.collect_into(self._ordered)
        return cut

    def _cut_client(self, intake: Intake, *, end_window: bool) -> ClientCut:
        lossy = intake.lossy
        if end_window:
            intake.close_window()
        else:
            intake.drain()
        lossy = lossy or intake.lossy
        counters = self.counters
        counters.duplicates += intake.duplicates
        counters.late += intake.late
        counters.stale += intake.stale
        counters.implausible += intake.implausible
        cut = ClientCut(
            intake.client.decode(),
            intake.first,
            intake.newest,
            intake.heartbeats_before,
            intake.heartbeats,
            list(intake.fresh),
            intake.duplicates,
            intake.late,
            lossy,
            intake.segments,
            intake.beats,
        )
        intake.taken()
        return cut

    def forget(self, clients: list[str]) -> None:
        """Drop the state of clients that have expired or said that they end."""
        for name in clients:
            intake = self._clients.pop(name.encode(), None)
            if intake is not None:
                self._active.discard(intake)
