"""What other processes of the same outbox say: PostgreSQL's LISTEN, or a look at SQLite's data version.

A thread of its own waits, so that neither the writer nor the event loop asks the database again and again. Messages are
words: `work ep_… ep_…` (new deliveries), `send ep_…` (somebody asked for them now), `changed` (endpoints), `shards`
(some are free), `new` (events of a caller's transaction), `*` (the connection was away: anything may have happened).
"""

import logging
import threading
import time
from collections.abc import Callable

from brokerless.webhooks.outbox.database import connect, connect_postgres, is_postgres, redact
from brokerless.webhooks.outbox.store import CHANNEL, Store

logger = logging.getLogger("brokerless.webhooks")
# After a failure of the connection, and how long a stop can take.
RECONNECT_S = 1.0
# PostgreSQL tells by itself; this is for rows of programs that do not say so.
LOOK_S = 5.0


class Notices:
    """Owns the thread. `on_message(text)` is called in it for every message."""

    def __init__(self, target: str, *, poll_s: float, on_message: Callable[[str], object]) -> None:
        self._target = target
        self._poll_s = poll_s
        self._on_message = on_message
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="brokerless-outbox-notices", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and join it."""
        self._stop.set()
        self._thread.join(10)

    def _main(self) -> None:
        listen = self._postgres if is_postgres(self._target) else self._sqlite
        while not self._stop.is_set():
            try:
                listen()
            except Exception as error:
                # Whatever failed: the next round reconnects, and `*` makes up for what was missed.
                logger.warning("listening to the outbox failed: %s", redact(str(error), self._target))
            self._stop.wait(RECONNECT_S)

    def _postgres(self) -> None:
        with connect_postgres(self._target, 10.0) as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            self._on_message("*")
            looked = time.monotonic()
            while not self._stop.is_set():
                for notice in connection.notifies(timeout=0.5, stop_after=1):
                    self._on_message(notice.payload)
                if time.monotonic() - looked > LOOK_S:
                    # Also notices a connection that is gone.
                    connection.execute("SELECT 1")
                    self._on_message("new")
                    looked = time.monotonic()

    def _sqlite(self) -> None:
        session = connect(self._target, read_only=True)
        try:
            store = Store(session)
            last = store.last_note()
            self._on_message("*")
            while not self._stop.wait(self._poll_s):
                if not session.changed():
                    continue
                for number, text in store.notes_after(last):
                    self._on_message(text)
                    last = number
                if store.any_unrouted():
                    self._on_message("new")
        finally:
            session.close()
