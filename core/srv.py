"""Publishers by DNS: `discover:srv:_orders._tcp.shop.example` follows every target of that SRV record.

The record says where publishers are, nothing else: all targets are followed, whatever their priority and weight. What
a server answered is used for as long as it said (`MIN_S` to `MAX_S`); while no server answers, what was known stays.
"""

import ipaddress
import logging
import time

from brokerless.core.config import split_host_port
from brokerless.core.errors import ConfigError, MissingDependency

PREFIX = "srv:"
# How often a name is looked up, whatever the records say: a change is seen within a minute, a server is not flooded.
MIN_S = 1.0
MAX_S = 60.0
# For one lookup, all servers and repetitions together.
TIMEOUT_S = 2.0
_log = logging.getLogger("brokerless.core.srv")


class SrvLookup:
    """The targets of one SRV record, as `{"target:port": ["tcp://address:port", …]}`."""

    def __init__(self, text: str) -> None:
        """`text` is what follows `srv:`, a name, or `NAME@ADDRESS:PORT` to ask that server and not the system's.

        Raises ConfigError if it is no such name, or the system names no server; MissingDependency without dnspython.
        """
        try:
            import dns.exception
            import dns.resolver
        except ImportError:
            raise MissingDependency("dnspython", "dns", "discovery by DNS") from None
        self.name, _, server = text.partition("@")
        labels = self.name.removesuffix(".").split(".")
        if len(labels) < 3 or not labels[0].startswith("_") or labels[1] != "_tcp" or not all(labels):
            raise ConfigError(
                "address", f"discover:srv:{text} needs a service: discover:srv:_orders._tcp.shop.example"
            )
        try:
            self._resolver = dns.resolver.Resolver(configure=not server)
            if server:
                host, self._resolver.port = split_host_port(server, "address")
                self._resolver.nameservers = [str(ipaddress.ip_address(host))]
        except ValueError:
            raise ConfigError(
                "address", f"discover:srv:{text}: after @ comes the address of a DNS server: @10.0.0.53:53"
            ) from None
        except dns.exception.DNSException as error:
            raise ConfigError("address", f"discover:srv:{text}: {error}") from None
        self._resolver.lifetime = TIMEOUT_S
        self._targets: dict[str, list[str]] = {}
        self._due = 0.0
        self._problem = ""

    def targets(self) -> dict[str, list[str]]:
        """Looked up if that is due, else as they were. Waits for an answer at most `TIMEOUT_S` per name."""
        if time.monotonic() >= self._due:
            self._look()
        return self._targets

    def _look(self) -> None:
        import dns.exception
        import dns.resolver

        seconds = MIN_S
        try:
            answer = self._resolver.resolve(self.name, "SRV")
            found: dict[str, list[str]] = {}
            shortest = answer.rrset.ttl if answer.rrset is not None else 0
            for record in answer:
                try:
                    addresses = self._resolver.resolve_name(record.target)
                except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
                    continue  # a host that is gone must not cost the others
                hosts = [f"[{each}]" if ":" in each else each for each in addresses.addresses()]
                key = f"{record.target.to_text(omit_final_dot=True)}:{record.port}"
                found[key] = [f"tcp://{host}:{record.port}" for host in sorted(hosts)]
            seconds = min(MAX_S, max(MIN_S, shortest))
            self._targets, problem = found, ""
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer) as error:
            self._targets, problem = {}, str(error)
        except (dns.exception.DNSException, OSError) as error:
            problem = str(error)
        if problem and problem != self._problem:
            _log.warning("%s: %s; following whom is known", self.name, problem)
        self._problem = problem
        self._due = time.monotonic() + seconds
