"""One run with real processes: start, break, heal, drain, stop. Everything is noted as it is done."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from brokerless.core.errors import Fault
from brokerless.losstest.adapters.base import CONNECT_HOST, RELAYED_HOST, Setup
from brokerless.losstest.evidence.event_log import EventLog, plain
from brokerless.losstest.faults import namespaces, small_disk
from brokerless.losstest.faults.power_cut import WatchedDisk, shim
from brokerless.losstest.harness.ports import Ports
from brokerless.losstest.harness.processes import Proc, Workers
from brokerless.losstest.harness.scenarios import SCENARIOS, Scenario
from brokerless.losstest.harness.usage import since, tree_usage
from brokerless.losstest.harness.watch import Watch
from brokerless.losstest.model import Cell, Traits, Usage, to_json
from brokerless.losstest.registry import resolve

READY_TIMEOUT_S = 120.0  # two JVMs on a busy machine; the controls notice what never comes
POLL_S = 0.03
SILENT_S = 0.3  # nothing moved for so long: what is left of the run is waiting, and costs next to nothing
MARGIN_S = 10.0  # added to what a producer waits for the other side: it is never the first to give up
START_IN_S = 0.1
STRETCH = 10  # times the drain time, for a machine so busy that what takes seconds takes minutes
BROKER_STOP_S = 10.0  # in order; a JVM on a busy machine needs seconds
MAX_WORDS = 300  # of a process's log, in a problem
HEALING = ("up", "resume", "fast", "uncut", "producer-up", "broker-up", "instruction", "relay", "disk")


class DrainProgress:
    """Is there still hope? For `drain_s` without anything new, and for STRETCH times that as long as there is."""

    def __init__(self, begin_s: float, drain_s: float, quiet_s: float = 0.0) -> None:
        self._drain_s = drain_s + quiet_s
        self._give_up = begin_s + self._drain_s
        self._last = begin_s + STRETCH * drain_s + quiet_s
        self._count = -1

    def is_over(self, now_s: float, count: int) -> bool:
        """`count` is how many events got on so far: offered, or committed for the first time."""
        if count > self._count:
            self._count = count
            self._give_up = max(self._give_up, now_s + self._drain_s)
        return now_s > min(self._give_up, self._last)


class CellRun:
    """Runs one cell in its directory. `run()` returns when all its processes have ended."""

    def __init__(
        self,
        cell: Cell,
        directory: Path,
        workers: Workers,
        ports: Ports,
        when_silent: Callable[[], None] = lambda: None,
    ) -> None:
        """`when_silent` is called once all that is left is to wait whether something comes late."""
        # Absolute: an adapter may change its working directory.
        self.cell, self.directory = cell, directory.absolute()
        self._when_silent = when_silent
        self.scenario: Scenario = SCENARIOS[cell.scenario]
        self._workers, self._ports = workers, ports
        self._leased: list[int] = []
        self._procs: dict[str, Proc] = {}
        self._consumers: dict[int, Proc] = {}
        self._incarnations: dict[str, int] = {}
        self._producer: Proc | None = None
        self._more_producers: list[Proc] = []
        self._relay: Proc | None = None
        self._namespace = 0  # the process that holds the network of the run; 0: the machine's
        self._carried = -1  # bytes that had gone over that network when the run began
        self._services: dict[int, Proc] = {}  # in the order of their start; the last is the broker
        self._small_disk: Proc | None = None  # of a broker
        self._service_usage: dict[str, Usage] = {}  # service → what it had cost when it was ready
        self._start = 0
        self._healed = 0
        self._problems: set[str] = set()
        self._disk: WatchedDisk | None = None  # of whoever keeps the events
        self.watch = Watch(directory, cell)
        self.phase = "starting"

    # What the scripts see -------------------------------------------------------------------------------

    @property
    def _planned_s(self) -> float:
        return self.cell.lead_s + self.cell.offline_s + self.cell.tail_s

    @property
    def offline_s(self) -> float:
        return self.cell.offline_s

    @property
    def consumers(self) -> int:
        return self.cell.consumers

    @property
    def rate(self) -> float:
        return self.cell.rate

    @property
    def size(self) -> int:
        return self.cell.size

    @property
    def seed(self) -> int:
        return self.cell.seed

    @property
    def traits(self) -> Traits:
        return self.cell.traits

    @property
    def disk_can_be_slow(self) -> bool:
        return self._disk is not None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def start(self, consumer: int, *, fresh: bool = False) -> None:
        name = self._name("consumer", consumer)
        if fresh:
            shutil.rmtree(self._state(f"consumer-{consumer}"))
        self._log(
            "up", consumer=consumer, incarnation=self._incarnations[f"consumer-{consumer}"], fresh=fresh
        )
        self._consumers[consumer] = await self._spawn("consumer", name, consumer)
        await self._until_ready(name)

    async def stop(self, consumer: int) -> None:
        self._down(consumer, "stop")
        await self._stop(self._consumers[consumer])

    async def kill(self, consumer: int) -> None:
        self._down(consumer, "kill")
        proc = self._consumers[consumer]
        proc.signal(signal.SIGKILL)
        await proc.wait(5.0)

    async def ended(self, consumer: int) -> None:
        self._consumers[consumer].told_to_end = True
        await self._consumers[consumer].wait(self.cell.offline_s + 5.0)
        self._down(consumer, "died")

    def pause(self, consumer: int) -> None:
        self._log("pause", consumer=consumer)
        self._consumers[consumer].signal(signal.SIGSTOP)

    def resume(self, consumer: int) -> None:
        self._consumers[consumer].signal(signal.SIGCONT)
        self._log("resume", consumer=consumer)

    def slow(self, consumer: int, per_event_s: float) -> None:
        self._log("slow", consumer=consumer)
        self._consumers[consumer].send(f"slow {per_event_s}")

    def fast(self, consumer: int) -> None:
        self._consumers[consumer].send("slow 0")
        self._log("fast", consumer=consumer)

    def instruct(self, consumer: int, instruction: str) -> None:
        self._log("instruction", consumer=consumer, instruction=instruction)
        self._consumers[consumer].send(instruction)

    async def kill_producer(self) -> None:
        assert self._producer is not None
        self._producer.signal(signal.SIGKILL)
        await self._producer.wait(5.0)
        self._log("producer-down")

    async def start_producer(self) -> None:
        self.watch.poll()
        name = self._name("producer", 0)
        self._log("producer-up")
        self._producer = await self._spawn("producer", name, 0, probes=False)
        await self._until_ready(name)
        self._producer.send(f"go {self._start} {self.watch.next}")

    async def kill_broker(self) -> None:
        broker = self._services[max(self._services)]
        self._log_service_usage()
        broker.signal(signal.SIGKILL)
        await broker.wait(5.0)
        self._log("broker-down")  # from now on it takes nothing; what it had taken may be gone

    async def start_broker(self) -> None:
        self._log("broker-up")
        await self._start_service(max(self._services))

    async def fill_disk(self) -> None:
        if self._small_disk is None:
            self.instruct_producer("disk full")
            return
        self._log("disk", full=True)
        self._small_disk.send("full")
        seen = f"/proc/{self._small_disk.pid}/root{self._state('shared').resolve()}"
        deadline = time.monotonic() + READY_TIMEOUT_S
        while small_disk.room(seen):
            if time.monotonic() > deadline:
                raise Fault("the disk could not be filled")
            await asyncio.sleep(POLL_S)

    async def free_disk(self) -> None:
        """Make room, and restart a broker: some end of a full disk, some take nothing before they are restarted."""
        if self._small_disk is None:
            self.instruct_producer("disk ok")
            return
        self._small_disk.send("ok")
        self._log("disk", full=False)
        broker = self._services[max(self._services)]
        self._log_service_usage()
        broker.told_to_end = True  # or it had ended of the full disk
        broker.signal(signal.SIGTERM)
        if not await broker.wait(BROKER_STOP_S):
            broker.signal(signal.SIGKILL)
            await broker.wait(5.0)
        self._log("broker-down")
        await self.start_broker()

    def instruct_producer(self, instruction: str) -> None:
        assert self._producer is not None
        self._log("instruction", producer=0, instruction=instruction)
        self._producer.send(instruction)

    def relay(self, instruction: str) -> None:
        assert self._relay is not None
        self._log("relay", instruction=instruction)
        self._relay.send(instruction)

    def partition(self, direction: str) -> None:
        self._log("cut", direction=direction)
        self.relay(f"cut {direction}")

    def heal_partition(self) -> None:
        self.relay("uncut")
        self._log("uncut")

    def slow_disk(self, seconds: float) -> None:
        assert self._disk is not None
        self._log("disk", slower_s=seconds)
        self._disk.slow(seconds)

    async def cut_power(self) -> None:
        assert self._disk is not None
        await (self.kill_broker() if self._services else self.kill_producer())
        self._disk.lose_power(Random(self.seed))
        self._log("power-cut")

    async def restore_power(self) -> None:
        await (self.start_broker() if self._services else self.start_producer())

    # The run --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the cell. Problems of the run are in its notes; raises only if it could not even begin."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "cell.json").write_bytes(to_json(self.cell))
        self._event_log = EventLog(self.directory / "supervisor.jsonl")
        self._log("begin")
        finished = False
        try:
            await self._run_phases()
            finished = True
        except Fault as fault:
            self._report_problem(str(fault))
            finished = True
        except Exception as error:  # a mistake of a plug-in, or of ours: of this run, and not of the others
            self._report_problem(f"{type(error).__name__}: {error}")
            finished = True
        finally:
            await self._stop_all()
            self._log("end" if finished else "interrupted")
            self._event_log.close()
            self.watch.close()
            for port in self._leased:
                self._ports.give_back(port)

    async def _run_phases(self) -> None:
        count, traits = self.cell.consumers, self.cell.traits
        more_ports = traits.ports_per_producer * (self.cell.producers - 1)
        self._cell_ports = [self._lease() for _ in range(count + self.cell.traits.ports + more_ports)]
        services = resolve(self.cell.transport).services
        if self.cell.enclosed or self.cell.network == "nft":
            await self._make_network()
        if self.scenario.disk or (self.scenario.random and self.cell.traits.journal == "disk" and shim()):
            root = self._state("producer-0" if services is None else "shared")
            self._disk = WatchedDisk(root, self.directory / "durable")
        if services is not None and self.scenario.fills:
            self._small_disk = await self._spawn("disk", "disk-0.1", 0)
            await self._until_ready("disk-0.1")
        if services is not None:
            for index in range(len(services(self._setup("service", 0)))):
                await self._start_service(index)
        if self.cell.network == "relay":
            self._relay = await self._spawn_network("relay")
        if self.scenario.joined:
            for consumer in range(count):
                await self.start(consumer)
        name = self._name("producer", 0)
        self._producer = await self._spawn("producer", name, 0, probes=self.scenario.joined)
        await self._until_ready(name)
        for index in range(1, self.cell.producers):
            name = self._name("producer", index)
            self._more_producers.append(await self._spawn("producer", name, index))
            await self._until_ready(name)
        if self.scenario.joined:
            await self._until_probed()
        # What a broker needed to start, and for the probes, is not counted as the cost of events.
        self._service_usage = {name: tree_usage(proc.pid) for name, proc in self._service_procs()}
        if self._namespace:
            self._carried = namespaces.carried_bytes(self._namespace)
        if self._disk is not None:
            self._disk.all_is_durable()  # what was written before the run is on the disk
        self._start = time.monotonic_ns() + int(START_IN_S * 1e9)
        for producer in (self._producer, *self._more_producers):
            producer.send(f"go {self._start} 0")
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
        self._log("fault-begin")
        self.phase = "fault"
        await self.scenario.script(self)
        # The fault ends when the healing begins: what a restart takes is part of the recovery.
        self._log("fault-end", healed=self._healed)

    async def _drain(self) -> None:
        # TCP itself tries again after as long as it was cut off, and a user of the kernel's filter waits for it.
        quiet = self.cell.traits.quiet_s + (self.cell.offline_s if self.cell.network == "nft" else 0.0)
        # A producer that is held back, and a backlog, are given the time that they need as long as they get on, and
        # not for ever: from when all was healed.
        planned = max(self._start + int(self._planned_s * 1e9), time.monotonic_ns()) / 1e9
        progress = DrainProgress(planned, self.cell.drain_s)
        draining = False
        while True:
            self.watch.poll()
            now = time.monotonic()
            ended = self._producer is None or self._producer.status is not None
            if (self.watch.done or ended) and not draining:
                draining = True
                self.phase = "draining"
                self._log("drain")
                # Silence counts from here: a consumer that was just restarted has not had its chance before.
                self.watch.moved = max(self.watch.moved, time.monotonic_ns())
                progress = DrainProgress(
                    now, self.cell.drain_s, quiet
                )  # to deliver, and then to be seen at rest
            if draining:
                if self.watch.quiet_s > SILENT_S:
                    self._when_silent()
                # Also when all is there: a late duplicate comes within the transport's own time, too.
                # What is promised and missing has the whole drain time.
                promised = self.cell.promise.loss == "none" and not self.cell.control and self.watch.owed
                needed = max(quiet, self.cell.drain_s) if promised else quiet
                if self.watch.at_rest(needed, self._present()):
                    self._log("quiescent")
                    return
            if progress.is_over(now, self.watch.offered + self.watch.committed_total):
                return
            await asyncio.sleep(POLL_S)

    # Processes ------------------------------------------------------------------------------------------

    def _log(self, what: str, **fields: object) -> None:
        now = self._event_log.write(what, **fields)
        if what in HEALING:
            self._healed = now

    def _report_problem(self, text: str) -> None:
        if text not in self._problems:
            self._problems.add(text)
            self._log("error", text=plain(text))

    def _lease(self) -> int:
        port = self._ports.take()
        self._leased.append(port)
        return port

    async def _stop(self, proc: Proc) -> None:
        if not await proc.stop():
            self._log("hung", process=proc.name.rpartition(":")[2])

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
        self._log("down", consumer=consumer, incarnation=incarnation, how=how)

    def _present(self) -> list[str]:
        """The witnesses of producer and consumers that are running."""
        ends = ("producer", "consumer")
        return [name for name, p in self._procs.items() if name.startswith(ends) and p.status is None]

    def _setup(self, role: str, index: int) -> Setup:
        return Setup(
            state=self._state(f"{role}-{index}"),
            shared=self._state("shared"),
            ports=self._cell_ports,
            listen_host=self._listen_host,
            rate=self.cell.rate,
            size=self.cell.size,
            seed=self.cell.seed,
            buffer_events=self.cell.buffer_events,
            retention_events=self.cell.retention_events,
            index=index,
            subscription=self.cell.subscription(index) if role == "consumer" else "",
            consumers=self.cell.consumers,
            producers=self.cell.producers,
            incarnation=self._incarnations.get(f"{role}-{index}", 0),
            patience_s=self._planned_s + self.cell.drain_s + MARGIN_S,
            sync=self.cell.sync,
            compress=self.cell.compress,
        )

    @property
    def _listen_host(self) -> str:
        return RELAYED_HOST if self.cell.network == "relay" else CONNECT_HOST

    async def _spawn(self, role: str, name: str, index: int, probes: bool = True) -> Proc:
        task: dict[str, Any] = {
            "role": role,
            "setup": msgspec.to_builtins(self._setup(role, index), enc_hook=str),
            "probes": probes,
        }
        if role == "producer" and self.scenario.fills and self._small_disk is None:
            task["witness"] = await self._witness_through_fifo(name)
        if self._disk is not None and role == (
            "producer" if self.cell.traits.journal == "disk" else "service"
        ):
            task["environment"] = self._disk.environment
        if self._small_disk is not None:
            task["disk"] = self._small_disk.pid  # also the ends: some look at what their broker has saved
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
            if namespaces.listens(self._namespace or os.getpid(), self._listen_host, command.port):
                self._service_usage[name] = tree_usage(proc.pid)
                return
            await asyncio.sleep(POLL_S)
        raise Fault(f"{command.words[0]} did not start: {self._last_words(name)}")

    def _service_procs(self) -> list[tuple[str, Proc]]:
        """The programs beside the run that are running, by name."""
        return [
            (name, proc)
            for name, proc in self._procs.items()
            if name.startswith("service") and proc.status is None
        ]

    def _log_service_usage(self) -> None:
        for name, proc in self._service_procs():
            used = since(tree_usage(proc.pid), self._service_usage.get(name, Usage()))
            self._log("usage", process=name, usage=used)

    async def _witness_through_fifo(self, name: str) -> str:
        fifo = self.directory / f"{name}.fifo"
        os.mkfifo(fifo)
        await self._fork(
            f"{name}.witness-copier", {"role": "witness-copier", "witness": str(fifo), "name": name}
        )
        return str(fifo)

    async def _make_network(self) -> None:
        """A network of the run alone, where all live who start from now on. Its faults, if any, are the filter's."""
        if self.cell.network:
            proc = self._relay = await self._spawn_network("network")
        else:
            proc = await self._spawn("network", "network-0.1", 0)
            await self._until_ready(proc.name.rpartition(":")[2])
        self._namespace = proc.pid

    async def _spawn_network(self, role: str) -> Proc:
        """What makes the network's faults: a relay between the ends, or the filter of a namespace around them."""
        ports = self._cell_ports
        if self._services:  # between the broker and its consumers; its other ports are its own business
            ports = ports[self.cell.consumers : self.cell.consumers + 1]
        config = {
            "kind": self.cell.traits.link,
            "ports": ports,
            "pairs": [((CONNECT_HOST, port), (RELAYED_HOST, port)) for port in ports],
            "connects": self.cell.traits.connects,
            "seed": self.cell.seed,
        }
        name = f"{role}-0.1"
        self.watch.follow(name)
        proc = await self._fork(name, {"role": role, "relay": config})
        await self._until_ready(name)
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
                raise Fault(self._ended_by_itself(name))
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
                    raise Fault(self._ended_by_itself(name))
            await asyncio.sleep(POLL_S / 3)

    def _ended_by_itself(self, name: str) -> str:
        return f"{name} ended by itself: {self._last_words(name)}"

    def _last_words(self, name: str) -> str:
        """The last line of its log, of a traceback the exception; how it ended if it said nothing."""
        text = ""
        with contextlib.suppress(OSError):
            text = (self.directory / "logs" / f"{name}.log").read_text("utf-8", "replace").strip()
        _, found, trace = text.rpartition("Traceback (most recent call last):\n")
        if found:
            said = dropwhile(lambda line: line.startswith(" "), trace.splitlines())
            return " ".join(said)[:MAX_WORDS]
        status = self._procs[name].status
        how = f"exit code {status}" if status is None or status >= 0 else signal.Signals(-status).name
        return text.rpartition("\n")[2][-MAX_WORDS:] or how

    async def _stop_all(self) -> None:
        for name, proc in self._procs.items():
            # A copier ends with the one that wrote.
            if proc.status is not None and not proc.told_to_end and not name.endswith("witness-copier"):
                self._report_problem(self._ended_by_itself(name))
        self._log_service_usage()
        if self._carried >= 0:
            with contextlib.suppress(
                OSError
            ):  # who held it was killed: a problem of the run, which is told above
                self._log("wire", bytes=namespaces.carried_bytes(self._namespace) - self._carried)
        # The consumers last: what a producer still flushes while closing must find them.
        for group in ("producer", "consumer", "relay", "network", "disk"):
            await asyncio.gather(
                *(self._stop(proc) for name, proc in self._procs.items() if name.startswith(group))
            )
        for service in reversed(self._services.values()):
            service.signal(signal.SIGKILL)  # what it has is thrown away: no need to let it write
            await service.wait(5.0)
