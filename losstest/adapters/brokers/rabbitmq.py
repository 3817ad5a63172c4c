"""Optional reference: RabbitMQ, classic and quorum queues with publisher confirms, on a broker for each run."""

import shutil
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brokerless.losstest.adapters.base import (
    Command,
    Consumer,
    Message,
    Producer,
    Rejected,
    Setup,
    Transport,
)
from brokerless.losstest.adapters.brokers.reconnect import PAUSE_S, Reconnecting, Unreachable
from brokerless.losstest.adapters.brokers.version import package_version
from brokerless.losstest.model import Promise, Traits

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel

QUEUE = "losstest"
PREFETCH = 64
# Debian's rabbitmq-server in the PATH changes to a user and directory of the system's broker; this one does not.
DEBIAN = "/usr/lib/rabbitmq/bin/rabbitmq-server"


def _server() -> str | None:
    return DEBIAN if Path(DEBIAN).exists() else shutil.which("rabbitmq-server")


# A new quorum queue is saved in the node's register after half a second: a broker that is killed before has forgotten
# it, which says nothing about a queue that is in use.
REGISTERED_S = 1.5


def services(setup: Setup) -> list[Command]:
    """Erlang's port mapper and the broker, with names, ports, cookie and data of this run alone."""
    host, port = setup.listen(setup.consumers)
    names_port, peers_port = setup.ports[setup.consumers + 1 : setup.consumers + 3]
    home = setup.shared / "rabbitmq"
    home.mkdir(exist_ok=True)
    (home / "plugins").write_text("[].\n")
    env = {
        "HOME": str(home),  # the cookie lies there
        "ERL_EPMD_ADDRESS": host,
        "ERL_EPMD_PORT": str(names_port),
        # One scheduler is enough for a few hundred events/s, and leaves the machine to the run.
        "ERL_FLAGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1",
        "RABBITMQ_NODENAME": f"losstest-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": host,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(peers_port),
        "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(home / "none"),  # nothing of /etc/rabbitmq
        "RABBITMQ_CONF_ENV_FILE": str(home / "none"),
        "RABBITMQ_PID_FILE": str(home / "pid"),
        "detached": "yes",  # its start script then becomes the broker, instead of staying beside it
    }
    epmd = [shutil.which("epmd") or "epmd", "-address", host, "-port", str(names_port)]
    return [Command(epmd, names_port, env), Command([_server() or "rabbitmq-server"], port, env)]


class _Link:
    """A connection, its channel, and the queue that both sides declare."""

    def __init__(self, setup: Setup, kind: str, *, producer: bool) -> None:
        import pika

        host, port = setup.broker(producer=producer)
        # No heartbeats: a scenario stops processes for longer than any.
        parameters = pika.ConnectionParameters(host, port, heartbeat=0, socket_timeout=5.0)
        self.connection = pika.BlockingConnection(parameters)
        self.channel: BlockingChannel = self.connection.channel()
        # A full queue drops its oldest message, which is RabbitMQ's default.
        limits = {"x-queue-type": kind, "x-max-length": setup.retention_events}
        self.channel.queue_declare(QUEUE, durable=True, arguments=limits)

    def close(self) -> None:
        if self.connection.is_open:
            self.connection.close()


def _faults() -> tuple[type[Exception], ...]:
    from pika.exceptions import AMQPError

    return (AMQPError, OSError)


class RabbitProducer(Producer):
    """Persistent messages, each confirmed by the broker before `send()` returns."""

    def __init__(self, setup: Setup, *, kind: str) -> None:
        import pika
        from pika.exceptions import UnroutableError

        self._persistent = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)
        self._refusals = (
            UnroutableError,
        )  # a nack is none: the broker cannot promise anything, so send it again

        def connect() -> _Link:
            link = _Link(setup, kind, producer=True)
            link.channel.confirm_delivery()
            return link

        self._link = Reconnecting(connect, _Link.close, _faults(), setup.patience_s)

    def send(self, data: bytes) -> None:
        """Publish; on the broker's disk when it returns."""
        self._link.until_done(lambda link: self._publish(link, data))

    def _publish(self, link: _Link, data: bytes) -> None:
        try:
            link.channel.basic_publish("", QUEUE, data, self._persistent, mandatory=True)
        except self._refusals as error:
            raise Rejected(str(error)) from error

    def close(self) -> None:
        self._link.drop()


class RabbitConsumer(Consumer):
    """Takes up to PREFETCH events at a time and acknowledges each after its effect."""

    def __init__(self, setup: Setup, *, kind: str) -> None:
        self._arrived: deque[tuple[Any, bytes]] = deque()  # PREFETCH at most: the broker keeps to it

        def connect() -> _Link:
            self._arrived.clear()  # of an old connection: they come again
            link = _Link(setup, kind, producer=False)
            link.channel.basic_qos(prefetch_count=PREFETCH)
            link.channel.basic_consume(QUEUE, lambda _, how, __, body: self._arrived.append((how, body)))
            return link

        self._link = Reconnecting(connect, _Link.close, _faults(), setup.patience_s)
        self._link.until_done(lambda link: None)
        if kind == "quorum" and setup.incarnation == 1:
            time.sleep(REGISTERED_S)
        self._open = True

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        try:
            if not self._arrived:
                self._link.once(lambda link: link.connection.process_data_events(timeout_s))
        except Unreachable:
            time.sleep(PAUSE_S)
        while self._arrived:
            how, body = self._arrived.popleft()
            yield Message(body, ack=lambda how=how: self._ack(how), attempt=2 if how.redelivered else 1)  # type: ignore[misc]

    def _ack(self, how: Any) -> None:
        self._link.once(lambda link: link.channel.basic_ack(how.delivery_tag))

    def close(self) -> None:
        self._open = False
        self._link.drop()


def _missing() -> str:
    absent = [name for name in ("epmd",) if shutil.which(name) is None]
    absent += [] if _server() else ["rabbitmq-server"]
    absent += [] if find_spec("pika") else ["the package pika"]
    return ", ".join(absent)


_BUG = Promise("may", ("in_flight",), "acknowledged before the effect was recorded")


_DROPPED = Promise(
    "must", ("evicted", "overflow_sender"), "a full queue drops its oldest message, and tells nobody"
)


def _transport(name: str, kind: str, keeps: str, syncs: str) -> Transport:
    return Transport(
        name,
        partial(RabbitProducer, kind=kind),
        partial(RabbitConsumer, kind=kind),
        Traits(
            family="broker",
            enclosed=True,
            journal="broker",
            many_producers=True,
            link="tcp",
            connects="consumer",
            ports=3,
            group=True,
            acks=True,
            heavy=True,
            max_rate=200.0,  # a confirm per event, and a broker beside it on two cores
            promises={"ack-then-die": _BUG, "beyond-retention": _DROPPED},
            summary=f"RabbitMQ, {keeps} and publisher confirms: what a broker would have done",
            settings=f"{keeps}; {syncs}; confirmed before send() returns, acknowledged after the effect, "
            f"prefetch {PREFETCH}",
        ),
        _missing,
        services=services,
        version=lambda: package_version("rabbitmq-server", "RabbitMQ"),
    )


TRANSPORTS = [
    _transport(
        "rabbitmq",
        "classic",
        "durable classic queue, persistent messages",
        "written before the confirm, synced later",
    ),
    _transport("rabbitmq-quorum", "quorum", "quorum queue of one member", "fsync before the confirm"),
]
