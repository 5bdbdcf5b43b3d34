"""Uploading the shards with a client that has nothing to do with nearflash: ``minio``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from minio import Minio

from cachefs.config import Origin

from .shards import ShardFile


def upload(files: Sequence[ShardFile], origin: Origin, bucket: str, *, done: Callable[[int], None]) -> None:
    """Put every file under its key; ``done`` is told how many are up. The bucket exists already."""
    secure, _, host = (origin.endpoint or "").rpartition("://")
    client = Minio(
        host,
        access_key=origin.access_key_id,
        secret_key=origin.secret_access_key,
        region=origin.region,
        secure=secure == "https",
    )

    def put(file: ShardFile) -> None:
        client.fput_object(bucket, file.key, str(file.path))

    with ThreadPoolExecutor(4) as pool:
        for count, _ in enumerate(pool.map(put, files), 1):
            done(count)
