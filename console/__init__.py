"""The live web page: what runs on this machine, how fast, who is behind, what was lost."""

from brokerless.console.app import console_app
from brokerless.console.history import History
from brokerless.core.summary import summarise

__all__ = ["History", "console_app", "summarise"]
