"""Multicast on loopback, peers in the same run: plain sockets, a bare offload loop, ZeroMQ over epgm and norm.

    python bench/multicast.py [--quick] [--part rates|receivers|latency|recovery|flood]

Publisher and subscriber are two processes. The publisher is held to a window of what was delivered, so that what
is measured is what the pair can do, not how fast a buffer overflows. Every run ends by itself.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from _multicast_group import WAYS, latency, many, publish_under_requests
from common import Report, human

from brokerless.core import MemoryJournal, Retention
from brokerless.multicast import Publisher, Subscriber

HERE = Path(__file__).resolve().parent
GROUP = "239.255.77.7"
WINDOW_BYTES = 3_000_000
SILENCE_S = 3.0
RING_BYTES = 32 << 20
REPEAT = 3
PER_CPU = "events/CPU s"  # per CPU second of the busier side
# Below the ports that the system gives to anybody who asks for one.
_port = 23_000


class Pair(NamedTuple):
    """One side's means of telling the other."""

    ready: Any
    delivered: "Synchronized[int]"
    begun: "Synchronized[float]"
    spent: "Synchronized[float]"  # CPU seconds of the producer while the clock ran
    result: Any


class Result(NamedTuple):
    """What arrived, in which time, and the CPU seconds that it took the consumer and the producer."""

    got: int
    seconds: float
    notes: dict[str, int]
    cpu_consumer: float = 0.0
    cpu_producer: float = 0.0

    @property
    def rate(self) -> float:
        return self.got / self.seconds if self.seconds > 0 else 0.0

    @property
    def per_cpu(self) -> float:
        """Per CPU second of the busier side: what two free cores would reach, whatever else this machine does."""
        busy = max(self.cpu_consumer, self.cpu_producer)
        return self.got / busy if busy > 0 else 0.0


def next_port() -> int:
    """A port whose successor, where requests are answered, is free."""
    global _port  # noqa: PLW0603 - every run has a group of its own
    while True:
        _port += 2
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, suppress(OSError):
            tcp.bind(("127.0.0.1", _port + 1))
            udp.bind(("127.0.0.1", _port + 1))
            return _port


def run(produce: Callable[..., None], consume: Callable[..., None], *arguments: object) -> Result:
    """Run the two in processes; a run that does not end is ended, and counts nothing."""
    pair = Pair(
        multiprocessing.Event(),
        multiprocessing.Value("q", 0, lock=False),  # type: ignore[arg-type]
        multiprocessing.Value("d", 0.0, lock=False),  # type: ignore[arg-type]
        multiprocessing.Value("d", 0.0, lock=False),  # type: ignore[arg-type]
        multiprocessing.Queue(),
    )
    port = next_port()
    consumer = multiprocessing.Process(target=consume, args=(pair, port, *arguments), daemon=True)
    producer = multiprocessing.Process(target=produce, args=(pair, port, *arguments), daemon=True)
    consumer.start()
    producer.start()
    try:
        said = pair.result.get(timeout=60)
        producer.join(10)
        return Result(*said, pair.spent.value)
    except Empty:  # the run hung
        return Result(0, 1.0, {})
    finally:
        for process in (consumer, producer):
            process.join(3)
            if process.is_alive():
                process.terminate()
                process.join(5)


def explain(name: str, result: Result) -> None:
    """The CPU time of both sides, for whoever wants to know which is the busier."""
    each = 1e9 / max(1, result.got)
    print(
        f"{name}: CPU {result.cpu_producer * each:.1f} ns to send, {result.cpu_consumer * each:.1f} ns to receive",
        flush=True,
    )


def best(produce: Callable[..., None], consume: Callable[..., None], *arguments: object) -> Result:
    """The best of some runs, in each respect: the ones that the machine disturbed least."""
    results = [run(produce, consume, *arguments) for _ in range(REPEAT)]
    fastest = max(results, key=lambda result: result.rate)
    thriftiest = max(results, key=lambda result: result.per_cpu)
    scale = fastest.got / max(1, thriftiest.got)
    return fastest._replace(
        cpu_consumer=thriftiest.cpu_consumer * scale, cpu_producer=thriftiest.cpu_producer * scale
    )


# -- plain sockets, one message per datagram --------------------------------------------------------------


def plain_sender(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
    sock.connect((GROUP, port))
    return sock


def plain_receiver(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((GROUP, port))
    membership = socket.inet_aton(GROUP) + socket.inet_aton("127.0.0.1")
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    try:
        sock.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    sock.settimeout(SILENCE_S)
    return sock


def plain_produce(pair: Pair, port: int, events: int, size: int) -> None:
    sock = plain_sender(port)
    pair.ready.wait(20)
    data, window = b"x" * size, 3_000  # a buffer of 8 MiB takes twice as many small datagrams
    pair.begun.value = time.time()
    spent = time.process_time()
    for i in range(events):
        sock.send(data)
        if not i & 63:
            wait_for_room(pair, i, window)
    pair.spent.value = time.process_time() - spent


def plain_consume(pair: Pair, port: int, events: int, size: int) -> None:
    sock = plain_receiver(port)
    pair.ready.set()
    spent = time.process_time()
    got = 0
    try:
        while got < events:
            sock.recv(2048)
            got += 1
            if not got & 63:
                pair.delivered.value = got
    except TimeoutError:
        pass
    seconds = time.time() - pair.begun.value - (SILENCE_S if got < events else 0)
    pair.result.put((got, seconds, {}, time.process_time() - spent))


def wait_for_room(pair: Pair, sent: int, window: int) -> None:
    """Hold the producer back; not for ever, because what is lost is never delivered."""
    deadline = time.monotonic() + 1.0
    while sent - pair.delivered.value > window and time.monotonic() < deadline:
        time.sleep(
            0.0005
        )  # the window lasts for several of these; shorter sleeps would cost more than sending


# -- the least that offload can do: send one buffer again and again, count bytes ----------------------------


def bare_produce(pair: Pair, port: int, batches: int, size: int) -> None:
    sock = plain_sender(port)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    segments = min(64, 65_507 // size)
    buffer, control = b"x" * (size * segments), [(17, 103, struct.pack("=H", size))]
    pair.ready.wait(20)
    pair.begun.value = time.time()
    spent = time.process_time()
    for i in range(batches):
        sock.sendmsg([buffer], control)
        if not i & 7:
            wait_for_room(pair, i, WINDOW_BYTES // len(buffer))
    pair.spent.value = time.process_time() - spent


def bare_consume(pair: Pair, port: int, batches: int, size: int) -> None:
    sock = plain_receiver(port)
    sock.setsockopt(17, 104, 1)
    pair.ready.set()
    spent = time.process_time()
    got = n = 0
    try:
        while n < batches:
            got += len(sock.recvmsg(65_536, 64)[0])
            n += 1
            if not n & 7:
                pair.delivered.value = n
    except TimeoutError:
        pass
    seconds = time.time() - pair.begun.value - (SILENCE_S if n < batches else 0)
    pair.result.put((got, seconds, {}, time.process_time() - spent))


# -- ours ---------------------------------------------------------------------------------------------------


def our_produce(
    pair: Pair, port: int, events: int, size: int, io_mode: str, io: str, key: bytes | None, loss: float
) -> None:
    journal = MemoryJournal(retention=Retention(max_bytes=RING_BYTES))
    with Publisher(f"{GROUP}:{port}", "BENCH", journal=journal, io=io, auth_key=key) as pub:  # type: ignore[arg-type]
        batch = max(1, 60_000 // (size + 50) * 4)
        datas = [os.urandom(size) for _ in range(batch)]
        window = max(batch, WINDOW_BYTES // (size + 50))
        pair.ready.wait(20)
        warm = warm_up(size, loss)
        total = events + warm
        pair.begun.value = time.time()
        spent, warm_at = time.process_time(), 0
        if io_mode == "publish":
            data = datas[0]
            for i in range(total):
                pub.publish("orders.eu", data)
                if not i & 255:
                    wait_for_room(pair, i, window)
                    if not warm_at and i >= warm:
                        spent, warm_at = time.process_time(), i
        else:
            for start in range(0, total, batch):
                pub.publish_many("orders.eu", datas[: total - start])
                wait_for_room(pair, start, window)
                if not warm_at and start >= warm:
                    spent, warm_at = time.process_time(), start + batch
        pub.flush()
        pair.spent.value = (time.process_time() - spent) * events / max(1, total - warm_at)
        deadline = time.monotonic() + 20
        while pair.delivered.value < total and time.monotonic() < deadline:
            time.sleep(0.01)


def warm_up(size: int, loss: float) -> int:
    """Events before the clock runs: until the ring's memory is used again, as in a process that has run for long.

    That is two rings: the C library gives the first one's frames back to the system when they are dropped, and only
    then begins to keep such blocks. A page that comes from the system costs 3 µs here, which is two datagrams.
    """
    return 0 if loss else 2 * RING_BYTES // size


def our_consume(
    pair: Pair, port: int, events: int, size: int, io_mode: str, io: str, key: bytes | None, loss: float
) -> None:
    with Subscriber(f"{GROUP}:{port}", "BENCH", start=0, io=io, auth_key=key) as sub:  # type: ignore[arg-type]
        sub.wait_joined(10)
        keep = drop_randomly(sub._engine._lines[0].sock, loss) if loss else None
        pair.ready.set()
        warm = warm_up(size, loss)
        total = events + warm
        got, begun, spent = 0, 0.0, time.process_time()
        if io_mode == "batches":
            for batch in sub.batches(SILENCE_S):
                got = pair.delivered.value = got + len(
                    batch.datas
                )  # each event's data as an object of its own
                if not begun and got >= warm > 0:
                    begun, warm, spent = time.time(), got, time.process_time()
                if got >= total:
                    break
        else:
            for _ in sub.events(SILENCE_S):
                got += 1
                if not got & 255 or got == total:
                    pair.delivered.value = got
                    if not begun and got >= warm > 0:
                        begun, warm, spent = time.time(), got, time.process_time()
                    if got == total:
                        break
        seconds = time.time() - (begun or pair.begun.value) - (SILENCE_S if got < total else 0)
        spent = time.process_time() - spent
        sub.commit()
        accounting = sub.ledger.account()
        assert accounting.balanced, accounting
        notes = {
            "lost": accounting.lost,
            "repaired": sub.counters.repaired,
            "requests": sub.counters.requests,
        }
        del keep
    pair.result.put((got - warm, seconds, notes, spent))


def drop_randomly(sock: socket.socket, share: float) -> object:
    """Let the kernel drop that share of what this socket receives."""
    lines = [
        (0x20, 0, 0, 0xFFFFF000 + 56),
        (0x35, 0, 1, int(share * 2**32)),
        (6, 0, 0, 0xFFFFFFFF),
        (6, 0, 0, 0),
    ]
    keep = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", len(lines), ctypes.addressof(keep)))
    return keep


# -- ZeroMQ's multicast transports --------------------------------------------------------------------------


def zmq_python(kind: str) -> str | None:
    """The system's Python; None where its libzmq does not have that transport."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        return None
    probe = f"import zmq, sys; sys.exit(not zmq.has('{'pgm' if kind == 'epgm' else kind}'))"
    return (
        None if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode else python
    )


def zmq_latency(processors: list[int], events: int, rate: float) -> dict[str, float] | None:
    """p50 and p99 in µs of so many events over epgm; None where there is no epgm, or nothing came."""
    python = zmq_python("epgm")
    if python is None:
        return None
    url = f"epgm://127.0.0.1;239.255.77.8:{next_port()}"
    command = [python, str(HERE / "_multicast_peer.py"), url, str(events), "100", "0", str(rate)]
    command += map(str, processors)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return None
    said = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else {}
    return said if said.get("got") == events else None


def zmq_peer(kind: str, events: int, size: int, loss: float) -> Result | None:
    """Run the peer in the system's Python; None where its libzmq does not have that transport."""
    python = zmq_python(kind)
    if python is None:
        return None
    best_result: Result | None = None
    patience_s = 30
    for _ in range(REPEAT if kind == "epgm" else 2):
        url = f"{kind}://127.0.0.1;239.255.77.8:{next_port()}"
        command = [python, str(HERE / "_multicast_peer.py"), url, str(events), str(size), str(loss)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False)
            said = json.loads(done.stdout.strip().splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            why = (
                "takes longer than 40 s"
                if isinstance(error, subprocess.TimeoutExpired)
                else done.stderr.strip()
            )
            print(
                f"{kind}, {loss:.0%} loss, a run without a result: {why.splitlines()[-1:]}", file=sys.stderr
            )
            continue
        result = Result(said["got"], said["seconds"], {"filtered": said["filtered"]})
        if best_result is None or (result.got, result.rate) > (best_result.got, best_result.rate):
            best_result = result
        if kind == "norm":
            break  # one run takes up to half a minute
    return best_result


# -- the table ----------------------------------------------------------------------------------------------


def rates(report: Report, count: int) -> Result:
    """What a pair of publisher and subscriber can do."""

    plain = best(plain_produce, plain_consume, 100_000, 100)
    report.add("plain sockets, one 100-byte message per datagram", plain.rate, "events/s")
    report.add("the same", plain.per_cpu, PER_CPU)
    batches = best(our_produce, our_consume, count, 100, "batches", "auto", None, 0.0)
    events = best(our_produce, our_consume, count, 100, "events", "auto", None, 0.0)
    single = best(our_produce, our_consume, count // 2, 100, "publish", "auto", None, 0.0)
    for name, result, goal in (
        ("ours, publish_many and batches(), with ledger", batches, "≥ 1 M/s, ≥ 10×"),
        ("ours, publish_many and events, with ledger", events, "≥ 1 M/s, ≥ 10×"),
        ("ours, publish() one by one, with ledger", single, ""),
    ):
        explain(name + ", per event", result)
        for what, value, unit, peer in (
            (name, result.rate, "events/s", plain.rate),
            ("the same", result.per_cpu, PER_CPU, plain.per_cpu),
        ):
            ratio = value / peer
            met = (ratio >= 10 and value >= 1e6 and not result.notes.get("lost")) if goal else None
            report.add(what, value, unit, against="plain sockets", ratio=ratio, goal=goal, met=met)
    signed = best(our_produce, our_consume, count // 2, 100, "batches", "auto", b"k" * 32, 0.0)
    ratio = signed.per_cpu / batches.per_cpu
    report.add(
        "ours, batches, authenticated",
        signed.per_cpu,
        PER_CPU,
        against="without",
        ratio=ratio,
        goal="≥ 0.6×",
        met=ratio >= 0.6,
    )

    size = 1340  # with our header and message head that is a datagram of 1,400 bytes
    bare = best(bare_produce, bare_consume, 8_000, 1400)
    fast = best(our_produce, our_consume, 150_000, size, "batches", "auto", None, 0.0)
    slow = best(our_produce, our_consume, 60_000, size, "batches", "plain", None, 0.0)
    middle = best(our_produce, our_consume, 100_000, size, "batches", "mmsg", None, 0.0)
    explain("bare loop, per byte", bare)
    explain("ours, GSO/GRO, per 1,340-byte event", fast)
    explain("ours, plain sockets, per 1,340-byte event", slow)
    for unit, of in (("bytes/s", Result.rate.fget), ("bytes/CPU s", Result.per_cpu.fget)):  # type: ignore[attr-defined]
        least, ours, theirs = of(slow) * size, of(fast) * size, of(bare)
        report.add("bare GSO/GRO loop that counts, 1,400-byte datagrams", theirs, unit)
        report.add("ours, plain sockets, 1,400-byte datagrams", least, unit)
        ratio = of(middle) * size / least
        report.add("ours, sendmmsg/recvmmsg", of(middle) * size, unit, against="ours, plain", ratio=ratio)
        ratio = ours / least
        report.add(
            "ours, GSO/GRO", ours, unit, against="ours, plain", ratio=ratio, goal="≥ 5×", met=ratio >= 5
        )
        ratio = ours / theirs
        report.add(
            "ours, GSO/GRO", ours, unit, against="bare loop", ratio=ratio, goal="≥ 1/3", met=ratio >= 1 / 3
        )

    beside = {io: beside_a_thread(io) for io in ("plain", "mmsg")}
    report.add("ours, plain sockets: 400 datagrams beside a thread that computes", beside["plain"], "s")
    ratio = beside["plain"] / beside["mmsg"]
    report.add("ours, sendmmsg: the same", beside["mmsg"], "s", against="ours, plain", ratio=ratio)
    return batches


def beside_a_thread(io: str) -> float:
    """Seconds for 400 datagrams of different sizes while another thread of the process computes."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1000))

    datas = [b"x" * (600 + i) for i in range(400)]
    with Publisher(f"{GROUP}:{next_port()}", "BUSY", io=io, requests=None) as pub:  # type: ignore[arg-type]
        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        begun = time.monotonic()
        pub.publish_many("a", datas)
        seconds = time.monotonic() - begun
        done.set()
        thread.join()
    return seconds


def receivers(report: Report, quick: bool) -> None:
    """One publisher and 1, 4, 16 subscribers; then 16 that lose the same packets."""
    for number in (1, 4, 16):
        found = many(number, next_port(), (100_000 if quick else 400_000) // number)
        note = "" if not (found["lost"] or found["short"]) else ", NOT ALL ARRIVED"
        report.add(f"ours, {number} subscribers, each gets all{note}", found["rate"], "events/s")
        report.add("the same, publisher", found["cpu_sender"] * 1e6, "CPU µs/event")
        report.add("the same, one subscriber", found["cpu_receiver"] * 1e6, "CPU µs/event")
    for number in (1, 4, 16):
        found = many(number, next_port(), 1000 if quick else 2000, loss=0.05, rate=200)
        ratio = found["requests_per_lost"]
        goal = {"goal": "≤ 1.5", "met": ratio <= 1.5 and not found["lost"]} if number == 16 else {}
        what = f"{number} subscribers lost the same {found['lost_packets']:.0f} packets"
        report.add(what, ratio, "requests per lost packet", **goal)  # type: ignore[arg-type]


def latencies(report: Report, quick: bool) -> None:
    """At 1,000 events/s, in turn with raw sockets that wait in the same way; the median of the rounds' ratios."""
    processors, rounds_events = len(os.sched_getaffinity(0)), 1000 if quick else 2000
    for way in [way for way in WAYS if way.processors <= processors]:
        rounds = [
            [latency(raw, way, next_port(), rounds_events, 1000) for raw in (True, False)]
            for _ in range(2 if quick else 5)
        ]
        for share, limit in (("p50", 1.5), ("p99", 2.0)):
            theirs, ours = (statistics.median(of[share] for of in side) for side in zip(*rounds, strict=True))
            ratio = statistics.median(mine[share] / raw[share] for raw, mine in rounds)
            report.add(f"raw sockets, {way.name}, {share} at 1,000 events/s", theirs, "µs")
            report.add(
                "ours, the same",
                ours,
                "µs",
                against="raw sockets",
                ratio=ratio,
                goal=f"≤ {limit}×",
                met=ratio <= limit,
            )
        if way.spins:
            continue
        first, *others = sorted(os.sched_getaffinity(0))
        peer = zmq_latency([first, others[0] if way.processors > 1 else first], rounds_events, 1000)
        for share in ("p50", "p99") if peer is not None else ():
            assert peer is not None
            theirs = statistics.median(mine[share] for _, mine in rounds)
            report.add(
                f"ZeroMQ epgm, the same, {share}",
                peer[share],
                "µs",
                against="ours",
                ratio=peer[share] / theirs,
            )


def floods(report: Report, quick: bool) -> None:
    """Publishing while 10,000 requests come every second."""
    seconds = 2.0 if quick else 5.0
    alone = publish_under_requests(next_port(), seconds, rate=0, process=False)
    report.add("publish() one by one to disk, no requests", alone["per_cpu"], PER_CPU)
    for process, name in ((False, "in the publisher's process"), (True, "request_process=True")):
        found = publish_under_requests(next_port(), seconds, rate=10_000, process=process)
        what = f"the same, {human(found['requests_s'])} requests/s, {name}"
        for key, unit in (("rate", "events/s"), ("per_cpu", PER_CPU)):
            report.add(what, found[key], unit, against="no requests", ratio=found[key] / alone[key])


def recoveries(report: Report, batches: Result) -> None:
    """How long it takes until everything is there, at 5 and 20 % loss."""
    recovery = 20_000
    worst = best(our_produce, our_consume, recovery, 100, "batches", "plain", None, 0.20)
    report.add(f"ours, plain sockets: {recovery} events at 20 % loss, all of them", worst.seconds, "s")
    offloaded = best(our_produce, our_consume, recovery, 100, "batches", "auto", None, 0.20)
    report.add("ours: the same", offloaded.seconds, "s")
    ours = best(our_produce, our_consume, recovery, 100, "batches", "auto", None, 0.05)
    ours_plain = best(our_produce, our_consume, recovery, 100, "batches", "plain", None, 0.05)
    report.add(f"ours: {recovery} events at 5 % loss, all of them", ours.seconds, "s")
    report.add("ours, plain sockets: the same", ours_plain.seconds, "s")
    for kind in ("epgm", "norm"):
        fine = zmq_peer(kind, 100_000 if kind == "epgm" else recovery, 100, 0.0)
        if fine is None:
            print(f"{kind}: the system's libzmq does not have it", file=sys.stderr)
            continue
        report.add(f"ZeroMQ {kind}, no loss ({human(fine.got)} arrived)", fine.rate, "events/s")
        report.add(
            "ours, batches",
            batches.rate,
            "events/s",
            against=f"ZeroMQ {kind}",
            ratio=batches.rate / max(1.0, fine.rate),
        )
        lossy = zmq_peer(kind, recovery, 100, 0.05)
        if lossy is None:
            continue
        report.add(f"ZeroMQ {kind}: {recovery} events at 5 % loss, {lossy.got} of them", lossy.seconds, "s")
        for name, result in (("ours, 5 % loss", ours), ("ours, plain sockets, 5 % loss", ours_plain)):
            ratio = lossy.seconds / result.seconds * (recovery / max(1, lossy.got))
            goal = "≥ 3×" if kind == "epgm" and result is ours else ""
            whole = result.got == recovery and not result.notes["lost"]
            report.add(
                name,
                result.seconds,
                "s",
                against=f"ZeroMQ {kind}",
                ratio=ratio,
                goal=goal,
                met=(ratio >= 3 and whole) if goal else None,
            )


def main() -> None:
    parts = ("rates", "receivers", "latency", "recovery", "flood")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer events and rounds")
    parser.add_argument("--part", choices=parts, action="append", help="only this; repeatable")
    options = parser.parse_args()
    wanted = options.part or parts
    if options.quick:
        global REPEAT  # noqa: PLW0603 - one round instead of several
        REPEAT = 1
    report = Report("multicast")
    count = 200_000 if options.quick else 600_000
    batches = None
    if "rates" in wanted:
        batches = rates(report, count)
    if "receivers" in wanted:
        receivers(report, options.quick)
    if "latency" in wanted:
        latencies(report, options.quick)
    if "flood" in wanted:
        floods(report, options.quick)
    if "recovery" in wanted:
        if batches is None:
            batches = best(our_produce, our_consume, count, 100, "batches", "auto", None, 0.0)
        recoveries(report, batches)
    report.close()


if __name__ == "__main__":
    main()
