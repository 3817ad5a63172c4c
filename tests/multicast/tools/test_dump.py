"""The small packet analyser: its words, its files, its command line."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brokerless.core import DiskJournal
from brokerless.core.errors import ConfigError
from brokerless.multicast import Publisher
from brokerless.multicast.tools.dump import Dumper, messages_of
from brokerless.multicast.tools.pcap import Datagram, PcapWriter, read_pcap
from brokerless.multicast.wire.moldudp64 import end_of_session, heartbeat, request
from brokerless.multicast.wire.packing import encode_block, pack_blocks

SESSION = b"ORDERS0001"


def packet(first: int, count: int) -> bytes:
    blocks = [encode_block("", 1, "t", i, i, b"data%d" % i) for i in range(count)]
    return next(pack_blocks(SESSION, first, blocks, 60_000)).buffer


def test_gaps_and_repeats_are_told() -> None:
    """In sequence: nothing to say; then a gap, a repeat, a heartbeat that shows a lost tail, the end, noise."""
    d = Dumper()
    assert d.look("g", packet(1, 5)).notes == ("first of this session",)
    assert d.look("g", packet(6, 5)).notes == ()
    assert d.look("g", packet(21, 5)).notes == ("GAP: 10 missing, 11 to 20",)
    assert d.look("g", packet(9, 4)).notes == ("repeats 4",)
    assert d.look("g", heartbeat(SESSION, 30)).notes == ("GAP: 4 missing, 26 to 29",)
    assert d.look("g", end_of_session(SESSION, 30)).kind == "end"
    assert d.look("g", b"noise").kind == "malformed"
    assert d.look("g", packet(1, 5)[:-1]).kind == "malformed"
    assert d.look("s", request(SESSION, 5, 6), multicast=False)[:4] == ("request", "ORDERS0001", 5, 6)
    assert (d.gaps, d.missing, d.repeated, d.malformed) == (2, 14, 4, 2)
    assert [m[2] for m in messages_of(packet(1, 3))] == [b"data0", b"data1", b"data2"]


@pytest.mark.parametrize(("source", "group"), [("127.0.0.1", "239.1.2.3"), ("fd77::1", "ff15::7")])
@given(datas=st.lists(st.binary(max_size=200), max_size=20))
def test_captures_come_back_as_they_were_written(source: str, group: str, datas: list[bytes]) -> None:
    """What is written is read, with addresses and ports, of IPv4 and IPv6."""
    file = io.BytesIO()
    writer = PcapWriter(file)
    written = [Datagram(1000.5 + i, source, 5000, group, 30_001, d) for i, d in enumerate(datas)]
    for datagram in written:
        writer.write(datagram)
    file.seek(0)
    assert list(read_pcap(file)) == written


@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\xc3\xd4", b"\x0a\x0d\x0d\x0a"]),
)
def test_any_file_is_read_or_refused(noise: bytes, magic: bytes) -> None:
    """A damaged capture gives what can be read of it, or a ConfigError; never anything else."""
    try:
        for datagram in read_pcap(io.BytesIO(magic + noise)):
            Dumper().look("x", datagram.data)
    except ConfigError:
        pass


def run(*arguments: str, timeout: float = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", "from brokerless.cli.main import main; main()", "mcast", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", "from brokerless.cli.main import main; main()", "mcast", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_commands_work_together(group: str, tmp_path: Path, until: Callable[..., None]) -> None:
    """`sub` and `dump` hear what `Publisher` sends; the capture that `dump` writes is read by `dump --pcap`."""
    capture = tmp_path / "x.pcap"
    with Publisher(group, "CLI") as pub:
        pub.publish_many("old", [b"0", b"1"])
        sub = start("sub", group, "--session", "CLI", "--from", "oldest", "--count", "5", "--json")
        dump = start("dump", group, "--timeout", "3", "--write", str(capture), "--messages")
        # Heartbeats are written as soon as it listens.
        until(lambda: capture.exists() and capture.stat().st_size > 24, 60, "dump listens")
        for i in range(2, 5):
            pub.publish("new", b"%d" % i)
        out, err = sub.communicate(timeout=60)
        assert [json.loads(line)["data"] for line in out.splitlines()] == ["0", "1", "2", "3", "4"]
        assert "5 delivered, 0 lost" in err
        assert sub.returncode == 0
    shown, told = dump.communicate(timeout=30)
    assert "new seq=0" in shown
    assert "0 malformed" in told
    again = run("dump", "--pcap", str(capture), "--show", "all")
    assert again.stdout.count("data ") == shown.count("data ")


def test_publishing_from_standard_input_and_serving_from_a_journal(group: str, tmp_path: Path) -> None:
    """`pub` reads lines into a disk journal; `serve` answers from it when the publisher is gone."""
    lines = "".join(f"line {i}\n" for i in range(100))
    done = subprocess.run(
        [sys.executable, "-c", "from brokerless.cli.main import main; main()", "mcast", "pub", group, "CLI", "t", "-",
         "--journal", str(tmp_path / "j"), "--linger", "0"],
        input=lines, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "100 published" in done.stderr, done.stderr
    server = start("serve", str(tmp_path / "j"), "CLI")
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        sub = start("sub", group, "--from", "oldest", "--request-server", address, "--count", "101")
        with Publisher(group, "CLI", journal=None, requests=None, source="CLI") as other:
            assert other.session  # another session of the same name: not what the server has
        with Publisher(group, "CLI", journal=DiskJournal(tmp_path / "j"), requests=None) as pub:
            pub.publish("t", b"line 100")
            out, err = sub.communicate(timeout=40)
        assert out.splitlines()[-1] == "t line 100", err
        assert len(out.splitlines()) == 101
    finally:
        server.terminate()
        server.communicate(timeout=20)
    assert server.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["dump"],
        ["dump", "239.1.1.1:5", "--pcap", "x"],
        ["dump", "--pcap", "/no/such/file"],
        ["sub", "10.0.0.1:5"],
        ["sub", "239.1.1.1:5", "--from", "yesterday"],
        ["pub", "239.1.1.1:5001", "TOOLONG", "t", "x"],
        ["sub", "239.1.1.1:5", "--auth-key", "/no/such/key"],
    ],
)
def test_wrong_arguments_are_explained_in_one_line(arguments: list[str]) -> None:
    """Exit code 2 and one line that names the problem, no traceback."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("brokerless: ")
    assert done.stderr.count("\n") == 1
