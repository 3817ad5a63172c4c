"""How much of an endpoint's answer is parsed: no endpoint takes the processor by sending without end."""

from asyncio import AbstractEventLoop
from typing import Any

from aiohttp.client_proto import ResponseHandler

# For the head of an answer, which aiohttp bounds too, and for what may come before it (any number of "100 Continue").
MAX_HEAD_BYTES = 32 * 1024


class BoundedAnswers(ResponseHandler):
    """aiohttp's protocol that parses up to `limit` bytes for each request, and reads no more after that.

    What needs more than that for its head fails by the timeout of the attempt. Bodies are cut by the client.
    """

    def __init__(self, loop: AbstractEventLoop, limit: int) -> None:
        super().__init__(loop)
        self._limit = self._left = limit

    def set_response_params(self, **options: Any) -> None:
        """A request is about to be sent."""
        self._left = self._limit
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Part of an answer came."""
        if len(data) > self._left:
            data = data[: self._left]
            if self.transport is not None:
                self.transport.pause_reading()
        if data:
            self._left -= len(data)
            super().data_received(data)
