"""Tokens and limits in files, read again when they change: no restart for a new tenant."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request

from brokerless.core.config import load_toml
from brokerless.core.errors import ConfigError
from brokerless.webhooks.api.http import TenantLimits, TokenTable

logger = logging.getLogger("brokerless.webhooks")
T = TypeVar("T")
# How often a file is looked at, at most.
LOOK_S = 1.0


class WatchedFile(Generic[T]):
    """The content of a file, read again when it changed. One that became unreadable changes nothing, and is logged."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        self._path = path
        self._read = read
        self._value = read(path)
        self._stamp = self._look()
        self._looked = time.monotonic()

    def _look(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_size)

    @property
    def value(self) -> T:
        """The content, at most a second old."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._value = self._read(self._path)
                    logger.info("%s was read again", self._path)
                except ConfigError as error:
                    logger.warning("%s; what it said before still holds", error)
        return self._value


def read_tokens(path: Path) -> dict[str, str]:
    """Tokens and their tenants from lines `TENANT TOKEN`; empty lines and # are skipped."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        hint = f"make one with: brokerless webhooks token TENANT > {path}"
        raise ConfigError(str(path), f"cannot be read: {error.strerror}; {hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "is not a text file") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ConfigError(f"{path}:{number}", "must be: TENANT TOKEN")
        found[words[1]] = words[0]
    if not found:
        raise ConfigError(str(path), "has no tokens; make one with: brokerless webhooks token TENANT")
    return found


def token_file(path: Path) -> Callable[[Request], str | None]:
    """An `auth` for `registration_app` that follows a file of lines `TENANT TOKEN`."""
    watched = WatchedFile(path, lambda found: TokenTable(read_tokens(found)))

    def tenant(request: Request) -> str | None:
        return watched.value.tenant(request)

    return tenant


class LimitsTable(msgspec.Struct, forbid_unknown_fields=True):
    """The limits of tenants: TOML tables `[tenant.NAME]`; `[tenant."*"]` are those of all others."""

    tenant: dict[str, TenantLimits] = {}


def limits_file(path: Path) -> Callable[[str], TenantLimits]:
    """A `limits` for `registration_app` that follows a TOML file."""
    watched = WatchedFile(path, lambda found: load_toml(found, LimitsTable).tenant)
    return lambda tenant: watched.value.get(tenant) or watched.value.get("*") or TenantLimits()
