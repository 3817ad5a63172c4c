"""An input that receives webhooks: the receiver kit's app into a journal of its own, and from there into the spool."""

import os

from brokerless.core import DiskJournal, Retention
from brokerless.core.config import split_host_port
from brokerless.core.errors import ConfigError
from brokerless.core.runtime.http_host import HttpHost, listen
from brokerless.spark_collector.collector.config import JournalIn, WebhooksIn
from brokerless.spark_collector.collector.inputs.base import CollectorInterface, InputStatus
from brokerless.spark_collector.collector.inputs.journal import JournalInput

# What senders may be ahead of the spool: an hour of a hundred 1 kB webhooks a second.
_MAX_BYTES = 512 * 1024 * 1024
_CURSOR = "collector"


class WebhooksInput:
    """Answers 2xx when the event is in its journal, as durable as the spool is configured to be.

    The journal is read into the spool at once; it is there because the receiver kit recognises repeated
    deliveries by their ids, which outlives crashes only together with a journal. A full one answers 503.
    """

    def __init__(self, config: WebhooksIn) -> None:
        self.config = config
        self._host, self._port = split_host_port(config.listen, "listen")
        if not self._host:
            raise ConfigError("listen", f"{config.listen!r} names no host")
        self.status = InputStatus(config.listen, "webhooks")
        self._server: HttpHost | None = None
        self._journal: DiskJournal | None = None
        self._reader: JournalInput | None = None
        self.address = ""

    def start(self, sink: CollectorInterface) -> None:
        """Serve, and follow the journal. Raises ConfigError if the port is in use."""
        from brokerless.webhooks import receiver_app

        name = "".join(c if c.isalnum() else "-" for c in self.config.listen)
        path = os.path.join(sink.path, f"webhooks-{name}")
        self._journal = DiskJournal(
            path,
            source=self.config.source or f"{sink.name}.webhooks",
            retention=Retention(max_bytes=_MAX_BYTES),
            on_full="reject",
            fsync="never" if sink.fsync == "never" else "batch",
        )
        self._journal.register(_CURSOR)
        try:
            app = receiver_app(self.config.secrets, journal=self._journal)
            self._server = HttpHost(app, listen(self._host, self._port))
        except BaseException:
            self._journal.close()
            raise
        self.address = self._server.address
        self._reader = JournalInput(JournalIn(path=path, transport="webhooks"), on_durable=self._advance)
        self._reader.status = self.status
        self._reader.start(sink)

    def _advance(self, offset: int) -> None:
        """The spool has everything before this: the journal may drop it."""
        if self._journal is not None:
            self._journal.advance(_CURSOR, offset)

    def stop(self) -> None:
        """Stop serving, bring what was accepted into the spool, close."""
        if self._server is not None:
            self._server.close()
        if self._reader is not None:
            self._reader.finish()
            self._reader.stop()
        if self._journal is not None:
            self._journal.close()
