"""Secrets encrypted at rest: nothing readable in the file, a new key without stopping, and clear errors."""

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from brokerless.core.errors import ConfigError
from brokerless.webhooks import Dispatcher, OutboxError, verify
from brokerless.webhooks.outbox.vault import Vault, make_key

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]
Eventually = Callable[..., Awaitable[None]]


def content(directory: Path) -> bytes:
    """All that is on disk: the file, and its log."""
    return b"".join(path.read_bytes() for path in sorted(directory.glob("outbox.sqlite*")))


def made(directory: Path, config: Any, *keys: str) -> Dispatcher:
    return Dispatcher(directory / "outbox.sqlite", config=config, encryption_keys=keys)


async def test_no_secret_is_readable(
    tmp_path: Path, targets: Targets, make_config: Any, eventually: Eventually
) -> None:
    """Signing keys, own headers and the portal's key are not in the file; deliveries are signed as ever."""
    target, key = await targets(), make_key()
    async with made(tmp_path, make_config(), key) as dispatcher:
        headers = {"authorization": "Bearer of-the-consumer"}
        endpoint, secret = await dispatcher.add_endpoint(target.url, ["**"], headers=headers)
        await dispatcher.publish("t", b"{}")
        await eventually(lambda: target.got)
        _, newer = await dispatcher.rotate_secret(endpoint.id)
        portal_key = dispatcher.outbox.portal_key.hex()
    for text in (secret.removeprefix("whsec_"), newer.removeprefix("whsec_"), "of-the-consumer", portal_key):
        assert text.encode() not in content(tmp_path)
    async with made(tmp_path, make_config(), key) as again:
        assert (await again.endpoint(endpoint.id)).headers == headers
        await again.publish("t", b"{}")
        await eventually(lambda: len(target.got) == 2)
        assert again.outbox.portal_key.hex() == portal_key
    verify(target.got[0].headers.items(), target.got[0].body, secret)
    for known in (secret, newer):
        verify(target.got[1].headers.items(), target.got[1].body, known)
    assert target.got[1].headers["authorization"] == "Bearer of-the-consumer"


async def test_a_key_is_replaced_while_everything_runs(
    tmp_path: Path, targets: Targets, make_config: Any, eventually: Eventually
) -> None:
    """From plain to a key to a newer one, with two dispatchers that overlap: events go on, the old one goes."""
    target = await targets()
    old, new = make_key(), make_key()
    async with made(tmp_path, make_config()) as plain:
        ids = [(await plain.add_endpoint(target.url, [f"t{n}"]))[0].id for n in range(3)]
        link = plain.portal_link("acme").partition("token=")[2]

    def sealed(key: str) -> bool:
        with sqlite3.connect(tmp_path / "outbox.sqlite") as db:
            docs = [row[0] for row in db.execute("SELECT doc FROM outbox_endpoints")]
            (portal_key,) = db.execute("SELECT v FROM outbox_meta WHERE k = 'portal_key'").fetchone()
        name = Vault([key]).name
        return portal_key.startswith(f"{name}:") and all(f'"sealed":"{name}:' in doc for doc in docs)

    async with made(tmp_path, make_config(), old):
        await eventually(lambda: sealed(old), "plain secrets to be encrypted")
    async with (
        made(tmp_path, make_config(), old, new) as prepared,
        made(tmp_path, make_config(), new, old) as ahead,
    ):
        await eventually(lambda: len(prepared.deliverer.shards) == len(ahead.deliverer.shards))
        await prepared.maintenance.seal_anew()
        await ahead.maintenance.seal_anew()
        for n in range(3):
            await (prepared, ahead)[n % 2].publish(f"t{n}", b"{}")
        await eventually(lambda: len(target.got) == 3)
    # Whoever had shard 0 sealed with its own first key; now nobody puts the old one first.
    async with made(tmp_path, make_config(), new, old):
        await eventually(lambda: sealed(new), "secrets to be encrypted with the new key")
    async with made(tmp_path, make_config(), new) as after:
        assert [endpoint.id for endpoint in await after.endpoints()] == sorted(ids)
        assert after.portal_visitor(link) == "acme"
        await after.publish("t0", b"{}")
        await eventually(lambda: len(target.got) == 4)


async def test_a_missing_or_wrong_key_is_one_clear_error(tmp_path: Path, make_config: Any) -> None:
    """Without the key the outbox does not open; the error names the key's number and not the key."""
    key = make_key()
    async with made(tmp_path, make_config(), key) as dispatcher:
        await dispatcher.add_endpoint("http://127.0.0.1:9/", ["**"])
    for keys in ((), (make_key(),)):
        with pytest.raises(OutboxError, match=f"encrypted with key {Vault([key]).name}") as caught:
            await made(tmp_path, make_config(), *keys).start()
        assert key not in str(caught.value)
    for wrong in ("short", "", "é" * 44):
        with pytest.raises(ConfigError) as refused:
            Vault([wrong])
        assert refused.value.field == "encryption_keys"


def test_a_changed_text_is_noticed() -> None:
    """One changed character of a sealed secret is an error and not another secret."""
    vault = Vault([make_key()])
    sealed = vault.seal(b"secret")
    assert vault.unseal(sealed, "o") == b"secret"
    changed = sealed[:-8] + ("A" if sealed[-8] != "A" else "B") + sealed[-7:]
    with pytest.raises(OutboxError, match="was changed"):
        vault.unseal(changed, "o")
