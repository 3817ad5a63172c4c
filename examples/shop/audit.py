from brokerless.direct import Subscriber
from shop import ADDRESS


def audit(count: int | None = None) -> None:
    """Read so many orders, or go on for ever."""
    with Subscriber(ADDRESS, topics=["orders."], start="cursor", cursor="var/audit.cursor") as subscriber:
        for number, event in enumerate(subscriber.events(30 if count else None), 1):
            print("seen", event.data.decode(), "lost", subscriber.ledger.account().lost, flush=True)
            if number == count:
                break


if __name__ == "__main__":
    audit()
