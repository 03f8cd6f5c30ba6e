"""moto's S3 server in this process, for benchmarks with --save_to."""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]  # as WSGI defines it
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def start_s3_server(wrap: Callable[[Application], Application]) -> None:
    """Start an S3 server with the bucket `runs`, which this process and those that it starts find
    by their environment. `wrap` gets the application and returns what serves the requests."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line per request
    application = wrap(DomainDispatcherApplication(create_backend_app))
    server = make_server(
        "127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=address)
    import boto3

    boto3.client("s3").create_bucket(Bucket="runs")
