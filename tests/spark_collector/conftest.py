"""Tests of the Spark jobs share one session per worker process, and an S3 server on loopback."""

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.spark_fixture import spark

__all__ = ["s3", "spark", "url"]


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """The storage options of a server with an empty bucket named `bucket`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A process of its own: deltalake holds the interpreter's lock while it waits for an answer.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    options = {
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
        "aws_endpoint": f"http://127.0.0.1:{port}",
        "aws_allow_http": "true",
    }
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=options["aws_endpoint"],
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="bucket")
            break
        except Exception:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield options
    server.kill()
    server.wait()


@pytest.fixture
def url() -> str:
    """A folder of the bucket that nobody else uses."""
    return f"s3://bucket/{uuid.uuid4().hex}-{os.getpid()}"
