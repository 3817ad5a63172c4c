"""The log of a command on standard error: lines for people, or JSON for a log collector."""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
# What every record has; anything else was given as `extra` and belongs into the JSON.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (ISO 8601, UTC), level, logger, message, and every `extra` field."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def configure_logging(log_format: LogFormat, log_level: LogLevel) -> None:
    """Send the log of brokerless to standard error, and only there."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("brokerless")
    logger.handlers[:] = [handler]
    logger.setLevel(log_level.upper())
    logger.propagate = False
