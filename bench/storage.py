"""Object stores: obstore, pyarrow.fs and fsspec at what the remote tier does, on a directory and on an S3 server.

Writing and reading a part, a range of it, a small manifest, and creating an object that is already there, which must be
refused: that is the tier's fence. The S3 server is moto in a process of its own, so differences between clients are
those of their CPU. fsspec needs s3fs for S3, which is measured if it is installed.

    bench/storage.py [ROUNDS]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Report
from bench.spark import object_store

PART = bytes(range(256)) * 4096 * 2  # 2 MiB: moto copies whole objects
SMALL = PART[:20_000]
RANGE = 65_536


class Client(Protocol):
    """A library, bound to one place."""

    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def ranged(self, key: str, first: int, length: int) -> bytes: ...
    def create(self, key: str, data: bytes) -> None: ...


class Obstore:
    def __init__(self, url: str, s3: dict[str, str]) -> None:
        from brokerless.spark_collector.tier.object_store import open_store

        self.store = open_store(url, s3 if url.startswith("s3") else None, make=True)

    def put(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self.store, key, data)

    def get(self, key: str) -> bytes:
        import obstore

        return bytes(obstore.get(self.store, key).bytes())

    def ranged(self, key: str, first: int, length: int) -> bytes:
        import obstore

        return bytes(obstore.get_range(self.store, key, start=first, length=length))

    def create(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self.store, key, data, mode="create")


class PyarrowFs:
    def __init__(self, url: str, s3: dict[str, str]) -> None:
        from pyarrow import fs

        self.root = url.partition("://")[2]
        if not url.startswith("s3"):
            self.fs: Any = fs.LocalFileSystem()
            return
        self.fs = fs.S3FileSystem(
            access_key=s3["aws_access_key_id"],
            secret_key=s3["aws_secret_access_key"],
            region=s3["aws_region"],
            endpoint_override=s3["aws_endpoint"],
        )

    def put(self, key: str, data: bytes) -> None:
        with self.fs.open_output_stream(f"{self.root}/{key}") as out:
            out.write(data)

    def get(self, key: str) -> bytes:
        with self.fs.open_input_file(f"{self.root}/{key}") as file:
            return bytes(file.read())

    def ranged(self, key: str, first: int, length: int) -> bytes:
        with self.fs.open_input_file(f"{self.root}/{key}") as file:
            return bytes(file.read_at(length, first))

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)  # it has nothing else


class Fsspec:
    def __init__(self, url: str, s3: dict[str, str]) -> None:
        import fsspec

        self.root = url.partition("://")[2]
        keys: dict[str, Any] = {"skip_instance_cache": True}
        if url.startswith("s3"):
            import s3fs  # noqa: F401

            keys |= {"key": s3["aws_access_key_id"], "secret": s3["aws_secret_access_key"]}
            keys |= {"endpoint_url": s3["aws_endpoint"]}
        self.fs = fsspec.filesystem(url.partition("://")[0], **keys)

    def put(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{key}", data)

    def get(self, key: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.root}/{key}"))

    def ranged(self, key: str, first: int, length: int) -> bytes:
        return bytes(self.fs.cat_file(f"{self.root}/{key}", start=first, end=first + length))

    def create(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{key}", data, mode="create")


def fenced(client: Client, key: str) -> bool:
    """Whether the second of two that create one object is refused, and the first one's stays."""
    client.create(key, b"first")
    try:
        client.create(key, b"second")
    except Exception:  # each library has its own
        return client.get(key) == b"first"
    return False


def main(rounds: int) -> None:
    report = Report("storage")
    with tempfile.TemporaryDirectory(prefix="bench-storage-") as work, object_store() as s3:
        for url in (f"file://{work}", "s3://bucket/x"):
            measure(report, url, s3, rounds)
    report.close()


def measure(report: Report, url: str, s3: dict[str, str], rounds: int) -> None:
    """All libraries in turns; the best round of each counts."""
    place = url.partition("://")[0]
    clients: dict[str, Client] = {}
    for made in (Obstore, PyarrowFs, Fsspec):
        try:
            clients[made.__name__.lower()] = made(url, s3)
        except ImportError as error:
            print(f"{made.__name__} is left out on {place}: {error}")
    best: dict[tuple[str, str], float] = {}
    for n in range(rounds):
        for name, client in clients.items():
            key = f"{name}-{n}"
            works: dict[str, Callable[[], object]] = {
                "put a part of 2 MiB": lambda c=client, k=key: c.put(k, PART),
                "get it": lambda c=client, k=key: c.get(k),
                "get 64 KiB of it": lambda c=client, k=key: c.ranged(k, 1_000_000, RANGE),
                "put a manifest of 20 kB": lambda c=client, k=key: c.put(f"{k}-m", SMALL),
                "create an object": lambda c=client, k=key: c.create(f"{k}-c", SMALL),
            }
            for what, work in works.items():
                began = time.perf_counter()
                work()
                taken = time.perf_counter() - began
                best[what, name] = min(taken, best.get((what, name), taken))
    for (what, name), seconds in sorted(best.items()):
        peer = best[what, "obstore"]
        report.add(f"{place}, {name}: {what}", seconds * 1000, "ms", against="obstore", ratio=seconds / peer)
    for name, client in clients.items():
        holds = fenced(client, f"{name}-fence")
        report.add(f"{place}, {name}: the second of two creators is refused", float(holds), "(1: yes)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rounds", nargs="?", type=int, default=10)
    main(parser.parse_args().rounds)
