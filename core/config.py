"""Reading what a user configures: TOML into a documented Struct, `host:port`, keys. Errors name the field."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_origin

import msgspec

from brokerless.core.errors import ConfigError

T = TypeVar("T")


def load_toml(path: str | Path, into: type[T]) -> T:
    """Read `path` into the Struct type `into`; unknown fields and wrong types raise ConfigError."""
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is not UTF-8: {error}") from None
    return parse_toml(text, into, name=str(path))


def parse_toml(text: str, into: type[T], *, name: str = "configuration") -> T:
    """Like `load_toml`, from a string; `name` is how errors call it."""
    try:
        return msgspec.convert(tomllib.loads(text), into)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(name, f"is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(name, str(error)) from None


def check_choices(config: msgspec.Struct) -> None:
    """Raise ConfigError if a field that offers some words has another one.

    For `__post_init__`: msgspec checks what it reads from a file, but not what a program passes.
    """
    for name, words in _choices(type(config)).items():
        if getattr(config, name) not in words:
            raise ConfigError(name, f"must be {' or '.join(map(repr, words))}, not {getattr(config, name)!r}")


@cache
def _choices(kind: type[msgspec.Struct]) -> dict[str, tuple[object, ...]]:
    fields = msgspec.structs.fields(kind)
    return {field.name: get_args(field.type) for field in fields if get_origin(field.type) is Literal}


def split_host_port(text: str, field: str) -> tuple[str, int]:
    """`host:port`, `:port` or `[v6]:port`, the host without brackets; ConfigError names the field."""
    host, colon, port = text.rpartition(":")
    if not colon or not is_port(port):
        raise ConfigError(field, f"{text!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_port(text: str) -> bool:
    """Whether this is a number from 0 to 65535, in ASCII digits: `str.isdigit` accepts what `int` refuses."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 0xFFFF


# Shorter keys can be guessed offline from one signed packet.
MIN_KEY_BYTES = 16


def check_key(key: bytes, field: str = "auth_key") -> bytes:
    """Return a key that two sides share, or raise ConfigError."""
    if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
        raise ConfigError(field, f"must be at least {MIN_KEY_BYTES} random bytes")
    return key
