from brokerless.direct import Worker
from shop import ADDRESS


def bill(count: int | None = None) -> None:
    """Bill so many orders, or go on for ever."""
    with Worker(ADDRESS, group="billing", topics=["orders."]) as worker:
        for number, delivery in enumerate(worker.deliveries(30 if count else None), 1):
            # Here: charge the card; delivery.event.id is the idempotency key.
            print("billed", delivery.event.data.decode(), flush=True)
            delivery.ack()
            if number == count:
                break


if __name__ == "__main__":
    bill()
