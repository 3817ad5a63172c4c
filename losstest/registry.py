"""Finding transports by name: built in, by entry point, or as `package.module:object`."""

import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from brokerless.core.errors import ConfigError
from brokerless.losstest.adapters.base import Transport
from brokerless.losstest.harness.scenarios import SCENARIOS
from brokerless.losstest.model import REASONS, Promise, Traits

GROUP = "brokerless.losstest.transports"
# Each module has TRANSPORTS, a list. They import their libraries only when an end is made.
BUILT_IN = (
    "brokerless.losstest.adapters.pipe",
    "brokerless.losstest.adapters.tcp",
    "brokerless.losstest.adapters.udp",
    "brokerless.losstest.adapters.rawzmq",
    "brokerless.losstest.adapters.http_post",
    "brokerless.losstest.adapters.statsd_plain",
    "brokerless.losstest.adapters.direct",
    "brokerless.losstest.adapters.multicast",
    "brokerless.losstest.adapters.webhooks",
    "brokerless.losstest.adapters.metrics",
    # What others would have done; run only when asked for, where the software is on the machine.
    "brokerless.losstest.adapters.peers",
    "brokerless.losstest.adapters.brokers.redis_stream",
    "brokerless.losstest.adapters.brokers.nats_jetstream",
    "brokerless.losstest.adapters.brokers.rabbitmq",
    "brokerless.losstest.adapters.brokers.mqtt",
    "brokerless.losstest.adapters.brokers.kafka",
)


def built_in() -> dict[str, Transport]:
    """The transports of this package, by name."""
    found: dict[str, Transport] = {}
    for module in BUILT_IN:
        for transport in importlib.import_module(module).TRANSPORTS:
            found[transport.name] = transport
    return found


def plugins() -> dict[str, Callable[[], Transport]]:
    """Transports of other packages: name → loader."""
    return {point.name: point.load for point in entry_points(group=GROUP)}


def names() -> list[str]:
    """All transports that can be named without `module:object`."""
    return [*built_in(), *plugins()]


def resolve(name: str) -> Transport:
    """The transport of that name. Raises ConfigError if there is none."""
    ours = built_in()
    if name in ours:
        return ours[name]
    if ":" in name:
        found = _load(name)
    elif name in (others := plugins()):
        try:
            found = others[name]()
        except Exception as error:  # whatever the other package does when it is imported
            raise ConfigError(
                "--transport", f"{name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from None
    else:
        raise ConfigError("--transport", f"there is no {name!r}; there are: {', '.join(names())}")
    if not isinstance(found, Transport):
        raise ConfigError("--transport", f"{name!r} is not a Transport, but {type(found).__name__}")
    _check(name, found)
    return found


def why_missing(transport: Transport) -> str:
    """Why the transport cannot run on this machine, or an empty text. A check that fails says so, too."""
    try:
        return transport.missing()
    except Exception as error:  # of a plug-in
        return f"its own check failed ({type(error).__name__}: {error})"


def _check(name: str, transport: Transport) -> None:
    """Refuse what would only be noticed in the middle of a run."""
    traits = transport.traits
    if not isinstance(traits, Traits):
        raise ConfigError("--transport", f"{name!r}: traits must be Traits, not {type(traits).__name__}")
    for end in ("producer", "consumer", "missing"):
        if not callable(getattr(transport, end)):
            raise ConfigError("--transport", f"{name!r}: {end} cannot be called")
    if transport.services is not None and not callable(transport.services):
        raise ConfigError("--transport", f"{name!r}: services cannot be called")
    for scenario, promise in traits.promises.items():
        if not isinstance(promise, Promise):
            raise ConfigError(
                "--transport", f"{name!r}: the promise for {scenario!r} is not a Promise: {promise!r}"
            )
        if promise.loss not in ("none", "may", "must"):
            raise ConfigError(
                "--transport", f"{name!r}: a promise is none, may or must, not {promise.loss!r}"
            )
        if strange := sorted(set(promise.reasons) - set(REASONS)):
            raise ConfigError("--transport", f"{name!r}: there is no reason {', '.join(strange)}")
        if (promise.loss != "none") != bool(promise.reasons):
            raise ConfigError(
                "--transport",
                f"{name!r}: what may be lost with {scenario!r} needs its reasons, and only that",
            )
    named = {*traits.promises, *traits.only, *traits.without}
    if unknown := sorted(named - set(SCENARIOS)):
        raise ConfigError("--transport", f"{name!r}: there is no scenario {', '.join(unknown)}")
    try:
        msgspec.convert(msgspec.to_builtins(traits), Traits)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError("--transport", f"{name!r}: traits: {error}") from None
    for field, most in (
        ("quiet_s", 3600),
        ("ports", 1000),
        ("ports_per_producer", 1000),
        ("max_rate", 200_000),
    ):
        value = getattr(traits, field)
        if not 0 <= value <= most:
            raise ConfigError("--transport", f"{name!r}: {field} must be from 0 to {most}, not {value}")


def _load(name: str) -> object:
    """`package.module:object`, or `path/to/file.py:object`."""
    where, _, attribute = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            if spec is None or spec.loader is None:
                raise ImportError(f"{where} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        return getattr(module, attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(
            "--transport", f"{name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from None
