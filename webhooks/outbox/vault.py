"""Secrets encrypted at rest: signing keys and own headers of endpoints, and the key of portal links.

The first key encrypts, all of them decrypt, so a new key can be brought in without stopping: give it second to every
process, then first, and drop the old one when `Maintenance` has encrypted everything again. Fernet: AES-128-CBC with
HMAC-SHA256. What is stored begins with the name of its key, so it is known which key a row still needs.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from brokerless.core.errors import ConfigError, MissingDependency
from brokerless.webhooks.errors import OutboxError


class Vault:
    """Keys, the newest first; none: nothing is encrypted."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys: dict[str, Any] = {}
        if keys:
            try:
                from cryptography.fernet import Fernet
            except ImportError:
                raise MissingDependency("cryptography", "webhooks", "encryption of secrets") from None
            for key in keys:
                try:
                    made = Fernet(key)
                except (ValueError, TypeError):
                    # Without the key itself: errors are printed and logged.
                    problem = "is not a key; make one with: brokerless webhooks key"
                    raise ConfigError("encryption_keys", problem) from None
                self._keys[hashlib.sha256(key.encode()).hexdigest()[:8]] = made
        self.name = next(iter(self._keys), "")
        """The name of the key that encrypts; empty without one."""

    def seal(self, text: bytes) -> str:
        """Encrypt with the first key."""
        sealed: bytes = self._keys[self.name].encrypt(text)
        return f"{self.name}:{sealed.decode()}"

    def unseal(self, sealed: str, outbox: str) -> bytes:
        """Decrypt; OutboxError if the key is not there, or the text was changed."""
        name, _, token = sealed.partition(":")
        key = self._keys.get(name)
        if key is None:
            raise OutboxError(outbox, f"its secrets are encrypted with key {name}, which was not given")
        from cryptography.fernet import InvalidToken

        try:
            text: bytes = key.decrypt(token.encode())
        except InvalidToken:
            raise OutboxError(
                outbox, f"a secret cannot be decrypted with key {name}: it was changed"
            ) from None
        return text


PLAIN = Vault()


def make_key() -> str:
    """A new random key."""
    try:
        from cryptography.fernet import Fernet
    except ImportError:
        raise MissingDependency("cryptography", "webhooks", "encryption of secrets") from None
    return Fernet.generate_key().decode()
