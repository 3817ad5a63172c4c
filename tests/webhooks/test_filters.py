"""Payload filters: what matches, and that no data can make them fail."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core.errors import ConfigError
from brokerless.webhooks import PayloadFilter
from brokerless.webhooks.filters import CompiledFilters, check_filter, decode

DATA = {"order": {"total": 12.5, "paid": True, "items": [{"sku": "abc-1"}], "note": None}, "n": 1}


@pytest.mark.parametrize(
    ("condition", "matches"),
    [
        ({"path": "$.order.total", "equals": 12.5}, True),
        ({"path": "$.order.paid", "equals": True}, True),
        ({"path": "$.n", "equals": True}, False),
        ({"path": "$.order.note", "equals": None}, True),
        ({"path": "$.order.missing", "equals": None}, False),
        ({"path": "$.order.items[0].sku", "prefix": "abc"}, True),
        ({"path": "$.order.items[1].sku", "prefix": "abc"}, False),
        ({"path": "$.n", "prefix": "1"}, False),
        ({"path": "$.order.total", "minimum": 12.5, "maximum": 13}, True),
        ({"path": "$.order.total", "minimum": 13}, False),
        ({"path": "$.order.paid", "minimum": 0}, False),
    ],
)
def test_conditions(condition: dict[str, Any], matches: bool) -> None:
    """Equality by kind and value, prefixes of text, inclusive ranges of numbers."""
    document = decode(json.dumps(DATA).encode(), "application/json")
    assert CompiledFilters([check_filter(PayloadFilter(**condition))]).match(document) is matches


@given(st.binary(max_size=100), st.sampled_from(["application/json", "text/plain", ""]))
def test_no_data_makes_them_fail(data: bytes, content_type: str) -> None:
    """Whatever the data is, the answer is yes or no."""
    conditions = [PayloadFilter(path="$.a[0].b", equals="x"), PayloadFilter(path="$.a", minimum=0)]
    assert CompiledFilters(conditions).match(decode(data, content_type)) in {True, False}


@pytest.mark.parametrize("fields", [{}, {"equals": 1, "prefix": "a"}, {"prefix": "a", "minimum": 1}])
def test_exactly_one_kind_of_condition(fields: dict[str, Any]) -> None:
    """None, or two kinds at once, are refused."""
    with pytest.raises(ConfigError):
        check_filter(PayloadFilter(path="$.a", **fields))
