"""direct against raw pyzmq, pynng and zenoh: one producer, one consumer, over tcp, peers in the same run.

    python bench/direct.py [--quick] [--part throughput|small|latency|mirrors|other]

Every pair of processes ends by itself: consumers give up after seconds of silence, and what they had counts.
The rate is what the consumer received per second, from its first message to its last. Peers and ours run in
turn, several rounds, and ratios compare medians, because a shared machine changes its mind between runs. For latency
and fan-out, where that matters most, the ratio is the median of the ratios of neighbouring rounds.

A MemoryJournal's ring has room for the whole run and has been gone through once: new memory costs a page fault every
4 KiB, which a publisher pays once in its life, and which would be most of what is measured. "New ring" is without that.
"""

import argparse
import contextlib
import gc
import importlib.util
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import Report
from bench.processes import Result, expect, median_of, processes, running

SILENCE_S = 3.0


# ---- ours ----------------------------------------------------------------------------------------------------


def make_journal(kind: str, directory: str, n: int, size: int) -> Any:
    from brokerless.core import DiskJournal, MemoryJournal, Retention

    if kind == "disk":
        return DiskJournal(directory, fsync="interval")
    # Room for the whole run, with what frames add: this measures the way through, not retention.
    return MemoryJournal(retention=Retention(max_bytes=n * (size + 50)))


def ours_consumer(pipe: Connection, n: int, how: str) -> None:
    from brokerless.direct import Subscriber

    address, start = pipe.recv()
    with Subscriber(address, start=start) as sub:
        if start == "live":
            sub.wait_joined(10)
        pipe.send("ready")
        gc.collect()
        gc.freeze()
        seen, began = 0, 0.0
        if how == "events":
            for _ in sub.events(SILENCE_S):
                if not seen:
                    began = time.perf_counter()
                seen += 1
                if seen == n:
                    break
        else:
            for batch in sub.batches(SILENCE_S):
                if not seen:
                    began = time.perf_counter()
                seen += len(batch.datas)
                if seen >= n:
                    break
        ended = time.perf_counter()
        account = sub.ledger.account()
        pipe.send(
            {"rate": seen / (ended - began), "seen": seen, "lost": account.lost, "gaps": sub.counters.gaps}
        )


def ours_producer(pipe: Connection, n: int, size: int, how: str, kind: str, backlog: bool) -> None:
    from brokerless.direct import Publisher

    directory = tempfile.mkdtemp()
    try:
        # A frame of its own adds some 100 bytes to each event.
        journal = make_journal(kind, directory, n, size + 150 if how == "lone" else size)
        with Publisher("tcp://127.0.0.1:*", source="bench", journal=journal) as pub:
            data = b"x" * size
            if kind == "memory" and not backlog:
                # A little more than it holds, in as large frames as any: all of its memory has been used.
                publish(pub, n + n // 2, data, "batches")
            gc.collect()
            gc.freeze()
            if backlog:
                publish(pub, n, data, "lone" if how == "lone" else "batches")
                pipe.send((pub.address, "oldest"))
                pipe.recv()
            else:
                pipe.send((pub.address, "live"))
                pipe.recv()
                pub.wait_for_subscribers(1, 10)
                began = time.perf_counter()
                publish(pub, n, data, how)
                pipe.send(n / (time.perf_counter() - began))
            pipe.recv()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish(pub: Any, n: int, data: bytes, how: str) -> None:
    if how == "lone":
        for _ in range(n):
            pub.journal.append("bench", data)  # a frame for each
    elif how == "events":
        send = pub.publish
        for _ in range(n):
            send("bench", data)
        pub.flush()
    else:
        datas = [data] * 1000
        for sent in range(0, n, 1000):
            # Not one fewer than the consumer counts to, or it waits for the rest until its time is over.
            pub.publish_many("bench", datas[: n - sent])


def ours(n: int, size: int, how: str, kind: str = "memory", backlog: bool = False) -> Result:
    """A publisher and a subscriber, each in a process of its own."""
    to_producer, producer_end = processes.Pipe()
    to_consumer, consumer_end = processes.Pipe()
    producer = processes.Process(target=ours_producer, args=(producer_end, n, size, how, kind, backlog))
    consumer = processes.Process(target=ours_consumer, args=(consumer_end, n, how))
    with running(producer, consumer):
        to_consumer.send(expect(to_producer))
        expect(to_consumer)
        to_producer.send("go")
        sent = 0.0 if backlog else expect(to_producer)
        result: Result = expect(to_consumer)
        to_producer.send("end")
    result["sent"] = sent
    return result


# ---- peers ---------------------------------------------------------------------------------------------------


def zmq_peer(pipe: Connection, role: str, n: int, size: int, pattern: str) -> None:
    import zmq

    context = zmq.Context()
    sending = role == "producer"
    kinds = {"pubsub": (zmq.PUB, zmq.SUB), "pushpull": (zmq.PUSH, zmq.PULL)}
    socket = context.socket(kinds[pattern][0 if sending else 1])
    # Unlimited queues: with the default of 1,000, PUB drops most of it, and the comparison would flatter us.
    socket.set_hwm(0)
    socket.linger = 5000
    if sending:
        pipe.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        pipe.recv()
        data = b"x" * size
        send = socket.send
        for _ in range(n):
            send(data)
        pipe.recv()
    else:
        if pattern == "pubsub":
            socket.subscribe(b"")
        socket.rcvtimeo = int(SILENCE_S * 1000)
        socket.connect(pipe.recv())
        time.sleep(0.3)
        pipe.send("ready")
        count_messages(pipe, n, socket.recv, zmq.Again)
    socket.close()
    context.term()


def nng_peer(pipe: Connection, role: str, n: int, size: int, pattern: str) -> None:
    import pynng

    if role == "producer":
        socket = pynng.Push0(listen="tcp://127.0.0.1:0", send_buffer_size=8000)
        pipe.send(str(socket.listeners[0].url))
        pipe.recv()
        data = b"x" * size
        for _ in range(n):
            socket.send(data)
        pipe.recv()
    else:
        socket = pynng.Pull0(recv_buffer_size=8000, recv_timeout=int(SILENCE_S * 1000))
        socket.dial(pipe.recv(), block=True)
        pipe.send("ready")
        count_messages(pipe, n, socket.recv, pynng.Timeout)
    socket.close()


def zenoh_peer(pipe: Connection, role: str, n: int, size: int, pattern: str) -> None:
    import socket as sockets

    import zenoh

    config = zenoh.Config()
    config.insert_json5("scouting/multicast/enabled", "false")
    if role == "producer":
        with sockets.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp/127.0.0.1:{probe.getsockname()[1]}"
        config.insert_json5("listen/endpoints", f'["{address}"]')
        with zenoh.open(config) as session:
            publisher = session.declare_publisher("bench", congestion_control=zenoh.CongestionControl.BLOCK)
            pipe.send(address)
            pipe.recv()
            data = b"x" * size
            for _ in range(n):
                publisher.put(data)
            pipe.recv()
    else:
        config.insert_json5("connect/endpoints", f'["{pipe.recv()}"]')
        with zenoh.open(config) as session:
            times = [0.0, 0.0]
            seen = 0
            done = threading.Event()

            def on_sample(_: Any) -> None:
                nonlocal seen
                seen += 1
                times[1] = time.perf_counter()
                if seen == 1:
                    times[0] = times[1]
                if seen == n:
                    done.set()

            session.declare_subscriber("bench", on_sample)
            time.sleep(0.5)
            pipe.send("ready")
            last = -1
            while not done.wait(SILENCE_S) and seen != last:
                last = seen
            pipe.send({"rate": seen / max(1e-9, times[1] - times[0]), "seen": seen})


def count_messages(pipe: Connection, n: int, recv: Callable[[], Any], silence: type[Exception]) -> None:
    seen, began = 0, 0.0
    last = 0.0
    try:
        recv()
        began = last = time.perf_counter()
        seen = 1
        while seen < n:
            recv()
            seen += 1
        last = time.perf_counter()
    except silence:
        last = time.perf_counter() - SILENCE_S
    pipe.send({"rate": seen / max(1e-9, last - began), "seen": seen})


def pair(target: Callable[..., None], n: int, *arguments: object) -> Result:
    """What the consumer of two processes reports: both run `target`, each in its role."""
    to_producer, producer_end = processes.Pipe()
    to_consumer, consumer_end = processes.Pipe()
    producer = processes.Process(target=target, args=(producer_end, "producer", n, *arguments))
    consumer = processes.Process(target=target, args=(consumer_end, "consumer", n, *arguments))
    with running(producer, consumer):
        to_consumer.send(expect(to_producer))
        expect(to_consumer)
        to_producer.send("go")
        result: Result = expect(to_consumer)
        to_producer.send("end")
    return result


# ---- latency, groups, fan-out, topics ---------------------------------------------------------------------------


def latency_ours(pipe: Connection, role: str, n: int, *, lone: bool = True) -> None:
    from brokerless.core import MemoryJournal
    from brokerless.direct import Publisher, Subscriber

    if role == "producer":
        journal = MemoryJournal()
        journal._may_keep = lone
        with Publisher("tcp://127.0.0.1:*", source="bench", journal=journal) as pub:
            pipe.send(pub.address)
            pipe.recv()
            publish_one = pub.publish
            paced(n, lambda data: publish_one("bench", data))
            pipe.recv()
    else:
        with Subscriber(pipe.recv()) as sub:
            sub.wait_joined(10)
            pipe.send("ready")
            pipe.send(delays(n, (event.data for event in sub.events(SILENCE_S))))


def latency_ours_batched(pipe: Connection, role: str, n: int) -> None:
    """Without the lone-event path: every event is staged and flushed as a batch, here of one."""
    latency_ours(pipe, role, n, lone=False)


def latency_zmq(pipe: Connection, role: str, n: int) -> None:
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PUB if role == "producer" else zmq.SUB)
    if role == "producer":
        pipe.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        pipe.recv()
        paced(n, socket.send)
        pipe.recv()
    else:
        socket.subscribe(b"")
        socket.rcvtimeo = int(SILENCE_S * 1000)
        socket.connect(pipe.recv())
        time.sleep(0.3)
        pipe.send("ready")

        def messages() -> Any:
            with contextlib.suppress(zmq.Again):
                while True:
                    yield socket.recv()

        pipe.send(delays(n, messages()))
    socket.close(0)
    context.term()


def paced(n: int, send: Callable[[bytes], object]) -> None:
    """1,000 a second, each with two times in it: when it was sent, and when it should have been."""
    clock = time.perf_counter_ns
    began = clock() + 1_000_000
    for due in range(began, began + n * 1_000_000, 1_000_000):
        while (left := due - clock()) > 0:
            time.sleep(left / 1e9)
        send(b"%d %d" % (clock(), due) + b" " * 68)


def delays(n: int, messages: Any) -> Result:
    """How long they took since they were sent (p50, p99), and since they should have been (late_p50, late_p99)."""
    clock = time.perf_counter_ns
    since_sent, since_due = [], []
    for data in messages:
        now = clock()
        sent, due = data.split()
        since_sent.append(now - int(sent))
        since_due.append(now - int(due))
        if len(since_sent) == n:
            break
    result = {"seen": float(len(since_sent))}
    for name, waits in (("", since_sent), ("late_", since_due)):
        values = sorted(waits[len(waits) // 10 :])  # the first ones are the warming-up
        result[f"{name}p50"] = values[len(values) // 2] / 1000
        result[f"{name}p99"] = values[len(values) * 99 // 100] / 1000
    return result


def latency(report: Report, rounds: int, n: int) -> None:
    """Raw and ours in turn, in short rounds; each of ours is compared with the raw one just before it."""
    raw, ours, batched = [], [], []
    for _ in range(rounds):
        raw.append(pair(latency_zmq, n))
        ours.append(pair(latency_ours, n))
        batched.append(pair(latency_ours_batched, n))
    named = (("p50", 1.25), ("p99", 2.0), ("late_p50", 0.0), ("late_p99", 0.0))
    for which, goal in named:
        name = f"{which.replace('late_', '')} at 1,000/s"
        if not goal:
            name += ", from when it was due"
        theirs = statistics.median(r[which] for r in raw)
        mine = statistics.median(r[which] for r in ours)
        ratio = statistics.median(o[which] / r[which] for o, r in zip(ours, raw, strict=True))
        report.add(f"pyzmq PUB/SUB, latency {name}", theirs, "µs")
        report.add(
            f"direct, latency {name}",
            mine,
            "µs",
            against="pyzmq PUB/SUB",
            ratio=ratio,
            goal=f"≤ {goal}×" if goal else "",
            met=ratio <= goal if goal else None,
        )
        slower = statistics.median(b[which] / o[which] for b, o in zip(batched, ours, strict=True))
        report.add(
            f"direct without the lone-event path, latency {name}",
            statistics.median(b[which] for b in batched),
            "µs",
            against="direct",
            ratio=slower,
        )


def groups(pipe: Connection, role: str, n: int) -> None:
    """A backlog, worked off by one worker that acknowledges each event."""
    from brokerless.core import MemoryJournal, Retention
    from brokerless.direct import Publisher, Worker

    if role == "producer":
        journal = MemoryJournal(retention=Retention(max_bytes=1 << 30))
        with Publisher("tcp://127.0.0.1:*", source="bench", journal=journal) as pub:
            publish(pub, n, b"x" * 100, "batches")
            pipe.send(pub.address)
            pipe.recv()
            pipe.recv()
    else:
        with Worker(pipe.recv(), group="g", prefetch=4096) as worker:
            pipe.send("ready")
            seen, began = 0, 0.0
            for delivery in worker.deliveries(SILENCE_S):
                if not seen:
                    began = time.perf_counter()
                seen += 1
                delivery.ack()
                if seen == n:
                    break
            pipe.send({"rate": seen / (time.perf_counter() - began), "seen": seen})


def keyed(pipe: Connection, role: str, n: int, *, nacked: float = 0.0) -> None:
    """Key affinity: a worker gives back this share of the events, once, and acknowledges the rest."""
    from brokerless.core import MemoryJournal, Retention
    from brokerless.direct import Publisher, Worker

    if role == "producer":
        journal = MemoryJournal(retention=Retention(max_bytes=1 << 30))
        with Publisher("tcp://127.0.0.1:*", source="bench", journal=journal) as pub:
            for i in range(n):
                pub.publish("bench", b"x" * 100, key=f"k{i % 1000}")
            pub.flush()
            pipe.send(pub.address)
            pipe.recv()
            pipe.recv()
    else:
        with Worker(pipe.recv(), group="g", key_affinity=True) as worker:
            pipe.send("ready")
            done, began, every = 0, 0.0, int(1 / nacked) if nacked else 0
            for delivery in worker.deliveries(SILENCE_S):
                began = began or time.perf_counter()
                if every and delivery.attempt == 1 and delivery.event.offset % every == 0:
                    delivery.nack()
                    continue
                delivery.ack()
                done += 1
                if done == n:
                    break
            pipe.send({"rate": done / (time.perf_counter() - began), "seen": done})


def keyed_with_nacks(pipe: Connection, role: str, n: int) -> None:
    keyed(pipe, role, n, nacked=0.05)


def follow(address: str, ready: Any, stop: Any) -> None:
    from brokerless.direct import Subscriber

    with Subscriber(address) as sub:
        sub.wait_joined(10)
        ready.release()
        while not stop.is_set():
            for _ in sub.batches(0.2):
                if stop.is_set():
                    break


def fan_out(subscribers: int, n: int) -> float:
    """CPU seconds of the publishing process per million events, with so many subscribers."""
    from brokerless.core import MemoryJournal
    from brokerless.direct import Publisher

    ready, stop = processes.Semaphore(0), processes.Event()
    with Publisher("tcp://127.0.0.1:*", source="bench", journal=MemoryJournal()) as pub:
        children = [
            processes.Process(target=follow, args=(pub.address, ready, stop)) for _ in range(subscribers)
        ]
        with running(*children):
            for _ in children:
                if not ready.acquire(timeout=30):
                    raise RuntimeError("a subscriber did not come")
            # The caller's thread: what publishing costs. libzmq's own thread does the copying to sockets.
            data = b"x" * 100
            best = float("inf")
            for _ in range(5):
                began = time.thread_time()
                publish(pub, n // 5, data, "events")
                best = min(best, time.thread_time() - began)
                time.sleep(0.3)
            stop.set()
    return best / (n // 5) * 1e6


def follow_many(address: str, count: int, ready: Any, stop: Any) -> None:
    """So many subscribers in one process, a thread for each."""
    from brokerless.direct import Subscriber

    def receive(sub: Any) -> None:
        sub.wait_joined(60)
        ready.release()
        for _ in sub.batches():
            pass

    subscribers = [Subscriber(address) for _ in range(count)]
    threads = [threading.Thread(target=receive, args=(sub,), daemon=True) for sub in subscribers]
    for thread in threads:
        thread.start()
    stop.wait()
    for sub, thread in zip(subscribers, threads, strict=True):
        sub.stop()
        thread.join(5)


def drain(scheme: str, subscribers: int, n: int) -> float:
    """Seconds until so many subscribers have had n events that were published one by one."""
    from brokerless.core import MemoryJournal
    from brokerless.direct import Publisher

    ready, stop = processes.Semaphore(0), processes.Event()
    with Publisher(f"{scheme}://127.0.0.1:*", source="bench", journal=MemoryJournal()) as pub:
        children = [
            processes.Process(target=follow_many, args=(pub.address, subscribers // 4, ready, stop))
            for _ in range(4)
        ]
        with running(*children):
            for _ in range(subscribers):
                ready.acquire(timeout=60)
            began = time.perf_counter()
            for _ in range(n):
                pub.publish("bench", b"x" * 100)
            drained = pub.drain(60)
            seconds = time.perf_counter() - began
            stop.set()
    return seconds if drained else float("inf")


def topics(count: int, mixed: bool, n: int) -> Result:
    """Rate and bytes for a subscriber of a tenth of the topics: mixed frames, or one topic per message."""
    from brokerless.core.frame import Frame, encode_frame
    from brokerless.core.topics import TopicFilter

    names = [f"{i % 10}.{i}" for i in range(count)]
    wanted = TopicFilter(["0."])
    batch = 500  # what a busy publisher has in a frame
    frames: list[bytes] = []
    datas = [b"x" * 100] * batch
    times = [0] * batch
    for start in range(0, n, batch):
        chosen = [(start + k) % count for k in range(batch)]
        if mixed:
            used = sorted(set(chosen))
            where = {topic: i for i, topic in enumerate(used)}
            frames.append(
                encode_frame(
                    "s",
                    1,
                    start,
                    topics=[(names[t], 0) for t in used],
                    topic_index=[where[t] for t in chosen],
                    times=times,
                    datas=datas,
                ).raw
            )
        else:
            by_topic: dict[int, int] = {}
            for topic in chosen:
                by_topic[topic] = by_topic.get(topic, 0) + 1
            frames += [
                encode_frame(
                    "s", 1, start, topics=[(names[t], 0)], topic_index=None, times=times[:k], datas=datas[:k]
                ).raw
                for t, k in by_topic.items()
            ]
    # One-topic frames are filtered by the socket: the receiver parses only what matches, a tenth of them. What the
    # publisher must send is in the other two lines: each message costs it and the socket as much as a raw one.
    if not mixed:
        frames_seen = [raw for raw in frames if wanted(Frame.parse(raw, verify=False).topics[0][0])]
    else:
        frames_seen = frames
    began = time.perf_counter()
    seen = 0
    for raw in frames_seen:
        frame = Frame.parse(raw, verify=False)
        matching = sum(k for topic, _, k in frame.topics if wanted(topic))
        if matching == frame.count:
            seen += len(frame.events())
        elif matching and mixed:
            seen += sum(1 for event in frame.events() if wanted(event.topic))
    took = time.perf_counter() - began
    return {
        "messages": len(frames),
        "bytes": sum(map(len, frames)),
        "per_event_us": took / n * 1e6,
        "seen": seen,
    }


# ---- running -------------------------------------------------------------------------------------------------


def throughput(report: Report, rounds: int, scale: float, sizes: list[int]) -> None:
    for size, one_goal, many_goal in ((100, 2.5, 5.0), (1000, 1.0, 2.0)):
        if size not in sizes:
            continue
        n = int((1_000_000 if size == 100 else 300_000) * scale)
        cases: dict[str, Callable[[], Result]] = {
            "pyzmq PUB/SUB": lambda n=n, size=size: pair(zmq_peer, n, size, "pubsub"),  # type: ignore[misc]
            "pyzmq PUSH/PULL": lambda n=n, size=size: pair(zmq_peer, n, size, "pushpull"),  # type: ignore[misc]
            "pynng PUSH/PULL": lambda n=n, size=size: pair(nng_peer, n // 10, size, ""),  # type: ignore[misc]
            "zenoh": lambda n=n, size=size: pair(zenoh_peer, n // 5, size, ""),  # type: ignore[misc]
            "direct, event by event": lambda n=n, size=size: ours(n, size, "events"),  # type: ignore[misc]
            "direct, whole batches": lambda n=n, size=size: ours(2 * n, size, "batches"),  # type: ignore[misc]
            "direct, whole batches, new ring": lambda n=n, size=size: ours(2 * n, size, "batches", "new"),  # type: ignore[misc]
            "direct, event by event, DiskJournal": lambda n=n, size=size: ours(
                n // 2, size, "events", "disk"
            ),  # type: ignore[misc]
        }
        for module, name in (("pynng", "pynng PUSH/PULL"), ("zenoh", "zenoh")):
            if importlib.util.find_spec(module) is None:
                print(f"{name} is left out: {module} is not installed (`make bench` does that)")
                del cases[name]
        found = median_of(rounds, cases)
        raw = found["pyzmq PUB/SUB"]["rate"]
        goals = {
            "direct, event by event": one_goal,
            "direct, whole batches": many_goal,
            "direct, event by event, DiskJournal": 1.5 if size == 100 else 0.0,
        }
        for name, result in found.items():
            goal = goals.get(name, 0.0)
            ratio = result["rate"] / raw
            report.add(
                f"{name}, {size} bytes" + ("" if not result.get("lost") else f" ({result['lost']:.0f} lost)"),
                result["rate"],
                "events/s",
                against="pyzmq PUB/SUB",
                ratio=ratio,
                goal=f"≥ {goal}×" if goal else "",
                met=ratio >= goal if goal else None,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round with fewer messages")
    parser.add_argument(
        "--part", choices=["throughput", "small", "latency", "mirrors", "other"], help="only this part"
    )
    options = parser.parse_args()
    rounds, scale = (1, 0.3) if options.quick else (5, 1.0)
    report = Report("direct" if options.part is None else f"direct-{options.part}")
    if options.part in (None, "throughput", "small"):
        throughput(report, rounds, scale, sizes=[100] if options.part == "small" else [100, 1000])
    if options.part in (None, "latency"):
        latency(report, 4 if options.quick else 10, 1000 if options.quick else 2500)
    if options.part in (None, "mirrors"):
        mirrors(report, rounds, int(1_000_000 * scale))
    if options.part in (None, "other"):
        others(report, rounds, int(1_000_000 * scale))
    report.close()


def keep_mirror(pipe: Connection) -> None:
    """A mirror in a process of its own: told its address, then the publisher's."""
    from brokerless.direct import Mirror

    upstream, serve, directory = pipe.recv()
    with Mirror(upstream, journal=directory, serve=serve) as mirror:
        pipe.send(mirror.address)
        pipe.recv()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def mirrored(n: int, how: str, callers: int = 1, batch: int = 1) -> Result:
    """Events per second that a publisher with a DiskJournal accepts: alone, with a mirror, or waiting for it.

    The first two publish half as many before it counts: a mirror learns ten times a second whether somebody waits for
    it, and here somebody did.
    """
    from brokerless.core import DiskJournal
    from brokerless.direct import Publisher

    directory = tempfile.mkdtemp()
    address, place = free_address(), free_address()
    to_mirror, end = processes.Pipe()
    children = [] if how == "alone" else [processes.Process(target=keep_mirror, args=(end,))]
    try:
        with (
            running(*children),
            Publisher(
                address,
                source="bench",
                journal=DiskJournal(f"{directory}/a"),
                mirrors=[place] if children else [],
            ) as pub,
        ):
            if children:
                to_mirror.send((address, place, f"{directory}/b"))
                expect(to_mirror)
                pub.publish("bench", b"first", wait="mirrored", timeout=60)
            data = b"x" * 100
            if how == "waiting":
                count = n // callers // batch

                def call() -> None:
                    for _ in range(count):
                        pub.publish_many("bench", [data] * batch, wait="mirrored", timeout=60)

                threads = [threading.Thread(target=call) for _ in range(callers)]
                began = time.perf_counter()
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                rate = count * callers * batch / (time.perf_counter() - began)
            else:
                publish(pub, n // 2, data, "events")
                began = time.perf_counter()
                publish(pub, n, data, "events")
                rate = n / (time.perf_counter() - began)
            if children:
                pub.publish("bench", b"last", wait="mirrored", timeout=120)  # it has everything
                to_mirror.send("end")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {"rate": rate}


def mirrors(report: Report, rounds: int, n: int) -> None:
    cases = {
        "alone": lambda: mirrored(n, "alone"),
        "mirrored": lambda: mirrored(n, "asynchronous"),
        "waiting": lambda: mirrored(n // 2, "waiting", callers=8, batch=100),
        "one by one": lambda: mirrored(n // 100, "waiting", callers=32),
    }
    found = {name: result["rate"] for name, result in median_of(rounds, cases).items()}
    report.add("publish, DiskJournal, no mirror", found["alone"], "events/s")
    ratio = found["mirrored"] / found["alone"]
    report.add(
        "publish, DiskJournal, a mirror, asynchronous",
        found["mirrored"],
        "events/s",
        against="no mirror",
        ratio=ratio,
        goal="≥ 0.9×",
        met=ratio >= 0.9,
    )
    report.add(
        "wait=mirrored, 8 callers with 100 events each",
        found["waiting"],
        "events/s",
        goal="≥ 200 k",
        met=found["waiting"] >= 2e5,
    )
    report.add("wait=mirrored, 32 callers with one event each", found["one by one"], "events/s")


def others(report: Report, rounds: int, n: int) -> None:
    replay = median_of(rounds, {"replay": lambda: ours(n, 100, "events", "memory", True)})["replay"]["rate"]
    report.add("replay of a backlog, 100 bytes", replay, "events/s", goal="≥ 1 M", met=replay >= 1e6)
    lone = median_of(rounds, {"lone": lambda: ours(n // 5, 100, "lone", "memory", True)})["lone"]["rate"]
    report.add("replay of lone events, 100 bytes", lone, "events/s", goal="≥ 500 k", met=lone >= 5e5)
    acked = median_of(rounds, {"groups": lambda: pair(groups, n // 3)})["groups"]["rate"]
    report.add("group with acks, 100 bytes", acked, "events/s", goal="≥ 100 k", met=acked >= 1e5)
    found = median_of(
        rounds,
        {"plain": lambda: pair(keyed, n // 10), "nacks": lambda: pair(keyed_with_nacks, n // 10)},
    )
    plain, nacks = found["plain"]["rate"], found["nacks"]["rate"]
    report.add("group with key affinity, 100 bytes", plain, "events/s")
    report.add(
        "the same, 5 % given back once", nacks, "events/s", against="none given back", ratio=nacks / plain
    )

    costs = [(fan_out(1, n), fan_out(8, n)) for _ in range(rounds)]
    ratio = statistics.median(eight / one for one, eight in costs)
    report.add("publisher's cost, 1 subscriber", statistics.median(one for one, _ in costs), "µs/event")
    report.add(
        "publisher's cost, 8 subscribers",
        statistics.median(eight for _, eight in costs),
        "µs/event",
        against="1",
        ratio=ratio,
        goal="≤ 1.3×",
        met=ratio <= 1.3,
    )

    for scheme in ("tcp", "nng+tcp"):
        seconds = drain(scheme, 200, 5000)
        name = f"200 subscribers over {scheme} have had 5,000 events"
        report.add(name, seconds, "s", goal="≤ 10", met=seconds <= 10)

    for count in (1, 100, 10_000):
        for mixed in (True, False):
            found = topics(count, mixed, 50_000)
            name = f"{count} topics, {'mixed frames' if mixed else 'one topic per frame'}"
            report.add(f"{name}: receiver", found["per_event_us"], "µs/event")
            report.add(f"{name}: messages", found["messages"], "per 50,000")
            report.add(f"{name}: bytes", found["bytes"] / 50_000, "per event")


if __name__ == "__main__":
    main()
