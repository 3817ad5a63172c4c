from brokerless.direct import Worker
from shop import ADDRESS


def bill(count: int) -> list[bytes]:
    """Bill so many orders."""
    billed = []
    with Worker(ADDRESS, group="billing", topics=["orders."]) as worker:
        for delivery in worker.deliveries(30):
            billed.append(
                delivery.event.data
            )  # here: charge the card; use delivery.event.id as idempotency key
            delivery.ack()
            if len(billed) == count:
                break
    return billed
