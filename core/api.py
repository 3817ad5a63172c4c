"""The shape that publishers and subscribers share, whatever their transport.

Types for code that takes any of them; `tests/test_api_shape.py` holds the classes to it. After the essentials (`topic`,
`data`) everything is keyword-only; a method `x` that can wait has a twin `ax` for asyncio with the same parameters.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from brokerless.core.consumer import Batch
from brokerless.core.counters import Counters
from brokerless.core.cursor import Position
from brokerless.core.event import Event, Lost, Receipt
from brokerless.core.journal.base import Journal
from brokerless.core.ledger.ledger import Ledger


class _Component(Protocol):
    """What both have: they are announced while they are open, and closed at the end of a `with` block."""

    counters: Counters

    @property
    def metrics_address(self) -> str:
        """Where Prometheus finds this process's metrics; empty without `metrics=`."""

    def close(self) -> None:
        """Finish what is under way, save, and release everything. Closing twice is fine."""

    async def aclose(self) -> None:
        """`close` for asyncio."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class EventPublisher(_Component, Protocol):
    """Accepts events into its journal and sends them."""

    journal: Journal

    @property
    def source(self) -> str:
        """The producer's name."""

    def publish(self, topic: str, data: bytes, *, content_type: str = "", key: str = "") -> Receipt:
        """Accept one event: when this returns it is in the journal, and sent or about to be."""

    async def apublish(self, topic: str, data: bytes, *, content_type: str = "", key: str = "") -> Receipt:
        """`publish` for asyncio."""

    def publish_many(
        self, topic: str, datas: Sequence[bytes], *, content_type: str = "", keys: Sequence[str] | None = None
    ) -> Receipt:
        """Accept many events of one topic, all or none; the receipt is that of the first."""

    async def apublish_many(
        self, topic: str, datas: Sequence[bytes], *, content_type: str = "", keys: Sequence[str] | None = None
    ) -> Receipt:
        """`publish_many` for asyncio."""

    def flush(self) -> None:
        """Send now what is batched."""

    def close(self) -> None:
        """Send what is left and close, the journal too. Closing twice is fine."""


@runtime_checkable
class EventSubscriber(_Component, Protocol):
    """Hands out events in order, and the losses between them. `core.consumer.Consumer` implements all of it."""

    topics: tuple[str, ...]
    positions: dict[str, Position]
    losses: deque[Lost]
    on_loss: Callable[[Lost], None] | None

    @property
    def ledger(self) -> Ledger:
        """The accounting, including every event handed out so far."""

    def __iter__(self) -> Iterator[Event]: ...
    def __aiter__(self) -> AsyncIterator[Event]: ...
    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Events one by one; ends when none has come for `timeout` seconds."""

    def aevents(self, timeout: float | None = None) -> AsyncIterator[Event]:
        """`events` for asyncio."""

    def batches(self, timeout: float | None = None) -> Iterator[Batch]:
        """Whole batches."""

    def abatches(self, timeout: float | None = None) -> AsyncIterator[Batch]:
        """`batches` for asyncio."""

    def items(self, timeout: float | None = None) -> Iterator[Batch | Lost]:
        """Batches, and `Lost` in its place between them."""

    def aitems(self, timeout: float | None = None) -> AsyncIterator[Batch | Lost]:
        """`items` for asyncio."""

    def receive(self, timeout: float | None = None) -> Event | None:
        """One event, or None."""

    async def areceive(self, timeout: float | None = None) -> Event | None:  # noqa: ASYNC109 - as in `receive`
        """`receive` for asyncio."""

    def wait_joined(self, timeout: float = 10.0) -> bool:
        """Wait until the stream is received."""

    async def await_joined(self, timeout: float = 10.0) -> bool:  # noqa: ASYNC109 - as in `wait_joined`
        """`wait_joined` for asyncio."""

    def commit(self) -> None:
        """Everything handed out so far is processed: save positions and ledger."""

    async def acommit(self) -> None:
        """`commit` for asyncio."""

    def stop(self) -> None:
        """End the iteration after the current event; for signal handlers."""
