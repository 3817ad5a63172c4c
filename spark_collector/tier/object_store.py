"""Object stores by URL, through `obstore`."""

import os
import re
from datetime import timedelta
from typing import Any

from brokerless.core.errors import ConfigError, MissingDependency

# A store that is away must be noticed while a batch is planned, not minutes later; callers try again.
_CONNECT_TIMEOUT = timedelta(seconds=5)
_TIMEOUT = timedelta(seconds=60)
_RETRY: dict[str, Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
# More of an error than that says nothing new.
_CAUSE_CHARS = 500
# Of remote tiers; a directory that machines mount is one, too.
FILE = "file://"
SCHEMES = ("s3://", "s3a://", "gs://", "abfs://", "abfss://", "az://", "memory://")


def is_url(path: str) -> bool:
    """Whether this names an object store, and not a directory. Raises ConfigError for an unknown scheme."""
    if "://" not in path or path.startswith("file://"):
        return False
    if not path.startswith(SCHEMES):
        stores = ", ".join(SCHEMES[:-1])
        raise ConfigError(
            "path", f"{path}: no such store; there are {stores}, and file:// for what is mounted here"
        )
    return True


def open_store(url: str, options: dict[str, str] | None = None, *, make: bool = False) -> Any:
    """The obstore store whose root is this URL.

    `options` are those of obstore and deltalake (`aws_access_key_id`, `aws_endpoint`, `aws_allow_http`, …); both also
    read the usual environment variables. `make`: make the directory, if it is one (`file://`, or a path). Raises
    MissingDependency without obstore, ConfigError for options that the store does not have.
    """
    try:
        import obstore.store
        from obstore.exceptions import BaseError
    except ImportError:
        raise MissingDependency("obstore", "remote", "an object store") from None
    if "://" not in url or url.startswith(FILE):
        return obstore.store.LocalStore(url.removeprefix(FILE), mkdir=make)
    config = {key.lower(): value for key, value in (options or {}).items()}
    client: dict[str, Any] = {"connect_timeout": _CONNECT_TIMEOUT, "timeout": _TIMEOUT}
    # Our own client options would hide the variable from obstore.
    for value in (
        config.pop("aws_allow_http", ""),
        config.pop("allow_http", ""),
        os.environ.get("AWS_ALLOW_HTTP", ""),
    ):
        if value.lower() in ("true", "1"):
            client["allow_http"] = True
    config.pop("aws_conditional_put", None)
    from_url: Any = obstore.store.from_url  # typed for one store, and serves all
    try:
        return from_url(url, config=config or None, client_options=client, retry_config=_RETRY)
    except BaseError as error:
        raise ConfigError("storageOptions", f"{url}: {cause(error)}") from None


def cause(error: BaseException) -> str:
    """What a store's library says in one line, without the pages of detail after it and the tags of the store's XML."""
    said = re.sub(r"<[^>]*>", " ", str(error).partition("\n\nDebug source")[0])
    return " ".join(said.split())[:_CAUSE_CHARS] or type(error).__name__
