"""librdkafka's built-in mock cluster in the place of a Kafka: it speaks the protocol, and keeps all in memory.

`install()` makes a KAFKA_HOME whose scripts start it. The mock listens on a port of its own choice and tells it
to clients; a forwarder on the port of the configuration is where clients begin.
"""

import contextlib
import re
import socket
import sys
import threading
from pathlib import Path

STORAGE = """#!/bin/sh
# As the real one is called: format --ignore-formatted -t CLUSTER -c CONFIG
test "$1" = format && test "$#" = 6 && test "${#4}" = 22 && test -f "$6" && touch "$6.formatted"
"""
START = """#!/bin/sh
test -f "$1.formatted" && exec {python} {script} "$1"
"""


def install(home: Path) -> Path:
    """Make the directory `home` a KAFKA_HOME, and return it."""
    (home / "bin").mkdir(parents=True)
    start = START.format(python=sys.executable, script=Path(__file__).resolve())
    for name, text in (("kafka-storage.sh", STORAGE), ("kafka-server-start.sh", start)):
        path = home / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    return home


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def main(config: str) -> None:
    """Serve until killed, where `advertised.listeners` of the configuration says."""
    from confluent_kafka import Producer

    found = re.search(
        r"^advertised\.listeners=PLAINTEXT://([^:]+):(\d+)$", Path(config).read_text(), re.MULTILINE
    )
    assert found is not None
    cluster = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    broker = next(iter(cluster.list_topics(timeout=20).brokers.values()))
    with socket.create_server((found[1], int(found[2]))) as listener:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection((broker.host, broker.port))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
