"""Many subscribers, latency, and floods of requests: what `bench/multicast.py` measures besides rates.

Every role is a process of its own, and every run ends by itself.
"""

import os
import socket
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.processes import Result, expect, processes, running
from brokerless.core import MemoryJournal, Retention
from brokerless.multicast import Publisher, Subscriber
from brokerless.multicast.wire.moldudp64 import request
from tests.multicast.lossy import attach_loss

GROUP = "239.255.77.9"
INTERFACE = "127.0.0.1"
SILENCE_S = 5.0
# Events that may be under way to the slowest subscriber: less than what its kernel buffer holds.
WINDOW = 20_000
STAMP = struct.Struct("=q")


def quantile(values: list[float], share: float) -> float:
    """The value that so large a share is below."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# -- many subscribers ---------------------------------------------------------------------------------------


def subscriber(pipe: Connection, port: int, events: int, loss: float) -> None:
    """Take so many events; lose that share of the publisher's packets, the same ones as everybody else."""
    with Subscriber(f"{GROUP}:{port}", "MANY", start=0, io="plain" if loss else "auto") as sub:
        sub.wait_joined(30)
        pipe.send("joined")
        source_port = expect(pipe)
        keep = attach_loss(sub._engine._lines[0].sock, 11, loss, source_port=source_port) if loss else None
        pipe.send("ready")
        spent, got, told = time.process_time(), 0, 0
        for batch in sub.batches(SILENCE_S):
            got += len(batch.datas)
            if got - told >= WINDOW // 4:
                told = got
                pipe.send(got)
            if got >= events:
                break
        c = sub.counters
        pipe.send(
            {
                "got": got,
                "at": time.monotonic(),
                "cpu": time.process_time() - spent,
                "requests": c.requests,
                "missing": c.missing_kernel + c.missing_network,
                "lost": c.lost,
            }
        )
        expect(pipe)  # stay until everybody has everything
        del keep


def many(receivers: int, port: int, events: int, *, loss: float = 0.0, rate: float = 0.0) -> Result:
    """Publish to so many; with `rate` one event per packet at that many a second."""
    pairs = [processes.Pipe() for _ in range(receivers)]
    children = [
        processes.Process(target=subscriber, args=(theirs, port, events, loss), daemon=True)
        for _, theirs in pairs
    ]
    pipes = [ours for ours, _ in pairs]
    journal = MemoryJournal(retention=Retention(max_bytes=256 << 20))
    with (
        Publisher(f"{GROUP}:{port}", "MANY", journal=journal, io="plain" if loss else "auto") as pub,
        running(*children),
    ):
        for pipe in pipes:
            assert expect(pipe) == "joined"
        server = pub.request_server
        assert server is not None
        until_s = time.monotonic() + 30
        while len(server.positions) < receivers and time.monotonic() < until_s:
            time.sleep(0.01)
        for pipe in pipes:
            pipe.send(pub._lines[0]._sock.getsockname()[1])
        for pipe in pipes:
            assert expect(pipe) == "ready"
        time.sleep(0.5)  # so that all of them have heard how many they are
        begun, spent = time.monotonic(), time.process_time()
        told: dict[Connection, int] = dict.fromkeys(pipes, 0)
        done: dict[Connection, dict[str, float]] = {}
        if rate:
            for i in range(events):
                pub.publish_many("a", [b"x" * 100])
                if (ahead := (i + 1) / rate - (time.monotonic() - begun)) > 0:
                    time.sleep(ahead)
        else:
            sent, datas = 0, [b"x" * 100] * 1000
            stopped = time.monotonic() + 60
            while sent < events and time.monotonic() < stopped:
                if sent - min(told.values()) < WINDOW:
                    pub.publish_many("a", datas)
                    sent += 1000
                else:
                    time.sleep(0.0005)
                for pipe in pipes:
                    while pipe not in done and pipe.poll():
                        word = pipe.recv()
                        if isinstance(word, dict):
                            done[pipe], told[pipe] = word, events
                        else:
                            told[pipe] = word
        cpu = time.process_time() - spent
        for pipe in pipes:
            while pipe not in done:
                word = expect(pipe)
                if isinstance(word, dict):
                    done[pipe] = word
        for pipe in pipes:
            pipe.send("end")
        results = list(done.values())
        lost_packets = max(result["missing"] for result in results)
        requests = sum(result["requests"] for result in results)
        return {
            "rate": min(result["got"] for result in results) / (max(r["at"] for r in results) - begun),
            "cpu_sender": cpu / events,
            "cpu_receiver": sum(result["cpu"] for result in results) / receivers / events,
            "requests_per_lost": requests / max(1.0, lost_packets),
            "lost_packets": lost_packets,
            "shared": server.counters.shared,
            "lost": sum(result["lost"] for result in results),
            "short": sum(result["got"] < events for result in results),
        }


# -- latency --------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How both ends wait, and where they run."""

    name: str
    processors: int
    spins: bool


WAYS = (
    Way("two processors, both sleep", 2, False),
    Way("one processor, both sleep", 1, False),
    Way("two processors, the receiver spins", 2, True),
)


def raw_receiver(pipe: Connection, port: int, events: int, processor: int, spins: bool) -> None:
    os.sched_setaffinity(0, {processor})
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((GROUP, port))
    membership = socket.inet_aton(GROUP) + socket.inet_aton(INTERFACE)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    sock.settimeout(0 if spins else SILENCE_S)
    pipe.send("ready")
    took: list[int] = []
    until_s = time.monotonic() + SILENCE_S
    while len(took) < events and time.monotonic() < until_s:
        try:
            data = sock.recv(2048)
        except (BlockingIOError, TimeoutError):
            continue
        took.append(time.monotonic_ns() - STAMP.unpack_from(data)[0])
        until_s = time.monotonic() + SILENCE_S
    pipe.send(took)


def our_receiver(pipe: Connection, port: int, events: int, processor: int, spins: bool) -> None:
    os.sched_setaffinity(0, {processor})
    with Subscriber(f"{GROUP}:{port}", "LATE", busy_poll_s=0.01 if spins else 0.0) as sub:
        sub.wait_joined(30)
        pipe.send("ready")
        took = []
        for event in sub.events(SILENCE_S):
            took.append(time.monotonic_ns() - STAMP.unpack_from(event.data)[0])
            if len(took) == events:
                break
    pipe.send(took)


def latency(raw: bool, way: Way, port: int, events: int, rate: float) -> Result:
    """One-way times in µs of so many events at that rate, of raw sockets or of ours."""
    everywhere = os.sched_getaffinity(0)
    first, *others = sorted(everywhere)
    try:
        os.sched_setaffinity(0, {first})
        return _latency(raw, port, events, rate, others[0] if way.processors > 1 else first, way.spins)
    finally:
        os.sched_setaffinity(0, everywhere)


def _latency(raw: bool, port: int, events: int, rate: float, processor: int, spins: bool) -> Result:
    ours, theirs = processes.Pipe()
    target = raw_receiver if raw else our_receiver
    child = processes.Process(target=target, args=(theirs, port, events, processor, spins), daemon=True)
    with running(child):
        if raw:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(INTERFACE))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
            sock.connect((GROUP, port))
            assert expect(ours) == "ready"
            begun = time.monotonic()
            for i in range(events):
                sock.send(STAMP.pack(time.monotonic_ns()) + b"x" * 92)
                time.sleep(max(0.0, (i + 1) / rate - (time.monotonic() - begun)))
            sock.close()
        else:
            with Publisher(f"{GROUP}:{port}", "LATE") as pub:
                assert expect(ours) == "ready"
                begun = time.monotonic()
                for i in range(events):
                    pub.publish("a", STAMP.pack(time.monotonic_ns()) + b"x" * 92)
                    time.sleep(max(0.0, (i + 1) / rate - (time.monotonic() - begun)))
        took = [ns / 1000 for ns in expect(ours)]
    return {"p50": quantile(took, 0.5), "p99": quantile(took, 0.99), "got": float(len(took))}


# -- floods ---------------------------------------------------------------------------------------------------


def flood(pipe: Connection, host: str, port: int, session: bytes, rate: float) -> None:
    """That many requests a second until told to stop."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    begun, sent = time.monotonic(), 0
    while not pipe.poll(0):
        while sent < rate * (time.monotonic() - begun):
            sock.sendto(request(session, 1 + sent % 50, 1), (host, port))
            sent += 1
        time.sleep(0.002)
    pipe.send(sent / (time.monotonic() - begun))


def publish_under_requests(port: int, seconds: float, *, rate: float, process: bool) -> Result:
    """Events per second, and per CPU second of the publisher's process, that publish() alone reaches meanwhile."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Publisher(f"{GROUP}:{port}", "FLOOD", journal=f"{folder}/journal", request_process=process) as pub,
    ):
        pub.publish_many("a", [b"x" * 100] * 100)
        assert pub.request_server is not None
        ours, theirs = processes.Pipe()
        where = pub.request_server.address
        arguments = (theirs, where.host, where.port, pub._sender.session, rate)
        child = processes.Process(target=flood, args=arguments, daemon=True)
        with running(*([child] if rate else [])):
            time.sleep(1.0 if rate else 0.0)
            events, begun, spent = 0, time.monotonic(), time.process_time()
            while time.monotonic() < begun + seconds:
                for _ in range(100):
                    pub.publish("a", b"x" * 100)
                events += 100
            took, cpu = time.monotonic() - begun, time.process_time() - spent
            if rate:
                ours.send("stop")
                rate = expect(ours)
    return {"rate": events / took, "per_cpu": events / cpu, "requests_s": rate}
