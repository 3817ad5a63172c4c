"""The scenarios: each is a short script of what is broken and healed, and who it makes sense for."""

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


Script = Callable[[FaultInjector], Awaitable[None]]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario. Buffers and retention are in multiples of what is sent during the fault."""

    name: str
    text: str
    script: Script | None = None
    main: bool = False  # part of the quick profile
    control: bool = False
    consumers: int = 1
    joined: bool = True  # consumers are there before the producer begins
    buffers: float = 4.0
    retention: float = 20.0
    relay: bool = False  # the network misbehaves: by a relay, or by the kernel's filter
    filters: bool = True  # the kernel's filter can do it as well
    datagrams: bool = False  # only where packets can get lost singly
    streams: bool = False  # only where there are connections
    needs_http: bool = False
    needs_acks: bool = False
    needs_disk: bool = False
    needs_journal: bool = False
    needs_broker: bool = False
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
            (not self.needs_disk or traits.journal == "disk"),
            (not self.needs_journal or traits.journal != "none"),
            (not self.needs_broker or traits.journal == "broker"),
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


# What the network may do in the random schedule; the relay heals with `pass` or `uncut`.
_RANDOM_NETWORK = ("latency 0.05 0.02", "reset 4", "bandwidth 20000", "cut both", "cut to", "cut from")


async def _random_faults(s: FaultInjector) -> None:
    """Kill, pause and network faults one after the other, as the seed has them, until the time is over."""
    chosen = Random(s.seed)
    left = s.offline_s
    while left > 0:
        length = min(left, chosen.uniform(0.1, 0.5) * min(s.offline_s, 20.0))
        what = chosen.choice(("kill", "pause", "network", "both"))
        network = chosen.choice(_RANDOM_NETWORK)
        direction = network.partition("cut ")[2]
        if what in ("network", "both"):
            if direction:
                s.partition(direction)
            else:
                s.relay(network)
        if what == "kill":
            await s.kill(0)
        elif what in ("pause", "both"):
            s.pause(0)
        await s.sleep(length)
        if what == "kill":
            await s.start(0)
        elif what in ("pause", "both"):
            s.resume(0)
        if what in ("network", "both"):
            if direction:
                s.heal_partition()
            else:
                s.relay("pass")
        pause = min(left, chosen.uniform(0.1, 0.3) * min(s.offline_s, 10.0))
        await s.sleep(pause)
        left -= length + pause


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
    s.instruct_producer("disk full")
    await s.sleep(s.offline_s)
    s.instruct_producer("disk ok")


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


async def _clock(s: FaultInjector) -> None:
    for instruction in (f"clock {HOUR_S}", "clock 0"):
        s.instruct_producer(instruction)
        for consumer in range(s.consumers):
            s.instruct(consumer, instruction)
        if instruction != "clock 0":
            await s.sleep(s.offline_s)


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
        text="kill, pause and network faults at random, as the seed has them",
        script=_random_faults,
        relay=True,
        filters=False,
        streams=True,
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
        text="the producer's disk takes nothing more",
        script=_disk_full,
        needs_disk=True,
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
