"""The shop: run it with `python main.py` in this folder; see docs/guides/shop.md."""

from starlette.testclient import TestClient

from brokerless.spark_collector import spark_session

from audit import audit
from billing import bill
from shop import app

with TestClient(app) as client:
    print([client.post("/orders", json={"number": n}).status_code for n in range(2)])
    # prints [202, 202]
    bill(2)
    # prints billed {"number":0}
    # prints billed {"number":1}
    audit(2)
    # prints seen {"number":0} lost 0
    # prints seen {"number":1} lost 0

with spark_session() as spark:
    spark.read.format("brokerless").load("var/shop").createOrReplaceTempView("events")
    orders = spark.sql(
        "SELECT count(DISTINCT CAST(data AS STRING)) AS n FROM events WHERE topic = 'orders.new'"
    )
    print(orders.first().n)  # prints 2
