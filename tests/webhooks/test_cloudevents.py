"""CloudEvents: the rules of the specification's JSON format and HTTP binding, valid and invalid."""

import base64
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.webhooks import CloudEvent
from brokerless.webhooks.cloudevents import (
    check,
    from_headers,
    from_json,
    from_json_batch,
    to_headers,
    to_json,
    to_json_batch,
)
from brokerless.webhooks.errors import CloudEventError

MINIMAL = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}


def doc(**changes: object) -> bytes:
    return json.dumps({k: v for k, v in (MINIMAL | changes).items() if v is not ...}).encode()


VALID = [
    {},
    {"source": "https://example.com/a?b=c#d"},
    {"source": "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66"},
    {"source": "../relative"},
    {"time": "2018-04-05T17:31:00Z"},
    {"time": "2018-04-05T17:31:00.123456789+01:30"},
    {"time": "2016-12-31T23:59:60Z"},
    {"time": "2020-02-29t00:00:00z"},
    {"datacontenttype": "text/xml"},
    {"datacontenttype": "application/json; charset=utf-8"},
    {"dataschema": "https://example.com/schema"},
    {"subject": "x.jpg"},
    {"subject": None},
    {"comexampleextension1": "value"},
    {"comexampleothervalue": 5},
    {"flag": True},
    {"ext": -(2**31)},
    {"ext": None},
    {"data": {"a": [1, 2.5, None]}},
    {"data": None},
    {"data": "text", "datacontenttype": "text/plain"},
    {"data_base64": "AAEC", "datacontenttype": "application/octet-stream"},
    {"data_base64": None, "data": 1},
    {"id": "ünïcödé 😀"},
]
INVALID = [
    ({"specversion": ...}, "specversion"),
    ({"specversion": "0.3"}, "specversion"),
    ({"specversion": 1.0}, "specversion"),
    ({"id": ...}, "id"),
    ({"id": ""}, "id"),
    ({"id": None}, "id"),
    ({"id": 5}, "id"),
    ({"source": ...}, "source"),
    ({"source": ""}, "source"),
    ({"source": "has space"}, "source"),
    ({"type": ...}, "type"),
    ({"type": ""}, "type"),
    ({"type": "a\u0007b"}, "type"),
    ({"type": "a\u0085b"}, "type"),
    ({"type": "a\ufffeb"}, "type"),
    ({"type": "a\ufdd0b"}, "type"),
    ({"subject": ""}, "subject"),
    ({"time": "2018-04-05"}, "time"),
    ({"time": "2018-04-05T17:31:00"}, "time"),
    ({"time": "2018-13-05T17:31:00Z"}, "time"),
    ({"time": "2019-02-29T17:31:00Z"}, "time"),
    ({"time": "2018-04-05T25:31:00Z"}, "time"),
    ({"time": "2018-04-05 17:31:00Z"}, "time"),
    ({"time": 1522949460}, "time"),
    ({"datacontenttype": "notamediatype"}, "datacontenttype"),
    ({"datacontenttype": ""}, "datacontenttype"),
    ({"dataschema": ""}, "dataschema"),
    ({"dataschema": "relative/only"}, "dataschema"),
    ({"my_ext": "x"}, "my_ext"),
    ({"MyExt": "x"}, "MyExt"),
    ({"my-ext": "x"}, "my-ext"),
    ({"ext": {"a": 1}}, "ext"),
    ({"ext": [1]}, "ext"),
    ({"ext": 1.5}, "ext"),
    ({"ext": 2**31}, "ext"),
    ({"data": 1, "data_base64": "AAEC"}, "data"),
    ({"data_base64": "not base64!"}, "data_base64"),
    ({"data_base64": 5}, "data_base64"),
]


@pytest.mark.parametrize("changes", VALID, ids=str)
def test_valid_documents(changes: dict[str, object]) -> None:
    """Each document that the specification allows is read, written and read again to the same event."""
    event = from_json(doc(**changes))
    assert from_json(to_json(event)) == event
    assert json.loads(to_json(event))["specversion"] == "1.0"


@pytest.mark.parametrize(("changes", "attribute"), INVALID, ids=str)
def test_invalid_documents(changes: dict[str, object], attribute: str) -> None:
    """Each broken rule raises CloudEventError that names the attribute."""
    with pytest.raises(CloudEventError) as caught:
        from_json(doc(**changes))
    assert caught.value.attribute == attribute


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'"x"', b"{", b"\xff", b"[" * 100_000])
def test_not_a_document(body: bytes) -> None:
    """Bodies that are not a JSON object are refused with the same error type."""
    with pytest.raises(CloudEventError):
        from_json(body)


def test_data_follows_its_content_type() -> None:
    """JSON stays JSON, text becomes a string, and everything else becomes data_base64."""
    event = CloudEvent(id="1", source="/s", type="t", data=b'{"a": 1}', datacontenttype="application/json")
    assert json.loads(to_json(event))["data"] == {"a": 1}
    event = CloudEvent(id="1", source="/s", type="t", data="ä".encode(), datacontenttype="text/plain")
    assert json.loads(to_json(event))["data"] == "ä"
    event = CloudEvent(
        id="1", source="/s", type="t", data=b"\x00\xff", datacontenttype="application/octet-stream"
    )
    assert base64.b64decode(json.loads(to_json(event))["data_base64"]) == b"\x00\xff"
    event = CloudEvent(id="1", source="/s", type="t", data=b"{broken", datacontenttype="application/json")
    assert from_json(to_json(event)).data == b"{broken"


text = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn", "Co")), min_size=1, max_size=20)
names = st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True).filter(
    lambda n: (
        n not in {"data", "id", "source", "type", "time", "subject", "specversion"}
        and not n.startswith("data")
    )
)
events = st.builds(
    CloudEvent,
    id=text,
    source=st.from_regex(r"[a-z/:.]{1,20}", fullmatch=True),
    type=text,
    subject=st.none() | text,
    time=st.none() | st.datetimes().map(lambda at: at.isoformat() + "Z"),
    datacontenttype=st.sampled_from(["application/octet-stream", "image/png", "text/plain"]),
    extensions=st.dictionaries(names, text | st.booleans() | st.integers(-(2**31), 2**31 - 1), max_size=4),
    data=st.binary(),
)


@given(st.lists(events, max_size=4))
def test_json_round_trip(batch: list[CloudEvent]) -> None:
    """Any event, and any batch, is the same after writing and reading."""
    assert from_json_batch(to_json_batch(batch)) == batch
    for event in batch:
        assert from_json(to_json(event)) == event


@given(events)
def test_binary_round_trip(event: CloudEvent) -> None:
    """Binary mode keeps every attribute (as text), with header values in printable ASCII only."""
    headers = to_headers(event)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    again = from_headers({name.title(): value for name, value in headers.items()}, event.data or b"")
    assert again.data == event.data
    assert (again.id, again.source, again.type, again.subject) == (
        event.id,
        event.source,
        event.type,
        event.subject,
    )
    for name, value in event.extensions.items():
        expected = str(value).lower() if isinstance(value, bool) else str(value).strip()
        if isinstance(value, str) and value != value.strip():
            continue
        assert again.extensions[name] == expected


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=20)), st.binary())
def test_headers_never_raise_anything_else(headers: dict[str, str], body: bytes) -> None:
    """Any headers give an event or CloudEventError."""
    marked = {f"ce-{name}": value for name, value in headers.items()}
    with suppress(CloudEventError):
        assert check(from_headers(marked | {"ce-specversion": "1.0", "ce-id": "1"}, body)).id


@given(st.binary() | st.text().map(str.encode))
def test_json_never_raises_anything_else(body: bytes) -> None:
    """Any bytes give an event or CloudEventError."""
    for parse in (from_json, from_json_batch):
        with suppress(CloudEventError):
            parse(body)


def test_batch_is_all_or_nothing() -> None:
    """One invalid event makes the batch invalid; an empty batch is valid."""
    assert from_json_batch(b"[]") == []
    with pytest.raises(CloudEventError):
        from_json_batch(b"[" + doc() + b"," + doc(id="") + b"]")


def test_quoted_header_values_are_read() -> None:
    """Older writers quote header values; the binding says they must be read."""
    headers = {"ce-specversion": "1.0", "ce-id": '"a\\"b"', "ce-source": "/s", "ce-type": "a%20b%C3%A4"}
    event = from_headers(headers, b"")
    assert (event.id, event.type) == ('a"b', "a bä")
