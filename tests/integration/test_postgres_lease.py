"""A lease in PostgreSQL: held by one connection, given back with it, and not held while the server hangs."""

import time

import psycopg
import pytest

from brokerless.core import MemoryJournal
from brokerless.direct import PostgresLease, Publisher
from tests.postgres import frozen

pytestmark = pytest.mark.xdist_group("postgres")


def test_a_lease_in_postgresql_is_held_by_one(server: str) -> None:
    """The second waits, another key is another lease, and the end of the connection gives it back."""
    one, two, other = PostgresLease(server, 7), PostgresLease(server, 7), PostgresLease(server, 8)
    assert one.acquire()
    assert one.acquire()
    assert one.holds()
    assert not two.acquire()
    assert not two.holds()
    assert other.acquire()
    assert one._connection is not None
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", (one._connection.info.backend_pid,))
    deadline = time.monotonic() + 30
    while not two.acquire():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not one.holds()
    assert not one.acquire()
    for lease in (one, two, other):
        lease.release()


def test_a_publisher_stops_dispatching_while_the_server_hangs(server: str) -> None:
    """It cannot show that it holds the lease, so it behaves as if it did not; afterwards it goes on."""
    with Publisher(
        "tcp://127.0.0.1:*", source="s", journal=MemoryJournal(), lease=PostgresLease(server, 9)
    ) as pub:
        assert pub._mirrored.may_dispatch(time.monotonic())
        deadline = time.monotonic() + 30
        with frozen(server):
            while pub._mirrored.may_dispatch(time.monotonic()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        while not pub._mirrored.may_dispatch(time.monotonic()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
