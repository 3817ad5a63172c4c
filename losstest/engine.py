"""One run with real processes: start, break, heal, drain, stop. Everything is noted as it is done."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from brokerless.core.errors import Fault
from brokerless.losstest.adapters.base import CONNECT_HOST, RELAYED_HOST, Setup
from brokerless.losstest.model import Cell, to_json
from brokerless.losstest.notes import Notes
from brokerless.losstest.ports import Ports
from brokerless.losstest.procs import Proc, Workers
from brokerless.losstest.registry import resolve
from brokerless.losstest.scenarios import SCENARIOS, Scenario
from brokerless.losstest.watch import Watch

READY_TIMEOUT_S = 40.0  # importing a transport on a busy machine; the controls notice what never comes
GRACE_S = 0.3  # after all is committed: duplicates that are on their way still arrive and are counted
POLL_S = 0.03
START_IN_S = 0.1
HEALING = ("up", "resume", "fast", "uncut", "producer-up", "broker-up", "order", "relay")


class CellRun:
    """Runs one cell in its directory. `run()` returns when all its processes have ended."""

    def __init__(self, cell: Cell, directory: Path, workers: Workers, ports: Ports) -> None:
        self.cell, self.directory = cell, directory
        self.scenario: Scenario = SCENARIOS[cell.scenario]
        self._workers, self._ports = workers, ports
        self._leased: list[int] = []
        self._procs: dict[str, Proc] = {}
        self._consumers: dict[int, Proc] = {}
        self._incarnations: dict[str, int] = {}
        self._producer: Proc | None = None
        self._relay: Proc | None = None
        self._namespace = 0
        self._services: dict[int, Proc] = {}  # in the order of their start; the last is the broker
        self._start = 0
        self._healed = 0
        self._complaints: set[str] = set()
        self.watch = Watch(directory, cell)
        self.phase = "starting"

    # What the scripts see -------------------------------------------------------------------------------

    @property
    def offline_s(self) -> float:
        return self.cell.offline_s

    @property
    def consumers(self) -> int:
        return self.cell.consumers

    @property
    def rate(self) -> float:
        return self.cell.rate

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def start(self, consumer: int, *, fresh: bool = False) -> None:
        name = self._name("consumer", consumer)
        if fresh:
            shutil.rmtree(self._state(f"consumer-{consumer}"))
        self._note(
            "up", consumer=consumer, incarnation=self._incarnations[f"consumer-{consumer}"], fresh=fresh
        )
        self._consumers[consumer] = await self._spawn("consumer", name, consumer)
        await self._until_ready(name)

    async def stop(self, consumer: int) -> None:
        self._down(consumer, "stop")
        await self._consumers[consumer].stop()

    async def kill(self, consumer: int) -> None:
        self._down(consumer, "kill")
        proc = self._consumers[consumer]
        proc.signal(signal.SIGKILL)
        await proc.wait(5.0)

    async def ended(self, consumer: int) -> None:
        await self._consumers[consumer].wait(self.cell.offline_s + 5.0)
        self._down(consumer, "died")

    def pause(self, consumer: int) -> None:
        self._note("pause", consumer=consumer)
        self._consumers[consumer].signal(signal.SIGSTOP)

    def resume(self, consumer: int) -> None:
        self._consumers[consumer].signal(signal.SIGCONT)
        self._note("resume", consumer=consumer)

    def slow(self, consumer: int, per_event_s: float) -> None:
        self._note("slow", consumer=consumer)
        self._consumers[consumer].tell(f"slow {per_event_s}")

    def fast(self, consumer: int) -> None:
        self._consumers[consumer].tell("slow 0")
        self._note("fast", consumer=consumer)

    def tell(self, consumer: int, order: str) -> None:
        self._note("order", consumer=consumer, order=order)
        self._consumers[consumer].tell(order)

    async def kill_producer(self) -> None:
        assert self._producer is not None
        self._producer.signal(signal.SIGKILL)
        await self._producer.wait(5.0)
        self._note("producer-down")

    async def start_producer(self) -> None:
        self.watch.poll()
        name = self._name("producer", 0)
        self._note("producer-up")
        self._producer = await self._spawn("producer", name, 0, probes=False)
        await self._until_ready(name)
        self._producer.tell(f"go {self._start} {self.watch.next}")

    async def kill_broker(self) -> None:
        broker = self._services[max(self._services)]
        broker.signal(signal.SIGKILL)
        await broker.wait(5.0)
        self._note("broker-down")  # from now on it takes nothing; what it had taken may be gone

    async def start_broker(self) -> None:
        self._note("broker-up")
        await self._start_service(max(self._services))

    def tell_producer(self, order: str) -> None:
        assert self._producer is not None
        self._note("order", producer=0, order=order)
        self._producer.tell(order)

    def relay(self, order: str) -> None:
        assert self._relay is not None
        self._note("relay", order=order)
        self._relay.tell(order)

    def cut(self, direction: str) -> None:
        self._note("cut", direction=direction)
        self.relay(f"cut {direction}")

    def uncut(self) -> None:
        self.relay("uncut")
        self._note("uncut")

    # The run --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the cell. Problems of the run are in its notes; raises only if it could not even begin."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "cell.json").write_bytes(to_json(self.cell))
        self._notes = Notes(self.directory / "world.jsonl")
        self._note("begin")
        try:
            await self._play()
        except Fault as fault:
            self._complain(str(fault))
        finally:
            await self._stop_all()
            self._note("end")
            self._notes.close()
            self.watch.close()
            for port in self._leased:
                self._ports.give_back(port)

    async def _play(self) -> None:
        count = self.cell.consumers
        self._cell_ports = [self._lease() for _ in range(count + self.cell.traits.ports)]
        services = resolve(self.cell.transport).services
        if services is not None:
            for index in range(len(services(self._setup("service", 0)))):
                await self._start_service(index)
        if self.cell.network:
            self._relay = await self._spawn_network()
        if self.scenario.joined:
            for consumer in range(count):
                await self.start(consumer)
        name = self._name("producer", 0)
        self._producer = await self._spawn("producer", name, 0, probes=self.scenario.joined)
        await self._until_ready(name)
        if self.scenario.joined:
            await self._until_probed()
        self._start = time.monotonic_ns() + int(START_IN_S * 1e9)
        self._producer.tell(f"go {self._start} 0")
        self.phase = "steady"
        await self._break()
        self.phase = "sending"
        await self._drain()

    async def _break(self) -> None:
        lead = self.cell.lead_s + START_IN_S
        if self.scenario.script is None:
            return
        # A late joiner is missing from the start: its fault is the whole time until it has come.
        if self.scenario.joined:
            await asyncio.sleep(lead)
        self._note("fault-begin")
        self.phase = "fault"
        await self.scenario.script(self)
        # The fault ends when the healing begins: what a restart takes is part of the recovery.
        self._note("fault-end", healed=self._healed)

    async def _drain(self) -> None:
        # TCP itself tries again after as long as it was cut off, and a user of the kernel's filter waits for it.
        quiet = self.cell.traits.quiet_s + (self.cell.offline_s if self._namespace else 0.0)
        deadline = 0.0
        while True:
            self.watch.poll()
            now = time.monotonic()
            ended = self._producer is None or self._producer.status is not None
            if (self.watch.done or ended) and not deadline:
                self.phase = "draining"
                self._note("drain")
                # Silence counts from here: a consumer that was just restarted has not had its chance before.
                self.watch.moved = max(self.watch.moved, time.monotonic_ns())
                deadline = now + self.cell.drain_s
            if not deadline:
                # A producer that is held back is given the time to catch up, and not for ever.
                total = self.cell.lead_s + self.cell.offline_s + self.cell.tail_s + self.cell.drain_s
                if time.monotonic_ns() > self._start + total * 1e9:
                    return
            else:
                all_there = self.watch.owed() == 0 and self.watch.quiet_s > GRACE_S
                at_rest = self.watch.at_rest(quiet, self._present())
                if all_there or at_rest:
                    self._note("quiescent", owed=self.watch.owed())
                    return
                if now > deadline:
                    return
            await asyncio.sleep(POLL_S)

    # Processes ------------------------------------------------------------------------------------------

    def _note(self, what: str, **fields: object) -> None:
        now = self._notes.write(what, **fields)
        if what in HEALING:
            self._healed = now

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            self._note("error", text=text)

    def _lease(self) -> int:
        port = self._ports.take()
        self._leased.append(port)
        return port

    def _name(self, role: str, index: int) -> str:
        key = f"{role}-{index}"
        self._incarnations[key] = self._incarnations.get(key, 0) + 1
        return f"{key}.{self._incarnations[key]}"

    def _state(self, name: str) -> Path:
        path = self.directory / "state" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _down(self, consumer: int, how: str) -> None:
        incarnation = self._incarnations[f"consumer-{consumer}"]
        self._note("down", consumer=consumer, incarnation=incarnation, how=how)

    def _present(self) -> list[str]:
        """The witnesses of producer and consumers that are running."""
        ends = ("producer", "consumer")
        return [name for name, p in self._procs.items() if name.startswith(ends) and p.status is None]

    def _setup(self, role: str, index: int) -> Setup:
        return Setup(
            state=self._state(f"{role}-{index}"),
            shared=self._state("shared"),
            ports=self._cell_ports,
            listen_host=RELAYED_HOST if self.cell.network == "relay" else CONNECT_HOST,
            rate=self.cell.rate,
            size=self.cell.size,
            seed=self.cell.seed,
            buffer_events=self.cell.buffer_events,
            retention_events=self.cell.retention_events,
            index=index,
            subscription=self.cell.subscription(index) if role == "consumer" else "",
            consumers=self.cell.consumers,
            incarnation=self._incarnations.get(f"{role}-{index}", 0),
        )

    async def _spawn(self, role: str, name: str, index: int, probes: bool = True) -> Proc:
        task: dict[str, Any] = {
            "role": role,
            "setup": msgspec.to_builtins(self._setup(role, index), enc_hook=str),
            "probes": probes,
        }
        if role == "producer" and self.scenario.needs_disk:
            task["witness"] = await self._with_scribe(name)
        self.watch.follow(name)
        return await self._fork(name, task)

    async def _start_service(self, index: int) -> None:
        """A program beside the run, ready when its port answers."""
        services = resolve(self.cell.transport).services
        assert services is not None
        command = services(self._setup("service", index))[index]
        name = self._name("service", index)
        proc = await self._spawn("service", name, index)
        self._services[index] = proc
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and proc.status is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(CONNECT_HOST, command.port)
                writer.close()
                return
            await asyncio.sleep(POLL_S)
        raise Fault(f"{command.words[0]} did not start: {self._last_words(name)}")

    async def _with_scribe(self, name: str) -> str:
        fifo = self.directory / f"{name}.fifo"
        os.mkfifo(fifo)
        await self._fork(f"{name}.scribe", {"role": "scribe", "witness": str(fifo), "name": name})
        return str(fifo)

    async def _spawn_network(self) -> Proc:
        """What makes the network's faults: a relay between the ends, or the filter of a namespace around them."""
        config = {
            "kind": self.cell.traits.link,
            "ports": self._cell_ports,
            "pairs": [((CONNECT_HOST, port), (RELAYED_HOST, port)) for port in self._cell_ports],
            "connects": self.cell.traits.connects,
            "seed": self.cell.seed,
        }
        role = "relay" if self.cell.network == "relay" else "network"
        name = f"{role}-0.1"
        self.watch.follow(name)
        proc = await self._fork(name, {"role": role, "relay": config})
        await self._until_ready(name)
        if role == "network":
            self._namespace = proc.pid
        return proc

    async def _fork(self, name: str, task: dict[str, Any]) -> Proc:
        # The error output lies in `logs`, where no witness is looked for.
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        empty = {"state": "", "shared": "", "ports": [], "rate": 1, "size": 0, "seed": 0}
        empty |= {"buffer_events": 0, "retention_events": 0}
        full = {
            "name": name,
            "directory": str(self.directory),
            "log": str(logs / f"{name}.log"),
            "cell": msgspec.to_builtins(self.cell),
            "setup": empty,
            "namespace": self._namespace,
        } | task
        proc = await self._workers.spawn(f"{self.cell.key}:{name}", full)
        self._procs[name] = proc
        return proc

    async def _until_ready(self, name: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while name not in self.watch.ready:
            self.watch.poll()
            if self._procs[name].status is not None:
                raise Fault(f"{name} ended by itself: {self._last_words(name)}")
            if time.monotonic() > deadline:
                raise Fault(f"{name} was not ready within {READY_TIMEOUT_S} s")
            await asyncio.sleep(POLL_S / 3)

    async def _until_probed(self) -> None:
        """Until every subscription has seen a probe: all of them are connected."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        wanted = {self.cell.subscription(i) for i in range(self.cell.consumers)}
        while True:
            self.watch.poll()
            indexes = {int(name.partition("-")[2].partition(".")[0]) for name in self.watch.probed}
            if wanted <= {self.cell.subscription(i) for i in indexes}:
                return
            if time.monotonic() > deadline:
                raise Fault(f"no probe arrived at every consumer within {READY_TIMEOUT_S} s")
            for name, proc in self._procs.items():
                if proc.status is not None:
                    raise Fault(f"{name} ended by itself: {self._last_words(name)}")
            await asyncio.sleep(POLL_S / 3)

    def _last_words(self, name: str) -> str:
        with contextlib.suppress(OSError):
            text = (self.directory / "logs" / f"{name}.log").read_text("utf-8", "replace").strip()
            return text.split("\n")[-1][-300:] or "without a word"  # of a traceback, the exception
        return "without a word"

    async def _stop_all(self) -> None:
        for name, proc in self._procs.items():
            if proc.status not in (None, 0, -signal.SIGKILL):
                self._complain(f"{name} ended by itself: {self._last_words(name)}")
        # The consumers last: what a producer still flushes while closing must find them.
        for group in ("producer", "consumer", "relay", "network"):
            await asyncio.gather(
                *(proc.stop() for name, proc in self._procs.items() if name.startswith(group))
            )
        for service in reversed(self._services.values()):
            service.signal(signal.SIGKILL)  # what it has is thrown away: no need to let it write
            await service.wait(5.0)
