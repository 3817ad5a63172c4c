"""A worker process: receives on inherited sockets and answers its parent. Started by the server only."""

import asyncio
import gc
import signal
import socket
import sys

import msgspec

from brokerless.metrics.collector import Collector
from brokerless.metrics.repeater import Repeater
from brokerless.metrics.window import Window
from brokerless.metrics.workers import Order, Reply, frame, open_inherited, read_setup


async def serve(control: socket.socket, setup_text: str) -> None:
    """Receive until the parent says stop, or is gone."""
    setup = read_setup(setup_text)
    repeaters = [Repeater(f"repeater:{address}", address) for address in setup.repeaters]
    collector = Collector(
        [open_inherited(fd) for fd in setup.sockets],
        max_series=setup.max_series,
        max_clients=setup.max_clients,
        taps=list(repeaters),
    )
    await collector.start()
    reader, writer = await asyncio.open_connection(sock=control)
    try:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            order = msgspec.msgpack.decode(await reader.readexactly(size), type=Order)
            if order.what == "stop":
                return
            if order.what == "forget":
                await collector.forget(order.names)
                continue
            if order.what == "delete":
                await collector.delete(order.table, order.names)
                continue
            body = await _answer(collector, order)
            writer.write(frame(body))
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        return  # the parent is gone, and with it everybody who wanted the figures
    finally:
        await collector.stop()
        collector.close()
        writer.close()


async def _answer(collector: Collector, order: Order) -> bytes:
    def encode(window: Window) -> bytes:
        reply = Reply(window, collector.counters.snapshot())
        try:
            return msgspec.msgpack.encode(reply)
        except OverflowError:
            window.tame()
            return msgspec.msgpack.encode(reply)

    if order.what == "peek":
        return await collector.peek(lambda window: encode(window.part(order.table)))
    if order.what == "last":
        await collector.stop()
    window = await collector.close_window()
    return await collector.in_digest(lambda: encode(window))


def main() -> None:
    """Entry point; a service manager's SIGTERM to all processes is for the parent, which will tell us."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tune_process()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]))


def tune_process() -> None:
    """With 100,000s of live objects a collection takes 100 ms; almost nothing here is cyclic.

    So nothing is collected by itself; the collector does it after each window.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    # The thread that receives waits at most this long for one that digests or renders; the default is 5 ms.
    sys.setswitchinterval(0.001)


if __name__ == "__main__":
    main()
