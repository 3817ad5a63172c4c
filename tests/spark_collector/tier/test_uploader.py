"""A spool with a remote tier, on an S3 server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from brokerless.core import DiskJournal, Retention
from brokerless.core.errors import ConfigError, Fault, UsageError
from brokerless.spark_collector import Collector, CollectorConfig, DataLoss, JournalIn, SpoolConfig, local
from brokerless.spark_collector.collector.config import RemoteConfig
from brokerless.spark_collector.collector.counters import CollectorCounters
from brokerless.spark_collector.source.options import parse_options
from brokerless.spark_collector.source.planning import Planner, read_partition
from brokerless.spark_collector.source.remote import RemoteLocation
from brokerless.spark_collector.tier import uploader as uploading
from brokerless.spark_collector.tier.object_store import open_store
from brokerless.spark_collector.tier.parts import PartDamaged, part_key
from brokerless.spark_collector.tier.uploader import TierUploader
from tests.conftest import Until
from tests.spark_collector.spools import BIG, fill, open_spool

Options = dict[str, str]


def upload(path: Path, url: str, s3: Options, **options: object) -> TierUploader:
    made = TierUploader(
        str(path),
        url,
        counters=CollectorCounters(),
        close_after_s=0.2,
        storage_options=s3,
        **options,  # type: ignore[arg-type]
    )
    made.start()
    return made


def source(url: str, s3: Options, **options: str) -> dict[str, str]:
    return {"path": url, "storageOptions": json.dumps(s3), **options}


def offsets(url: str, s3: Options, **options: str) -> list[int]:
    """The offsets of all events."""
    found = []
    for batch in local.read_rows(source(url, s3, **options)):
        kinds, numbers = (batch.column(name).to_pylist() for name in ("kind", "offset"))
        found += [n for n, kind in zip(numbers, kinds, strict=True) if kind == "event"]
    return found


def test_a_spool_is_read_from_its_tier(tmp_path: Path, url: str, s3: Options, until: Until) -> None:
    """Everything that was spooled, in parts of bounded size and age, with the same numbers as from the disk."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 500)
        made = upload(tmp_path / "s", url, s3, part_bytes=2048)
        until(lambda: made.uploaded == spool.next, 60, "the first part of it")
        assert offsets(url, s3) == list(range(500))
        fill(spool, "p", 510, 90)
        until(lambda: made.uploaded == spool.next, 60, "a part that is closed by its age")
        made.stop()
        remote = local.loss(source(url, s3), settle_s=0, by="topic").to_pylist()
        assert remote == local.loss({"path": str(tmp_path / "s")}, settle_s=0, by="topic").to_pylist()
        assert sum(r["lost"] for r in remote) == 10
        location = RemoteLocation(url, s3)
        assert location.extent() is not None
        sizes = list(location.sizes(0, spool.next))
        assert sum(events for _, events, _ in sizes) == 590
        assert sizes[-1][0] == spool.next
        assert all(0 < size <= 4096 for _, _, size in sizes)


def test_batches_cover_the_tier_once(tmp_path: Path, url: str, s3: Options) -> None:
    """Limits, tasks and offsets anywhere: every event in exactly one partition."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 400)
        made = upload(tmp_path / "s", url, s3, part_bytes=1024)
        made.stop()
    options = parse_options(source(url, s3, numPartitions="3"))
    plan = Planner(options)
    at, seen = plan.initial(), []
    for _ in range(100):
        after = plan.latest(at, 50)
        for partition in plan.partitions(at, after):
            for batch in read_partition(RemoteLocation(url, s3), partition, options):
                seen += batch.column("offset").to_pylist()  # type: ignore[attr-defined]
        if after == at:
            break
        at = after
    assert seen == list(range(400))


def test_a_checkpoint_of_the_spool_goes_on_with_its_tier(tmp_path: Path, url: str, s3: Options) -> None:
    """The same journal at another location: nothing again, nothing left out."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        at = Planner(parse_options({"path": str(tmp_path / "s")})).latest({})
        fill(spool, "p", 100, 50)
        upload(tmp_path / "s", url, s3).stop()
    plan = Planner(parse_options(source(url, s3, numPartitions="1")))
    after = plan.latest(at)
    assert list(after) == [url]
    (partition,) = plan.partitions(at, after)
    assert (partition.key, partition.first, partition.stop) == (url, 10, 15)


def test_a_tier_on_a_mounted_file_system(tmp_path: Path, until: Until) -> None:
    """A directory serves as a store: read by its path, by its URL and by a glob, and with one writer."""
    tier = tmp_path / "tiers" / "one"
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        made = upload(tmp_path / "s", f"file://{tier}", {}, part_bytes=1024)
        made.stop()
        at = Planner(parse_options({"path": str(tmp_path / "s")})).latest({})
        fill(spool, "p", 100, 50)
        upload(tmp_path / "s", f"file://{tier}", {}).stop()
    for path in (str(tier), f"file://{tier}", str(tmp_path / "tiers" / "*")):
        assert offsets(path, {}) == list(range(150))
    assert offsets(str(tier), {}, startingOffsets=json.dumps({str(tier): 12})) == list(range(120, 150))
    plan = Planner(parse_options({"path": str(tier), "numPartitions": "1"}))
    (partition,) = plan.partitions(at, plan.latest(at))
    assert (partition.key, partition.first, partition.stop) == (str(tier), 10, 15)
    with open_spool(tmp_path / "other") as spool:
        fill(spool, "p", 0, 10)
        other = upload(tmp_path / "other", f"file://{tier}", {})
        until(lambda: other.fenced, 60, "another spool is refused")
        other.stop()
    with pytest.raises(UsageError):
        offsets(str(tmp_path / "tiers" / "none"), {})
    assert not (tmp_path / "tiers" / "none").exists()


def test_many_manifests(tmp_path: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full manifests stay, and only those that are needed are read."""
    monkeypatch.setattr(uploading, "PARTS_PER_MANIFEST", 3)
    with open_spool(tmp_path / "s") as spool:
        for n in range(8):
            fill(spool, "p", 10 * n, 10)
            upload(tmp_path / "s", url, s3).stop()
    assert offsets(url, s3) == list(range(80))
    assert offsets(url, s3, startingOffsets=json.dumps({url: 7})) == list(range(70, 80))
    names = {o["path"] for page in obstore.list(open_store(url, s3)) for o in page}
    assert {n for n in names if n.startswith("manifests/")} == {"manifests/00000000", "manifests/00000001"}


def test_a_trigger_lists_once_and_asks_each_tier_twice(
    tmp_path: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty collectors are fifty tiers: what a trigger asks the store for grows with them, so it is little for each.
    A tier that is made meanwhile is found."""

    def make(name: str) -> None:
        with open_spool(tmp_path / name, source=name) as spool:
            fill(spool, name, 0, 20)
            upload(tmp_path / name, f"{url}/{name}", s3).stop()

    for n in range(6):
        make(f"c{n}")
    obstore.put(open_store(url, s3), "other/file", b"no tier")
    plan = Planner(parse_options(source(f"{url}/*", s3)))
    start = plan.initial()
    at = plan.latest(start)
    asked: Counter[str] = Counter()
    for name in ("get", "list_with_delimiter"):
        real = getattr(obstore, name)

        def count(*args: object, name: str = name, real: Callable[..., object] = real) -> object:
            asked[name] += 1
            return real(*args)

        monkeypatch.setattr(obstore, name, count)
    after = plan.latest(at)
    assert after == at
    assert plan.partitions(at, after) == []
    assert plan.newest() == at
    assert plan.backlog(start) == sum(offset.next for offset in at.values())
    assert asked == {"list_with_delimiter": 1, "get": 2 * 6 + 1}, "the last one is what is no tier"
    make("c6")
    after = plan.latest(at)
    assert set(after) - set(at) == {f"{url}/c6"}
    assert [partition.key for partition in plan.partitions(at, after)] == [f"{url}/c6"]


def test_a_part_that_was_not_listed_is_recognised(tmp_path: Path, url: str, s3: Options) -> None:
    """Killed between the part and its manifest: the next one goes on after it."""
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 50)
        upload(tmp_path / "s", url, s3).stop()
        before = obstore.get(open_store(url, s3), "newest").bytes()
        fill(spool, "p", 50, 50)
        upload(tmp_path / "s", url, s3).stop()
        obstore.put(open_store(url, s3), "newest", before)
        fill(spool, "p", 100, 50)
        upload(tmp_path / "s", url, s3).stop()
    assert offsets(url, s3) == list(range(150))


def test_a_power_cut_takes_back_what_was_uploaded(tmp_path: Path, url: str, s3: Options) -> None:
    """The spool goes on at earlier offsets: what comes there is uploaded after the tier's end, and a stream gets it."""
    path = tmp_path / "s"
    with open_spool(path) as spool:
        fill(spool, "p", 0, 100)
        stale, size = (path / "head").read_bytes(), (path / "00000001.seg").stat().st_size
        fill(spool, "p", 100, 100)
        upload(path, url, s3).stop()
    planner = Planner(parse_options(source(url, s3)))
    at = planner.latest(planner.initial())
    (path / "head").write_bytes(stale)
    os.truncate(path / "00000001.seg", size)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"boot_id": "another boot", "clean": False}))
    for first in (100, 150):  # again after a restart, too
        with open_spool(path) as spool:
            fill(spool, "q", first - 100, 50)
            upload(path, url, s3).stop()
    assert Counter(offsets(url, s3)) == Counter([*range(200), *range(100)])
    options = parse_options(source(url, s3))
    after = planner.latest(at)
    location = RemoteLocation(url, s3)
    new = [b for p in planner.partitions(at, after) for b in read_partition(location, p, options)]
    assert [s for b in new for s in b.column("source").to_pylist()] == ["q"] * 100


def test_only_what_is_synced_is_uploaded(tmp_path: Path, until: Until) -> None:
    """A power cut would take the rest back, and Spark has read it."""
    synced = 4
    url = f"file://{tmp_path}/tier"
    with open_spool(tmp_path / "s") as spool:
        fill(spool, "p", 0, 100)
        made = upload(tmp_path / "s", url, {}, durable=lambda: synced)
        until(lambda: made.uploaded == 4, 60, "what is synced")
        fill(spool, "p", 100, 10)
        made.stop()
        assert offsets(url, {}) == list(range(40))
        synced = spool.next
        upload(tmp_path / "s", url, {}, durable=lambda: synced).stop()
    assert offsets(url, {}) == list(range(110))


def test_why_a_tier_cannot_be_read(url: str, s3: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what the store said: no tier, no bucket, a refused address, an option that is none, damage."""

    def problem(at: str, options: Options) -> str:
        with pytest.raises((UsageError, Fault)) as raised:
            local.counts(source(at, options))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    obstore.put(open_store(url, s3), "other/object", b"")
    assert "no object 'newest'" in problem(url, s3)
    assert "none of the 1 folders" in problem(f"{url}/*", s3)
    away = s3 | {"aws_endpoint": "http://127.0.0.1:9"}
    for at in (url, f"{url}/*"):
        assert "bucket" in problem(at.replace("bucket", "missing", 1), s3).lower()
        assert "error sending request" in problem(at, away)
        assert "nonsense" in problem(at, s3 | {"nonsense": "1"})
    plain = {key: value for key, value in s3.items() if key != "aws_allow_http"}
    assert "builder error" in problem(url, plain)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert "no object 'newest'" in problem(url, plain)
    obstore.put(open_store(url, s3), "newest", b"")
    assert f"{url}/newest: is damaged" in problem(url, s3)


def test_two_writers_of_one_tier(tmp_path: Path, url: str, s3: Options, until: Until) -> None:
    """Another spool is refused, and so is a copy of the same one that writes at the same time."""
    import shutil

    with open_spool(tmp_path / "s") as spool, open_spool(tmp_path / "other") as other:
        fill(spool, "p", 0, 50)
        fill(other, "q", 0, 50)
        first = upload(tmp_path / "s", url, s3)
        until(lambda: first.uploaded == spool.next, 60, "the first part")
        shutil.copytree(tmp_path / "s", tmp_path / "copy")
        copy = upload(tmp_path / "copy", url, s3)
        until(lambda: copy.uploaded == spool.next, 60, "the copy to have found the tier")
        stranger = upload(tmp_path / "other", url, s3)
        until(lambda: stranger.fenced, 60, "the other spool to be refused")
        fill(spool, "p", 50, 10)
        until(lambda: first.uploaded == spool.next, 60, "the next part")
        with DiskJournal(tmp_path / "copy", source="collector", retention=BIG, fsync="never") as copied:
            fill(copied, "p", 50, 20)
            until(lambda: copy.fenced, 60, "the copy to be refused")
        for each in (first, copy, stranger):
            each.stop()
    assert offsets(url, s3) == list(range(60))
    assert "another process" in copy.error


def test_lost_and_damaged_parts(tmp_path: Path, url: str, s3: Options) -> None:
    """An object that a lifecycle rule removed is evicted, one that was changed is corrupt; both with the range."""
    with open_spool(tmp_path / "s") as spool:
        for n in range(3):
            fill(spool, "p", 100 * n, 100)
            upload(tmp_path / "s", url, s3).stop()
    store = open_store(url, s3)
    raw = bytearray(obstore.get(store, part_key(1)).bytes())
    raw[-1] ^= 0xFF
    obstore.put(store, part_key(1), bytes(raw))
    with pytest.raises(PartDamaged, match="offsets 10 to 19"):
        offsets(url, s3)
    assert len(offsets(url, s3, onCorrupt="quarantine")) == 200
    obstore.delete(store, part_key(1))
    with pytest.raises(DataLoss, match="offsets 10 to 19"):
        offsets(url, s3)
    assert len(offsets(url, s3, failOnDataLoss="false")) == 200


def test_a_spool_keeps_what_was_not_uploaded(tmp_path: Path, url: str, s3: Options, until: Until) -> None:
    """With its store away a full spool refuses, and evicts nothing; when the store is back, it goes on."""
    away = {**s3, "aws_endpoint": "http://127.0.0.1:9"}

    def collector(options: Options) -> Collector:
        remote = RemoteConfig(url=url, close_after_s=0.2, storage_options=options)
        spool = SpoolConfig(path=str(tmp_path / "s"), max_bytes=8 * 1024 * 1024, remote=remote)
        inputs = [JournalIn(path=str(tmp_path / "j"))]
        return Collector(CollectorConfig(name="c", spool=spool, input=list(inputs), status=None))

    small = Retention(max_bytes=1 << 26)
    with DiskJournal(tmp_path / "j", source="p", retention=small, fsync="never") as journal:
        for _ in range(30):
            journal.append_many("a", [os.urandom(1000)] * 500)
            journal.flush()
        with collector(away) as first:
            until(lambda: first.counters.refused > 0, 60, "the spool to be full")
            assert first.spool.oldest == 0
            until(lambda: first.counters.upload_failures > 0, 120, "the upload to fail")
        with collector(s3) as second:
            until(lambda: second.counters.events + first.counters.events == 15_000, 120, "everything spooled")
            until(lambda: second.uploader.uploaded == second.spool.next, 120, "everything uploaded")  # type: ignore[union-attr]
    assert sorted(offsets(url, s3)) == list(range(15_000))
    with pytest.raises(ConfigError, match="url"):
        RemoteConfig(url="ftp://x")


COLLECTOR = """
import json, sys, time
from brokerless.spark_collector import Collector, CollectorConfig, JournalIn, SpoolConfig
from brokerless.spark_collector.collector.config import RemoteConfig
path, url, options = sys.argv[1:]
remote = RemoteConfig(url=url, close_after_s=0.1, part_bytes=4096, storage_options=json.loads(options))
spool = SpoolConfig(path=path + "/s", remote=remote, sync_interval_s=0.02)
config = CollectorConfig(name="c", spool=spool, input=[JournalIn(path=path + "/j")], status=None)
with Collector(config):
    time.sleep(600)
"""


@pytest.mark.timeout(280)
def test_a_collector_killed_again_and_again(tmp_path: Path, url: str, s3: Options, until: Until) -> None:
    """Each event is in the tier once, wherever the kill came; its reader sees a growing prefix meanwhile."""
    command = [sys.executable, "-c", COLLECTOR, str(tmp_path), url, json.dumps(s3)]
    with DiskJournal(tmp_path / "j", source="p", retention=BIG, fsync="never") as journal:
        count = 0
        for life in range(5):
            process = subprocess.Popen(command)
            try:
                for _ in range(20):
                    journal.append_many("a", [b"x" * 50] * 20)
                    count += 20
                    time.sleep(0.02)
                if life < 4:
                    before = RemoteLocation(url, s3).extent()
                    begin = before.next if before else 0
                    until(
                        lambda b=begin: (e := RemoteLocation(url, s3).extent()) and e.next > b,
                        60,
                        "a new part",
                    )
                    found = offsets(url, s3, failOnDataLoss="false")
                    assert len(set(found)) == len(found)
                else:
                    until(lambda n=count: len(set(offsets(url, s3)) & set(range(n))) == n, 100, "all of it")
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
    assert sorted(offsets(url, s3)) == list(range(count))
