"""Optional reference: Mosquitto, MQTT with quality of service 0, 1 and 2, on a broker of its own for each run.

The client is paho. It keeps its half of a QoS 2 session in memory: what a subscriber had confirmed (PUBREC) and not yet
been given (PUBREL) is gone when it is killed, because the broker will not send it again.
"""

import getpass
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
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

TOPIC = "losstest/events"
REPEAT_S = 2.0  # the client library does not always repeat what a broker that died had not confirmed
SAVED_TIMEOUT_S = 60.0
KEEPALIVE_S = 60  # a scenario that stops a process must not be decided by the broker's clock
# Mosquitto keeps sessions and queues in memory and saves all of it now and then: by default every 30 minutes, here
# every second, which is the shortest. `autosave_on_changes` would write the whole queue with every message: with a
# backlog of a few thousand it cannot keep up with 200 events/s. It never calls fsync.
CONFIG = """\
listener {port} {host}
allow_anonymous true
user {user}
persistence true
persistence_location {directory}/
autosave_interval 1
max_queued_messages {queued}
max_queued_bytes 0
"""


def services(setup: Setup) -> list[Command]:
    """Mosquitto for this run."""
    host, port = setup.listen(setup.consumers)
    directory = setup.shared / "mosquitto"
    directory.mkdir(exist_ok=True)
    config = directory / "mosquitto.conf"
    config.write_text(
        CONFIG.format(
            host=host, port=port, directory=directory, queued=setup.retention_events, user=getpass.getuser()
        )
    )
    return [Command([_server() or "mosquitto", "-c", str(config)], port)]


def _server() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")


def _client(setup: Setup, name: str, *, clean: bool, producer: bool, manual_ack: bool = False) -> Any:
    import paho.mqtt.client as mqtt
    from paho.mqtt.enums import CallbackAPIVersion

    client = mqtt.Client(
        CallbackAPIVersion.VERSION2, client_id=name, clean_session=clean, manual_ack=manual_ack
    )
    client.reconnect_delay_set(min_delay=1, max_delay=1)
    client.max_queued_messages_set(0)
    client.connect_async(*setup.broker(producer=producer), keepalive=KEEPALIVE_S)
    return client


class MqttProducer(Producer):
    """Waits for the broker's confirmation of each event (QoS 1 and 2); QoS 0 has none."""

    def __init__(self, setup: Setup, *, qos: int) -> None:
        self._qos, self._patience_s = qos, setup.patience_s
        self._confirmed: set[int] = set()  # message ids; each is taken out by the send() that waits for it
        self._news = threading.Condition()
        self._client = _client(setup, f"producer-{setup.incarnation}", clean=not qos, producer=True)
        self._client.on_publish = lambda _, __, mid, *___: self._confirm(mid)
        self._client.loop_start()

    def _confirm(self, mid: int) -> None:
        with self._news:
            self._confirmed.add(mid)
            self._news.notify()

    def send(self, data: bytes) -> None:
        """Publish; the broker has it when this returns, except with QoS 0."""
        told = self._client.publish(TOPIC, data, qos=self._qos)
        if not self._qos:
            if told.rc:
                raise Rejected("not connected")
            return
        deadline = time.monotonic() + self._patience_s
        mids = {told.mid}
        with self._news:
            while not self._news.wait_for(lambda: mids & self._confirmed, REPEAT_S):
                if time.monotonic() > deadline:
                    raise Indeterminate("the broker did not confirm it")
                if self._qos == 1 and self._client.is_connected():  # at least once: it may be repeated
                    mids.add(self._client.publish(TOPIC, data, qos=1).mid)
            self._confirmed -= mids

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class MqttConsumer(Consumer):
    """A subscriber, with a session that the broker keeps (QoS 1 and 2); acknowledges after the effect.

    With QoS 1 by paho's `manual_ack`. That cannot be used with QoS 2: paho then never answers a PUBREL for a message
    that it does not know, as a restarted subscriber gets them, and the broker's window stays full for ever. So with
    QoS 2 the network thread waits in the callback until the effect is recorded, and paho sends PUBCOMP after it.
    """

    def __init__(self, setup: Setup, *, qos: int) -> None:
        self._qos = qos
        # The broker sends no more than its window of unacknowledged messages (20); with QoS 0 there is no bound.
        self._arrived: deque[tuple[int, Any]] = deque()
        self._open = True
        self._connection = 0
        self._subscribed = threading.Event()
        self._done = threading.Event()
        self._client = _client(
            setup, f"consumer-{setup.index}", clean=not qos, producer=False, manual_ack=qos == 1
        )
        self._client.on_connect = self._connected
        self._client.on_message = lambda _, __, message: self._take(message)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.loop_start()
        if qos and setup.incarnation == 1:
            self._wait_until_saved(setup.shared / "mosquitto" / "mosquitto.db")

    def _wait_until_saved(self, file: Path) -> None:
        """A session is usually older than a second: wait until the broker has saved this one for the first time."""
        deadline = time.monotonic() + SAVED_TIMEOUT_S
        self._subscribed.wait(SAVED_TIMEOUT_S)
        subscribed = time.time()
        while time.monotonic() < deadline:
            if file.exists() and file.stat().st_mtime > subscribed:
                return
            time.sleep(0.02)
        raise Fault(f"Mosquitto did not save its sessions within {SAVED_TIMEOUT_S:g} s")

    def _connected(self, client: Any, *_: object) -> None:
        """Called in the network thread. What arrived before comes again, perhaps with another message's old number:
        a broker that died goes on from what it had saved."""
        self._connection += 1
        self._arrived.clear()
        client.subscribe(TOPIC, self._qos)

    def _take(self, message: Any) -> None:
        """Called in the network thread."""
        self._done.clear()
        self._arrived.append((self._connection, message))
        while self._qos == 2 and self._open and not self._done.wait(0.05):
            pass

    def receive(self, timeout_s: float) -> Iterable[Message]:
        if not self._open:
            return
        deadline = time.monotonic() + timeout_s
        while not self._arrived and time.monotonic() < deadline:
            time.sleep(0.002)
        while self._arrived:
            try:
                connection, message = self._arrived.popleft()
            except IndexError:  # the network thread has just thrown them away
                return
            ack = partial(self._ack, connection, message) if self._qos else None
            yield Message(message.payload, ack=ack, attempt=2 if message.dup else 1)

    def _ack(self, connection: int, message: Any) -> None:
        if self._qos == 2:
            self._done.set()
        elif connection != self._connection or self._client.ack(message.mid, message.qos):
            raise Fault("mqtt: not connected")  # it comes again

    def close(self) -> None:
        self._open = False
        self._done.set()
        self._client.disconnect()
        self._client.loop_stop()


def _missing() -> str:
    absent = [] if _server() else ["mosquitto"]
    absent += [] if find_spec("paho") else ["the package paho-mqtt"]
    return ", ".join(absent)


_GONE = Promise("must", ("offline", "in_flight"), "QoS 0: nobody keeps what a subscriber that is away misses")
_NO_ROOM = Promise(
    "may", ("overflow_sender", "in_flight"), "QoS 0: the broker drops for a subscriber that does not read"
)
_BEFORE = Promise("must", ("offline",), "a session begins when its subscriber connects for the first time")
_BUG = Promise("may", ("in_flight",), "acknowledged before the effect was recorded")
_CRASH = Promise(
    "may", ("in_flight", "producer_crash"), "QoS 0: what had not left memory, and nobody sends it again"
)
_SAVED = Promise(
    "may", ("in_flight", "offline"), "confirmed before it was written: Mosquitto saves once a second"
)
_HALF = Promise(
    "may",
    ("in_flight", "offline"),
    "paho had confirmed it (PUBREC) and had it in memory only: the broker does not send it again",
)
_FULL = Promise(
    "must", ("offline", "overflow_sender"), "a full session queue takes nothing more, and nobody is told"
)
_FULL_HALF = Promise("must", (*_FULL.reasons, "in_flight"), f"{_FULL.why}; {_HALF.why}")
_LINE = Promise(
    "may",
    ("in_flight", "overflow_sender", "offline"),
    "QoS 0: what the connection had when it broke, or did not take",
)
_ALL_OF_IT = Promise("may", (*_LINE.reasons, "producer_crash"), f"{_LINE.why}; {_CRASH.why}")


def _transport(qos: int) -> Transport:
    outages = ("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "late")
    if qos:
        promises = {"late": _BEFORE, "ack-then-die": _BUG, "broker-kill": _SAVED, "beyond-retention": _FULL}
        promises |= dict.fromkeys(("power-cut", "disk-full"), _SAVED)
        if qos == 2:
            promises |= dict.fromkeys(
                ("stop", "kill", "kill-fresh", "flap", "all-down", "rolling", "random"), _HALF
            )
            promises["beyond-retention"] = _FULL_HALF
    else:
        promises = {
            **dict.fromkeys(outages, _GONE),
            **dict.fromkeys(("pause-short", "pause-long", "slow"), _NO_ROOM),
            "producer-kill": _CRASH,
            **dict.fromkeys(("partition", "partition-to", "partition-from", "reset", "bandwidth"), _LINE),
            # Whoever reconnects first to the broker that is back is not heard yet; with `random` its producer is
            # killed, too, as that of every broker.
            **dict.fromkeys(("broker-kill", "disk-full", "power-cut", "random"), _ALL_OF_IT),
        }
    return Transport(
        f"mqtt-qos{qos}",
        partial(MqttProducer, qos=qos),
        partial(MqttConsumer, qos=qos),
        Traits(
            family="broker",
            enclosed=True,
            journal="broker",
            link="tcp",
            connects="consumer",
            ports=1,
            acks=bool(qos),
            max_rate=200.0,  # a confirm per event, and a broker beside it on two cores
            without=("beyond-retention",) if not qos else (),  # nothing is retained
            quiet_s=2.5,  # clients connect again after a second
            promises=promises,
            summary=f"Mosquitto, MQTT QoS {qos}"
            + (", persistent session, saved every second" if qos else "")
            + ": what a broker would have done",
            settings=f"QoS {qos}, persistent session, saved every second and never synced (autosave_interval 1; the "
            "default is 1800); confirmed before send() returns, acknowledged after the effect; client: paho"
            if qos
            else "QoS 0, clean session: nothing is confirmed or kept; client: paho",
        ),
        _missing,
        services=services,
        version=lambda: version_of([_server() or "mosquitto", "-h"], "Mosquitto"),
    )


TRANSPORTS = [_transport(qos) for qos in (0, 1, 2)]
