"""ZeroMQ over epgm or norm: run by the system's Python, whose libzmq has them. Prints one line of JSON.

    python3 _multicast_peer.py URL EVENTS BYTES LOSS [RATE PROCESSOR PROCESSOR]

With a rate (events/s) every event carries the time at which it was sent, publisher and subscriber are bound to these
processors, and the line has the quantiles of how long the events took, in µs.

Only the standard library and zmq: this does not run in our environment.
"""

import ctypes
import json
import multiprocessing
import os
import socket
import struct
import sys
import time

import zmq

STAMP = struct.Struct("=q")
QUANTILES = {"p50": 0.5, "p99": 0.99}
RATE_KBPS = 2_000_000  # 2 Gbit/s: far above what it reaches, so the rate limit is not what is measured
RECOVERY_MS = 2_000
# Longer than NORM is silent between two rounds of repair on a busy machine.
SILENCE_S = 12


def endpoint(url, node):
    """NORM takes no notice of what its own node sends, and two processes at one address are one node by default.

    Then the sender ignores the receiver's requests for repair, and most of the stream is never seen.
    """
    return url.replace("norm://", f"norm://{node},")


def drop_randomly(port, share):
    """Attach a filter that drops that share of datagrams to the socket that listens on the port."""
    program = [
        (0x20, 0, 0, 0xFFFFF000 + 56),
        (0x35, 0, 1, int(share * 2**32)),
        (0x06, 0, 0, 0xFFFFFFFF),
        (0x06, 0, 0, 0),
    ]
    raw = b"".join(struct.pack("HBBI", *line) for line in program)
    keep = ctypes.create_string_buffer(raw)
    done = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            where = sock.getsockname()
            if isinstance(where, tuple) and len(where) == 2 and where[1] == port:
                sock.setsockopt(
                    socket.SOL_SOCKET, 26, struct.pack("HL", len(program), ctypes.addressof(keep))
                )
                done += 1
        except OSError:
            pass
        sock.close()
    return done


def make(context, kind):
    sock = context.socket(kind)
    sock.setsockopt(zmq.RATE, RATE_KBPS)
    sock.setsockopt(zmq.RECOVERY_IVL, RECOVERY_MS)
    sock.setsockopt(zmq.SNDBUF, 4 << 20)
    sock.setsockopt(zmq.RCVBUF, 8 << 20)
    sock.sndhwm = sock.rcvhwm = 0
    return sock


def subscribe(url, events, loss, rate, processor, ready, begun, result):
    if rate:
        os.sched_setaffinity(0, {processor})
    context = zmq.Context()
    sock = make(context, zmq.SUB)
    sock.subscribe(b"")
    sock.connect(endpoint(url, 1))
    time.sleep(0.3)
    filtered = drop_randomly(int(url.rsplit(":", 1)[1]), loss) if loss else 0
    ready.set()
    sock.RCVTIMEO = SILENCE_S * 1000
    got, last, took = 0, 0.0, []
    try:
        while got < events:
            data = sock.recv()
            got += 1
            if rate:
                took.append((time.monotonic_ns() - STAMP.unpack_from(data)[0]) / 1000)
        last = time.time()
    except zmq.Again:
        last = time.time() - SILENCE_S
    took.sort()
    quantiles = {name: took[int(share * len(took))] for name, share in QUANTILES.items() if took}
    result.put({"got": got, "seconds": last - begun.value, "filtered": filtered, **quantiles})
    sock.close(0)
    context.term()


def main(url, events, size, loss, rate=0.0, processors=(0, 0)):
    ready, begun, result = multiprocessing.Event(), multiprocessing.Value("d", 0.0), multiprocessing.Queue()
    child = multiprocessing.Process(
        target=subscribe, args=(url, events, loss, rate, processors[-1], ready, begun, result), daemon=True
    )
    child.start()
    if rate:
        os.sched_setaffinity(0, {processors[0]})
    if not ready.wait(20):
        sys.exit("the subscriber does not start")
    # The publisher comes last: both listen on one port of one machine, and what is sent to that port by
    # unicast (requests for repair) reaches the socket that was bound last.
    context = zmq.Context()
    sock = make(context, zmq.PUB)
    sock.connect(url) if url.startswith("epgm") else sock.bind(endpoint(url, 2))
    time.sleep(0.5)
    data = b"x" * size
    begun.value = time.time()
    for i in range(events):
        if rate:
            time.sleep(max(0.0, begun.value + i / rate - time.time()))
            data = STAMP.pack(time.monotonic_ns()) + data[STAMP.size :]
        sock.send(data)
    print(json.dumps(result.get(timeout=60)))
    sock.close(0)
    context.term()


if __name__ == "__main__":
    _, where, number, bytes_each, share, *paced = sys.argv
    options = (float(paced[0]), [int(text) for text in paced[1:]]) if paced else ()
    main(where, int(number), int(bytes_each), float(share), *options)
