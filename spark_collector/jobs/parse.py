"""JSON payloads as columns; what does not parse is kept apart."""

import logging
from typing import TYPE_CHECKING

from brokerless.core.errors import ConfigError
from brokerless.spark_collector.jobs.table import ExactlyOnceTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

log = logging.getLogger(__name__)
INFER = "infer"
_CORRUPT = "_corrupt"


def check_json_schema(schema: str, table: ExactlyOnceTable) -> str:
    """The schema to parse payloads with, as DDL, or still `"infer"` if there is nothing to take it from yet.

    A table that has a column `json` keeps its schema where the choice is ours. Raises ConfigError for a schema that
    Spark does not understand, or with names that differ only in case, which no reader of the table could tell apart.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    if schema != INFER:
        _without_twins(_parse_ddl(schema), strict=True)
        return schema
    found = table.arrow_schema()
    if found is None:
        return INFER
    fields = from_arrow_schema(found)
    return _ddl(fields["json"].dataType) if "json" in fields.names else INFER


def _parse_ddl(schema: str) -> "StructType":
    from pyspark.errors import ParseException
    from pyspark.sql.types import StructType

    try:
        fields = StructType.fromDDL(schema)
    except ParseException as error:
        raise ConfigError("json_schema", f"is not a schema: {str(error).splitlines()[0]}") from None
    if not isinstance(fields, StructType):
        raise ConfigError("json_schema", f"must name columns, as in 'a int, b string', not {schema!r}")
    return fields


def _ddl(fields: "DataType") -> str:
    from pyspark.sql.types import StructType

    assert isinstance(fields, StructType)
    return ", ".join(f"`{f.name.replace('`', '``')}` {f.dataType.simpleString()}" for f in fields.fields)


def _without_twins(kind: "DataType", *, strict: bool) -> "DataType":
    """The type with one field for names that differ only in case: an error if `strict`, else the first one."""
    from pyspark.sql.types import ArrayType, StructField, StructType

    if isinstance(kind, ArrayType):
        return ArrayType(_without_twins(kind.elementType, strict=strict), kind.containsNull)
    if not isinstance(kind, StructType):
        return kind
    fields: dict[str, StructField] = {}
    for field in kind.fields:
        first = fields.get(field.name.lower())
        if first is None:
            fields[field.name.lower()] = StructField(
                field.name, _without_twins(field.dataType, strict=strict)
            )
        elif strict:
            raise ConfigError(
                "json_schema", f"{first.name!r} and {field.name!r} differ only in case; choose one"
            )
        else:
            log.warning("the field %r is left out: it differs from %r only in case", field.name, first.name)
    return StructType(list(fields.values()))


def infer_json(rows: "DataFrame") -> str | None:
    """The schema of these rows' payloads as DDL; None if there are no rows.

    Fields that are null everywhere or have several types become text. Raises ConfigError if the payloads are not
    JSON objects.
    """
    from pyspark.sql import functions as F

    text = F.col("data").cast("string")
    found = rows.select(
        F.schema_of_variant_agg(F.try_parse_json(text)).alias("s"), F.count(F.lit(1)).alias("n")
    ).first()
    if found is None or not found.n:
        return None
    schema = found.s or ""
    if not schema.startswith("OBJECT<"):
        raise ConfigError(
            "json_schema", f"cannot be inferred: the payloads are {schema or 'empty'}, not JSON objects"
        )
    inner = schema.removeprefix("OBJECT<").removesuffix(">")
    ddl = inner.replace("OBJECT<", "STRUCT<").replace(": VOID", ": STRING").replace(": VARIANT", ": STRING")
    return _ddl(_without_twins(_parse_ddl(ddl), strict=False))


def parse_json(rows: "DataFrame", schema: str) -> tuple["DataFrame", str]:
    """Rows with the payload's fields in the column `json`, and the schema, inferred if it was `"infer"`.

    Rows that are not a JSON object of this schema keep their data and have no `json`. Without rows to infer from there
    is no column `json` yet. Raises ConfigError for a schema that Spark does not understand.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    if schema == INFER:
        found = infer_json(rows)
        if found is None:
            return rows, INFER
        schema = found
    full = StructType([*_parse_ddl(schema).fields, StructField(_CORRUPT, StringType())])
    text = F.col("data").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    parsed = rows.withColumn("json", F.from_json(text, full, options))
    broken = F.col(f"json.{_CORRUPT}").isNotNull() | F.col("json").isNull() | ~F.ltrim(text).startswith("{")
    return parsed.withColumn("json", F.when(~broken, F.col("json").dropFields(_CORRUPT))), schema


def split_parsed(parsed: "DataFrame") -> tuple["DataFrame", "DataFrame"]:
    """The rows that parsed, and the rows for quarantine."""
    from pyspark.sql import functions as F

    if "json" not in parsed.columns:
        return parsed, parsed.limit(0)
    bad = parsed.where(F.col("json").isNull()).drop("json")
    return parsed.where(F.col("json").isNotNull()), bad
