"""A plain synchronous S3 client for test servers; it reads no configuration but what it is given."""

from __future__ import annotations

from typing import Any


def s3_client(endpoint: str, access_key: str, secret_key: str, region: str) -> Any:
    """A botocore client for one test server on loopback: path style, one try, short timeouts, no proxy."""
    import botocore.session
    from botocore.config import Config

    config = Config(
        proxies={},
        retries={"total_max_attempts": 1},
        connect_timeout=2,
        read_timeout=20,
        s3={"addressing_style": "path"},
    )
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=config,
    )


def make_bucket(client: Any, name: str) -> str:
    """Make a bucket, if there is none of this name yet, and return its name."""
    from botocore.exceptions import ClientError

    try:
        client.create_bucket(Bucket=name)
    except ClientError as e:
        if e.response["Error"]["Code"] not in {"BucketAlreadyExists", "BucketAlreadyOwnedByYou"}:
            raise
    return name
