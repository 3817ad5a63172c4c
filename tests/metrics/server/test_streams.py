"""metrics/server/streams.py and repeater.py: bytes into lines and lines into datagrams, however they are cut."""

from hypothesis import given
from hypothesis import strategies as st

from brokerless.metrics.backends.repeater import repack
from brokerless.metrics.server.streams import LineSplitter


@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=30), st.data())
def test_lines_come_out_whole_wherever_the_stream_is_cut(lines: list[bytes], data: st.DataObject) -> None:
    """Against splitting everything at once; lines beyond the limit are skipped and counted, neighbours stay."""
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    splitter = LineSplitter(limit=1000)
    out: list[bytes] = []
    for first, last in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found = splitter.feed(stream[first:last])
        if found or stream[first:last].endswith(b"\n"):
            out += found.split(b"\n")
    assert [line for line in out if line] == [line for line in lines if line]
    assert splitter.unfinished == b""


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_a_line_beyond_the_limit_is_skipped_to_its_newline(pieces: list[int]) -> None:
    """An endless line in pieces costs no memory, is counted once, and the next line is whole."""
    splitter = LineSplitter(limit=20)
    for size in pieces:
        assert splitter.feed(b"x" * size) == b""
        assert len(splitter.unfinished) <= 20
    found = splitter.feed(b"\na:1|c\nb:2")
    assert found.endswith(b"a:1|c")
    assert splitter.overlong == (1 if sum(pieces) > 20 else 0)
    assert splitter.unfinished == b"b:2"


@given(
    st.lists(
        st.binary(min_size=1, max_size=50).map(lambda b: b.replace(b"\n", b"x")), min_size=1, max_size=60
    )
)
def test_repacked_lines_are_the_same_lines(lines: list[bytes]) -> None:
    """Nothing is cut or lost, and datagrams stay within their size."""
    datagrams = repack(b"\n".join(lines), size=100)
    assert b"\n".join(datagrams).split(b"\n") == lines
    assert all(len(d) <= 100 for d in datagrams)
