"""The plain data of the loss test: what a transport promises, what a run was told to do, what came out."""

from typing import Any, Literal

import msgspec

REASONS = (
    "offline",
    "producer_crash",
    "overflow_sender",
    "overflow_receiver",
    "in_flight",
    "evicted",
    "gave_up",
    "unattributed",
)
Verdict = Literal["pass", "fail", "unknown"]


class Promise(msgspec.Struct, frozen=True):
    """What a transport may lose in a scenario, for which reasons, and why that is so.

    `loss`: "none" means zero lost; "may" any number for one of the reasons; "must" at least one.
    """

    loss: Literal["none", "may", "must"] = "none"
    reasons: tuple[str, ...] = ()
    why: str = ""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What the harness must know about a transport; `docs/losstest.md` explains each field."""

    family: str
    journal: Literal["none", "memory", "disk", "broker"] = "none"
    link: Literal["", "tcp", "udp", "multicast"] = ""
    connects: Literal["producer", "consumer"] = "consumer"
    ports: int = 0  # how many ports beyond one per consumer
    compressible: bool = False  # its timers can be made shorter, as `Setup.compress` says
    many_producers: bool = False  # several producers can send to one consumer
    ports_per_producer: int = 0  # for each producer after the first
    group: bool = False
    acks: bool = False
    http: bool = False  # the receiver is an HTTP server: it can answer 500, hang, or answer and die
    overflow_at: Literal["sender", "receiver"] = "sender"
    max_rate: float = 0.0  # events per second it is offered at most; 0: as many as the user wants
    heavy: bool = False  # a virtual machine per run: no more at once than there are cores
    # Reaches nothing outside its run: root gives it a network of its own, where every byte is counted
    enclosed: bool = False
    quiet_s: float = (
        1.5  # many reconnect intervals (ZeroMQ's is 0.1 s): library threads starve on a busy machine
    )
    promises: dict[str, Promise] = {}
    only: tuple[str, ...] = ()  # scenarios that make sense; empty: all that the other traits allow
    without: tuple[str, ...] = ()  # scenarios that make none, although the other traits allow them
    summary: str = ""
    settings: str = ""  # of a broker: what it keeps, when it syncs, what is confirmed


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The complete configuration of one run: one transport, one scenario, one seed."""

    transport: str
    scenario: str
    seed: int
    run: int  # in every payload: an event of another run is noticed
    rate: float
    size: int
    lead_s: float
    offline_s: float
    tail_s: float
    drain_s: float
    consumers: int = 1
    producers: int = 1  # they send in turn: event n is of producer n modulo producers
    buffer_events: int
    retention_events: int
    seeded_drop: float = 0.0  # proportion that the harness drops on purpose (the seeded control)
    independent: bool = False  # each event is lost independently of the others: an interval makes sense
    control: bool = False
    traits: Traits
    promise: Promise
    network: Literal["", "relay", "nft"] = ""  # what makes the network's faults; empty: the run has none
    enclosed: bool = False  # in a network namespace of the run
    at_once: int = 1  # how many runs were allowed at the same time
    spool: bool = False  # consumers also append what they commit to a journal that Spark reads
    sync: bool = False  # what is accepted must survive a power cut
    compress: float = 1.0  # times are that much shorter than was asked for, and the rate that much higher

    @property
    def events(self) -> int:
        """How many events the producer is to offer."""
        return int(self.rate * (self.lead_s + self.offline_s + self.tail_s))

    @property
    def label(self) -> str:
        """The transport as people see it: of one given as path/to/file.py:object the last part is enough."""
        return self.transport.rpartition("/")[2]

    @property
    def key(self) -> str:
        """Where the run lies in the run directory."""
        return f"{self.label}/{self.scenario}/{self.seed}"

    def subscription(self, consumer: int) -> str:
        """The subscription that a consumer serves: workers of a group share one."""
        return "group" if self.traits.group else f"sub-{consumer}"

    @property
    def subscriptions(self) -> int:
        """How many subscriptions the run has; every accepted event is owed to each of them."""
        return 1 if self.traits.group else self.consumers


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds from the intended send time to the first delivery, with a relative error below 0.1 %."""

    p50: float
    p99: float
    max: float
    p999: float = 0.0


class Usage(msgspec.Struct, frozen=True):
    """What one process cost: CPU seconds (user and system), peak memory in bytes, bytes it wrote to disk."""

    cpu_s: float = 0.0
    peak_memory: int = 0
    disk_bytes: int = 0
    relayed_bytes: int = 0  # of a relay


class Price(msgspec.Struct, frozen=True):
    """What a run cost. CPU is in seconds per million accepted events; memory is the peak of one process.

    `wire_bytes` is what went over loopback, with all headers, from the first event until the run was at rest; None
    where the run had no network of its own. `relayed_bytes` is what passed the relay, without headers; or None.
    """

    producer_cpu_s: float
    consumer_cpu_s: float
    broker_cpu_s: float
    producer_memory: int
    consumer_memory: int
    broker_memory: int
    disk_bytes: int
    relayed_bytes: int | None = None
    wire_bytes: int | None = None


class Timeline(msgspec.Struct, frozen=True):
    """Accepted, committed and lost events per step, from the intended time of event 0; lost ones when accepted."""

    step_s: float
    accepted: list[int]
    committed: list[int]
    lost: dict[str, list[int]] = {}  # reason → per step
    latency_ms: list[float] = []  # the highest of each step, by the time of delivery; 0 where nothing came


class Row(msgspec.Struct, kw_only=True):
    """The result of one run. Field names are the words of `docs/losstest.md`, and only ever added to."""

    transport: str
    scenario: str
    seed: int
    offered: int = 0
    rejected: int = 0
    unknown: int = 0
    accepted: int = 0
    delivered: int = 0
    committed: int = 0
    acked: int = 0
    lost: int = 0
    lost_by_reason: dict[str, int] = {}
    pending: int = 0
    duplicates: int = 0
    reordered: int = 0
    unexpected: int = 0
    recovered: int = 0
    unavailable_s: float | None = None
    recovery_s: float | None = None
    backlog_clear_s: float | None = None
    verdict: Verdict = "unknown"
    balanced: bool = False
    # Further fields, beyond the documented core.
    family: str = ""
    journal: str = ""
    control: bool = False
    subscriptions: int = 1
    withheld: int = 0
    unknown_delivered: int = 0
    rate: float = 0.0
    latency_ms: Latency | None = None
    lost_percent: float = 0.0
    independent: bool = False
    network: str = ""
    problems: list[str] = []
    expected: Promise = Promise()
    fault: tuple[float, float] | None = None
    lost_ranges: list[tuple[int, int, str]] = []
    timeline: Timeline | None = None
    due_s: float = 0.0  # when the last event was due, from the first
    duration_s: float = 0.0
    indeterminate: int = 0
    rejected_delivered: int = 0
    premature: int = 0
    lost_ranges_omitted: int = 0
    accepted_during_fault: int | None = None
    lost_during_fault_percent: float | None = None
    findings: list[str] = []  # where the product's own account of its losses contradicts the evidence
    latency_before_ms: Latency | None = None
    latency_during_ms: Latency | None = None
    latency_after_ms: Latency | None = None
    price: Price | None = None
    compress: float = 1.0
    at_once: int = 1  # runs at the same time: above 1, times and prices were disturbed


MEASURES = {
    "offered": "send() was called",
    "rejected": "send() refused: not accepted, and the application knows",
    "rejected_delivered": "of these, delivered all the same: the refusal was not true",
    "unknown": "send() neither returned nor refused: the producer was killed inside it, or it did not know",
    "indeterminate": "of these, send() itself said that it does not know",
    "unknown_delivered": "of the unknown, delivered all the same: neither loss nor invention",
    "accepted": "send() returned",
    "delivered": "handler invoked at least once",
    "committed": "effect recorded at least once",
    "acked": "acknowledged to the transport",
    "lost": "accepted, and not committed after the fault and a complete drain",
    "accepted_during_fault": "accepted while the fault lasted",
    "lost_during_fault_percent": "lost, of what was accepted during the fault",
    "pending": "accepted, not committed, drain not complete",
    "duplicates": "deliveries after the first",
    "reordered": "delivered after a later event, to the same process",
    "unexpected": "never offered: invented, damaged or of another run",
    "premature": "delivered before it was sent",
    "recovered": "accepted before the fault ended, committed after it",
    "unavailable_s": "longest silence that touches the fault",
    "recovery_s": "end of the fault to the first delivery",
    "backlog_clear_s": "end of the fault until all accepted before it is committed",
    "rate": "committed events per second",
    "latency_ms": "from the intended send time to the first delivery",
    "withheld": "not offered in time: the producer was held back",
}


def to_json(value: Any) -> bytes:
    """JSON with two spaces of indentation, for files that people read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
