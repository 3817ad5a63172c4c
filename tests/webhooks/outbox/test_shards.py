"""The plan of shards: in any order of joins, deaths and renewals one owner at a time, and all shards are taken."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.webhooks.outbox.schema import SHARDS
from brokerless.webhooks.outbox.shards import Lease, plan, shard_of

LEASE = 10


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["renew", "die", "wait"])), max_size=60))
def test_shards_are_shared_fairly(steps: list[tuple[str, str]]) -> None:
    """After any history, a few rounds of renewals give every live member its share, and no shard two owners."""
    table = {shard: Lease(shard, "", 0) for shard in range(SHARDS)}
    members: dict[str, int] = {}
    stopped: dict[str, frozenset[int]] = {}
    dead: set[str] = set()
    now = 0

    def renew(name: str) -> None:
        for shard in stopped.get(name, ()):
            if table[shard].owner == name:
                table[shard] = Lease(shard, "", 0)
        members[name] = now + LEASE
        live = [member for member, until in members.items() if until >= now and member not in dead]
        held = {shard for shard, lease in table.items() if lease.owner == name}
        decided = plan(name, held, table.values(), live, now, dead.__contains__)
        assert not decided.lost
        for shard in held:
            table[shard] = Lease(shard, name, now + LEASE)
        for shard in decided.take:
            before = table[shard]
            assert not before.owner or before.until < now or before.owner in dead
            table[shard] = Lease(shard, name, now + LEASE)
        stopped[name] = decided.give_up

    for name, action in steps:
        now += 1
        if action == "die":
            dead.add(name)
            members.pop(name, None)
        elif action == "renew" and name not in dead:
            renew(name)
    living = [name for name in "abcd" if name not in dead]
    for _ in range(4):
        now += 1
        for name in living:
            renew(name)
    if living:
        counts = {name: sum(lease.owner == name for lease in table.values()) for name in living}
        assert sum(counts.values()) == SHARDS
        assert max(counts.values()) <= -(-SHARDS // len(living))


def test_what_another_process_took_is_lost() -> None:
    """A process that slept learns which of its shards are another's now."""
    table = [Lease(shard, "me" if shard < 5 else "other", 100) for shard in range(8)]
    assert plan("me", range(8), table, ["me", "other"], 50, lambda _owner: False).lost == {5, 6, 7}


@given(st.text())
def test_every_endpoint_has_a_shard(name: str) -> None:
    """Any id belongs to one of the shards."""
    assert 0 <= shard_of(name) < SHARDS
