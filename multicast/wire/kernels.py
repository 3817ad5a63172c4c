"""The inner loops, compiled if possible: `_speed` where there is one, `pure` otherwise."""

from typing import TYPE_CHECKING

from brokerless.core.runtime.accelerated import load
from brokerless.multicast.wire import pure

_speed = load("multicast")
COMPILED = _speed is not None

size_range = pure.size_range
pack_gso_batch = pure.pack_gso_batch
pack_packets = pure.pack_packets
send_lone = pure.send_lone
gso_batch_header = pure.gso_batch_header
unpack = pure.unpack
wait_next = pure.wait_next
mac_key = pure.mac_key
sign_packets = pure.sign_packets
verify_packets = pure.verify_packets
if _speed is not None and not TYPE_CHECKING:
    size_range = _speed.size_range
    pack_gso_batch = _speed.pack_gso_batch
    pack_packets = _speed.pack_packets
    send_lone = _speed.send_lone
    gso_batch_header = _speed.gso_batch_header
    unpack = _speed.unpack
    wait_next = _speed.wait_next
    mac_key = _speed.mac_key
    sign_packets = _speed.sign_packets
    verify_packets = _speed.verify_packets

__all__ = [
    "COMPILED",
    "gso_batch_header",
    "mac_key",
    "pack_gso_batch",
    "pack_packets",
    "send_lone",
    "sign_packets",
    "size_range",
    "unpack",
    "verify_packets",
    "wait_next",
]
