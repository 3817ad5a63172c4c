"""direct: run it with `python main.py`; see docs/direct.md."""

from brokerless.core import DiskJournal
from brokerless.direct import Publisher, Subscriber, Worker

with Publisher("tcp://127.0.0.1:*", source="orders-1", journal=DiskJournal("var/orders")) as pub:
    pub.publish("orders.eu", b"sent while nobody listened")

    with Subscriber(pub.address, topics=["orders."], cursor="var/billing.cursor") as sub:
        print(sub.receive(timeout=5).data)  # prints b'sent while nobody listened'
        print(sub.ledger.account().lost)  # prints 0

    with Worker(pub.address, group="mailer") as worker:  # every group gets every event, one worker each
        delivery = worker.receive(timeout=5)
        delivery.ack()  # prints nothing; without it the event comes again
