"""JSON payloads as columns; what does not parse is kept apart, with the reason."""

from typing import TYPE_CHECKING

from brokerless.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CORRUPT = "_corrupt"


def infer_json(rows: "DataFrame") -> str:
    """The schema of these rows' payloads as a DDL string.

    Raises ConfigError if none of them is a JSON object.
    """
    from pyspark.sql import functions as F

    text = F.col("data").cast("string")
    found = rows.select(F.schema_of_variant_agg(F.try_parse_json(text)).alias("s")).first()
    schema = (found.s if found else "") or ""
    if not schema.startswith("OBJECT<"):
        raise ConfigError(
            "json_schema", f"cannot be inferred: the payloads are {schema or 'empty'}, not JSON objects"
        )
    return _to_ddl(schema)


def _to_ddl(schema: str) -> str:
    """`OBJECT<a: BIGINT, b: OBJECT<…>>` as `a BIGINT, b STRUCT<…>`."""
    inner = schema.removeprefix("OBJECT<").removesuffix(">")
    # A field that was null in all payloads, or of different types, is kept as text.
    return inner.replace("OBJECT<", "STRUCT<").replace(": VOID", ": STRING").replace(": VARIANT", ": STRING")


def parse_json(rows: "DataFrame", schema: str) -> tuple["DataFrame", str]:
    """Rows with the payload's fields in the column `json`; returns the schema too (inferred if `"infer"`).

    Rows that are not a JSON object of this schema keep their data and have no `json`. Raises ConfigError
    for a
    schema that Spark does not understand.
    """
    from pyspark.errors import ParseException
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    if schema == "infer":
        schema = infer_json(rows)
    try:
        fields = StructType.fromDDL(schema)
    except ParseException as error:
        raise ConfigError("json_schema", f"is not a schema: {str(error).splitlines()[0]}") from None
    assert isinstance(fields, StructType)
    full = StructType([*fields.fields, StructField(_CORRUPT, StringType())])
    text = F.col("data").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = rows.withColumn("json", F.from_json(text, full, options))
    broken = F.col(f"json.{_CORRUPT}").isNotNull() | F.col("json").isNull() | ~F.ltrim(text).startswith("{")
    return parsed.withColumn("json", F.when(~broken, F.col("json").dropFields(_CORRUPT))), schema


def split_parsed(parsed: "DataFrame") -> tuple["DataFrame", "DataFrame"]:
    """The rows that parsed, and the rows for quarantine."""
    from pyspark.sql import functions as F

    bad = parsed.where(F.col("json").isNull()).drop("json")
    return parsed.where(F.col("json").isNotNull()), bad
