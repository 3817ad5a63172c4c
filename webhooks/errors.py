"""Errors of the webhooks package, under the common root.

Fault
├── VerificationError   what arrived is not a valid signed webhook (the only error of `verify`)
├── OutboxFull          on_full="reject", or "block" and the time is up; the event was not accepted
├── OutboxError         the outbox's database cannot be used
└── BlockedAddress      the SSRF guard refused an address (also an OSError: raised inside the connect call)
UsageError
├── CloudEventError     not a valid CloudEvent (names the attribute)
├── NotFound            no such endpoint, delivery or event
└── Conflict            it exists, but not in a state (or with content) that allows this
"""

from brokerless.core.errors import Fault, UsageError


class VerificationError(Fault):
    """What arrived must not be trusted; `problem` says why, without telling an attacker anything useful."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"webhook not verified: {problem}")
        self.problem = problem


class OutboxFull(Fault):
    """The outbox holds `pending` undelivered deliveries of at most `max_pending`; the event was not accepted."""

    def __init__(self, pending: int, max_pending: int, retry_after_s: float) -> None:
        super().__init__(
            f"the outbox is full ({pending} of {max_pending} deliveries pending); the event was not accepted"
        )
        self.pending = pending
        self.max_pending = max_pending
        self.retry_after_s = retry_after_s


class OutboxError(Fault):
    """The database of the outbox cannot be used; what was accepted before stays in it.

    `transient` tells that the database itself asked to repeat the transaction (a deadlock or serialisation failure).
    """

    def __init__(self, outbox: str, problem: str, *, transient: bool = False) -> None:
        super().__init__(f"outbox {outbox}: {problem}")
        self.outbox = outbox
        self.problem = problem
        self.transient = transient


class BlockedAddress(Fault, OSError):
    """Deliveries may not go to `address`; `rule` names the entry of the table that forbids it."""

    def __init__(self, address: str, rule: str) -> None:
        super().__init__(f"blocked address {address} ({rule})")
        self.address = address
        self.rule = rule


class CloudEventError(UsageError, ValueError):
    """Not a valid CloudEvent; `attribute` names the part that is wrong."""

    def __init__(self, attribute: str, problem: str) -> None:
        super().__init__(f"CloudEvent {attribute}: {problem}")
        self.attribute = attribute
        self.problem = problem


class NotFound(UsageError, LookupError):
    """There is no `what` of the id `which` (or it belongs to another tenant, which is not told)."""

    def __init__(self, what: str, which: str) -> None:
        super().__init__(f"no such {what}: {which}")
        self.what = what
        self.which = which


class Conflict(UsageError):
    """The request contradicts what is there."""
