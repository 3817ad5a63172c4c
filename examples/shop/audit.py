from brokerless.direct import Subscriber
from shop import ADDRESS


def audit(count: int) -> tuple[int, int]:
    """Read so many orders; return how many were delivered and lost since the cursor was made."""
    with Subscriber(ADDRESS, topics=["orders."], start="cursor", cursor="var/audit.cursor") as subscriber:
        for number, _event in enumerate(subscriber.events(30), 1):
            if number == count:
                break
        account = subscriber.ledger.account()
        return account.delivered, account.lost
