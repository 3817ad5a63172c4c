"""The processes that the fault tests of direct start, stop and kill. Each writes a witness file line by line.

    publisher ADDRESS JOURNAL WITNESS RATE     JOURNAL is a directory, or mem:BYTES; SIGUSR1: publish no more,
                                               SIGUSR2: print what the groups have
    subscriber ADDRESS CURSOR WITNESS          CURSOR may be -
    worker ADDRESS GROUP WITNESS LEASE_S

A line is written before the event is committed or acknowledged, so that a kill between the two shows as a
duplicate and never as a loss. Every process prints `ready` when it is, and its accounting as JSON on SIGTERM.
"""

import itertools
import json
import os
import signal
import sys
import time

from brokerless.core import DiskJournal, MemoryJournal, Retention
from brokerless.direct import Publisher, Subscriber, Worker


class Stop(Exception):
    """SIGTERM arrived."""


def say(word: str) -> None:
    print(word, flush=True)


def publisher(address: str, journal: str, witness: str, rate: str) -> None:
    out = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if journal.startswith("mem:"):
        kept: DiskJournal | MemoryJournal = MemoryJournal(retention=Retention(max_bytes=int(journal[4:])))
    else:
        kept = DiskJournal(journal, fsync="never")
    with Publisher(address, source="p", journal=kept) as pub:

        def groups() -> dict[str, tuple[int, int, int, bool]]:
            return {name: (g.acked, g.pending, g.lost, g.balanced) for name, g in pub.groups().items()}

        finish: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: finish.append(number))
        signal.signal(signal.SIGUSR2, lambda *_: say(json.dumps(groups())))
        say("ready")
        start, first = time.monotonic(), kept.next
        for i in itertools.count(first):
            if finish:
                break
            receipt = pub.publish(f"t{i % 3}", b"%d" % i + b"." * 80)
            os.write(out, b"%d\n" % receipt.offset)
            if i % 10 == 0:
                ahead = (i - first) / float(rate) - (time.monotonic() - start)
                if ahead > 0:
                    time.sleep(ahead)
        say(f"{kept.next + kept.staged}")
        try:
            while True:
                time.sleep(0.1)
        except Stop:
            say(json.dumps({"next": kept.next, "oldest": kept.oldest}))


def subscriber(address: str, cursor: str, witness: str) -> None:
    out = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    start = "cursor" if cursor != "-" else "oldest"
    with Subscriber(
        address, start=start, cursor=cursor if cursor != "-" else None, commit_every_s=0.05
    ) as sub:
        signal.signal(signal.SIGTERM, lambda *_: sub.stop())
        say("ready")
        for event in sub:
            os.write(out, b"%d %d\n" % (event.offset, sub.redelivered(event)))
        account = sub.ledger.account()
        lost = [(word.first, word.last, word.reason) for word in sub.losses]
        say(
            json.dumps(
                {
                    "delivered": account.delivered,
                    "lost": account.lost,
                    "by_reason": account.lost_by_reason,
                    "balanced": account.balanced,
                    "duplicates": account.duplicates,
                    "losses": lost,
                    "counters": sub.counters.snapshot(),
                }
            )
        )


def worker(address: str, group: str, witness: str, lease_s: str) -> None:
    out = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Worker(address, group=group, lease_s=float(lease_s), max_deliver=1000, prefetch=50) as work:
        signal.signal(signal.SIGTERM, lambda *_: work.stop())
        say("ready")
        for delivery in work:
            os.write(out, b"%d %d\n" % (delivery.event.offset, delivery.attempt))
            delivery.ack()


def stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stop


def main(role: str, *args: str) -> None:
    signal.signal(signal.SIGTERM, stop)
    {"publisher": publisher, "subscriber": subscriber, "worker": worker}[role](*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
