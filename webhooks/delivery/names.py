"""Names to addresses, in threads: a name server that hangs for some hosts holds up no others.

Every endpoint's name is looked up again after `TTL_S`, so thousands of names that nobody answers for would occupy any
number of threads. Therefore names whose last look-up was slow have threads of their own, and a name that was found
before is used as it was while its look-up takes long. What nobody waits for any more is not looked up.
"""

import asyncio
import concurrent.futures
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from brokerless.webhooks.delivery.ssrf import AddressGuard
from brokerless.webhooks.errors import BlockedAddress

# They mostly wait. Not the threads that the application's own `to_thread` uses.
THREADS, SLOW_THREADS = 32, 32
# A changed DNS entry is followed within this time; every connect is checked anyway.
TTL_S = 30.0
# A look-up that takes longer makes its name a slow one: usual ones take a tenth of it.
SLOW_S = 1.0
# So long a look-up may hold up an attempt for which older addresses are there, and so old these may be.
PATIENCE_S = 0.2
STALE_S = 600.0
# Names that are remembered; the ones looked up longest ago are forgotten first.
MAX_NAMES = 10_000
_Key = tuple[str, int]


class _Name(msgspec.Struct):
    """What the last look-up brought; `at` is when it was begun."""

    found: list[ResolveResult]
    refused: BlockedAddress | None
    at: float
    slow: bool

    def usable(self, now: float) -> bool:
        return bool(self.found) and now - self.at < STALE_S

    def addresses(self) -> list[ResolveResult]:
        if not self.found and self.refused is not None:
            raise BlockedAddress(self.refused.address, self.refused.rule)
        return self.found


class _Lookup(msgspec.Struct, eq=False):
    """One under way, and how many attempts wait for it."""

    job: concurrent.futures.Future[list[Any]]
    future: asyncio.Future[list[Any]]
    began: float
    waiting: int = 0


class Names(AbstractResolver):
    """aiohttp's resolver, which keeps only addresses that may be connected to."""

    def __init__(self, guard: AddressGuard, timeout_s: float) -> None:
        self._guard = guard
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="brokerless-dns")
        self._slow_threads = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="brokerless-slow-dns")
        self._known: dict[_Key, _Name] = {}
        self._lookups: dict[_Key, _Lookup] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a host; OSError, TimeoutError, or BlockedAddress if it has none but forbidden ones."""
        key, now = (host, port), time.monotonic()
        known = self._known.get(key)
        if known is not None and now - known.at < TTL_S:
            return known.addresses()
        lookup = self._lookups.get(key) or self._begin(key, family, slow=known is not None and known.slow)
        spare = known if known is not None and known.usable(now) else None
        patience_s = self._timeout_s if spare is None else lookup.began + PATIENCE_S - now
        lookup.waiting += 1
        try:
            await asyncio.wait([lookup.future], timeout=max(0.0, patience_s))
        finally:
            lookup.waiting -= 1
            # Does nothing once a thread has begun.
            if not lookup.waiting and spare is None and lookup.job.cancel():
                del self._lookups[key]
        if lookup.future.done():
            lookup.future.result()
            return self._known[key].addresses()
        if spare is None:
            raise TimeoutError
        return spare.addresses()

    def _begin(self, key: _Key, family: int, *, slow: bool) -> _Lookup:
        began = time.monotonic()
        job = (self._slow_threads if slow else self._threads).submit(_look_up, *key, family)
        lookup = self._lookups[key] = _Lookup(job, asyncio.wrap_future(job), began)
        lookup.future.add_done_callback(partial(self._ended, key, lookup))
        return lookup

    def _ended(self, key: _Key, lookup: _Lookup, future: asyncio.Future[list[Any]]) -> None:
        if future.cancelled():
            return  # nobody waited
        del self._lookups[key]
        before = self._known.pop(key, None)
        slow = time.monotonic() - lookup.began > SLOW_S
        if future.exception() is None:
            self._known[key] = self._checked(key, future.result(), lookup.began, slow)
        elif slow or before is not None:
            # It is to be asked again at once, and older addresses are not used any more: it has none now.
            self._known[key] = _Name([], None, -math.inf, slow)
        while len(self._known) > MAX_NAMES:
            del self._known[next(iter(self._known))]

    def _checked(self, key: _Key, found: list[Any], at: float, slow: bool) -> _Name:
        results: list[ResolveResult] = []
        refused: BlockedAddress | None = None
        for kind, _, proto, _, address in found:
            text = str(address[0])
            rule = self._guard.blocked(text)
            if rule is not None:
                refused = BlockedAddress(text, rule)
                continue
            results.append(
                ResolveResult(
                    hostname=key[0],
                    host=text,
                    port=int(address[1]),
                    family=kind,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        return _Name(results, refused, at, slow)

    async def close(self) -> None:
        """Begin no further look-up; threads that wait for a name server end when it answers."""
        for threads in (self._threads, self._slow_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int, family: int) -> list[Any]:
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
