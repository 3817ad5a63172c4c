"""The receiving side: a Starlette app that verifies, drops duplicates, and stores before it says 2xx."""

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from brokerless.core import DiskJournal, Journal
from brokerless.core.errors import BrokerlessError, ConfigError, InvalidEvent, JournalFull
from brokerless.webhooks.api.http import Refused, answer, problem, read_body
from brokerless.webhooks.cloudevents import CHALLENGE, CloudEvent
from brokerless.webhooks.counters import ReceiverCounters
from brokerless.webhooks.errors import CloudEventError, OutboxError, VerificationError
from brokerless.webhooks.receiver.dedup import KEEP_S, IdIndex
from brokerless.webhooks.receiver.inbound import Inbound, read_request
from brokerless.webhooks.signing import TOLERANCE_S, Verifier

logger = logging.getLogger("brokerless.webhooks")
Handler = Callable[[CloudEvent], Awaitable[None]]
# A batch of a hundred events of ordinary size; nginx accepts 1 MiB by default.
MAX_BODY = 4 * 1024 * 1024
# Requests that wait for the journal; more are refused with 503, and the sender slows down.
MAX_WAITING = 1000


class Receiver:
    """What `receiver_app` is made of; use it directly to receive inside another framework.

    `await accept(headers, body)` returns how many new events were stored, and raises VerificationError,
    CloudEventError, or a Fault if they could not be stored (answer 5xx then: the sender tries again).
    """

    def __init__(
        self,
        secrets: str | bytes | Sequence[str | bytes],
        *,
        journal: Journal | None = None,
        handler: Handler | None = None,
        ids: str | Path | None = None,
        keep_ids_s: float = KEEP_S,
        tolerance_s: float = TOLERANCE_S,
    ) -> None:
        if (journal is None) == (handler is None):
            raise ConfigError("journal", "either a journal or a handler is needed")
        if journal is not None and not (isinstance(journal, Journal) and journal.source):
            raise ConfigError(
                "journal", "must be a journal with a source, such as DiskJournal(path, source=…)"
            )
        self.verifier = Verifier(secrets, tolerance_s=tolerance_s)
        self.journal = journal
        self.handler = handler
        self.counters = ReceiverCounters()
        if ids is None:
            # Beside a journal on disk; without one, as short-lived as the process.
            ids = f"{journal.path}.ids.sqlite" if isinstance(journal, DiskJournal) else ":memory:"
        self._index = IdIndex(str(ids), keep_s=keep_ids_s)
        if journal is not None:
            self._index.catch_up(journal)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="brokerless-receiver")
        self._waiting: list[tuple[list[Inbound], asyncio.Future[int]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._handling: set[str] = set()

    async def close(self) -> None:
        """Finish what was accepted and end the thread; the journal stays open, it is the caller's."""
        if self._writer is not None:
            await self._writer
        self._thread.shutdown(wait=True)
        self._index.close()

    def read(self, headers: Sequence[tuple[str, str]], body: bytes) -> list[Inbound]:
        """Verify a request and read its events; VerificationError or CloudEventError."""
        try:
            verified = self.verifier.verify(headers, body, time.time())
        except VerificationError:
            self.counters.unverified += 1
            raise
        try:
            events = read_request(headers, body, verified.id)
        except CloudEventError:
            self.counters.malformed += 1
            raise
        self.counters.received += 1
        return events

    async def accept(self, headers: Sequence[tuple[str, str]], body: bytes) -> int:
        """Verify, drop duplicates, store; returns how many events were new."""
        return await self.store(self.read(headers, body))

    async def store(self, events: list[Inbound]) -> int:
        """Store events that were read; returns how many were new."""
        try:
            if self.handler is not None:
                return await self._handle(events, self.handler)
            if len(self._waiting) >= MAX_WAITING:
                raise OutboxError("of the receiver", "too many requests wait for the journal")
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting.append((events, future))
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write())
            return await future
        except BrokerlessError:
            self.counters.failures += 1
            raise

    # ── into a journal ───────────────────────────────────────────────────────

    async def _write(self) -> None:
        """Requests that came while one group was written make up the next."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            results = await loop.run_in_executor(self._thread, self._append, [events for events, _ in group])
            for (_, future), result in zip(group, results, strict=True):
                if future.done():
                    continue
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _append(self, groups: list[list[Inbound]]) -> list[int | BrokerlessError]:
        """In the thread: stage what is new, make it readable, remember the ids."""
        journal = self.journal
        assert journal is not None
        results: list[int | BrokerlessError] = []
        fresh: list[str] = []
        try:
            known = self._index.known([event.key for events in groups for event in events])
        except Exception as error:
            return [OutboxError(self._index.path, str(error)) for _ in groups]
        for events in groups:
            stored = 0
            try:
                for event in events:
                    if event.key in known:
                        self.counters.duplicates += 1
                        continue
                    journal.stage(event.topic, event.data, event.content_type, event.key, event.time)
                    # From here on it is in the journal, whatever happens to the rest.
                    known.add(event.key)
                    fresh.append(event.key)
                    self.counters.accepted += 1
                    stored += 1
                results.append(stored)
            except BrokerlessError as error:
                results.append(error)
        if not fresh:
            return results
        try:
            journal.flush()
            self._index.add(fresh, (journal.epoch, journal.next))
        except BrokerlessError as error:
            return [error if isinstance(result, int) and result else result for result in results]
        return results

    # ── to a handler ─────────────────────────────────────────────────────────

    async def _handle(self, events: list[Inbound], handler: Handler) -> int:
        """Call the handler for each new event; its id is remembered when it returned."""
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(self._thread, self._index.known, [e.key for e in events])
        done = 0
        for event in events:
            if event.key in known:
                self.counters.duplicates += 1
                continue
            if event.key in self._handling:
                raise OutboxError("of the receiver", "the same event is being handled at the moment")
            self._handling.add(event.key)
            try:
                await handler(event.event)
                await loop.run_in_executor(self._thread, self._index.add, [event.key])
            finally:
                self._handling.discard(event.key)
            known.add(event.key)
            self.counters.accepted += 1
            done += 1
        return done


def receiver_app(
    secrets: str | bytes | Sequence[str | bytes],
    *,
    journal: Journal | None = None,
    handler: Handler | None = None,
    ids: str | Path | None = None,
    origins: Sequence[str] = ("*",),
    allowed_rate: int | None = None,
    keep_ids_s: float = KEEP_S,
    tolerance_s: float = TOLERANCE_S,
    max_body: int = MAX_BODY,
) -> Starlette:
    """A Starlette app that takes webhooks on any path below it.

    Events go to the `journal` (which must be bound to a source) or to the coroutine `handler`, and only then the sender
    gets its 2xx. `origins` are those that may register this receiver (the CloudEvents handshake), `allowed_rate` the
    requests per minute that they are told. `app.state.receiver` is the Receiver, with its counters.
    """
    receiver = Receiver(
        secrets,
        journal=journal,
        handler=handler,
        ids=ids,
        keep_ids_s=keep_ids_s,
        tolerance_s=tolerance_s,
    )

    async def options(request: Request) -> Response:
        headers = {"Allow": "OPTIONS, POST"}
        origin = request.headers.get("webhook-request-origin", "")
        if origin and ("*" in origins or origin in origins):
            headers["WebHook-Allowed-Origin"] = origin
            headers["WebHook-Allowed-Rate"] = "*" if allowed_rate is None else str(allowed_rate)
        return Response(status_code=200, headers=headers)

    async def post(request: Request) -> Response:
        try:
            body = await read_body(request, max_body)
            events = receiver.read(list(request.headers.items()), body)
            if len(events) == 1 and events[0].topic == CHALLENGE:
                return answer(msgspec.Raw(events[0].data))
            new = await receiver.store(events)
        except Refused as refused:
            return problem(refused)
        except VerificationError as error:
            return problem(Refused(401, error.problem))
        except (CloudEventError, InvalidEvent) as error:
            return problem(Refused(400, str(error)))
        except JournalFull as error:
            return problem(Refused(503, str(error), headers={"Retry-After": "5"}))
        except BrokerlessError as error:
            logger.warning("a webhook could not be stored: %s", error)
            return problem(Refused(503, "cannot be stored at the moment", headers={"Retry-After": "1"}))
        except Exception:
            receiver.counters.failures += 1
            logger.exception("the handler failed; the sender will try again")
            return problem(Refused(500, "the handler failed"))
        return answer({"accepted": new, "duplicates": len(events) - new})

    async def handle(request: Request) -> Response:
        return await (options(request) if request.method == "OPTIONS" else post(request))

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await receiver.close()

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["POST", "OPTIONS"])], lifespan=lifespan)
    app.state.receiver = receiver
    return app
