"""Backends by their configured texts."""

from brokerless.core.errors import ConfigError
from brokerless.metrics.backends.base import Backend, Console
from brokerless.metrics.backends.graphite import Graphite, lines, pickled
from brokerless.metrics.backends.journal import JournalBackend
from brokerless.metrics.server.config import MetricsConfig, check_backend


def make_backends(config: MetricsConfig) -> list[Backend]:
    """The configured backends except repeaters, which get datagrams and not flushes."""
    made: list[Backend] = []
    try:
        for text in config.backends:
            kind, argument = check_backend(text)
            if kind == "console":
                made.append(Console())
            elif kind == "graphite":
                made.append(Graphite(text, argument, config.graphite, lines))
            elif kind == "graphite-pickle":
                made.append(Graphite(text, argument, config.graphite, pickled))
            elif kind == "otlp":
                made.append(_otlp(text, argument))
            elif kind == "journal":
                made.append(JournalBackend(text, argument, config.journal_source))
    except BaseException:
        for backend in made:
            backend.close(0)
        raise
    return made


def _otlp(text: str, url: str) -> Backend:
    try:
        from brokerless.metrics.backends.otlp import Otlp
    except ImportError:
        raise ConfigError(
            "backends", "otlp needs opentelemetry-proto: pip install 'brokerless[otlp]'"
        ) from None
    return Otlp(text, url)
