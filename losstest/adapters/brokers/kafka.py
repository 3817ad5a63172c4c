"""Optional reference: Kafka, acks=all and committed offsets, on a broker of its own for each run.

In KRaft mode where its scripts have that; older ones (before 3.3) get a ZooKeeper of the run, from the same package.
"""

import os
import shutil
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from brokerless.core.errors import Fault
from brokerless.losstest.adapters.base import (
    Command,
    Consumer,
    Indeterminate,
    Message,
    Producer,
    Rejected,
    Setup,
    Transport,
)
from brokerless.losstest.adapters.brokers.version import version_of
from brokerless.losstest.model import Promise, Traits

TOPIC, GROUP = "losstest", "losstest"
CLUSTER = "brokerless-losstest-0A"  # any 16 bytes in base64
BATCH = 64
CONFIG = """\
listeners={listeners}
advertised.listeners=PLAINTEXT://{host}:{port}
log.dirs={data}
num.partitions=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
group.min.session.timeout.ms=500
"""
SYNCED = "log.flush.interval.messages=1\n"
KRAFT = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{second}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""
# A killed broker is registered until its session with ZooKeeper ends, and the next one refuses to start before that. A
# shorter session ends by itself when the machine is busy or the disk slow.
SESSION_S = 6  # the default
WITH_ZOOKEEPER = """\
broker.id=1
zookeeper.connect={host}:{second}
zookeeper.connection.timeout.ms=60000
"""
# Its log grows by so many kB at once: of a watched disk a file is copied with every sync, and 64 MB would be too much.
ZOOKEEPER = """\
dataDir={data}
clientPort={second}
clientPortAddress={host}
preAllocSize=64
"""
# Before 0.10 a broker cannot say what it speaks; librdkafka asks, is cut off, and falls back to this for a while.
OLD_CLIENT = {"api.version.request": False, "broker.version.fallback": "0.9.0.1"}


def program(name: str) -> str | None:
    """One of Kafka's scripts: in the bin directory of KAFKA_HOME, Kafka's own variable, or in the PATH."""
    home = os.environ.get("KAFKA_HOME")
    if home and (found := Path(home) / "bin" / f"{name}.sh").exists():
        return str(found)
    return shutil.which(f"{name}.sh") or shutil.which(name)


def is_old() -> bool:
    """True if the Kafka that is installed needs ZooKeeper."""
    return program("kafka-storage") is None and program("zookeeper-server-start") is not None


def services(setup: Setup) -> list[Command]:
    """One node, and a ZooKeeper beside it if it is an old one; storage is formatted at the first start."""
    host, port = setup.listen(setup.consumers)
    second = setup.ports[setup.consumers + 1]
    directory = setup.shared / "kafka"
    directory.mkdir(exist_ok=True)
    config = directory / "server.properties"
    old = is_old()
    listeners = f"PLAINTEXT://{host}:{port}" + ("" if old else f",CONTROLLER://{host}:{second}")
    fields = {"host": host, "port": port, "second": second, "listeners": listeners}
    text = CONFIG + (WITH_ZOOKEEPER if old else KRAFT) + (SYNCED if setup.sync else "")
    config.write_text(text.format(**fields, data=directory / "data"))
    env = {
        "LOG_DIR": str(directory / "log"),
        "KAFKA_HEAP_OPTS": "-Xmx256m -Xms128m",
        "KAFKA_GC_LOG_OPTS": "-server",  # instead of options for a log that newer Javas refuse
    }
    start = program("kafka-server-start") or ""
    if old:
        keeper = directory / "zookeeper.properties"
        keeper.write_text(ZOOKEEPER.format(**fields, data=directory / "zookeeper"))
        words = [program("zookeeper-server-start") or "", str(keeper)]
        broker = [start, str(config)]
        if setup.incarnation > 1:
            broker = ["sh", "-c", f'sleep {2 * SESSION_S} && exec "$@"', "kafka", *broker]
        return [Command(words, second, env), Command(broker, port, env)]
    script = '"$1" format --ignore-formatted -t "$2" -c "$3" && exec "$4" "$3"'
    words = [program("kafka-storage") or "", CLUSTER, str(config), start]
    return [Command(["sh", "-c", script, "kafka", *words], port, env)]


def address(setup: Setup) -> str:
    """Where clients begin."""
    host, port = setup.connect(setup.consumers)
    return f"{host}:{port}"


class KafkaProducer(Producer):
    """Idempotent, and each event acknowledged by all replicas (here: one) before `send()` returns."""

    def __init__(self, setup: Setup) -> None:
        import confluent_kafka

        self._patience_s = setup.patience_s
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": address(setup),
                "acks": "all",
                # The library repeats what was not confirmed; a broker that knows how sees it once.
                **(OLD_CLIENT if is_old() else {"enable.idempotence": True}),
                "linger.ms": 0,
                "delivery.timeout.ms": int(setup.patience_s * 1000),
                "reconnect.backoff.max.ms": 500,
            }
        )

    def send(self, data: bytes) -> None:
        """Produce and wait for the broker's acknowledgement. Raises Indeterminate if there is none."""
        told: list[Any] = []
        self._producer.produce(TOPIC, data, on_delivery=lambda error, _: told.append(error))
        deadline = time.monotonic() + self._patience_s + 5.0
        while not told and time.monotonic() < deadline:
            self._producer.poll(0.1)
        error = told[0] if told else "no answer"
        if error is not None:
            refused = getattr(error, "name", lambda: "")() in (
                "MSG_SIZE_TOO_LARGE",
                "TOPIC_AUTHORIZATION_FAILED",
            )
            raise Rejected(str(error)) if refused else Indeterminate(f"kafka: {error}")

    def close(self) -> None:
        self._producer.flush(2.0)


class KafkaConsumer(Consumer):
    """A member of a group that commits an event's offset after its effect."""

    def __init__(self, setup: Setup) -> None:
        import confluent_kafka

        self._ignored = (
            confluent_kafka.KafkaError._PARTITION_EOF,
            confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART,  # nothing was produced yet
            confluent_kafka.KafkaError._ALL_BROKERS_DOWN,
            confluent_kafka.KafkaError._TRANSPORT,
        )
        self._error = confluent_kafka.KafkaException
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": address(setup),
                "group.id": GROUP,
                # A static member: killed and restarted it has its partition again without a rebalance.
                **(OLD_CLIENT if is_old() else {"group.instance.id": f"consumer-{setup.index}"}),
                "session.timeout.ms": 6000,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "topic.metadata.refresh.interval.ms": 500,
                "reconnect.backoff.max.ms": 500,
                "allow.auto.create.topics": True,
            }
        )
        self._open, self._joined = True, False
        self._consumer.subscribe([TOPIC], on_assign=self._joins, on_revoke=self._leaves)

    def _joins(self, *_: object) -> None:
        self._joined = True

    def _leaves(self, *_: object) -> None:
        self._joined = False

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        for message in self._consumer.consume(BATCH, timeout_s):
            error = message.error()
            if error is None:
                yield Message(message.value() or b"", ack=lambda m=message: self._ack(m))  # type: ignore[misc]
            elif error.code() not in self._ignored:
                raise Fault(f"kafka: {error}")

    def pending(self) -> int:
        """At least one while it waits for its place in the group, which it may do for members that died."""
        return int(self._open and not self._joined)

    def _ack(self, message: Any) -> None:
        try:
            self._consumer.commit(message=message, asynchronous=True)
        except self._error as error:
            raise Fault(f"kafka: {error}") from error

    def close(self) -> None:
        self._open = False
        self._consumer.close()


def _missing() -> str:
    first = "zookeeper-server-start" if is_old() else "kafka-storage"
    absent = [name for name in (first, "kafka-server-start") if program(name) is None]
    where = [f"{', '.join(absent)} (in KAFKA_HOME/bin or in the PATH)"] if absent else []
    where += [] if find_spec("confluent_kafka") else ["the package confluent-kafka"]
    return ", ".join(where)


def _version() -> str:
    start = program("kafka-server-start") or "kafka-server-start"
    jars = sorted(Path(start).resolve().parent.parent.glob("libs/kafka-clients-*.jar"))
    if jars:
        return f"Kafka {jars[0].stem.removeprefix('kafka-clients-')}"
    return version_of([start, "--version"], "Kafka")


_BUG = Promise("may", ("in_flight",), "acknowledged before the effect was recorded")
TRAITS = Traits(
    family="broker",
    enclosed=True,
    journal="broker",
    ports=2,
    group=True,
    acks=True,
    heavy=True,
    max_rate=200.0,  # a confirm per event, and a broker beside it on two cores
    # A member that left without a word is missed after its session timeout of 6 s; without static members the group
    # then waits as long for the others, and perhaps gives the partition to the next that is dead.
    quiet_s=20.0 if is_old() else 7.0,
    promises={"ack-then-die": _BUG},
    without=("beyond-retention",),  # Kafka drops whole segments, by size or age: not by a number of events
    settings=f"one partition, one replica; acks=all, {'not ' if is_old() else ''}idempotent, confirmed before send() "
    "returns; flushed by the operating system (the default), with `power-cut` after every message; offsets committed "
    f"after the effect{'; beside a ZooKeeper' if is_old() else ''}",
    summary="Kafka, acks=all and committed offsets: what a broker would have done",
)
TRANSPORTS = [
    Transport("kafka", KafkaProducer, KafkaConsumer, TRAITS, _missing, services=services, version=_version)
]
