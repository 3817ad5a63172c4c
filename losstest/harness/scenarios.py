"""The scenarios: each is a short script of what is broken and healed, and who it makes sense for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Protocol

import msgspec

from brokerless.losstest.model import Traits

HOUR_S = 3600


class FaultInjector(Protocol):
    """What a script can do. Implemented by the engine with real processes."""

    @property
    def offline_s(self) -> float: ...
    @property
    def consumers(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def size(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def traits(self) -> Traits: ...
    @property
    def disk_can_be_slow(self) -> bool: ...

    async def sleep(self, seconds: float) -> None: ...
    async def start(self, consumer: int, *, fresh: bool = False) -> None: ...
    async def stop(self, consumer: int) -> None: ...
    async def kill(self, consumer: int) -> None: ...
    def pause(self, consumer: int) -> None: ...
    def resume(self, consumer: int) -> None: ...
    def slow(self, consumer: int, per_event_s: float) -> None: ...
    def fast(self, consumer: int) -> None: ...
    def instruct(self, consumer: int, instruction: str) -> None: ...
    async def ended(self, consumer: int) -> None: ...
    async def kill_producer(self) -> None: ...
    async def start_producer(self) -> None: ...
    async def kill_broker(self) -> None: ...
    async def start_broker(self) -> None: ...
    def instruct_producer(self, instruction: str) -> None: ...
    def relay(self, instruction: str) -> None: ...
    def partition(self, direction: str) -> None: ...
    def heal_partition(self) -> None: ...
    def slow_disk(self, seconds: float) -> None: ...
    async def fill_disk(self) -> None: ...
    async def free_disk(self) -> None: ...
    async def cut_power(self) -> None: ...
    async def restore_power(self) -> None: ...


Script = Callable[[FaultInjector], Awaitable[None]]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario. Buffers and retention are in multiples of what is sent during the fault."""

    name: str
    text: str
    script: Script | None = None
    main: bool = False  # part of the quick profile
    control: bool = False
    consumers: int = 1
    producers: int = 1
    joined: bool = True  # consumers are there before the producer begins
    buffers: float = 4.0
    retention: float = 20.0
    relay: bool = False  # the network misbehaves: by a relay, or by the kernel's filter
    filters: bool = True  # the kernel's filter can do it as well
    datagrams: bool = False  # only where packets can get lost singly
    streams: bool = False  # only where there are connections
    needs_http: bool = False
    needs_acks: bool = False
    fills: bool = False  # the disk of whoever keeps the events
    needs_journal: bool = False
    needs_broker: bool = False
    random: bool = False  # a schedule of its own, which may make the disk slow where that can be done
    disk: bool = False  # syncs are watched, of the producer or of the broker: whoever keeps the events
    sync: bool = False  # what is accepted must survive a power cut
    max_rate: float = 0.0  # events per second at most; 0: as many as the user wants
    size: int = 0  # events of at least this many bytes
    seeded_drop: float = 0.0
    independent: bool = False

    def fits(self, traits: Traits) -> bool:
        """True if the scenario has a meaning for such a transport."""
        if self.control:
            return True
        if traits.only and self.name not in traits.only:
            return False
        wants = (
            (not self.relay or traits.link != ""),
            (not self.datagrams or traits.link in ("udp", "multicast")),
            (not self.streams or traits.link == "tcp"),
            (not self.needs_http or traits.http),
            (not self.needs_acks or traits.acks),
            (not self.fills or traits.journal in ("disk", "broker")),
            (not self.needs_journal or traits.journal != "none"),
            (self.producers == 1 or traits.many_producers),
            (not self.needs_broker or traits.journal == "broker"),
            (not self.disk or traits.journal in ("disk", "broker")),
            self.name not in traits.without,
        )
        return all(wants)


async def _stop(s: FaultInjector) -> None:
    await s.stop(0)
    await s.sleep(s.offline_s)
    await s.start(0)


async def _kill(s: FaultInjector) -> None:
    await s.kill(0)
    await s.sleep(s.offline_s)
    await s.start(0)


async def _kill_fresh(s: FaultInjector) -> None:
    await s.kill(0)
    await s.sleep(s.offline_s)
    await s.start(0, fresh=True)


async def _pause(s: FaultInjector) -> None:
    s.pause(0)
    await s.sleep(s.offline_s)
    s.resume(0)


async def _slow(s: FaultInjector) -> None:
    s.slow(0, 4 / s.rate)
    await s.sleep(s.offline_s)
    s.fast(0)


async def _late(s: FaultInjector) -> None:
    await s.sleep(s.offline_s)
    await s.start(0)


async def _all_down(s: FaultInjector) -> None:
    for consumer in range(s.consumers):
        await s.kill(consumer)
    await s.sleep(s.offline_s)
    for consumer in range(s.consumers):
        await s.start(consumer)


async def _flap(s: FaultInjector) -> None:
    for _ in range(4):
        await s.kill(0)
        await s.sleep(s.offline_s / 8)
        await s.start(0)
        await s.sleep(s.offline_s / 8)


async def _rolling(s: FaultInjector) -> None:
    for consumer in range(s.consumers):
        await s.stop(consumer)
        await s.sleep(s.offline_s / (2 * s.consumers))
        await s.start(consumer)
        await s.sleep(s.offline_s / (2 * s.consumers))


def _network(instruction: str) -> Script:
    async def script(s: FaultInjector) -> None:
        s.relay(instruction)
        await s.sleep(s.offline_s)
        s.relay("pass")

    return script


def _partition(direction: str) -> Script:
    async def script(s: FaultInjector) -> None:
        s.partition(direction)
        await s.sleep(s.offline_s)
        s.heal_partition()

    return script


async def _bandwidth(s: FaultInjector) -> None:
    """The line takes half of what is sent."""
    s.relay(f"bandwidth {s.rate * s.size / 2:g}")
    await s.sleep(s.offline_s)
    s.relay("pass")


MAX_ROUND_S = 20.0  # of random faults: an outage of an hour has hundreds of rounds


class RandomFault(msgspec.Struct, frozen=True):
    """One fault of a random schedule: `what` it is, with its argument, and from when to when, in s from the start."""

    begin_s: float
    end_s: float
    part: str  # consumer, producer, network, disk or clock: one fault at a time for each
    what: str


def random_schedule(seed: int, seconds: float, traits: Traits, disk: bool) -> list[RandomFault]:
    """Faults for the given time, one to three at once, ended by its end. Pure: the seed decides.

    `disk`: the disk can be made slow. A producer is killed only where that may lose nothing.
    """
    chosen = Random(seed)
    network = ["latency 0.05 0.02", "cut both", "cut to", "cut from"]
    network += ["reset 4", "bandwidth 20000"] if traits.link == "tcp" else ["loss 0.05", "burst 0.01 20"]
    kinds = {"consumer": ["kill", "pause", "slow"], "network": network, "clock": ["ahead", "behind"]}
    if traits.journal in ("disk", "broker"):
        kinds["producer"] = ["kill"]
    if disk and traits.journal == "disk":
        kinds["disk"] = ["slow"]
    faults, at = [], 0.0
    deck: list[str] = []  # no part is hit again before all of them were
    while at < seconds:
        length = min(seconds - at, chosen.uniform(0.1, 0.5) * min(seconds, MAX_ROUND_S))
        together = chosen.choice((1, 2, 3))
        if len(deck) < together:
            deck = [*deck, *chosen.sample(sorted(set(kinds) - set(deck)), len(kinds) - len(deck))]
        for part in (deck.pop(0) for _ in range(together)):
            begin, end = sorted((chosen.uniform(0, 0.4), chosen.uniform(0.5, 1)))
            faults.append(
                RandomFault(at + begin * length, at + end * length, part, chosen.choice(kinds[part]))
            )
        at += length + chosen.uniform(0.1, 0.3) * min(seconds, MAX_ROUND_S / 2)
    return sorted(faults, key=lambda fault: fault.begin_s)


async def _random_faults(s: FaultInjector) -> None:
    """Each part of the system has its own faults, one after the other; those of different parts overlap."""
    schedule = random_schedule(s.seed, s.offline_s, s.traits, s.disk_can_be_slow)
    started = time.monotonic()

    async def until(at_s: float) -> None:
        await s.sleep(max(0.0, started + at_s - time.monotonic()))

    async def run(part: str) -> None:
        for fault in schedule:
            if fault.part == part:
                await until(fault.begin_s)
                await _begin(s, fault)
                await until(fault.end_s)
                await _end(s, fault)

    async with asyncio.TaskGroup() as tasks:
        for part in sorted({fault.part for fault in schedule}):
            tasks.create_task(run(part))


async def _begin(s: FaultInjector, fault: RandomFault) -> None:
    match fault.part, fault.what:
        case "consumer", "kill":
            await s.kill(0)
        case "consumer", "pause":
            s.pause(0)
        case "consumer", _:
            s.slow(0, 4 / s.rate)
        case "producer", _:
            await s.kill_producer()
        case "disk", _:
            s.slow_disk(0.02)
        case "clock", what:
            _set_clocks(s, HOUR_S if what == "ahead" else -HOUR_S)
        case _, what if what.startswith("cut "):
            s.partition(what.removeprefix("cut "))
        case _, what:
            s.relay(what)


async def _end(s: FaultInjector, fault: RandomFault) -> None:
    match fault.part, fault.what:
        case "consumer", "kill":
            await s.start(0)
        case "consumer", "pause":
            s.resume(0)
        case "consumer", _:
            s.fast(0)
        case "producer", _:
            await s.start_producer()
        case "disk", _:
            s.slow_disk(0.0)
        case "clock", _:
            _set_clocks(s, 0)
        case _, what if what.startswith("cut "):
            s.heal_partition()
        case _:
            s.relay("pass")


async def _producer_kill(s: FaultInjector) -> None:
    s.pause(0)
    await s.sleep(s.offline_s / 2)
    await s.kill_producer()
    s.resume(0)
    await s.sleep(s.offline_s / 4)
    await s.start_producer()


async def _broker_kill(s: FaultInjector) -> None:
    await s.kill_broker()
    await s.sleep(s.offline_s)
    await s.start_broker()


async def _disk_full(s: FaultInjector) -> None:
    await s.fill_disk()
    await s.sleep(s.offline_s)
    await s.free_disk()


async def _disk_slow(s: FaultInjector) -> None:
    s.slow_disk(0.05)
    await s.sleep(s.offline_s)
    s.slow_disk(0.0)


async def _power_cut(s: FaultInjector) -> None:
    """The consumer is killed before: there must be something that only the disk has, and no socket's buffer."""
    await s.kill(0)
    await s.sleep(s.offline_s / 2)
    await s.cut_power()
    await s.sleep(s.offline_s / 4)
    await s.restore_power()
    await s.start(0)


def _receiver(instruction: str) -> Script:
    async def script(s: FaultInjector) -> None:
        s.instruct(0, instruction)
        await s.sleep(s.offline_s)
        s.instruct(0, "answer-200")

    return script


async def _ack_then_die(s: FaultInjector) -> None:
    s.instruct(0, "ack-first")
    await s.ended(0)
    await s.start(0)


def _set_clocks(s: FaultInjector, ahead_s: int) -> None:
    s.instruct_producer(f"clock {ahead_s}")
    for consumer in range(s.consumers):
        s.instruct(consumer, f"clock {ahead_s}")


async def _clock(s: FaultInjector) -> None:
    _set_clocks(s, HOUR_S)
    await s.sleep(s.offline_s)
    _set_clocks(s, 0)


_ALL = (
    Scenario(name="none", text="control: no fault, nothing may be lost", control=True),
    Scenario(name="seeded", text="control: the harness drops a known set", control=True, seeded_drop=0.05),
    Scenario(name="stop", text="consumer stopped gracefully, restarted with its state", script=_stop),
    Scenario(name="kill", text="consumer SIGKILLed, restarted with its state", script=_kill, main=True),
    Scenario(name="kill-fresh", text="consumer SIGKILLed, restarted without its state", script=_kill_fresh),
    Scenario(name="pause-short", text="consumer SIGSTOPped for less than the buffers hold", script=_pause),
    Scenario(
        name="pause-long",
        text="consumer SIGSTOPped for more than the buffers hold",
        script=_pause,
        main=True,
        buffers=0.2,
        # The kernel's TCP buffers hold megabytes, and not every library lets them be made smaller: what is
        # sent during a pause of one second at 400 events/s must be more.
        size=16_000,
    ),
    Scenario(name="slow", text="consumer takes a quarter of the rate", script=_slow, buffers=0.2),
    Scenario(name="late", text="consumer joins late", script=_late, main=True, joined=False),
    Scenario(name="all-down", text="all consumers SIGKILLed, then restarted", script=_all_down, consumers=2),
    Scenario(name="flap", text="consumer SIGKILLed and restarted four times", script=_flap),
    Scenario(
        name="rolling", text="two consumers restarted one after the other", script=_rolling, consumers=2
    ),
    Scenario(
        name="many-producers",
        text="three producers; consumer SIGKILLed, restarted with its state",
        script=_kill,
        producers=3,
    ),
    Scenario(
        name="beyond-retention",
        text="consumer offline for longer than the journal's retention",
        script=_kill,
        main=True,
        retention=0.4,
        needs_journal=True,
    ),
    Scenario(
        name="loss",
        text="5 % of the datagrams dropped",
        script=_network("loss 0.05"),
        main=True,
        relay=True,
        datagrams=True,
        independent=True,
    ),
    Scenario(
        name="burst",
        text="datagrams dropped in bursts of 20",
        script=_network("burst 0.01 20"),
        relay=True,
        datagrams=True,
    ),
    Scenario(
        name="reorder",
        text="5 % of the datagrams delayed by 20 ms, past others",
        script=_network("reorder 0.05 0.02"),
        relay=True,
        filters=False,
        datagrams=True,
    ),
    Scenario(
        name="duplicate",
        text="5 % of the datagrams sent twice",
        script=_network("duplicate 0.05"),
        relay=True,
        datagrams=True,
    ),
    Scenario(name="partition-to", text="nothing reaches the consumer", script=_partition("to"), relay=True),
    Scenario(
        name="partition-from",
        text="nothing of the consumer's gets out",
        script=_partition("from"),
        relay=True,
    ),
    Scenario(name="partition", text="nothing passes either way", script=_partition("both"), relay=True),
    Scenario(
        name="latency",
        text="every packet delayed by 50 ms, give or take 20 ms",
        script=_network("latency 0.05 0.02"),
        relay=True,
        filters=False,
    ),
    Scenario(
        name="bandwidth",
        text="the line takes half of what is sent",
        script=_bandwidth,
        relay=True,
        filters=False,
        streams=True,
    ),
    Scenario(
        name="reset",
        text="connections are reset four times a second",
        script=_network("reset 4"),
        relay=True,
        filters=False,
        streams=True,
    ),
    Scenario(
        name="random",
        text="faults of consumer, producer, network, disk and clock at random and together, as the seed has them",
        script=_random_faults,
        random=True,
        relay=True,
        filters=False,
    ),
    Scenario(
        name="producer-kill",
        text="producer SIGKILLed with unsent buffers, restarted",
        script=_producer_kill,
        main=True,
    ),
    Scenario(
        name="broker-kill",
        text="the broker itself SIGKILLed, restarted with its state",
        script=_broker_kill,
        main=True,
        needs_broker=True,
    ),
    Scenario(
        name="disk-full",
        text="the disk of whoever keeps the events takes nothing more; a broker is restarted when it does again",
        script=_disk_full,
        fills=True,
    ),
    Scenario(
        name="disk-slow",
        text="every write and sync of whoever keeps the events takes 50 ms longer",
        script=_disk_slow,
        disk=True,
    ),
    Scenario(
        name="power-cut",
        text="power cut where the events are kept: what was not synced may be gone",
        script=_power_cut,
        disk=True,
        sync=True,
        max_rate=25.0,  # every event is synced, and every sync copies the file
    ),
    Scenario(name="answer-500", text="receiver answers 500", script=_receiver("answer-500"), needs_http=True),
    Scenario(name="hang", text="receiver never answers", script=_receiver("hang"), needs_http=True),
    Scenario(
        name="ack-then-die",
        text="receiver acknowledges, and dies before the effect is recorded",
        script=_ack_then_die,
        needs_acks=True,
    ),
    Scenario(name="clock-jump", text="wall clocks jump an hour ahead, and back", script=_clock),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
CONTROLS = tuple(s.name for s in _ALL if s.control)
MAIN = tuple(s.name for s in _ALL if s.main)
