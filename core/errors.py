"""All errors of brokerless, as one tree.

    BrokerlessError
    ├── UsageError              the caller did something wrong; nothing was accepted
    │   ├── WrongField          a value is wrong (names the field)
    │   │   ├── ConfigError     … in a configuration
    │   │   └── InvalidEvent    … in an event: topic, data or key is not acceptable
    │   ├── Closed              the object was closed
    │   └── JournalLocked       another writer holds the journal
    ├── Fault                   something else failed: the other side, the disk, the network
    │   ├── FrameError          bytes that are not a frame
    │   ├── JournalFull         on_full="reject", or "block" and the time is up
    │   ├── JournalError        the journal's files cannot be used (read-only, newer format, I/O)
    │   ├── Evicted             the wanted offset is older than what the journal still has
    │   ├── PeerError           the other side answered something that is not the protocol
    │   ├── NotAcknowledged     the named groups did not acknowledge in time
    │   ├── NotMirrored         too few mirrors have the event in time
    │   ├── Superseded          a mirror became the publisher in this one's place
    │   ├── RolledBack          the publisher's journal went back behind what a mirror has of it
    │   └── NotPromoted         a mirror cannot become the publisher safely
    └── MissingDependency       an optional package is needed (names the extra to install)

Numbers are attributes, so that callers need not parse messages. Foreign exceptions are mapped at the edge.
"""

from collections.abc import Sequence


class BrokerlessError(Exception):
    """Root of all errors that this package raises on purpose."""


class UsageError(BrokerlessError):
    """The caller's mistake. Nothing was accepted, nothing was lost."""


class WrongField(UsageError, ValueError):
    """A value is wrong: `field` names it, `problem` says what is wrong with it."""

    _what = ""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{self._what}{field}: {problem}")
        self.field = field
        self.problem = problem


class ConfigError(WrongField):
    """A configuration value is wrong: `field` names it."""


class InvalidEvent(WrongField):
    """An event was refused before it was accepted: `field` names the part that is wrong."""

    _what = "event "


class Closed(UsageError):
    """The object was closed; `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed")
        self.what = what


class JournalLocked(UsageError):
    """Another process writes this journal; readers are always welcome."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(
            f"journal {path} is already open for writing by {holder}; a journal has one writer: "
            "stop the other one, or open it with JournalReader"
        )
        self.path = path
        self.holder = holder


class Fault(BrokerlessError):
    """Something other than the caller failed."""


class FrameError(Fault):
    """Bytes that are not a valid frame. `problem` says what was wrong with them."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"not a valid frame: {problem}")
        self.problem = problem


class JournalFull(Fault):
    """The journal may not drop its oldest events, because `waiting_for` has not had them.

    `max_bytes`, `oldest` and `wanted` (bytes that did not fit) are numbers; the event was not accepted.
    """

    def __init__(self, path: str, *, max_bytes: int, oldest: int, wanted: int, waiting_for: str) -> None:
        super().__init__(
            f"journal {path} is full ({max_bytes} bytes): {waiting_for!r} has not had offset {oldest}; "
            "the event was not accepted"
        )
        self.path = path
        self.max_bytes = max_bytes
        self.oldest = oldest
        self.wanted = wanted
        self.waiting_for = waiting_for


class JournalError(Fault):
    """The files of a journal cannot be used; what was accepted before stays readable."""

    def __init__(self, path: str, problem: str, *, errno: int | None = None) -> None:
        super().__init__(f"journal {path}: {problem}")
        self.path = path
        self.problem = problem
        self.errno = errno


class Evicted(Fault):
    """The offset `wanted` is gone; the journal begins at `oldest`."""

    def __init__(self, wanted: int, oldest: int) -> None:
        super().__init__(f"offset {wanted} is no longer in the journal, which begins at {oldest}")
        self.wanted = wanted
        self.oldest = oldest


class PeerError(Fault):
    """The other side does not speak the protocol, or refused us."""


class NotAcknowledged(Fault):
    """The event was accepted, but `missing` groups did not acknowledge it in time."""

    def __init__(self, offset: int, missing: Sequence[str], timeout_s: float) -> None:
        super().__init__(
            f"offset {offset} was accepted but not acknowledged within {timeout_s} s by: {', '.join(missing)}"
        )
        self.offset = offset
        self.missing = tuple(missing)
        self.timeout_s = timeout_s


class NotMirrored(Fault):
    """The event was accepted, but of the mirrors only some have it in time: `missing` do not."""

    def __init__(self, offset: int, missing: Sequence[str], mirrored: int, timeout_s: float) -> None:
        super().__init__(
            f"offset {offset} was accepted but is not with {mirrored} mirrors after {timeout_s} s; it is missing at: "
            f"{', '.join(missing)}"
        )
        self.offset = offset
        self.missing = tuple(missing)
        self.mirrored = mirrored
        self.timeout_s = timeout_s


class Superseded(Fault):
    """A mirror became the publisher of `source` in epoch `by`: nothing is accepted here any more.

    `unmirrored` is the range of offsets (first, last) of `epoch` that only this journal has; None if there is none.
    """

    def __init__(self, source: str, epoch: int, by: int, unmirrored: tuple[int, int] | None) -> None:
        rest = "everything accepted here is mirrored"
        if unmirrored is not None:
            rest = f"offsets {unmirrored[0]} to {unmirrored[1]} are only here, and stay in this journal"
        super().__init__(
            f"a mirror became the publisher of {source!r} in epoch {by}, this one has {epoch}; {rest}"
        )
        self.source = source
        self.epoch = epoch
        self.by = by
        self.unmirrored = unmirrored


class RolledBack(Fault):
    """The journal of `source` went back in time: `by` has its events up to offset `seen`, and it ends at `next`."""

    def __init__(self, source: str, epoch: int, next: int, seen: int, by: str) -> None:
        super().__init__(
            f"{by} has {source!r} up to offset {seen} of epoch {epoch}, but the publisher's journal, which ends at "
            f"{next}, has not: its machine or disk went back in time. "
            + (
                "When the publisher is restarted it takes from there what it lacks, if it has published nothing "
                "since"
                if next
                else "Promote that mirror and make this host a mirror of it; to start over, empty it"
            )
        )
        self.source = source
        self.epoch = epoch
        self.next = next
        self.seen = seen
        self.by = by


class NotPromoted(Fault):
    """The mirror stays a mirror; `problem` says what could be lost or done twice otherwise."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"not promoted: {problem}")
        self.problem = problem


class MissingDependency(BrokerlessError, ImportError):
    """An optional package is not installed; `extra` is the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}: pip install 'brokerless[{extra}]'", name=package
        )
        self.package = package
        self.extra = extra
