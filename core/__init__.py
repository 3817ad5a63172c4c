"""What every part of brokerless stands on: Event, Frame, Journal, Ledger, Cursor, errors and counters."""

from brokerless.core.config import load_toml
from brokerless.core.counters import Counters
from brokerless.core.cursor import Cursor, Position
from brokerless.core.errors import BrokerlessError
from brokerless.core.event import Event, Lost, Reason, Receipt
from brokerless.core.frame import Frame, encode_frame
from brokerless.core.intervals import IntervalSet
from brokerless.core.journal.base import Journal
from brokerless.core.journal.disk import DiskJournal
from brokerless.core.journal.memory import MemoryJournal
from brokerless.core.journal.reader import JournalReader
from brokerless.core.journal.recovery import Recovered
from brokerless.core.journal.types import Chunk, Retention
from brokerless.core.ledger.ledger import Ledger
from brokerless.core.ledger.tracker import Account
from brokerless.core.rate_limit import Backoff, TokenBucket
from brokerless.core.runtime.accelerated import ACCELERATED
from brokerless.core.version import __version__

__all__ = [
    "ACCELERATED",
    "Account",
    "Backoff",
    "BrokerlessError",
    "Chunk",
    "Counters",
    "Cursor",
    "DiskJournal",
    "Event",
    "Frame",
    "IntervalSet",
    "Journal",
    "JournalReader",
    "Ledger",
    "Lost",
    "MemoryJournal",
    "Position",
    "Reason",
    "Receipt",
    "Recovered",
    "Retention",
    "TokenBucket",
    "__version__",
    "encode_frame",
    "load_toml",
]
