"""metrics: run it with `python main.py`; see docs/metrics.md."""

from brokerless.metrics import MetricsServer, StatsClient

with MetricsServer(udp=["127.0.0.1:0"]) as server:
    host, _, port = server.addresses["udp"][0].rpartition(":")
    statsd = StatsClient(host, int(port))  # drop-in for the PyPI client; any StatsD server understands it
    for _ in range(1000):
        statsd.incr("orders")
    statsd.close()
    point = next(p for p in server.flush_now().counters if p.series == "orders")
    print(point.total, point.total_grade.label)  # prints 1000 exact
