"""The processes of the mirror campaign. Each obeys lines of JSON on stdin and answers each with one on stdout.

    publisher ADDRESS JOURNAL WITNESS MIRRORS(,) WAIT       WAIT: mirrored or none
    mirror UPSTREAM JOURNAL WITNESS SERVE WAIT              after `promote` it publishes as well
    subscriber ADDRESS CURSOR WITNESS
    worker ADDRESS GROUP WITNESS

A publisher's witness has a line for each event that it accepted: epoch, offset, id, and whether it is known to be
mirrored. A consumer's has a line for each event that it was handed: epoch, offset, id. They are written at once.
"""

import itertools
import json
import os
import sys
import threading
import time
from typing import Any

from brokerless.core import DiskJournal
from brokerless.core.errors import BrokerlessError, NotMirrored, Superseded
from brokerless.direct import Mirror, Publisher, Subscriber, Worker


def open_witness(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Producer:
    """Publishes until it is told to stop or is replaced, and notes when it dispatched."""

    def __init__(self, publisher: Publisher, witness: str, wait: str) -> None:
        self.publisher = publisher
        self._out = open_witness(witness)
        self._wait = wait
        self.stopping = False
        self.dispatched: list[float] = []  # when the first and the last delivery was noticed
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._publish, self._watch)]
        for thread in self._threads:
            thread.start()

    def _publish(self) -> None:
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        for i in itertools.count():
            if self.stopping:
                return
            ids = [b"%s-%d-%d" % (name.encode(), i, n) for n in range(3)]
            mirrored = 1
            try:
                if self._wait == "mirrored":
                    before = self.publisher.journal.next
                    try:
                        receipt = self.publisher.publish_many("t", ids, wait="mirrored", timeout=0.5)
                        first = receipt.offset
                    except NotMirrored as error:
                        first, mirrored = error.offset - 2, 0
                        assert first >= before
                else:
                    receipt, mirrored = self.publisher.publish_many("t", ids), 0
                    first = receipt.offset
            except Superseded:
                return
            epoch = self.publisher.journal.epoch
            lines = [b"%d %d %s %d\n" % (epoch, first + n, ids[n], mirrored) for n in range(3)]
            os.write(self._out, b"".join(lines))
            time.sleep(0.002)

    def _watch(self) -> None:
        had = 0
        while True:
            granted = self.publisher._coordinator.counters.granted
            if granted != had:
                had, now = granted, time.monotonic()
                self.dispatched = [self.dispatched[0] if self.dispatched else now, now]
            time.sleep(0.005)

    def status(self) -> dict[str, Any]:
        gone = self.publisher.superseded
        return {
            "next": self.publisher.journal.next,
            "epochs": self.publisher.journal.epochs(),
            "dispatched": self.dispatched,
            "superseded": None if gone is None else {"by": gone.by, "unmirrored": gone.unmirrored},
            "mirrors": self.publisher.mirrors(),
            "acked": {name: (g.acked, g.pending, g.lost) for name, g in self.publisher.groups().items()},
        }


def obey(handle: Any) -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        word = json.loads(line)
        try:
            said = handle(word)
        except BrokerlessError as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)


def publisher(address: str, journal: str, witness: str, mirrors: str, wait: str) -> None:
    kept = DiskJournal(journal, fsync="never")
    pub = Publisher(address, source="s", journal=kept, mirrors=mirrors.split(","), announce=False)
    producer = Producer(pub, witness, wait)

    def handle(word: dict[str, Any]) -> dict[str, Any]:
        if word["do"] == "finish":
            producer.stopping = True
            producer._threads[0].join()
            pub.flush()
        if word["do"] == "close":
            pub.close()
            return {}
        return producer.status()

    obey(handle)


def mirror(upstream: str, journal: str, witness: str, serve: str, wait: str) -> None:
    copy = Mirror(upstream, journal=DiskJournal(journal, fsync="never"), serve=serve)
    producer: list[Producer] = []

    def handle(word: dict[str, Any]) -> dict[str, Any]:
        if word["do"] == "promote":
            pub = copy.promote(announce=False)
            producer.append(Producer(pub, witness, wait))
        if producer:
            if word["do"] == "finish":
                producer[0].stopping = True
                producer[0]._threads[0].join()
                producer[0].publisher.flush()
            return producer[0].status()
        return {**copy.status(), "epochs": copy.journal.epochs()}

    obey(handle)


def subscriber(address: str, cursor: str, witness: str) -> None:
    out = open_witness(witness)
    sub = Subscriber(address, cursor=cursor, commit_every_s=0.1, announce=False)

    def receive() -> None:
        for event in sub:
            os.write(out, b"%d %d %s\n" % (event.epoch, event.offset, event.data))

    threading.Thread(target=receive, daemon=True).start()

    def handle(word: dict[str, Any]) -> dict[str, Any]:
        lost = [(word.epoch, word.first, word.last, str(word.reason)) for word in sub.losses]
        return {"lost": lost, "at": sub._sources[0].protocol.address}

    obey(handle)


def worker(address: str, group: str, witness: str) -> None:
    out = open_witness(witness)
    work = Worker(address, group=group, lease_s=5, max_deliver=1000, prefetch=20, announce=False)

    def receive() -> None:
        for delivery in work:
            event = delivery.event
            os.write(out, b"%d %d %s\n" % (event.epoch, event.offset, event.data))
            delivery.ack()

    threading.Thread(target=receive, daemon=True).start()
    obey(lambda _: {})


if __name__ == "__main__":
    {"publisher": publisher, "mirror": mirror, "subscriber": subscriber, "worker": worker}[sys.argv[1]](
        *sys.argv[2:]
    )
