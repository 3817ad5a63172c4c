"""What has files, threads or sockets belongs to the process that made it: a fork's copies are closed at once."""

import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """Something that a forked child must not touch."""

    def leave_to_parent(self) -> None:
        """In the child: be closed, without doing anything to what the parent uses."""


_here: "weakref.WeakSet[Owned]" = weakref.WeakSet()
# Forget it again when it is closed.
forget = _here.discard
remember = _here.add


def _leave_all() -> None:
    for owned in list(_here):
        owned.leave_to_parent()
    _here.clear()


os.register_at_fork(after_in_child=_leave_all)
