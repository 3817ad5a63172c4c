"""The small HTTP receiver: its parser takes any bytes."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest.adapters.http_server import parse_request


@given(st.binary(max_size=80))
def test_http_parser_never_crashes(data: bytes) -> None:
    """Any bytes are a request, not complete yet, or a ValueError."""
    try:
        request, used = parse_request(data)
    except ValueError:
        return
    assert (request is None) == (used == 0)


def test_http_parser() -> None:
    """Requests in one buffer are taken one after the other, with their bodies."""
    one = b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nX-Y: z\r\n\r\nabc"
    request, used = parse_request(one + one)
    assert request is not None
    assert (request.method, request.headers["x-y"], request.body, used) == ("POST", "z", b"abc", len(one))
    assert parse_request(one[:-1]) == (None, 0)
