"""Real processes for the webhook fault tests: forked from one parent that has imported everything already.

Reads JSON lines from stdin, {"role": …, …}; forks a child that plays the role, and answers with its pid.
Children write
witness files that survive `kill -9`. The parent ends, and its children with it, when stdin is closed.
"""

import asyncio
import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import aiohttp
import httpx_aiohttp
import msgspec
import uvicorn

from brokerless.core import DiskJournal
from brokerless.webhooks import (
    AddressPolicy,
    Dispatcher,
    DispatcherConfig,
    OutboxError,
    Schedule,
    TenantLimits,
    receiver_app,
    registration_app,
)

CONFIG = DispatcherConfig(
    policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
    verification="none",
    schedule=Schedule(delays_s=(0.1,) * 1000),
    attempt_timeout_s=1.0,
    connect_timeout_s=1.0,
)


class Witness:
    """Appends lines with one write each: what was written is there after `kill -9`."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def line(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


async def sender(
    outbox: str,
    witness: str,
    first: int,
    count: int,
    pause_s: float,
    prefix: str = "",
    own_source: bool = False,
) -> None:
    """Publish `count` numbered events while delivering, then go on delivering.

    With `own_source` receivers can tell which process sent a request (and the kit would not know repetitions).
    """
    source = f"pid:{os.getpid()}" if own_source else "brokerless"
    told = Witness(witness)
    while True:
        dispatcher = Dispatcher(outbox, source=source, config=CONFIG)
        try:
            await dispatcher.start()
            break
        except OutboxError:
            await asyncio.sleep(0.2)  # the database is being restarted
    try:
        told.line("started", first)
        for number in range(first, first + count):
            body = f"{prefix}{number}".encode()
            try:
                accepted = await dispatcher.publish("n", body, content_type="text/plain")
            except OutboxError:
                # The database is away: nothing was accepted (or nobody can know), the next number goes on.
                await asyncio.sleep(0.1)
                continue
            told.line("accepted", body.decode(), accepted.id)
            await asyncio.sleep(pause_s * random.random() * 2)
        await asyncio.sleep(3600)
    finally:
        await dispatcher.stop()


async def api(outbox: str, port: int, token: str) -> None:
    """A dispatcher and its registration app, as `brokerless webhooks serve` runs them: owners are asked."""
    # `connect_timeout_s` is for their answer, too, and a busy machine may take some seconds for it.
    config = msgspec.structs.replace(CONFIG, verification="handshake", connect_timeout_s=20.0)
    dispatcher = Dispatcher(outbox, config=config)
    app = registration_app(dispatcher, auth={token: "*"}, limits=TenantLimits(max_endpoints=10_000))
    server = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", access_log=False)
    await uvicorn.Server(server).serve()


async def kit(port: int, journal: str, secret: str, log: str, die_before_answer: int = 0) -> None:
    """The receiver kit over a DiskJournal; may die after it stored and before it answers."""
    told = Witness(log)
    with DiskJournal(journal, source="receiver", fsync="never") as opened:
        inner = receiver_app(secret, journal=opened)
        answered = 0

        async def app(scope, receive, send):  # type: ignore[no-untyped-def]
            nonlocal answered
            if scope["type"] == "http":
                headers = dict(scope["headers"])

                async def tell(message):  # type: ignore[no-untyped-def]
                    nonlocal answered
                    if message["type"] == "http.response.start":
                        answered += 1
                        if die_before_answer and answered >= die_before_answer:
                            os._exit(1)
                    await send(message)

                body = bytearray()

                async def listen():  # type: ignore[no-untyped-def]
                    message = await receive()
                    body.extend(message.get("body", b""))
                    if message["type"] == "http.request" and not message.get("more_body"):
                        told.line("got", headers[b"webhook-id"].decode(), body.decode())
                    return message

                await inner(scope, listen, tell)
            else:
                await inner(scope, receive, send)

        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", access_log=False)
        await uvicorn.Server(config).serve()


async def faulty(port: int, kind: str, log: str, die_after: int = 0) -> None:
    """A receiver that hangs, answers 500, drips, or says 200 and stores nothing."""
    told = Witness(log)
    handled = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal handled
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                told.line("got", fields["webhook-id"], body.decode())
                handled += 1
                if kind == "hang":
                    await asyncio.sleep(3600)
                elif kind == "drip":
                    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(1)
                elif kind == "lose":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
                    told.line("lost", fields["webhook-id"], body.decode())
                    if die_after and handled >= die_after:
                        os._exit(1)
                else:
                    writer.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


# Imported before the fork, so that no child spends its short life importing.
PREPARED = (aiohttp, httpx_aiohttp)
ROLES = {"sender": sender, "api": api, "kit": kit, "faulty": faulty}


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped at once
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = Path(order.pop("stderr"))
            os.dup2(os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)
            random.seed(time.time_ns())
            try:
                asyncio.run(ROLES[order.pop("role")](**order))
            except KeyboardInterrupt:
                pass
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
