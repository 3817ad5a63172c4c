"""`brokerless.webhooks`: the outbox, delivering to a plain HTTP receiver that answers 200 after its commit."""

from importlib.util import find_spec

from brokerless.losstest.adapters.base import Loss, Position, Producer, Rejected, Setup, Transport
from brokerless.losstest.adapters.http_server import HttpConsumer
from brokerless.losstest.model import Promise, Traits

TOPIC = "losstest.event"
# The default schedule begins with 5 s and outlives a weekend; the same shape, scaled to runs of seconds.
FIRST_DELAYS_S, DELAY_S = (0.1, 0.2, 0.3), 0.4
ATTEMPT_TIMEOUT_S = 0.8
MIN_TIMEOUT_S = 0.3  # a busy machine needs that for an answer
LOOK_EVERY = 10  # calls of losses() between two looks at the database


class OutboxProducer(Producer):
    """A BlockingDispatcher with one endpoint per consumer."""

    def __init__(self, setup: Setup) -> None:
        from brokerless.webhooks import (
            AddressPolicy,
            BlockingDispatcher,
            DeliveryQuery,
            DispatcherConfig,
            OutboxError,
            OutboxFull,
            Schedule,
        )

        self._refusals = (OutboxFull, OutboxError)
        self._query = DeliveryQuery
        delays_s = (*FIRST_DELAYS_S, *[DELAY_S] * int(setup.patience_s / DELAY_S))
        timeout_s = ATTEMPT_TIMEOUT_S
        if setup.compress > 1:  # the default schedule, which outlives a weekend
            delays_s = tuple(delay / setup.compress for delay in Schedule().delays_s)
            timeout_s = max(MIN_TIMEOUT_S, DispatcherConfig().attempt_timeout_s / setup.compress)
        self._dispatcher = BlockingDispatcher(
            setup.state / "outbox.sqlite",
            source="losstest",
            config=DispatcherConfig(
                schedule=Schedule(delays_s=delays_s),
                policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)),
                attempt_timeout_s=timeout_s,
                connect_timeout_s=timeout_s,
                max_pending_per_endpoint=setup.retention_events,
                verification="none",
                synchronous="full" if setup.sync else "normal",  # a killed process loses nothing with either
            ),
        )
        self._dispatcher.start()
        self._register(setup)
        self._numbers: dict[str, int] = {}
        self._told: set[str] = set()
        self._calls = 0

    def _register(self, setup: Setup) -> None:
        known = {endpoint.url for endpoint in self._dispatcher.endpoints()}
        for index in range(setup.consumers):
            host, port = setup.connect(index)
            url = f"http://{host}:{port}/events"
            if url not in known:
                self._dispatcher.add_endpoint(url, ["losstest.*"])

    def send(self, data: bytes) -> Position:
        """Publish: durable in the outbox when it returns."""
        try:
            published = self._dispatcher.publish(TOPIC, data, content_type="application/octet-stream")
        except self._refusals as error:
            raise Rejected(str(error)) from error
        self._numbers[published.id] = published.n
        return Position(0, published.n)

    def pending(self) -> int:
        return self._dispatcher.account().pending

    def losses(self) -> list[Loss]:
        """Deliveries that were evicted or given up, from the database, now and then."""
        self._calls += 1
        if self._calls % LOOK_EVERY:
            return []
        return self._look()

    def _look(self) -> list[Loss]:
        found = []
        for state in ("evicted", "gave_up"):
            query = self._query(state=state, limit=1_000_000)
            for delivery in self._dispatcher.deliveries(query):
                n = self._numbers.get(delivery.event)
                if n is not None and delivery.event not in self._told:
                    self._told.add(delivery.event)
                    found.append(Loss(0, n, n, state))
        return found

    def close(self) -> None:
        self._dispatcher.stop()


def _missing() -> str:
    absent = [name for name in ("httpx", "httpx_aiohttp") if find_spec(name) is None]
    return f"{', '.join(absent)} (pip install 'brokerless[webhooks]')" if absent else ""


_EVICTED = Promise("must", ("evicted",), "more was pending for the endpoint than the outbox may hold for it")
_BUG = Promise("must", ("in_flight",), "the receiver said 200 and died; one built on the receiver kit cannot")
TRANSPORTS = [
    Transport(
        "webhooks",
        OutboxProducer,
        HttpConsumer,
        Traits(
            family="webhooks",
            enclosed=True,
            journal="disk",
            link="tcp",
            connects="producer",
            many_producers=True,
            acks=True,
            http=True,
            overflow_at="receiver",
            compressible=True,
            max_rate=100.0,  # a request per event, and dozens of runs at once on two cores
            quiet_s=2.5,  # an attempt that hangs, and the longest delay of the schedule after it
            promises={"beyond-retention": _EVICTED, "ack-then-die": _BUG},
            summary="webhooks with a durable outbox: retries until the receiver has it",
        ),
        _missing,
        ("brokerless.webhooks", "httpx", "httpx_aiohttp", "aiohttp"),
    )
]
