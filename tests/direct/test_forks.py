"""A forked child has copies of publishers and subscribers, without their threads: they are closed there."""

import subprocess
import sys
from pathlib import Path

import pytest

FORKED = """
import os, sys
from brokerless.core import DiskJournal, MemoryJournal
from brokerless.core.errors import Closed
from brokerless.direct import Publisher, Subscriber

journal = DiskJournal(sys.argv[1] + "/journal") if sys.argv[2] == "disk" else MemoryJournal()
with Publisher("tcp://127.0.0.1:*", source="p", journal=journal) as pub:
    with Subscriber(pub.address, start="oldest", cursor=sys.argv[1] + "/cursor") as sub:
        pub.publish("t", b"0")
        assert sub.receive(10).data == b"0"
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (
                lambda: pub.publish("t", b"child"),
                lambda: pub.publish_many("t", [b"child"]),
                lambda: pub.publish("new", b"child", wait="acked", timeout=1),
                lambda: sub.wait_joined(1),
                lambda: pub.forget_group("g"),
            ):
                try:
                    call()
                except Closed:
                    refused += 1
                except BaseException as error:
                    print(repr(error), file=sys.stderr, flush=True)
            assert sub.receive(1) is None and list(sub) == []
            sub.close()
            pub.close()
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        print("refused", os.waitstatus_to_exitcode(status))
        pub.publish("t", b"1")
        event = sub.receive(10)
        assert (event.data, event.offset) == (b"1", 1)
        assert sub.ledger.account().lost == 0
"""


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_forked_child_cannot_use_them(kind: str, tmp_path: Path) -> None:
    """Everything is refused there, closing does nothing, and the parent goes on."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path), kind], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "5"], done.stderr
