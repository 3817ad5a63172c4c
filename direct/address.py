"""Addresses: `tcp://host:port`, `ipc://path`, `inproc://name`, and the same over NNG as `nng+tcp://…`.

A publisher has one address, its control socket. Where its live stream is follows from that address and a
short hint in WELCOME, because the publisher does not know by which host name a client reaches it.
"""

import contextlib
import ipaddress
from collections.abc import Iterator

import msgspec

from brokerless.core.config import is_port
from brokerless.core.errors import ConfigError, PeerError

# sockaddr_un holds 108 bytes with the final NUL; libzmq and NNG both fail late and unclearly beyond it.
MAX_IPC_PATH_BYTES = 107
LIVE_SUFFIX = ".live"


class Address(msgspec.Struct, frozen=True):
    """A parsed address. `place` is `host:port` for tcp, a path for ipc, a name for inproc."""

    library: str
    scheme: str
    place: str

    def __str__(self) -> str:
        prefix = "nng+" if self.library == "nng" else ""
        return f"{prefix}{self.scheme}://{self.place}"

    @property
    def url(self) -> str:
        """As the library wants it, without our `nng+`."""
        return f"{self.scheme}://{self.place}"

    @property
    def host(self) -> str:
        """The host of a tcp address, with the brackets of an IPv6 one."""
        return self.place.rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port of a tcp address; 0 asks for any free one."""
        port = self.place.rpartition(":")[2]
        return 0 if port == "*" else int(port)

    @property
    def ipv6(self) -> bool:
        """Whether the host is a literal IPv6 address."""
        return self.scheme == "tcp" and self.host.startswith("[")

    @property
    def local(self) -> bool:
        """Whether what is sent here cannot leave the machine; unknown host names count as leaving it."""
        if self.scheme != "tcp":
            return True
        host = self.host.strip("[]")
        try:
            return ipaddress.ip_address(host.partition("%")[0]).is_loopback
        except ValueError:
            return host == "localhost"

    def with_port(self, port: int) -> "Address":
        """The same host with another port."""
        return Address(self.library, self.scheme, f"{self.host}:{port}")


@contextlib.contextmanager
def address_given_as(field: str) -> Iterator[None]:
    """What is wrong with an address is reported with the name of the argument that it was given as."""
    try:
        yield
    except ConfigError as error:
        raise error if error.field != "address" else ConfigError(field, error.problem) from None


def parse_address(text: str) -> Address:
    """Parse an address, or raise ConfigError that shows what one looks like."""
    if not isinstance(text, str):
        raise ConfigError("address", f"must be str, not {type(text).__name__}")
    scheme, separator, place = text.partition("://")
    library = "zmq"
    if scheme.startswith("nng+"):
        library, scheme = "nng", scheme[4:]
    if not separator or scheme not in ("tcp", "ipc", "inproc") or not place:
        raise ConfigError(
            "address",
            f"{text!r} is not tcp://host:port, ipc://path, inproc://name, or one of them after nng+"
            " (consumers also take discover:NAME)",
        )
    if scheme == "tcp":
        _check_tcp(text, place)
    elif scheme == "ipc" and len(place.encode()) + len(LIVE_SUFFIX) > MAX_IPC_PATH_BYTES:
        limit = MAX_IPC_PATH_BYTES - len(LIVE_SUFFIX)
        raise ConfigError(
            "address", f"the path of {text!r} is longer than the {limit} bytes that a socket allows"
        )
    return Address(library, scheme, place)


def _check_tcp(text: str, place: str) -> None:
    host, colon, port = place.rpartition(":")
    if not colon or not host:
        raise ConfigError("address", f"{text!r} has no port: tcp://host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError("address", f"{text!r}: an IPv6 address needs brackets: tcp://[::1]:5556")
    if port != "*" and not is_port(port):
        raise ConfigError(
            "address", f"{text!r}: the port must be a number below 65536, or * for any free one"
        )


def live_bind(control: Address) -> Address:
    """Where a publisher puts its live socket unless told otherwise: a free port, or a name beside."""
    if control.scheme == "tcp":
        return control.with_port(0)
    return Address(control.library, control.scheme, control.place + LIVE_SUFFIX)


def live_hint(live: Address) -> str:
    """What WELCOME says about the live socket: the port for tcp, the whole place otherwise."""
    return str(live.port) if live.scheme == "tcp" else live.place


def live_connect(control: Address, hint: str) -> Address:
    """Where a client finds the live socket: the host it already reached, and the hinted port.

    The hint comes from the publisher. For tcp only a port is taken from it, for ipc a name that begins as the control
    socket's does and lies beside it, so that a hostile publisher cannot send its clients elsewhere: PeerError.
    """
    if control.scheme == "tcp":
        if not is_port(hint) or not int(hint):
            raise PeerError(f"the publisher names no usable live port: {hint[:40]!r}")
        return control.with_port(int(hint))
    if control.scheme == "ipc":
        directory, slash, name = control.place.rpartition("/")
        hinted = hint.rpartition("/")[2]
        place = f"{directory}{slash}{hinted}"
        usable = "\0" not in hinted and len(place.encode(errors="replace")) <= MAX_IPC_PATH_BYTES
        if not usable or not hinted.startswith(name) or hinted == name:
            raise PeerError(
                f"the publisher names no live socket beside {control}: {hint[:MAX_IPC_PATH_BYTES]!r}"
            )
        return Address(control.library, control.scheme, place)
    return Address(control.library, control.scheme, hint)
