"""The keys of a client, as options of every command that talks to a publisher."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from brokerless.core.errors import ConfigError
from brokerless.direct import ClientKeys

Curve = Annotated[Path | None, Parameter("--curve", help="Key file of this client.")]
ServerKey = Annotated[Path | None, Parameter("--server-key", help="Public key file of the publisher.")]


def client_keys(curve: Path | None, server_key: Path | None) -> ClientKeys | None:
    """The keys of --curve and --server-key, if they are given. Raises ConfigError."""
    if curve is None and server_key is None:
        return None
    if curve is None or server_key is None:
        raise ConfigError(
            "--curve", "encryption needs both --curve (own key file) and --server-key (publisher's)"
        )
    return ClientKeys.load(curve, server_key)
