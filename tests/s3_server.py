"""A real S3 server on loopback, which the processes that a test starts find by their environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("s3fs")
boto3 = pytest.importorskip("boto3")
ThreadedMotoServer = pytest.importorskip("moto.server").ThreadedMotoServer

SECRET = "do-not-write-this"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the address of a server with the empty bucket `runs`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=address)
    try:
        boto3.client("s3").create_bucket(Bucket="runs")
        yield address
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()
