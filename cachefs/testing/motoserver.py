"""moto's S3 emulation on loopback: slower than a real server, but it keeps keys apart that real ones may normalise."""

from __future__ import annotations

import json
import logging
from types import TracebackType
from typing import Any, Self

from ..config import Origin
from .s3client import make_bucket, s3_client

_ACCESS, _SECRET, _REGION = "any", "any-secret", "us-east-1"


class MotoServer:
    """A context manager; the server runs in a thread of this process and accepts any credentials."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._server: Any = None
        self._client: Any = None

    @property
    def origin(self) -> Origin:
        """How cachefs reaches this server."""
        return Origin(
            endpoint=self.endpoint,
            region=_REGION,
            addressing="path",
            access_key_id=_ACCESS,
            secret_access_key=_SECRET,
        )

    def make_bucket(self, name: str) -> str:
        """Make a bucket, if there is none of this name yet, and return its name."""
        return make_bucket(self._client, name)

    def make_public(self, bucket: str) -> None:
        """Let anybody read and list a bucket without signing requests."""
        arn = f"arn:aws:s3:::{bucket}"
        allow = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": [arn, f"{arn}/*"]}
        self._client.put_bucket_policy(
            Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [allow]})
        )

    def __enter__(self) -> Self:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would log every request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self._client = s3_client(self.endpoint, _ACCESS, _SECRET, _REGION)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._server.stop()
