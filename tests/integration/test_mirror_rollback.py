"""A publisher's disk that goes back and comes back: what was mirrored is neither lost nor delivered to nobody."""

import os
import random
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from brokerless.losstest.harness.ports import Ports
from tests.integration.test_mirror_campaign import ACTORS, Actor, lines, until


class Round:
    """Real processes: a publisher that waits for one of two mirrors, a subscriber and a worker. Again and again its
    journal is replaced by what it was some time ago, while the publisher is killed, and it is started again."""

    def __init__(self, path: Path, ports: Ports, stack: ExitStack, seed: int) -> None:
        self.chance = random.Random(seed)
        self.path = path
        self._stack = stack
        self.a, self.b, self.c = (f"tcp://127.0.0.1:{ports.take()}" for _ in range(3))
        self.mirrors = [
            self.start("mirror", self.a, path / place[-5:], path / "none", place, "none")
            for place in (self.b, self.c)
        ]
        self.publisher = self.publish()
        self.subscriber = self.start("subscriber", self.a, path / "cursor", path / "received")
        self.worker = self.start("worker", self.a, "g", path / "worked")

    def start(self, *arguments: object) -> Actor:
        actor = Actor([sys.executable, str(ACTORS), *map(str, arguments)])
        self._stack.callback(actor.kill)
        return actor

    def publish(self) -> Actor:
        journal, accepted = self.path / "journal", self.path / "accepted"
        return self.start("publisher", self.a, journal, accepted, f"{self.b},{self.c}", "mirrored")

    def mirrored(self) -> set[str]:
        return {name for _, _, name, mirrored in lines(self.path / "accepted") if mirrored == "1"}

    def run(self, times: int) -> None:
        for _ in range(times):
            before = len(self.mirrored())
            until(lambda before=before: len(self.mirrored()) > before + 20, "events that are mirrored")
            self.go_back()
        done = self.publisher.tell("finish")

        def has_all() -> bool:
            received, worked = (
                {line[2] for line in lines(self.path / name)} for name in ("received", "worked")
            )
            return self.mirrored() <= received and self.mirrored() <= worked

        until(has_all, f"everything mirrored, up to {done['next']}")
        ids = [name for _, _, name in lines(self.path / "received")]
        assert len(ids) == len(set(ids)), "an event came twice"
        for mirror in self.mirrors:
            until(lambda mirror=mirror: mirror.tell()["next"] == done["next"], "the mirrors have all")
            assert mirror.tell()["epochs"] == done["epochs"]

    def go_back(self) -> None:
        journal, copy = self.path / "journal", self.path / "snapshot"
        os.kill(self.publisher.pid, signal.SIGSTOP)
        shutil.copytree(journal, copy)
        os.kill(self.publisher.pid, signal.SIGCONT)
        time.sleep(self.chance.uniform(0.0, 0.4))
        self.publisher.kill()
        shutil.rmtree(journal)
        copy.rename(journal)
        self.publisher = self.publish()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_disk_that_goes_back_loses_no_mirrored_event(tmp_path: Path, ports: Ports, seed: int) -> None:
    """Three times each; the publisher takes from its mirrors what it had lost, before it gives an offset to others."""
    with ExitStack() as stack:
        Round(tmp_path, ports, stack, seed).run(3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_disks_that_go_back(tmp_path: Path, ports: Ports) -> None:
    """The same for much longer."""
    for seed in range(20):
        path = tmp_path / str(seed)
        path.mkdir()
        with ExitStack() as stack:
            Round(path, ports, stack, seed).run(10)
        shutil.rmtree(path)
