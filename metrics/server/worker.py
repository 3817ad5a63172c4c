"""A worker process: receives on inherited sockets and answers its parent. Started by the server only."""

import asyncio
import gc
import signal
import socket
import sys
from functools import partial

import msgspec

from brokerless.metrics.aggregate.filters import SeriesFilter
from brokerless.metrics.aggregate.window import Window
from brokerless.metrics.backends.repeater import Repeater
from brokerless.metrics.server.receive import Receiver
from brokerless.metrics.server.saved_state import HeardClients
from brokerless.metrics.server.workers import Order, Reply, WorkerSetup, frame, open_inherited


async def serve(control: socket.socket) -> None:
    """Receive until the parent says stop, or is gone."""
    reader, writer = await asyncio.open_connection(sock=control)
    try:
        setup = msgspec.msgpack.decode(await _message(reader), type=WorkerSetup)
    except (asyncio.IncompleteReadError, OSError):
        return
    repeaters = [Repeater(f"repeater:{address}", address) for address in setup.repeaters]
    receiver = Receiver(
        [open_inherited(fd, dialect) for fd, dialect in zip(setup.sockets, setup.dialects, strict=True)],
        max_series=setup.max_series,
        max_clients=setup.max_clients,
        options=setup.options,
        series_filter=SeriesFilter(setup.filters),
        auth_keys=setup.auth_keys,
        since_ms=setup.since_ms,
        taps=list(repeaters),
        heard=HeardClients(setup.heard).note,
    )
    await receiver.start()
    try:
        while True:
            order = msgspec.msgpack.decode(await _message(reader), type=Order)
            if order.what == "stop":
                return
            if order.what == "forget":
                await receiver.forget(order.names)
                continue
            if order.what == "delete":
                await receiver.delete(order.table, order.names)
                continue
            if order.limits is not None:
                receiver.configure(
                    order.limits.max_series, order.limits.options, SeriesFilter(order.limits.filters)
                )
                continue
            if order.what == "retain":
                await receiver.in_aggregator(partial(receiver.aggregator.retain, order.names))
                continue
            body = await _answer(receiver, order)
            writer.write(frame(body))
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        return  # the parent is gone, and with it everybody who wanted the figures
    finally:
        await receiver.stop()
        receiver.close()
        writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


async def _answer(receiver: Receiver, order: Order) -> bytes:
    def encode(window: Window) -> bytes:
        reply = Reply(window, receiver.counters.snapshot(), receiver.aggregator.crowded)
        try:
            return msgspec.msgpack.encode(reply)
        except OverflowError:
            window.fit_64_bits()
            return msgspec.msgpack.encode(reply)

    if order.what == "peek":
        return await receiver.peek(lambda window: encode(window.part(order.table)))
    if order.what == "last":
        await receiver.stop()
    window = await receiver.close_window()
    return await receiver.in_aggregator(lambda: encode(window))


def main() -> None:
    """Entry point; a service manager's SIGTERM to all processes is for the parent, which will tell us."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tune_process()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


def tune_process() -> None:
    """With 100,000s of live objects a collection takes 100 ms; almost nothing here is cyclic.

    So nothing is collected by itself; the receiver does it after each window.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    # The thread that receives waits at most this long for one that aggregators or renders; the default is 5 ms.
    sys.setswitchinterval(0.001)


if __name__ == "__main__":
    main()
