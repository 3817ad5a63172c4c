"""CURVE keys: who a publisher is, who may listen."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq

from brokerless.core.errors import ConfigError

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LINE = re.compile(r"^\s*(public|secret)\s*=\s*\"(.{40})\"\s*$", re.MULTILINE)


def _key(value: str | bytes, what: str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    if not isinstance(raw, bytes) or not _KEY.fullmatch(raw):
        raise ConfigError(
            what, "is not a CURVE key: 40 characters of Z85, as `brokerless keys new` makes them"
        )
    return raw


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85 text. Its repr never shows the secret."""

    public: bytes
    secret: bytes

    def __post_init__(self) -> None:
        _key(self.public, "public key")
        _key(self.secret, "secret key")

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()!r}, secret=…)"

    @classmethod
    def new(cls) -> "KeyPair":
        """A fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write `path` (secret and public, readable by the owner only) and `path.pub`. Never overwrites."""
        secret_file, public_file = Path(path), Path(f"{os.fspath(path)}.pub")
        line = f'public = "{self.public.decode()}"\n'
        secret_text = f'{line}secret = "{self.secret.decode()}"\n'
        for target, text, mode in ((secret_file, secret_text, 0o600), (public_file, line, 0o644)):
            try:
                fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            except FileExistsError:
                raise ConfigError("path", f"{target} exists; keys are never overwritten") from None
            except OSError as error:
                raise ConfigError("path", f"cannot write {target}: {error.strerror}") from None
            with os.fdopen(fd, "w") as file:
                file.write(text)
        return secret_file, public_file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "KeyPair":
        """Read what `save` wrote. Raises ConfigError."""
        found = _read(path)
        if "secret" not in found or "public" not in found:
            raise ConfigError(
                "key file", f"{os.fspath(path)} has no secret key; the .pub file is for the other side"
            )
        return cls(found["public"], found["secret"])


def load_public(path: str | os.PathLike[str]) -> bytes:
    """The public key of a key file or its `.pub` file."""
    found = _read(path)
    if "public" not in found:
        raise ConfigError("key file", f"{os.fspath(path)} has no public key")
    return found["public"]


def _read(path: str | os.PathLike[str]) -> dict[str, bytes]:
    try:
        text = Path(path).read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(os.fspath(path), f"cannot be read: {cause}") from None
    return {name: value.encode() for name, value in _LINE.findall(text)}


class ServerKeys(msgspec.Struct, frozen=True):
    """A publisher's own keys."""

    pair: KeyPair

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ServerKeys":
        """From a key file."""
        return cls(KeyPair.load(path))


class ClientKeys(msgspec.Struct, frozen=True):
    """A client's own keys, and the public key of the publisher it means to talk to."""

    pair: KeyPair
    server: bytes

    def __post_init__(self) -> None:
        _key(self.server, "server key")

    @classmethod
    def load(cls, path: str | os.PathLike[str], server: str | os.PathLike[str]) -> "ClientKeys":
        """From the client's key file and the publisher's `.pub` file."""
        return cls(KeyPair.load(path), load_public(server))


def allow_list(allow: Iterable[str | bytes] | None) -> frozenset[bytes] | None:
    """Public keys of clients that may connect; None allows every client that knows the server's key."""
    if allow is None:
        return None
    if isinstance(allow, (str, bytes)):
        raise ConfigError("allow", "must be a list of public keys")
    return frozenset(_key(key, "allow") for key in allow)
