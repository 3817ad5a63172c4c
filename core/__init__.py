"""What every part of brokerless stands on: Event, Frame, Journal, Ledger, Cursor, errors and counters."""

from brokerless.core.config import load_toml
from brokerless.core.counters import Counters
from brokerless.core.cursor import Cursor, Position
from brokerless.core.disk_journal import DiskJournal
from brokerless.core.errors import BrokerlessError
from brokerless.core.event import Event, Lost, Reason, Receipt
from brokerless.core.frame import Frame, encode_frame
from brokerless.core.intervals import IntervalSet
from brokerless.core.journal import Journal
from brokerless.core.journal_reader import JournalReader
from brokerless.core.journal_types import Chunk, Retention
from brokerless.core.ledger import Ledger
from brokerless.core.memory_journal import MemoryJournal
from brokerless.core.pace import Backoff, TokenBucket
from brokerless.core.recovery import Recovered
from brokerless.core.speed import ACCELERATED
from brokerless.core.tracker import Account

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
    "encode_frame",
    "load_toml",
]
