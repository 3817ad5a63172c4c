"""A Dispatcher for programs without asyncio."""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from brokerless.core.errors import Closed, UsageError
from brokerless.webhooks.config import DispatcherConfig
from brokerless.webhooks.counters import DispatcherCounters
from brokerless.webhooks.dispatcher import Dispatcher
from brokerless.webhooks.errors import OutboxError

P = ParamSpec("P")
T = TypeVar("T")


def _waits(
    method: Callable[Concatenate[Dispatcher, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["BlockingDispatcher", P], T]:
    """The method with the same arguments, result and documentation, for callers without an event loop."""

    @functools.wraps(method)
    def call(self: "BlockingDispatcher", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(method(self._dispatcher, *args, **kwargs))

    return call


def _same(
    method: Callable[Concatenate[Dispatcher, P], T],
) -> Callable[Concatenate["BlockingDispatcher", P], T]:
    """The same for a method that needs no event loop."""

    @functools.wraps(method)
    def call(self: "BlockingDispatcher", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._dispatcher, *args, **kwargs)

    return call


class BlockingDispatcher:
    """A Dispatcher whose event loop runs in a thread of its own; every method waits for its result.

        with BlockingDispatcher("var/outbox.sqlite") as dispatcher:
            dispatcher.publish("order.paid", b"{}")

    Arguments, results and errors are those of `Dispatcher`. `timeout_s` is how long a method other than `publish`
    may take.
    """

    def __init__(
        self,
        outbox: str | Path,
        *,
        source: str = "brokerless",
        config: DispatcherConfig | None = None,
        encryption_keys: Sequence[str] = (),
        metrics: str = "",
        timeout_s: float = 120.0,
    ) -> None:
        self._dispatcher = Dispatcher(
            outbox, source=source, config=config, encryption_keys=encryption_keys, metrics=metrics
        )
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ── life ─────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the thread and the dispatcher; raises what starting it raises."""
        if self._thread is not None:
            raise UsageError("this dispatcher has been started already")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="brokerless-dispatcher", daemon=True
        )
        self._thread.start()
        try:
            self._call(self._dispatcher.start())
        except BaseException:
            self._end_thread()
            raise

    def stop(self) -> None:
        """Stop the dispatcher and join the thread."""
        if self._thread is not None:
            try:
                self._call(self._dispatcher.stop())
            finally:
                self._end_thread()

    def _end_thread(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._loop = self._thread = None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the dispatcher in its loop and wait for it."""
        if self._loop is None:
            work.close()
            raise Closed("the dispatcher")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            problem = f"did not answer within {self._timeout_s:g} s"
            raise OutboxError(self._dispatcher.outbox.name, problem) from None

    def __enter__(self) -> "BlockingDispatcher":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def counters(self) -> DispatcherCounters:
        """What was counted since the start."""
        return self._dispatcher.counters

    @property
    def running(self) -> bool:
        """Whether it was started."""
        return self._dispatcher.running

    @property
    def delivering(self) -> bool:
        """Whether this process delivers for any endpoints."""
        return self._dispatcher.delivering

    # ── all that a Dispatcher does ───────────────────────────────────────────

    publish = _same(Dispatcher.publish_sync)

    add_endpoint = _waits(Dispatcher.add_endpoint)
    register = _waits(Dispatcher.register)
    update_endpoint = _waits(Dispatcher.update_endpoint)
    remove_endpoint = _waits(Dispatcher.remove_endpoint)
    rotate_secret = _waits(Dispatcher.rotate_secret)
    enable_endpoint = _waits(Dispatcher.enable_endpoint)
    disable_endpoint = _waits(Dispatcher.disable_endpoint)
    verify_endpoint = _waits(Dispatcher.verify_endpoint)
    test_endpoint = _waits(Dispatcher.test_endpoint)
    endpoint = _waits(Dispatcher.endpoint)
    endpoints = _waits(Dispatcher.endpoints)
    oldest_pending = _waits(Dispatcher.oldest_pending)

    set_event_type = _waits(Dispatcher.set_event_type)
    remove_event_type = _waits(Dispatcher.remove_event_type)
    event_types = _waits(Dispatcher.event_types)
    event_type = _waits(Dispatcher.event_type)

    deliveries = _waits(Dispatcher.deliveries)
    delivery = _waits(Dispatcher.delivery)
    events = _waits(Dispatcher.events)
    event = _waits(Dispatcher.event)
    account = _waits(Dispatcher.account)
    retry = _waits(Dispatcher.retry)
    replay = _waits(Dispatcher.replay)
    portal_link = _same(Dispatcher.portal_link)
    portal_visitor = _same(Dispatcher.portal_visitor)
