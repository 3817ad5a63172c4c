"""What runs in the worker processes: producer, consumer, relay, witness-copier."""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import time
from pathlib import Path
from typing import Any

import msgspec

from brokerless.core.errors import Fault
from brokerless.losstest.adapters.base import (
    Command,
    Consumer,
    Indeterminate,
    Loss,
    Message,
    Producer,
    Rejected,
    Setup,
)
from brokerless.losstest.evidence import payload
from brokerless.losstest.evidence.event_log import EventLog, plain
from brokerless.losstest.evidence.kernel_drops import KernelDrops
from brokerless.losstest.evidence.spool import Spool, source_name
from brokerless.losstest.evidence.witness import NO_POSITION, Kind, Unexpected, Witness, copy_records
from brokerless.losstest.faults import namespaces, netfilter, small_disk
from brokerless.losstest.faults.clock import shift_wall_clock
from brokerless.losstest.faults.seeded_drop import is_seeded_drop
from brokerless.losstest.harness.control import ControlChannel
from brokerless.losstest.harness.usage import own_usage
from brokerless.losstest.model import Cell
from brokerless.losstest.registry import resolve

PROBE_INTERVAL_S = 0.02
REPORT_INTERVAL_NS = 100_000_000
MAX_MISTAKES = 3  # of an adapter, in words; those of send() are all counted
USAGE_INTERVAL_NS = 1_000_000_000
ACK_FIRST_EVENTS = 20  # acknowledged without their effect recorded, before the consumer dies of it


class Task(msgspec.Struct, kw_only=True):
    """Everything that a worker is told when it starts."""

    role: str
    name: str  # producer-0.1: role, number, incarnation
    directory: Path
    log: str
    cell: Cell
    setup: Setup
    probes: bool = True
    witness: str = ""  # where to write, if not NAME.wit
    relay: dict[str, Any] = {}
    environment: dict[str, str] = {}  # of a watched disk
    namespace: int = 0  # live in the network namespace of this process
    disk: int = 0  # keep data in the file system that this process mounted


def main(task: dict[str, Any], control_fd: int) -> None:
    """Run one role until told to stop."""
    it = msgspec.convert(task, Task, dec_hook=lambda kind, value: kind(value))  # Path
    if it.role == "network":
        namespaces.unshare("net")
    elif it.namespace:
        namespaces.enter("net", it.namespace)
    if it.role == "disk":
        small_disk.mount(it.setup.shared)
    elif it.disk:
        namespaces.enter("mnt", it.disk)
    if it.environment:
        os.environ.update(it.environment)
        ctypes.CDLL(None).losstest_disk_setup()  # loaded before this process was forked
    control = ControlChannel(control_fd)  # its thread, and all that come later, are in that namespace as well
    if it.role == "producer":
        _ProducerProcess(it, control).run()
    elif it.role == "consumer":
        _ConsumerProcess(it, control).run()
    elif it.role == "relay":
        from brokerless.losstest.faults.relay import run_relay

        log = EventLog(it.directory / f"{it.name}.jsonl")
        run_relay(it.relay, it.cell, log, Witness(it.directory / f"{it.name}.wit"), control)
    elif it.role == "network" and it.relay:
        event_log = EventLog(it.directory / f"{it.name}.jsonl")
        netfilter.run_kernel(it.relay, event_log, Witness(it.directory / f"{it.name}.wit"), control)
    elif it.role == "network":
        namespaces.hold_network(Witness(it.directory / f"{it.name}.wit"), control)
    elif it.role == "disk":
        event_log = EventLog(it.directory / f"{it.name}.jsonl")
        small_disk.run_disk(it.setup.shared, event_log, Witness(it.directory / f"{it.name}.wit"), control)
    elif it.role == "service":
        command = _command_of(it)
        # It dies with the fork server, as this process would.
        os.execvpe(command.words[0], command.words, os.environ | command.env)  # noqa: S606
    elif it.role == "witness-copier":
        copy_records(Path(it.witness), it.directory / f"{it.name}.wit")


def _command_of(task: Task) -> Command:
    services = resolve(task.cell.transport).services
    assert services is not None
    return services(task.setup)[task.setup.index]


class _EndpointProcess:
    """What producer and consumer have in common."""

    def __init__(self, task: Task, control: ControlChannel) -> None:
        self.task, self.cell, self.control = task, task.cell, control
        self.witness = Witness(Path(task.witness) if task.witness else task.directory / f"{task.name}.wit")
        self.event_log = EventLog(task.directory / f"{task.name}.jsonl")
        self.transport = resolve(task.cell.transport)
        self._reported = 0
        self._usage_logged = 0
        self._start_cpu_s = 0.0  # what importing and connecting cost is no price of an event
        self._mistakes = 0

    def log(self, what: str, **fields: object) -> None:
        """An entry, as far as the disk takes it: in the disk-full scenario it does not."""
        with contextlib.suppress(OSError):
            self.event_log.write(what, **fields)

    def report(self, adapter: Producer | Consumer, force: bool = False) -> None:
        """Write down what the adapter says of losses, ten times a second."""
        now = time.monotonic_ns()
        if not force and now - self._reported < REPORT_INTERVAL_NS:
            return
        self._reported = now
        for loss in adapter.losses():
            self._declared(loss)
        if force or now - self._usage_logged >= USAGE_INTERVAL_NS:
            self._usage_logged = now
            self.log("usage", usage=own_usage(self._start_cpu_s))

    def _declared(self, loss: object) -> None:
        if isinstance(loss, Loss) and all(
            isinstance(number, int) for number in (loss.epoch, loss.first, loss.last)
        ):
            self.log("lost", epoch=loss.epoch, first=loss.first, last=loss.last, reason=str(loss.reason))
        else:
            self._report_mistake(f"losses() gave {loss!r:.200}, which is no Loss of positions")

    def _report_mistake(self, text: str) -> None:
        """A mistake of the adapter: it fails the run."""
        if self._mistakes < MAX_MISTAKES:
            self._mistakes += 1
            self.log("error", text=plain(text))

    def follow_instructions(self, adapter: Producer | Consumer) -> None:
        """Carry out the orders that concern this process or its adapter."""
        while self.control.queue:
            word, _, rest = self.control.queue.popleft().partition(" ")
            if word == "clock":
                shift_wall_clock(float(rest))
            elif word == "disk":
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 if rest == "full" else hard, hard))
            elif isinstance(adapter, Consumer):
                adapter.command(word)


class _ProducerProcess(_EndpointProcess):
    def run(self) -> None:
        adapter = self.transport.producer(self.task.setup)
        try:
            self.witness.write(Kind.READY)
            if self._probe(adapter):
                self._start_cpu_s = own_usage().cpu_s
                self._offer_all(adapter)
            self._serve(adapter)
            self.report(adapter, force=True)
        finally:
            adapter.close()
            self.witness.close()

    def _probe(self, adapter: Producer) -> bool:
        """Ask whether consumers are there until told to go; False if told to stop instead."""
        number = 0
        while self.control.go is None:
            if self.control.stop:
                return False
            if self.task.probes:
                with contextlib.suppress(Rejected, Indeterminate):
                    adapter.send(payload.encode(self.cell.run, payload.PROBE, number, self.cell.size))
                number += 1
            self.control.wake.wait(PROBE_INTERVAL_S)
        return True

    def _offer_all(self, adapter: Producer) -> None:
        cell, go = self.cell, self.control.go
        assert go is not None
        interval = int(1e9 / cell.rate)
        dropping = (
            Witness(self.task.directory / f"seeded_drop-{self.task.setup.index}.1.wit")
            if cell.seeded_drop
            else None
        )
        self.witness.write(Kind.START, cell.events, t=go.start, position=interval)
        own, count = self.task.setup.index, cell.producers
        for n in range(go.first + (own - go.first) % count, cell.events, count):
            wait = go.start + n * interval - time.monotonic_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            if self.control.stop:
                return
            if self.control.queue:
                self.follow_instructions(adapter)
            self.witness.write(Kind.OFFERED, n)
            if dropping is not None and is_seeded_drop(cell.seed, n, cell.seeded_drop):
                dropping.write(Kind.DROPPED, n)
                self.witness.write(Kind.ACCEPTED, n)
                continue
            self._offer(adapter, n)
            self.report(adapter)
        self.witness.write(Kind.DONE)

    def _offer(self, adapter: Producer, n: int) -> None:
        try:
            where = adapter.send(payload.encode(self.cell.run, self.task.setup.index, n, self.cell.size))
        except Rejected:
            self.witness.write(Kind.REJECTED, n)
        except Indeterminate:
            self.witness.write(Kind.INDETERMINATE, n)
        except Exception as error:
            # Nobody can say whether it was accepted. An error that the adapter does not name is its mistake.
            self.witness.write(Kind.INDETERMINATE, n)
            self._report_mistake(f"send() of event {n}: {type(error).__name__}: {error}")
        else:
            try:
                position, epoch = (where.offset, where.epoch) if where else (NO_POSITION, 0)
                self.witness.write(Kind.ACCEPTED, n, position=position, epoch=epoch)
            except (AttributeError, TypeError, struct.error):
                self.witness.write(Kind.ACCEPTED, n)
                self._report_mistake(f"send() of event {n} returned {where!r:.200}, which is no Position")

    def _serve(self, adapter: Producer) -> None:
        """All is offered: stay until told to stop, because consumers may still ask for repair."""
        told = -1
        while not self.control.stop:
            self.follow_instructions(adapter)
            adapter.flush()
            pending = adapter.pending()
            if pending != told:
                self.witness.write(Kind.PENDING, pending)
                told = pending
            self.report(adapter)
            time.sleep(0.03)


class _ConsumerProcess(_EndpointProcess):
    def run(self) -> None:
        adapter = self.transport.consumer(self.task.setup)
        self._probed = False
        self._said_idle = 0
        self._asked_pending = 0
        self._told_pending = 0
        self._dropped = 0
        # Where events come in datagrams, the kernel knows what it had no room for.
        datagrams = self.cell.traits.link in ("udp", "multicast")
        self._kernel_drops = KernelDrops() if datagrams else None
        self.spool: Spool | None = None
        if self.cell.spool:
            source = source_name(self.cell, self.task.setup.subscription)
            self.spool = Spool(self.task.directory / "spools" / self.task.name, self.task.name, source)
        self._ack_first = 0
        self._start_cpu_s = own_usage().cpu_s
        self.witness.write(Kind.READY)
        while not self.control.stop:
            self.follow_instructions(adapter)
            busy = False
            for item in adapter.receive(0.05):
                busy = True
                self._handle(item)
            self._idle(busy)
            self._expecting(adapter)
            self.report(adapter)
        self._report_drops()  # its sockets are closed with it
        adapter.close()
        for item in adapter.receive(0):  # what an orderly stop still brings, such as a last flush
            self._handle(item)
        self.report(adapter, force=True)
        if self.spool is not None:
            self.spool.close()
        self.witness.write(Kind.CLOSED)
        self.witness.close()

    def report(self, adapter: Producer | Consumer, force: bool = False) -> None:
        """What the adapter says, and what the kernel has dropped."""
        before = self._reported
        super().report(adapter, force)
        if self._reported != before:
            self._report_drops()

    def _report_drops(self) -> None:
        dropped = self._kernel_drops.read() if self._kernel_drops is not None else 0
        if dropped != self._dropped:
            self._dropped = dropped
            self.log("drops", drops={"overflow_receiver": dropped})

    def _idle(self, busy: bool) -> None:
        """Say now and then that there is nothing: a starved process is silent, too, so it must say that it is idle."""
        now = time.monotonic_ns()
        if not busy and now - self._said_idle >= REPORT_INTERVAL_NS:
            self._said_idle = now
            self.witness.write(Kind.IDLE)

    def _expecting(self, adapter: Consumer) -> None:
        """Say what is still expected when that changes: a transport that repairs is not at rest."""
        now = time.monotonic_ns()
        if now - self._asked_pending >= REPORT_INTERVAL_NS:
            self._asked_pending = now
            pending = adapter.pending()
            if pending != self._told_pending:
                self._told_pending = pending
                self.witness.write(Kind.PENDING, pending)

    def _saw_probe(self) -> None:
        if not self._probed:
            self.witness.write(Kind.PROBE)
            self._probed = True

    def _handle(self, message: Message) -> None:
        tag = payload.decode(message.data)
        if tag is None or tag.run != self.cell.run:
            self.witness.write(
                Kind.UNEXPECTED, flags=Unexpected.DAMAGED if tag is None else Unexpected.OTHER_RUN
            )
        elif tag.probe:
            self._saw_probe()
        else:
            self.witness.write(Kind.DELIVERED, tag.n, attempt=min(message.attempt, 0xFFFF))
            if self.control.slow_s:
                time.sleep(self.control.slow_s)
            if self.control.ack_first:
                self._ack_and_die(message)
                return
            if self.spool is not None:
                self.spool.add(tag.n + 1, message.data)
            self.witness.write(Kind.COMMITTED, tag.n)
            if self._ack(message):
                self.witness.write(Kind.ACKED, tag.n)
            return
        self._ack(message)

    def _ack(self, message: Message) -> bool:
        if message.ack is None:
            return False
        with contextlib.suppress(Fault):  # it will come again
            message.ack()
            return True
        return False

    def _ack_and_die(self, message: Message) -> None:
        """The bug that acknowledgements exist to prevent: answer first, do the work later, die in between."""
        tag = payload.decode(message.data)
        if tag is not None and self._ack(message):
            self.witness.write(Kind.ACKED, tag.n)
        self._ack_first += 1
        if self._ack_first >= ACK_FIRST_EVENTS:
            os.kill(os.getpid(), signal.SIGKILL)
