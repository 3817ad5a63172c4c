"""What a journal in memory and one on disk do differently: the steps that `Journal` is made of."""

from abc import ABC, abstractmethod
from typing import Self

from brokerless.core.frame import Frame


class JournalKind(ABC):
    """All but `close` are called under the journal's lock."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """How messages call this journal."""

    @abstractmethod
    def _bound(self) -> None:
        """The source is known now: fix the epoch."""

    @abstractmethod
    def _free_bytes(self) -> int:
        """How many bytes can be staged so that they fit without dropping anything."""

    @abstractmethod
    def _write(self, frames: list[Frame]) -> None:
        """Store frames, all or none."""

    @abstractmethod
    def _must_drop(self, size: int, events: int) -> int | None:
        """The offset up to which the oldest part must go so that `size` bytes fit, or None if they do."""

    @abstractmethod
    def _expired(self, before_s: float) -> int | None:
        """The offset up to which everything was written before that time, or None."""

    @abstractmethod
    def _drop_oldest(self, before: int) -> int:
        """Drop what is before that offset; return how many events went."""

    @abstractmethod
    def _cursors(self) -> dict[str, int]: ...

    @abstractmethod
    def _set_cursor(self, name: str, offset: int) -> None: ...

    @abstractmethod
    def _drop_cursor(self, name: str) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Flush and release everything; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
