"""Other people's software reads our streams, and ours reads theirs."""

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from brokerless.core import MemoryJournal, Retention
from brokerless.core.runtime.datagrams import DatagramReceiver
from brokerless.multicast import Publisher
from brokerless.multicast.sockets import parse_address, receiving_socket
from brokerless.multicast.tools.pcap import Datagram, PcapWriter, read_pcap
from brokerless.multicast.wire.moldudp64 import HEADER, LENGTH, parse_gone, request
from tests.multicast.groups import new_group


def capture(
    group: str, path: Path, publish: object, messages: int, *, io: str = "auto", **options: object
) -> Publisher:
    """Publish with a real publisher, and write what a plain socket hears into a capture file."""
    address = parse_address(group, "group", multicast=True)
    sock = receiving_socket(address, "127.0.0.1")
    reader = DatagramReceiver(sock, "plain")
    pub = Publisher(group, "TSHARK", io=io, **options)  # type: ignore[arg-type]
    try:
        with path.open("wb") as file:
            writer = PcapWriter(file)
            publish(pub)  # type: ignore[operator]
            seen = 0
            ended = False
            deadline = time.monotonic() + 20
            closed = False
            while not ended and time.monotonic() < deadline:
                arrivals = reader.receive()
                if not arrivals:
                    if seen >= messages and not closed:
                        pub.close()
                        closed = True
                    time.sleep(0.002)
                    continue
                data = bytes(arrivals[0][0])
                count = int.from_bytes(data[18:20], "big")
                ended = count == 0xFFFF
                seen += count if not ended else 0
                writer.write(Datagram(time.time(), "127.0.0.1", 5000, address.host, address.port, data))
            assert seen >= messages
            assert ended
    finally:
        pub.close()
        sock.close()
    return pub


def publish_all_kinds(pub: Publisher) -> None:
    pub.publish_many("run", [b"%04d" % i * 25 for i in range(2000)])
    for i in range(100):
        pub.publish(
            "mixed" if i % 2 else "other",
            b"z" * i,
            content_type="text/plain" if i % 3 else "",
            key="k" * (i % 4),
        )
    pub.publish("large", b"L" * 5000)
    pub.publish("empty", b"")
    pub.flush()


MESSAGES = 2102
# Wireshark's severities: comment, chat, note, warning, error. It comments on every packet without messages.
WARNING = 0x600000


def tshark(path: Path, port: int, *arguments: str) -> str:
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    done = subprocess.run(
        ["tshark", "-r", str(path), "-d", f"udp.port=={port},moldudp64", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("io", ["gso", "plain"])
def test_tshark_reads_our_stream_without_a_warning(tmp_path: Path, io: str) -> None:
    """Wireshark's dissector finds every message, in sequence, and has nothing to remark."""
    group, path = new_group(), tmp_path / "ours.pcap"
    pub = capture(group, path, publish_all_kinds, MESSAGES, io=io)
    port = int(group.split(":")[1])
    packets = json.loads(tshark(path, port, "-T", "json"))
    expected = 1
    kinds = set()
    for packet in packets:
        layers = packet["_source"]["layers"]
        mold = layers["moldudp64"]
        assert "_ws.malformed" not in layers
        severities = re.findall(r'"_ws.expert.severity": "(\d+)"', json.dumps(layers))
        assert all(int(severity) < WARNING for severity in severities), "the dissector warns"
        assert mold["moldudp64.session"] == pub.session
        count = int(mold["moldudp64.count"])
        sequence = int(mold["moldudp64.sequence"])
        if count in (0, 0xFFFF):
            kinds.add(count)
            continue
        assert sequence == expected
        blocks = mold["moldudp64.msgblock"]
        assert len(blocks if isinstance(blocks, list) else [blocks]) in (1, count), "one block per message"
        expected += count
    assert expected == MESSAGES + 1
    assert kinds == {0, 0xFFFF}, "a heartbeat and an end of session are in the capture"


def test_tshark_finds_nothing_wrong_with_our_captures_of_ipv6(tmp_path: Path) -> None:
    """Addresses, lengths and checksums of the packets that `PcapWriter` makes are right."""
    path = tmp_path / "six.pcap"
    with path.open("wb") as file:
        writer = PcapWriter(file)
        for i in range(50):
            data = HEADER.pack(b"ORDERS0001", 1 + i, 1) + LENGTH.pack(i) + b"x" * i
            writer.write(Datagram(1000.0 + i, "fe80::1%lo", 5000, "ff15::7", 30_001, data))
    fields = ["-T", "fields", "-e", "ipv6.dst", "-e", "udp.checksum.status", "-e", "moldudp64.sequence"]
    seen = tshark(path, 30_001, "-o", "udp.check_checksum:TRUE", *fields).split()
    assert seen == [word for i in range(50) for word in ("ff15::7", "1", str(1 + i))]
    assert tshark(path, 30_001, "-Y", "_ws.expert") == ""


def test_what_tshark_says_of_authenticated_packets(tmp_path: Path) -> None:
    """With authentication it still reads every packet, and remarks on the block that is not counted: as documented."""
    group, path = new_group(), tmp_path / "signed.pcap"
    capture(group, path, publish_all_kinds, MESSAGES, auth_key=b"k" * 32)
    port = int(group.split(":")[1])
    counts = tshark(path, port, "-T", "fields", "-e", "moldudp64.count").split()
    assert sum(int(count) for count in counts if count not in ("0", "65535")) == MESSAGES
    remarks = tshark(path, port, "-Y", "_ws.expert", "-T", "fields", "-e", "_ws.expert.message")
    assert "Invalid" in remarks


def test_a_plain_request_gets_a_plain_answer() -> None:
    """Anybody's 20-byte request is answered with the messages; for what is gone, with something like a heartbeat."""
    group = new_group()
    journal = MemoryJournal(retention=Retention(max_events=100))
    with Publisher(group, "PLAIN", journal=journal) as pub:
        for _ in range(20):
            pub.publish_many("a", [b"x" * 100] * 10)
        assert pub.request_server is not None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(5)
            sock.bind(("127.0.0.1", 0))
            sock.sendto(request(pub.session.encode().ljust(10), 190, 5), pub.request_server.address)
            answer = sock.recv(65_536)
            assert answer[:20] == pub.session.encode().ljust(10) + (190).to_bytes(8, "big") + b"\0\5"
            sock.sendto(request(pub.session.encode().ljust(10), 1, 5), pub.request_server.address)
            answer = sock.recv(65_536)
            assert int.from_bytes(answer[18:20], "big") == 0, "a heartbeat, to those who know nothing of it"
            gone = parse_gone(answer)
            assert gone is not None
            assert (gone.oldest, gone.next, gone.source) == (journal.oldest + 1, 201, "PLAIN")


def test_captures_of_other_programs_are_read(tmp_path: Path) -> None:
    """pcap and pcapng as tshark writes them give the same datagrams as our own file."""
    group, path = new_group(), tmp_path / "ours.pcap"
    capture(group, path, publish_all_kinds, MESSAGES)
    with path.open("rb") as file:
        ours = [datagram.data for datagram in read_pcap(file)]
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    for form in ("pcap", "pcapng", "nsecpcap"):
        other = tmp_path / f"other.{form}"
        subprocess.run(
            ["tshark", "-r", str(path), "-F", form, "-w", str(other)],
            check=True,
            capture_output=True,
            timeout=60,
        )
        with other.open("rb") as file:
            found = list(read_pcap(file))
        assert [datagram.data for datagram in found] == ours
        assert all(datagram.destination == group.split(":")[0] for datagram in found)
