"""Sets up s3fs's client (aiobotocore) for one S3 bucket."""

from __future__ import annotations

import asyncio
from datetime import datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any

from ..config import Origin
from .backoff import RetryPolicy
from .bundle import read_bundle
from .credentials import CredentialSource
from .presets import Access
from .proxies import proxy_for

_CONNECT_SECONDS = 5.0


async def connect(
    url: str, bucket: str, origin: Origin, access: Access, policy: RetryPolicy, source: CredentialSource
) -> Any:
    """A client with the keys of this moment; the caller closes it.

    Raises :class:`Denied` when there are no keys, :class:`ConfigError` for a CA bundle that cannot be read, and the
    client's own errors.
    """
    s3fs = await asyncio.to_thread(import_module, "s3fs")
    client_options: dict[str, Any] = {"region_name": access.region}
    if origin.ca_bundle is not None:
        await asyncio.to_thread(read_bundle, origin.ca_bundle)  # refuses a bad one in our own words
        client_options["verify"] = origin.ca_bundle
    keys = None if source.anonymous else await asyncio.to_thread(source.keys, url)
    fs = s3fs.S3FileSystem(
        asynchronous=True,
        skip_instance_cache=True,
        anon=source.anonymous,
        key=keys.access_key_id if keys else None,
        secret=keys.secret_access_key if keys else None,
        token=keys.session_token if keys else None,
        endpoint_url=access.endpoint,
        client_kwargs=client_options,
        config_kwargs={
            **_proxies(proxy_for(origin, access.bucket_endpoint(bucket))),
            "s3": {"addressing_style": "virtual" if access.virtual else "path"},
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(_CONNECT_SECONDS, policy.stall),
            "read_timeout": policy.stall,
            "max_pool_connections": max(10, policy.parallel),
            # Trailing checksums make chunked uploads, which several S3-compatible stores refuse.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
        session=_session(),
    )
    return await fs.set_session()


def _proxies(proxy: str | None) -> dict[str, Any]:
    return {} if proxy is None else {"proxies": {"http": proxy, "https": proxy} if proxy else {}}


def _session() -> Any:
    """A session whose replies' time stamps are read by the standard library: a tenth of dateutil's time."""
    from aiobotocore.session import AioSession

    session = AioSession()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_parse_time)
    return session


def _parse_time(value: str) -> datetime:
    return datetime.fromisoformat(value) if value[:4].isdigit() else parsedate_to_datetime(value)
