"""Which process delivers which endpoints: leases on shards. The plan is pure; `Store` applies it.

Every endpoint belongs to one of `SHARDS` shards by its id. Every process that delivers is a member and takes its fair
share of the shards, so one process owns an endpoint at a time and order, rate and concurrency stay exact. A process
that has more than its share stops delivering for some shards, waits until their attempts have ended, and gives them up.
"""

from collections.abc import Callable, Collection, Iterable
from zlib import crc32

import msgspec

from brokerless.webhooks.outbox.schema import SHARDS


def shard_of(endpoint_id: str) -> int:
    """The shard of an endpoint."""
    return crc32(endpoint_id.encode()) % SHARDS


class Lease(msgspec.Struct, frozen=True):
    """One row of the table: who has the shard, and until when (µs of the database's clock)."""

    shard: int
    owner: str
    until: int


class Plan(msgspec.Struct, frozen=True):
    """What a process should do next with the shards."""

    keep: frozenset[int]
    take: frozenset[int]
    give_up: frozenset[int]
    lost: frozenset[int]


def plan(
    owner: str,
    held: Collection[int],
    leases: Iterable[Lease],
    members: Collection[str],
    now: int,
    is_gone: Callable[[str], bool],
) -> Plan:
    """Compare what this process believes to hold with the table.

    `members` are the live members, this process included. The fair share is rounded up, so that all shards are taken.
    `lost` are shards that another process took over because this one did not renew in time.
    """
    table = {lease.shard: lease for lease in leases}
    mine = {shard for shard, lease in table.items() if lease.owner == owner}
    lost = frozenset(set(held) - mine)
    free = {
        shard
        for shard, lease in table.items()
        if lease.owner != owner and (not lease.owner or lease.until < now or is_gone(lease.owner))
    }
    share = -(-len(table) // max(1, len(members)))
    take = frozenset(sorted(free)[: max(0, share - len(mine))])
    give_up = frozenset(sorted(mine)[share:])
    return Plan(frozenset(mine - give_up), take, give_up, lost)
