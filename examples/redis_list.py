"""Measure Redis lists (LPUSH and BRPOP) with a server of your own on 127.0.0.1:6379. Run it with

    brokerless losstest run --quick --transport examples/redis_list.py:transport

REDIS=host:port names another server. No client library: the protocol is simple enough.
"""

import os
from collections.abc import Iterable

from brokerless.losstest import Consumer, Message, Producer, Promise, Setup, Traits, Transport
from brokerless.losstest.adapters.brokers.resp import Redis, RedisError


def connect() -> Redis:
    host, _, port = os.environ.get("REDIS", "127.0.0.1:6379").partition(":")
    return Redis(host, int(port))


def key(setup: Setup) -> str:
    return f"losstest:{setup.shared}"  # one list per run


class Pusher(Producer):
    def __init__(self, setup: Setup) -> None:
        self._redis, self._key = connect(), key(setup)

    def send(self, data: bytes) -> None:
        self._redis.call("LPUSH", self._key, data)

    def close(self) -> None:
        self._redis.call("DEL", self._key)


class Popper(Consumer):
    """BRPOP removes the event before anything was done with it: a killed consumer loses it."""

    def __init__(self, setup: Setup) -> None:
        self._redis, self._key = connect(), key(setup)

    def receive(self, timeout_s: float) -> Iterable[Message]:
        found = self._redis.call("BRPOP", self._key, str(max(0.01, timeout_s)))
        return [Message(found[1])] if isinstance(found, list) else []


def missing() -> str:
    try:
        connect().close()
    except (OSError, RedisError) as error:
        return f"a Redis server ({error})"
    return ""


POPPED = Promise("may", ("in_flight", "offline"), "BRPOP had removed it when the consumer was killed")
transport = Transport(
    "redis-list",
    Pusher,
    Popper,
    Traits(
        family="example",
        journal="broker",
        group=True,
        promises=dict.fromkeys(("kill", "kill-fresh", "flap", "all-down"), POPPED),
        without=("beyond-retention",),  # a list keeps everything
        summary="Redis list: survives outages, loses what was popped",
    ),
    missing,
)
