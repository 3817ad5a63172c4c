"""Which library serves an address."""

from brokerless.core.errors import ConfigError, MissingDependency
from brokerless.direct.address import Address
from brokerless.direct.io.base import LIVE_QUEUE, Network
from brokerless.direct.io.zmq import ZmqNetwork
from brokerless.direct.keys import ClientKeys, ServerKeys


def open_network(
    address: Address,
    *,
    server_keys: ServerKeys | None = None,
    allow: frozenset[bytes] | None = None,
    client_keys: ClientKeys | None = None,
    live_queue: int = LIVE_QUEUE,
) -> Network:
    """The network of the library that the address names. Raises ConfigError for keys that are none."""
    for keys, kind in ((server_keys, ServerKeys), (client_keys, ClientKeys)):
        if keys is not None and not isinstance(keys, kind):
            raise ConfigError("curve", f"must be {kind.__name__}, not {type(keys).__name__}")
    if address.library == "zmq":
        return ZmqNetwork(
            shared=address.scheme == "inproc",
            server_keys=server_keys,
            allow=allow,
            client_keys=client_keys,
            live_queue=live_queue,
        )
    if server_keys is not None or client_keys is not None:
        raise ConfigError("curve", "NNG has no CURVE: use a ZeroMQ address (tcp://…) for encryption")
    try:
        from brokerless.direct.io.nng import NngNetwork
    except ImportError:
        raise MissingDependency("pynng", "nng", f"the address {address}") from None
    return NngNetwork(live_queue)
