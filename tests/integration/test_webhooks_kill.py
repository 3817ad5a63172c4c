"""Nothing that `publish` accepted is lost, however often the sender is killed and whatever the receivers do."""

import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brokerless.core import JournalReader
from brokerless.losstest.harness.ports import Ports
from brokerless.webhooks import AddressPolicy, BlockingDispatcher, DispatcherConfig, Schedule

KILLS = 50
CONFIG = DispatcherConfig(
    policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
    verification="none",
    schedule=Schedule(delays_s=(0.1,) * 1000),  # the default waits for minutes after a second failure
)


class Roles:
    """Starts and kills real processes, which are forked from one prepared parent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        script = Path(__file__).with_name("webhook_roles.py")
        self._parent = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, role: str, **options: object) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        order = {"role": role, "stderr": str(self.directory / f"{role}.stderr"), **options}
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the process to be gone")

    def close(self) -> None:
        self._parent.kill()  # its children die with it
        self._parent.communicate()


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    made = Roles(tmp_path)
    yield made
    made.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def lines(path: Path, word: str) -> list[list[str]]:
    """The witness's lines that begin with the word; an incomplete last line is not counted."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return [line.split() for line in whole.splitlines() if line.split()[0] == word]


def journalled(path: Path) -> list[str]:
    """Bodies in a receiver's journal."""
    bodies = []
    with JournalReader(path) as reader:
        offset = reader.oldest
        while offset < reader.next:
            chunk = reader.read(offset)
            bodies += [
                e.data.decode() for frame in chunk.frames for e in frame.events() if e.offset >= offset
            ]
            offset = chunk.next
    return bodies


def pending(outbox: Path) -> int:
    with sqlite3.connect(outbox, timeout=30) as db:
        new = db.execute("SELECT count(*) FROM outbox_events WHERE routed = 0").fetchone()[0]
        return int(db.execute("SELECT count(*) FROM outbox_deliveries WHERE state = 0").fetchone()[0] + new)


FAULTS = ["offline", "hang", "500", "drip", "lose", "half"]


@pytest.mark.timeout(240)
def test_fifty_kills_lose_nothing(roles: Roles, tmp_path: Path, ports: Ports) -> None:
    """A sender killed 50 times at random moments, with receivers that are offline or refusing, hang, answer 500, drip,
    say 200 and die without storing, or die between storing and answering: every accepted event is in every receiver's
    journal exactly once, and every repetition carried the same webhook-id."""
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    outbox = tmp_path / "outbox.sqlite"
    port_of = {fault: ports.take() for fault in FAULTS}
    ids: dict[str, str] = {}
    secrets: dict[str, str] = {}
    with BlockingDispatcher(outbox, config=CONFIG) as setup:
        for fault, port in port_of.items():
            endpoint, secret = setup.add_endpoint(f"http://127.0.0.1:{port}/{fault}", ["**"])
            ids[fault], secrets[fault] = endpoint.id, secret
    running: dict[str, int] = {}

    def log(fault: str) -> Path:
        return tmp_path / f"{fault}.log"

    def break_receivers() -> None:
        for fault in ("hang", "500", "drip"):
            running[fault] = roles.start("faulty", port=port_of[fault], kind=fault, log=str(log(fault)))
        running["lose"] = roles.start(
            "faulty", port=port_of["lose"], kind="lose", log=str(log("lose")), die_after=30
        )

    def mend(fault: str, **options: object) -> None:
        roles.kill(running.pop(fault, 2**22 + 1))
        running[fault] = roles.start(
            "kit",
            port=port_of[fault],
            journal=str(tmp_path / fault),
            secret=secrets[fault],
            log=str(log(fault)),
            **options,
        )

    witness = tmp_path / "sender.log"
    break_receivers()
    number = 0
    for kill in range(KILLS):
        if not os.path.exists(f"/proc/{running.get('half', 0)}"):
            mend("half", die_before_answer=moments.randrange(1, 40))
        if kill == KILLS // 2:
            mend("500")
            mend("offline")
        started = len(lines(witness, "started"))
        sender = roles.start(
            "sender", outbox=str(outbox), witness=str(witness), first=number, count=30, pause_s=0.005
        )
        number += 30
        if moments.random() < 0.8:
            wait_until(lambda s=started: len(lines(witness, "started")) > s, "the sender to start")  # type: ignore[misc]
        time.sleep(moments.random() * 0.35)
        roles.kill(sender)

    accepted = {body: identity for _, body, identity in lines(witness, "accepted")}
    assert len(accepted) > KILLS, "the sender was killed before it could publish: the test proves nothing"
    for fault in FAULTS:
        mend(fault)
        wait_until(lambda f=fault: listening(port_of[f]), f"receiver {fault} to listen")  # type: ignore[misc]
    # The receiver that said 200 and stored nothing: only a replay can help, and the kit drops what it has.
    with BlockingDispatcher(outbox, config=CONFIG) as mended:
        mended.replay(ids["lose"], 0, only="all")
        for endpoint in mended.endpoints():
            assert endpoint.state == "active"
        wait_until(lambda: pending(outbox) == 0, "everything to be delivered", 120)
        account = mended.account()
        assert account.balanced
        assert account.lost == {}
        assert account.delivered == account.accepted >= len(accepted) * len(FAULTS)

    for fault in FAULTS:
        bodies = Counter(journalled(tmp_path / fault))
        missing = set(accepted) - set(bodies)
        assert not missing, f"{fault}: {len(missing)} of {len(accepted)} accepted events are lost"
        assert max(bodies.values()) == 1, f"{fault}: the kit stored a duplicate"
        sent = [(body, identity) for _, identity, body in lines(log(fault), "got")]
        by_body: dict[str, set[str]] = {}
        for body, identity in sent:
            by_body.setdefault(body, set()).add(identity)
        assert all(len(found) == 1 for found in by_body.values()), f"{fault}: a repetition changed its id"
        assert all(by_body[body] == {identity} for body, identity in accepted.items())
    repeated = sum(len(lines(log(fault), "got")) - len(accepted) for fault in FAULTS)
    assert repeated > 0, "no delivery was repeated: the faults did nothing"
