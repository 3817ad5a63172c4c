"""Two collectors on the same producers, machines that are gone for ever, and new ones that go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from brokerless.core import DiskJournal
from brokerless.direct import Publisher
from brokerless.spark_collector import Collector, local
from brokerless.spark_collector.collector.config import CollectorConfig, DirectIn, RemoteConfig, SpoolConfig
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Planner, read_partition
from brokerless.spark_collector.source.remote import RemoteLocation
from brokerless.spark_collector.tier.uploader import load_seen
from tests.conftest import Until
from tests.spark_collector.spools import BIG

Options = dict[str, str]


def publisher(path: Path, source: str, address: str = "tcp://127.0.0.1:0") -> Publisher:
    return Publisher(address, source=source, journal=DiskJournal(path, retention=BIG, fsync="never"))


def config(path: Path, addresses: list[str], url: str, s3: Options, **remote: Any) -> CollectorConfig:
    return CollectorConfig(
        name=url.rpartition("/")[2],
        spool=SpoolConfig(
            path=str(path), remote=RemoteConfig(url=url, close_after_s=0.2, storage_options=s3, **remote)
        ),
        input=[DirectIn(addresses=addresses)],
        status=None,
    )


def start_process(path: Path, addresses: list[str], url: str, s3: Options) -> "subprocess.Popen[bytes]":
    """A collector in a process of its own, for being killed."""
    file = path.with_suffix(".toml")
    options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in s3.items())
    file.write_text(
        f"""name = "{url.rpartition("/")[2]}"
[spool]
path = "{path}"
[spool.remote]
url = "{url}"
close_after_s = 0.2
[spool.remote.storage_options]
{options}
[status]
port = 0
[[input]]
type = "direct"
addresses = {json.dumps(addresses)}
"""
    )
    command = [sys.executable, "-m", "brokerless.cli", "collect", "--config", str(file), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def uploaded(url: str, s3: Options) -> "Counter[tuple[str, int]]":
    """How often each event is in the tier."""
    if RemoteLocation(url, s3).extent() is None:
        return Counter()
    found: Counter[tuple[str, int]] = Counter()
    for batch in local.read_rows({"path": url, "storageOptions": json.dumps(s3)}):
        events = [
            (source, offset)
            for source, offset, kind in zip(
                *(batch.column(n).to_pylist() for n in ("source", "offset", "kind")), strict=True
            )
            if kind == "event"
        ]
        found.update(events)
    return found


def test_a_new_machine_goes_on(tmp_path: Path, url: str, s3: Options, until: Until) -> None:
    """The collector is killed and its disk is gone: a new one has everything once, and a reader's position holds."""
    expected = {("p", n) for n in range(300)}
    with publisher(tmp_path / "p", "p") as p:
        p.publish_many("a", [b"x"] * 100)
        process = start_process(tmp_path / "first", [p.address], url, s3)
        until(lambda: len(uploaded(url, s3)) == 100, 120, "the first hundred in the tier")
        options = parse_options({"path": url, "storageOptions": json.dumps(s3), "numPartitions": "1"})
        before = Planner(options).latest({})
        p.publish_many("a", [b"y"] * 100)
        os.kill(process.pid, signal.SIGKILL)  # with anything between nothing and all of them uploaded
        process.wait()
        shutil.move(tmp_path / "first", tmp_path / "stolen")
        refused = config(tmp_path / "refused", [p.address], url, s3)
        with Collector(refused) as other:
            until(
                lambda: other.uploader is not None and other.uploader.fenced,
                60,
                "a new spool without take_over",
            )
        with Collector(config(tmp_path / "second", [p.address], url, s3, take_over=True)) as second:
            until(lambda: len(uploaded(url, s3)) == 200, 60, "what the producer still had")
            p.publish_many("a", [b"z"] * 100)
            until(lambda: len(uploaded(url, s3)) == 300, 60, "and what came after")
            assert second.counters.events <= 200, "what the tier had was not collected again"
            # The old disk comes back while the new machine writes.
            with Collector(config(tmp_path / "stolen", [p.address], url, s3)) as old:
                until(
                    lambda: old.uploader is not None and old.uploader.fenced, 60, "the old writer is refused"
                )
        counts = uploaded(url, s3)
        assert set(counts) == expected
        assert set(counts.values()) == {1}
        # A third machine, after an orderly end.
        with Collector(config(tmp_path / "third", [p.address], url, s3, take_over=True)) as third:
            p.publish_many("a", [b"!"] * 10)
            until(lambda: len(uploaded(url, s3)) == 310, 60, "the third goes on")
            assert third.counters.events == 10
        seen = load_seen(url, s3)
        assert seen is not None
        assert seen.positions()["p"].offset == 310
    # The reader's position from before goes on over all machines, with nothing twice.
    plan = Planner(options)
    rows = [
        offset
        for partition in plan.partitions(before, plan.latest(before))
        for batch in read_partition(RemoteLocation(url, s3), partition, options)
        for offset, kind in zip(
            batch.column("offset").to_pylist(),
            batch.column("kind").to_pylist(),
            strict=True,  # type: ignore[attr-defined]
        )
        if kind == "event"
    ]
    assert sorted(rows) == list(range(100, 310))


def test_two_collectors_one_gone_for_ever(tmp_path: Path, url: str, s3: Options, until: Until) -> None:
    """Both have the same producers; one is killed and its disk is gone. Nothing is missing, and each counts once."""
    with publisher(tmp_path / "p", "p") as p, publisher(tmp_path / "q", "q") as q:
        addresses = [p.address, q.address]
        process = start_process(tmp_path / "one", addresses, f"{url}/one", s3)
        with Collector(config(tmp_path / "two", addresses, f"{url}/two", s3)):
            for each in (p, q):
                each.publish_many("a", [b"x"] * 200)
            until(lambda: len(uploaded(f"{url}/one", s3)) == 400, 120, "the first has them in its tier")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(tmp_path / "one")
            for each in (p, q):
                each.publish_many("a", [b"y"] * 100)
            until(lambda: len(uploaded(f"{url}/two", s3)) == 600, 60, "the second has all")
    both = {"path": f"{url}/*", "storageOptions": json.dumps(s3)}
    found = local.loss(both, settle_s=0, by="topic").to_pylist()
    assert [(r["source"], r["sent"], r["received"], r["lost"]) for r in found] == [
        ("p", 300, 300, 0),
        ("q", 300, 300, 0),
    ]
    assert sum(r["duplicates"] for r in found) == 400


def test_the_live_tail_is_read_from_the_collector(tmp_path: Path, until: Until) -> None:
    """With `serve`, the option `endpoint` reads the spool over the network, while the collector writes it."""
    with publisher(tmp_path / "p", "p") as p:
        made = CollectorConfig(
            name="c",
            spool=SpoolConfig(path=str(tmp_path / "s"), serve="tcp://127.0.0.1:0"),
            input=[DirectIn(addresses=[p.address])],
            status=None,
        )
        with Collector(made) as collector:
            options = {"endpoint": collector.address}
            for n in (100, 150):
                p.publish_many("a", [b"x"] * (n - (100 if n == 150 else 0)))
                until(lambda n=n: collector.counters.events == n, 60, "collected")
                rows = [
                    r for batch in local.read_rows(options) for r in batch.to_pylist() if r["kind"] == "event"
                ]
                assert [(r["source"], r["offset"], r["transport"]) for r in rows] == [
                    ("p", i, "direct") for i in range(n)
                ]
        with pytest.raises(Exception, match="does not answer"):
            list(local.read_rows(options))
