"""Capture files: reading UDP datagrams out of pcap and pcapng, writing pcap. Pure but for the file."""

import socket
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from brokerless.core.errors import ConfigError

_MICRO, _NANO = 0xA1B2C3D4, 0xA1B23C4D
_PCAPNG = 0x0A0D0D0A
# Link types: how many bytes come before the IP header, and where the EtherType is (None: there is none).
_NULL, _ETHERNET, _RAW, _LINUX_SLL, _IPV4, _IPV6, _LINUX_SLL2 = 0, 1, 101, 113, 228, 229, 276
_MAX_PACKET = 1 << 20
_UDP = 17


class Datagram(NamedTuple):
    """One UDP datagram: time in seconds since 1970, addresses, payload."""

    time: float
    source: str
    source_port: int
    destination: str
    destination_port: int
    data: bytes


def read_pcap(file: BinaryIO, name: str = "capture") -> Iterator[Datagram]:
    """The UDP datagrams in a capture, in its order. Raises ConfigError if it is not a capture.

    Fragmented and truncated datagrams are left out; a file that ends in the middle of a packet just ends.
    """
    magic = file.read(4)
    if len(magic) < 4:
        raise ConfigError(name, "is not a capture file: too short")
    if struct.unpack("<I", magic)[0] == _PCAPNG:
        packets = _read_pcapng(file, name)
    else:
        packets = _read_classic(file, magic, name)
    for time, link, raw in packets:
        found = _udp(link, raw)
        if found is not None:
            yield Datagram(time, *found)


def _read_classic(file: BinaryIO, magic: bytes, name: str) -> Iterator[tuple[float, int, bytes]]:
    for order in "<>":
        number = struct.unpack(order + "I", magic)[0]
        if number in (_MICRO, _NANO):
            break
    else:
        raise ConfigError(name, "is neither pcap nor pcapng")
    scale = 1e-6 if number == _MICRO else 1e-9
    rest = file.read(20)
    if len(rest) < 20:
        raise ConfigError(name, "is not a capture file: its header is cut off")
    link = struct.unpack(order + "I", rest[16:20])[0] & 0xFFFF
    while len(head := file.read(16)) == 16:
        seconds, fraction, captured, original = struct.unpack(order + "IIII", head)
        if captured > _MAX_PACKET:
            raise ConfigError(name, f"is damaged: a packet of {captured} bytes")
        raw = file.read(captured)
        if len(raw) < captured:
            return
        if captured >= original:
            yield seconds + fraction * scale, link, raw


def _read_pcapng(file: BinaryIO, name: str) -> Iterator[tuple[float, int, bytes]]:
    file.seek(0)
    order = "<"
    links: list[tuple[int, float]] = []
    while len(head := file.read(8)) == 8:
        kind, length = struct.unpack(order + "II", head)
        if kind == _PCAPNG:
            mark = file.read(4)
            order = "<" if mark == b"\x4d\x3c\x2b\x1a" else ">"
            length = struct.unpack(order + "I", head[4:])[0]
            links.clear()
            body = mark + file.read(max(0, min(length, _MAX_PACKET) - 12))
        else:
            if not 12 <= length <= 2 * _MAX_PACKET:
                raise ConfigError(name, f"is damaged: a block of {length} bytes")
            body = file.read(length - 8)
        if kind == 1 and len(body) >= 8:
            links.append((struct.unpack_from(order + "H", body)[0], _resolution(order, body[8:-4])))
        elif kind == 6 and len(body) >= 24:
            interface, high, low, captured, original = struct.unpack_from(order + "IIIII", body)
            raw = body[20 : 20 + captured]
            if interface < len(links) and len(raw) == captured >= original:
                link, unit = links[interface]
                yield (high << 32 | low) * unit, link, raw


def _resolution(order: str, options: bytes) -> float:
    """The unit of time stamps of an interface: option 9 (if_tsresol), microseconds without it."""
    at = 0
    while at + 4 <= len(options):
        code, size = struct.unpack_from(order + "HH", options, at)
        if code == 9 and size >= 1 and at + 4 < len(options):
            value = options[at + 4]
            return 2.0 ** -(value & 0x7F) if value & 0x80 else 10.0**-value
        at += 4 + (size + 3) // 4 * 4
    return 1e-6


def _udp(link: int, raw: bytes) -> tuple[str, int, str, int, bytes] | None:
    """Addresses and payload of a UDP datagram in one link-layer packet."""
    start = {_ETHERNET: 14, _NULL: 4, _RAW: 0, _IPV4: 0, _IPV6: 0, _LINUX_SLL: 16, _LINUX_SLL2: 20}.get(link)
    if start is None:
        return None
    if link == _ETHERNET:
        while raw[start - 2 : start] in (b"\x81\x00", b"\x88\xa8"):  # VLAN tags
            start += 4
    ip = raw[start:]
    if not ip:
        return None
    version = ip[0] >> 4
    if version == 4 and len(ip) >= 28:
        size = (ip[0] & 15) * 4
        if ip[9] != _UDP or struct.unpack_from(">H", ip, 6)[0] & 0x3FFF:
            return None  # not UDP, or a fragment
        source, destination = ".".join(map(str, ip[12:16])), ".".join(map(str, ip[16:20]))
    elif version == 6 and len(ip) >= 48 and ip[6] == _UDP:
        size = 40
        source = socket.inet_ntop(socket.AF_INET6, ip[8:24])
        destination = socket.inet_ntop(socket.AF_INET6, ip[24:40])
    else:
        return None
    udp = ip[size:]
    if len(udp) < 8:
        return None
    source_port, destination_port, length = struct.unpack_from(">HHH", udp)
    data = udp[8:length] if length >= 8 else udp[8:]
    return source, source_port, destination, destination_port, data


class PcapWriter:
    """Writes datagrams as raw IP packets, each with one call of `write`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(struct.pack("<IHHiIII", _MICRO, 2, 4, 0, 0, 0x40000, _RAW))

    def write(self, datagram: Datagram) -> None:
        """Append one."""
        packet = _ip_packet(datagram)
        seconds = int(datagram.time)
        micros = int((datagram.time - seconds) * 1e6)
        self._file.write(struct.pack("<IIII", seconds, micros, len(packet), len(packet)) + packet)


def _ip_packet(datagram: Datagram) -> bytes:
    length = 8 + len(datagram.data)
    family = socket.AF_INET6 if ":" in datagram.destination else socket.AF_INET
    hosts = (datagram.source, datagram.destination)
    source, destination = (socket.inet_pton(family, host.partition("%")[0]) for host in hosts)
    udp = struct.pack(">HHH", datagram.source_port, datagram.destination_port, length)
    if family == socket.AF_INET:
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, 0x4000, 1, _UDP, 0) + source + destination
        # A UDP checksum of 0 says that there is none, which IPv4 allows.
        return ip[:10] + struct.pack(">H", _checksum(ip)) + ip[12:] + udp + bytes(2) + datagram.data
    pseudo = source + destination + struct.pack(">II", length, _UDP) + udp + bytes(2) + datagram.data
    checksum = _checksum(pseudo) or 0xFFFF
    ip = struct.pack(">IHBB", 6 << 28, length, _UDP, 1) + source + destination
    return ip + udp + struct.pack(">H", checksum) + datagram.data


def _checksum(covered: bytes) -> int:
    covered += bytes(len(covered) % 2)
    total: int = sum(struct.unpack(f">{len(covered) // 2}H", covered))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
