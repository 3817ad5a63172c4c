"""The one row schema, for Spark and for Arrow."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

# Spark's form. The same names and order as the Arrow form below: batches are handed over without a copy.
_FIELDS = [
    "source string", "epoch bigint", "topic string", "seq bigint", "offset bigint", "time timestamp",
    "received timestamp", "transport string", "kind string", "content_type string", "data binary",
    "key string", "headers map<string,string>",
]  # fmt: skip
COLUMNS = tuple(field.split(" ")[0] for field in _FIELDS)
# Nothing is ever null. Saying so saves a fifth of the JVM's time, which otherwise asks for each value of each row.
ROW_SCHEMA = ", ".join(f"{field} NOT NULL" for field in _FIELDS)

KIND_EVENT = "event"  # an event as it was accepted by its producer
KIND_SENT = "sent"  # sent counts of a producer: at `time` the next sequence number of `topic` was `seq`
KIND_LEDGER = "ledger"  # what a consumer knows of loss; `data` is the JSON of a `LedgerNote`
KIND_LOST = "lost"  # rows that the data source makes itself with failOnDataLoss=false
KIND_RANGE = "range"  # with the option ranges: what a task would read, for whoever reads it; `data` is JSON


def arrow_schema() -> "pa.Schema":
    """The Arrow form: what the data source yields. Spark wants exactly these types."""
    import pyarrow as pa

    time = pa.timestamp("us", tz="UTC")
    columns = [
        ("source", pa.string()),
        ("epoch", pa.int64()),
        ("topic", pa.string()),
        ("seq", pa.int64()),
        ("offset", pa.int64()),
        ("time", time),
        ("received", time),
        ("transport", pa.string()),
        ("kind", pa.string()),
        ("content_type", pa.string()),
        ("data", pa.binary()),
        ("key", pa.string()),
        ("headers", pa.map_(pa.string(), pa.string())),
    ]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])
