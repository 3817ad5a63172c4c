"""Request and reply: a request is an event of a group, and the worker that has it answers over its control socket.

So requests are load balanced, leased and delivered again as every event of a group is, and nothing is connected that
was not before. What makes an event a request are its headers; a worker passes over requests whose deadline is over.
"""

import asyncio
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from time import time_ns

from brokerless.core.errors import ConfigError, Fault, UsageError
from brokerless.direct.protocol import messages
from brokerless.direct.protocol.requests import BY, ID, ONCE
from brokerless.direct.publisher import Publisher

TIMEOUT_S = 10.0
# Requests that may wait for their reply at the same time; each costs a kilobyte or so.
_MAX_WAITING = 100_000


class NoReply(Fault):
    """No worker replied within the timeout. `offset` is the request's; it may have been done all the same."""

    def __init__(self, topic: str, offset: int, timeout_s: float) -> None:
        super().__init__(f"no reply to the request at offset {offset} ({topic}) within {timeout_s:g} s")
        self.topic = topic
        self.offset = offset
        self.timeout_s = timeout_s


class RequestClient:
    """Sends requests by a publisher and waits for the replies of its groups' workers (`delivery.reply(data)`).

    At least once (default): a request whose worker is gone is given to another one until the deadline. With
    `at_most_once` it is handed to one handler at most, and whether that one did it is unknown if it does not reply.
    With several groups the first reply counts. Thread-safe; one per publisher is enough, and it needs no closing.
    """

    def __init__(self, publisher: Publisher, *, at_most_once: bool = False) -> None:
        self._publisher = publisher
        self._at_most_once = at_most_once
        self._waiting: dict[str, Future[bytes]] = {}
        publisher.on_answer(self._answered)

    def request(
        self,
        topic: str,
        data: bytes,
        timeout: float = TIMEOUT_S,
        *,
        key: str = "",
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Publish a request and return the reply. `timeout` in seconds is also the deadline that workers keep, by the
        publisher's clock.

        Raises NoReply, or what `publish` raises if the request was not accepted.
        """
        name, reply, named = self._prepare(timeout, headers)
        offset = -1
        try:
            offset = self._publisher.publish(
                topic, data, key=key, content_type=content_type, headers=named
            ).offset
            return reply.result(timeout)
        except WaitTimeout:
            raise NoReply(topic, offset, timeout) from None
        finally:
            self._end(name, reply, offset)

    async def arequest(
        self,
        topic: str,
        data: bytes,
        timeout: float = TIMEOUT_S,  # noqa: ASYNC109 - as in `request`
        *,
        key: str = "",
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """`request` for asyncio. Cancelling it drops the reply, and withdraws what waits for another attempt."""
        name, reply, named = self._prepare(timeout, headers)
        # Shielded: whether a thread that waits for room in the journal gets it is not known when this is cancelled.
        accepting = asyncio.ensure_future(self._accept(topic, data, key, content_type, named))
        offset = -1
        try:
            offset = await asyncio.shield(accepting)
            return await asyncio.wait_for(asyncio.wrap_future(reply), timeout)
        except TimeoutError:
            raise NoReply(topic, offset, timeout) from None
        finally:
            self._end(name, reply, offset)
            if not accepting.done():
                accepting.add_done_callback(self._withdraw_accepted)

    async def _accept(
        self, topic: str, data: bytes, key: str, content_type: str, headers: Mapping[str, str]
    ) -> int:
        """Publish without holding up the loop; the offset."""
        publisher = self._publisher
        if publisher.journal.on_full == "block":
            receipt = await publisher.apublish(
                topic, data, key=key, content_type=content_type, headers=headers
            )
        else:
            receipt = publisher.publish(topic, data, key=key, content_type=content_type, headers=headers)
        return receipt.offset

    def _withdraw_accepted(self, accepting: "asyncio.Future[int]") -> None:
        if not accepting.cancelled() and accepting.exception() is None:
            self._publisher.withdraw(accepting.result())

    def _prepare(
        self, timeout: float, headers: Mapping[str, str] | None
    ) -> tuple[str, "Future[bytes]", dict[str, str]]:
        """The request's name, its reply, and the headers that make an event this request."""
        if not 0 < timeout <= 86400:
            raise ConfigError("timeout", "must be more than 0 and at most a day")
        if len(self._waiting) >= _MAX_WAITING:
            raise UsageError(f"{_MAX_WAITING} requests wait for their replies already")
        name = secrets.token_hex(12)
        named = {**(headers or {}), ID: name, BY: str(time_ns() // 1000 + round(timeout * 1e6))}
        if self._at_most_once:
            named[ONCE] = "1"
        reply: Future[bytes] = Future()
        self._waiting[name] = reply  # before it is published: the reply may be faster than we are
        return name, reply, named

    def _end(self, name: str, reply: "Future[bytes]", offset: int) -> None:
        self._waiting.pop(name, None)
        if offset >= 0 and (not reply.done() or reply.cancelled()):
            self._publisher.withdraw(offset)

    def _answered(self, answer: messages.Answer) -> None:
        """In the server's thread. An answer that nobody waits for (any more) is dropped."""
        reply = self._waiting.pop(answer.request, None)
        if reply is not None and reply.set_running_or_notify_cancel():
            reply.set_result(answer.data)
