"""The inner loops, compiled if they could be: `_speed` where there is one, `pure` otherwise.

`BROKERLESS_PURE=1` in the environment takes the Python ones in any case: for tests, and to find out.
"""

import os

from brokerless.multicast import pure

COMPILED = False
if os.environ.get("BROKERLESS_PURE", "") in ("", "0"):
    try:
        from brokerless.multicast import _speed

        COMPILED = True
    except ImportError:  # installed where there was no compiler
        pass

if COMPILED:
    size_range = _speed.size_range
    pack_train = _speed.pack_train
    pack_packets = _speed.pack_packets
    train_header = _speed.train_header
    unpack = _speed.unpack
else:
    size_range = pure.size_range
    pack_train = pure.pack_train
    pack_packets = pure.pack_packets
    train_header = pure.train_header
    unpack = pure.unpack

__all__ = ["COMPILED", "pack_packets", "pack_train", "size_range", "train_header", "unpack"]
