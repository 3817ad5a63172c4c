"""multicast: run it with `python main.py`; see docs/multicast.md."""

from brokerless.multicast import Publisher, Subscriber

with Publisher("239.255.7.7:30701", "ORDERS") as pub:  # stays on this machine unless told otherwise
    pub.publish("orders.eu", b"one")
    with Subscriber("239.255.7.7:30701", "ORDERS", start="oldest") as sub:  # joined late: asks for it
        print(sub.receive(timeout=5).data)  # prints b'one'
