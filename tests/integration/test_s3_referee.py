"""An independent client as referee: what we write it reads, and the reverse."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from minio import Minio
from minio.error import S3Error

from cachefs.config import Origin
from cachefs.errors import PreconditionFailed
from cachefs.objstore import BlockingStore
from cachefs.testing.motoserver import MotoServer
from cachefs.testing.seaweed import SeaweedServer
from cachefs.testing.strategies import ODD_KEYS, SPECIAL_NAMES

BACKENDS = ("auto", "fsspec")


def referee(origin: Origin) -> Any:
    assert origin.endpoint is not None
    return Minio(
        origin.endpoint.removeprefix("http://"),
        access_key=origin.access_key_id,
        secret_key=origin.secret_access_key,
        secure=False,
        region=origin.region,
    )


def read(client: Any, bucket: str, key: str) -> bytes:
    reply = client.get_object(bucket, key)
    try:
        data: bytes = reply.read()
        return data
    finally:
        reply.close()
        reply.release_conn()


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, moto: MotoServer, moto_bucket: str) -> Iterator[BlockingStore]:
    with BlockingStore(f"s3://{moto_bucket}", replace(moto.origin, backend=request.param)) as opened:
        yield opened


def test_keys_mean_the_same_to_both(store: BlockingStore, moto: MotoServer, moto_bucket: str) -> None:
    client = referee(moto.origin)
    # The referee itself refuses keys with . and .. segments.
    keys = [*SPECIAL_NAMES, *(key for key in ODD_KEYS if not set(key.split("/")) & {".", ".."}), "é/naïve 1+1.tar"]
    for i, key in enumerate(keys):
        ours, theirs = f"ours/{key}", f"theirs/{key}"
        store.put(ours, b"ours %d" % i)
        client.put_object(moto_bucket, theirs, io.BytesIO(b"theirs %d" % i), len(b"theirs %d" % i))
    for i, key in enumerate(keys):
        assert read(client, moto_bucket, f"ours/{key}") == b"ours %d" % i
        meta = store.head(f"theirs/{key}")
        assert bytes(store.get_range(f"theirs/{key}", 0, meta.size, version=meta)) == b"theirs %d" % i
    listed = {o.object_name: (o.size, o.etag) for o in client.list_objects(moto_bucket, recursive=True)}
    mine = {m.key: (m.size, (m.etag or "").strip('"')) for page in store.list("") for m in page.objects}
    assert mine == listed
    assert set(mine) == {f"{side}/{key}" for side in ("ours", "theirs") for key in keys}


@pytest.mark.s3
@pytest.mark.xdist_group("seaweed")
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_objects_and_conditions_on_a_real_server(seaweed: SeaweedServer, s3_bucket: str, backend: str) -> None:
    client = referee(seaweed.origin)
    parts = [bytes([i]) * (6 << 20) for i in range(3)]
    with BlockingStore(f"s3://{s3_bucket}", replace(seaweed.origin, backend=backend)) as store:
        meta = store.put_multipart("big", parts)
        assert read(client, s3_bucket, "big") == b"".join(parts)
        stat = client.stat_object(s3_bucket, "big")
        assert (stat.size, stat.etag) == (meta.size, (meta.etag or "").strip('"'))

        client.put_object(s3_bucket, "theirs", io.BytesIO(b"first"), 5)
        with pytest.raises(PreconditionFailed):
            store.put("theirs", b"ours", if_none_match=True)
        old = store.head("theirs")
        client.put_object(s3_bucket, "theirs", io.BytesIO(b"other"), 5)
        with pytest.raises(PreconditionFailed):
            store.put("theirs", b"ours", if_match=old.etag)
        assert read(client, s3_bucket, "theirs") == b"other"

        store.delete(["theirs"])
        with pytest.raises(S3Error, match="NoSuchKey"):
            client.stat_object(s3_bucket, "theirs")
        assert list(client._list_multipart_uploads(s3_bucket).uploads) == []
