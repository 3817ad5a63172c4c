"""Kills of application and relay: every committed row is published exactly once, and nothing else is."""

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brokerless.core import JournalReader
from tests.direct.test_ids import events_of
from tests.integration.outbox_actors import open_database

DEADLINE_S = 600.0  # a campaign ends with all that is left to do, on a machine that may be busy


class Actor:
    """One process of the campaign."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.integration.outbox_actors", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def finish(self) -> None:
        """Let it do all that there is, and end."""
        self.process.communicate("\n", timeout=DEADLINE_S)
        assert self.process.returncode == 0

    @property
    def running(self) -> bool:
        return self.process.poll() is None


def campaign(where: str, journal: Path, seed: int, kills: int, rows: int) -> None:
    """Kill application and relay in turn at random moments, then let both finish, and compare."""
    chance = random.Random(seed)
    start = {
        "application": lambda: Actor("application", where, str(chance.random()), str(rows)),
        "relay": lambda: Actor("relay", where, str(journal)),
    }
    actors = {name: make() for name, make in start.items()}
    try:
        for _ in range(kills):
            time.sleep(chance.random() * 0.15)
            victim = chance.choice(sorted(actors))
            actors[victim].kill()
            actors[victim] = start[victim]()
        actors["application"].finish()
        actors["relay"].finish()
    finally:
        for actor in actors.values():
            if actor.running:
                actor.kill()
    with contextlib.closing(open_database(where)) as connection:
        committed = [n for (n,) in connection.execute("SELECT n FROM orders ORDER BY n").fetchall()]
        assert not connection.execute("SELECT n FROM brokerless_outbox").fetchall()
    with JournalReader(journal) as reader:
        found = [int(event.data) for event in events_of(reader)]
    assert committed == list(range(rows))
    assert found == committed  # each once, and in order: there is one application


def campaign_of_ids(journal: Path, seed: int, kills: int, many: int) -> None:
    """Kill a publisher that repeats its ids."""
    chance = random.Random(seed)
    actor = Actor("ids", str(journal), str(chance.random()), str(many))
    try:
        for _ in range(kills):
            time.sleep(chance.random() * 0.1)
            actor.kill()
            actor = Actor("ids", str(journal), str(chance.random()), str(many))
        actor.finish()
    finally:
        if actor.running:
            actor.kill()
    with JournalReader(journal) as reader:
        found = [int(event.data) for event in events_of(reader)]
    assert found == list(range(many))


def test_the_outbox_survives_kills(tmp_path: Path) -> None:
    """In SQLite."""
    campaign(str(tmp_path / "app.db"), tmp_path / "journal", 1, 6, 2000)


@pytest.mark.xdist_group("postgres")
def test_the_outbox_in_postgresql_survives_kills(server: str, tmp_path: Path) -> None:
    """In PostgreSQL."""
    campaign(server, tmp_path / "journal", 2, 4, 1000)


def test_ids_survive_kills(tmp_path: Path) -> None:
    """Every id is in the journal once, however often its publisher was killed and began again a little earlier."""
    campaign_of_ids(tmp_path / "journal", 3, 5, 20_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path: Path) -> None:
    """Of application and relay."""
    campaign(str(tmp_path / "app.db"), tmp_path / "journal", 4, 200, 60_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("postgres")
def test_two_hundred_kills_beside_postgresql(server: str, tmp_path: Path) -> None:
    """The same with the outbox in PostgreSQL."""
    campaign(server, tmp_path / "journal", 6, 200, 30_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills_of_a_publisher_with_ids(tmp_path: Path) -> None:
    """The same for ids alone."""
    campaign_of_ids(tmp_path / "journal", 5, 200, 400_000)
