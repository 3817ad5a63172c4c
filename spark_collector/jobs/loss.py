"""Loss per source, topic and window, exactly, from ledger rows.

All sequence numbers of a stream are put in order once. What no island covers, between the first number that
counts and the last that is known to have been sent, is missing. Received numbers belong to the window of
their own time. A missing one has no time of its own: it lies between its neighbours, which are received
events and producers' words (see `ledger`). Where both neighbours are in one window, or a word falls on its
border, the window is certain; otherwise it is booked on the earlier one and counted in `uncertain`.

A missing number is `pending` while the row that revealed it is younger than `settle_s`, or until it is
declared lost; then it is `lost`. It leaves both when it arrives, however late: `healed` counts those.
`sent = received + pending + lost` holds in every row.
"""

from typing import TYPE_CHECKING, Any

from brokerless.spark_collector.jobs.ledger import KIND_BEGIN
from brokerless.spark_collector.schema import KIND_EVENT, KIND_LOST, KIND_SENT, STREAM_KEY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEY = list(STREAM_KEY)
LOSS_COLUMNS = (
    "source", "epoch", "topic", "window", "sent", "received", "duplicates", "lost", "pending",
    "healed", "uncertain", "reasons",
)  # fmt: skip


def loss(ledger: "DataFrame", *, window_s: float, now_us: int, settle_s: float = 10.0) -> "DataFrame":
    """The loss table of these ledger rows: one row per stream and window, columns `LOSS_COLUMNS`.

    `window_s` is the ledger's window or a multiple of it. `window` is the start of the window. `reasons` maps
    the declared reasons to counts; what is lost without a reason is `unattributed`.
    """
    from pyspark.sql import functions as F

    size = round(window_s * 1_000_000)
    got = received(ledger, size)
    gaps = missing(ledger)
    settled = F.lit(now_us) - F.col("seen") >= round(settle_s * 1_000_000)
    gone = _with_reasons(gaps, ledger).withColumn("is_lost", settled | F.col("declared"))
    amount = F.col("hi") - F.col("lo") + 1
    holes = (
        gone.withColumn("slot", _floor("slot_low", size))
        .groupBy(*KEY, "slot")
        .agg(
            F.sum(F.when(F.col("is_lost"), amount).otherwise(0)).alias("lost"),
            F.sum(F.when(F.col("is_lost"), 0).otherwise(amount)).alias("pending"),
            F.sum(F.when(_floor("slot_low", size) != _floor("slot_high", size), amount).otherwise(0)).alias(
                "uncertain"
            ),
            F.collect_list(F.when(F.col("is_lost"), F.struct("reason", amount.alias("n")))).alias("named"),
        )
        .withColumn("reasons", _sum_by_reason())
    )
    table = got.join(holes, [*KEY, "slot"], "full_outer")
    counts = ("received", "duplicates", "lost", "pending", "healed", "uncertain")
    filled: DataFrame = table.select(
        *KEY,
        F.timestamp_micros("slot").alias("window"),
        *(F.coalesce(F.col(c), F.lit(0)).cast("bigint").alias(c) for c in counts),
        F.coalesce(F.col("reasons"), F.expr("map()").cast("map<string,bigint>")).alias("reasons"),
    )
    return filled.withColumn("sent", F.expr("received + lost + pending")).select(*LOSS_COLUMNS)


def received(ledger: "DataFrame", size_us: int) -> "DataFrame":
    """Per stream and window: distinct events received, how often again, and how many of them were late.

    An event's time never changes, so all its copies are in one window and windows can be counted apart.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    keys = [*KEY, "slot"]
    before = Window.partitionBy(*keys).orderBy("lo", "hi").rowsBetween(Window.unboundedPreceding, -1)
    islands = (
        ledger.where(F.col("kind") == KIND_EVENT)
        .withColumn("slot", _floor("slot_low", size_us))
        .withColumn("reach", F.max("hi").over(before))
        .withColumn("reach_timely", F.max(F.expr("if(late, null, hi)")).over(before))
    )
    # How many numbers an island covers that none before it does.
    new = "greatest(0, hi - greatest(lo - 1, coalesce({}, lo - 1)))"
    return islands.groupBy(*keys).agg(
        F.sum(F.expr(new.format("reach"))).alias("received"),
        F.expr(f"sum(rows) - sum({new.format('reach')})").alias("duplicates"),
        F.expr(f"sum({new.format('reach')}) - sum(if(late, 0, {new.format('reach_timely')}))").alias(
            "healed"
        ),
    )


def missing(ledger: "DataFrame") -> "DataFrame":
    """The gaps: `lo` to `hi` of a stream, between `slot_low` and `slot_high`, revealed at `seen`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    ledger = ledger.where(F.col("kind") != KIND_BEGIN).unionByName(_begins(ledger))
    # Idle producers repeat themselves: of equal words the first bounds the left side, the last the right.
    words = (
        ledger.where(F.col("kind").isin(KIND_SENT, KIND_BEGIN))
        .groupBy(*KEY, "lo", "hi")
        .agg(
            F.max("slot_low").alias("slot_low"),
            F.min("slot_high").alias("slot_high"),
            F.min("seen").alias("seen"),
            F.max("off_lo").alias("off_lo"),
            F.max("off_hi").alias("off_hi"),
        )
    )
    columns = [*KEY, "lo", "hi", "slot_low", "slot_high", "seen", "off_lo", "off_hi"]
    events = ledger.where(F.col("kind") == KIND_EVENT)
    points = events.select(*columns).unionByName(words.select(*columns))
    before = (
        Window.partitionBy(*KEY).orderBy("lo", "hi", "slot_low").rowsBetween(Window.unboundedPreceding, -1)
    )
    furthest = F.max(F.struct("hi", "slot_low", "off_hi")).over(before)
    return (
        points.withColumn("left", furthest)
        .where("left is not null and lo > left.hi + 1")
        .select(
            *KEY,
            F.expr("left.hi + 1").alias("lo"),
            F.expr("lo - 1").alias("hi"),
            F.col("left.slot_low").alias("slot_low"),
            "slot_high",
            "seen",
            F.expr("left.off_hi + 1").alias("off_lo"),
            F.expr("off_lo - 1").alias("off_hi"),
        )
    )


def _begins(ledger: "DataFrame") -> "DataFrame":
    """The `begin` notes; one without a topic is given to every topic of its epoch."""
    from pyspark.sql import functions as F

    notes = ledger.where(F.col("kind") == KIND_BEGIN)
    streams = ledger.where(F.col("kind").isin(KIND_EVENT, KIND_SENT)).select(*KEY).distinct()
    general = notes.where(F.col("topic") == "").drop("topic").join(streams, ["source", "epoch"])
    return notes.where(F.col("topic") != "").unionByName(general)


def _with_reasons(gaps: "DataFrame", ledger: "DataFrame") -> "DataFrame":
    """Gaps cut at the borders of declared losses, each piece with `reason` and whether it was `declared`."""
    from pyspark.sql import functions as F

    said = ledger.where(F.col("kind") == KIND_LOST).select(
        "source", "epoch", F.col("topic").alias("said_topic"),
        F.col("lo").alias("said_lo"), F.col("hi").alias("said_hi"),
        F.coalesce("reason", F.lit("unattributed")).alias("said_reason"),
    )  # fmt: skip
    said = said.distinct()
    # Declared by sequence numbers of the topic, or (without a topic) by offsets of the source.
    by_seq = F.expr("said_topic = topic and said_lo <= hi and said_hi >= lo")
    by_offset = F.expr(
        "coalesce(said_topic, '') = '' and said_lo <= coalesce(off_hi, said_lo) and said_hi >= off_lo"
    )
    exact = F.expr("coalesce(said_topic, '') <> ''")
    keyed = gaps.withColumn("gap", F.monotonically_increasing_id())
    pairs = keyed.join(said, ["source", "epoch"], "left").where(by_seq | by_offset)
    claims = pairs.groupBy("gap").agg(
        F.collect_set(
            F.struct(
                F.when(exact, F.greatest("lo", "said_lo")).otherwise(F.col("lo")).alias("lo"),
                F.when(exact, F.least("hi", "said_hi")).otherwise(F.col("hi")).alias("hi"),
                F.col("said_reason").alias("reason"),
            )
        ).alias("claims")
    )
    cut = F.udf(
        _cut, "array<struct<lo: bigint, hi: bigint, reason: string, declared: boolean>>", useArrow=False
    )
    return (
        keyed.join(claims, "gap", "left")
        .withColumn("piece", F.explode(cut("lo", "hi", "claims")))
        .select(
            *KEY, "slot_low", "slot_high", "seen", "piece.lo", "piece.hi", "piece.reason", "piece.declared"
        )
    )


def _cut(lo, hi, claims):  # type: ignore[no-untyped-def]  # Spark would read hints as a pandas function
    """Divide the gap `lo` to `hi` among the claims on it; the first (by number) has it where they overlap."""
    pieces = []
    at = lo
    for first, last, reason in sorted((c[0], c[1], c[2]) for c in claims or ()):
        if first > at:
            pieces.append((at, first - 1, "unattributed", False))
            at = first
        if last >= at:
            pieces.append((at, last, reason, True))
            at = last + 1
    if at <= hi:
        pieces.append((at, hi, "unattributed", False))
    return pieces


def _sum_by_reason() -> Any:
    from pyspark.sql import functions as F

    return F.expr(
        "map_from_entries(transform(array_distinct(transform(named, x -> x.reason)), r -> struct(r, "
        "aggregate(filter(named, x -> x.reason = r), cast(0 as bigint), (a, x) -> a + x.n))))"
    )


def _floor(column: str, size_us: int) -> Any:
    from pyspark.sql import functions as F

    return F.expr(f"{column} - pmod({column}, {size_us})")


def totals(table: "DataFrame") -> "DataFrame":
    """The loss table summed over its windows: one row per source and topic, epochs apart."""
    from pyspark.sql import functions as F

    sums = [
        F.sum(c).alias(c)
        for c in ("sent", "received", "duplicates", "lost", "pending", "healed", "uncertain")
    ]
    return table.groupBy(*KEY).agg(*sums).orderBy(*KEY)
