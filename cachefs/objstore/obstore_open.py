"""Makes the obstore backend for a URL's scheme: client settings, credentials, addressing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote

from obstore import exceptions as obx
from obstore import store as obstore_stores

from ..cloudvars import AZURE, GOOGLE, store_options
from ..config import Origin
from ..errors import ConfigError
from .backoff import RetryPolicy
from .credentials import CredentialSource, ObstoreProvider
from .obstore_backend import Clients, ObstoreStore, Traits
from .presets import Access, resolve
from .replies import credential_hint, shorten
from .url import ObjectUrl

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "http", "https", "file", "memory"})

_CONNECT_SECONDS = 5


def open_obstore(url: ObjectUrl, origin: Origin, policy: RetryPolicy, source: CredentialSource) -> ObstoreStore:
    """The obstore backend of a URL's bucket. Nothing is connected or looked up before the first request.

    Raises :class:`ConfigError` for a scheme that obstore does not know or settings that exclude each other.
    """
    match url.scheme:
        case "s3" | "s3a":
            return _open_s3(url, resolve(origin, url.bucket), policy, source)
        case "gs":
            options = store_options(GOOGLE, origin.extra) | _if_set(skip_signature=origin.anonymous or None)
            return _open_cloud(url, obstore_stores.GCSStore, options, policy)
        case "az":
            # An origin's endpoint is that of S3 (AWS_ENDPOINT_URL) unless it says otherwise.
            endpoint = origin.endpoint if origin.preset == "azure" else None
            own = _if_set(skip_signature=origin.anonymous or None, endpoint=endpoint)
            options = store_options(AZURE, origin.extra) | own
            return _open_cloud(url, obstore_stores.AzureStore, options, policy)
        case "http" | "https":
            return _open_http(url, policy)
        case "file":
            paths = Traits(to_path=lambda key: key.lstrip("/"), to_key=lambda path: "/" + path, pages=False)
            return ObstoreStore(url.root, lambda: _same(obstore_stores.LocalStore()), paths)
        case "memory":
            return ObstoreStore(url.root, lambda: _same(_MEMORY.named(url.bucket)), Traits(pages=False))
    raise ConfigError(
        f"obstore knows no {url.scheme}:// URLs", url=str(url), hint=f"known: {', '.join(sorted(SCHEMES))}"
    )


def _open_s3(url: ObjectUrl, access: Access, policy: RetryPolicy, source: CredentialSource) -> ObstoreStore:
    def connect() -> Clients:
        # All of these are given, so that none of obstore's own environment variables mixes in: the endpoint twice,
        # because AWS_ENDPOINT_URL_S3 is an option apart, which wins over the other.
        endpoint = access.bucket_endpoint(url.bucket)
        options: dict[str, Any] = {
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "region": access.region,
            "virtual_hosted_style_request": access.virtual,
            "skip_signature": source.anonymous,
        }
        if not source.anonymous:
            source.keys(url.root)  # raises when there are none, in our own words
            options["credential_provider"] = ObstoreProvider(source, url.root)

        def make(**http: Any) -> Any:
            return obstore_stores.S3Store(url.bucket, **options, **http)

        return _clients(url, make, policy, plain_http=access.plain_http)

    traits = Traits(bulk_delete=access.bulk_delete, explains_head=True, tagged=True)
    return ObstoreStore(url.root, connect, traits, renew=lambda: source.renew(url.root))


def _open_cloud(url: ObjectUrl, kind: Any, options: dict[str, Any], policy: RetryPolicy) -> ObstoreStore:
    def make(**http: Any) -> Any:
        return kind(url.bucket, **options, **http)

    plain = str(options.get("endpoint") or options.get("base_url")).startswith("http://")
    return ObstoreStore(url.root, lambda: _clients(url, make, policy, plain_http=plain), Traits())


def _open_http(url: ObjectUrl, policy: RetryPolicy) -> ObstoreStore:
    def make(**http: Any) -> Any:
        return obstore_stores.HTTPStore(url.root, **http)

    # The key of an http URL is percent-encoded already; obstore encodes what it is given.
    paths = Traits(to_path=unquote, to_key=quote)
    plain = url.scheme == "http"
    return ObstoreStore(url.root, lambda: _clients(url, make, policy, plain_http=plain), paths)


def _clients(url: ObjectUrl, make: Callable[..., Any], policy: RetryPolicy, *, plain_http: bool) -> Clients:
    limit = timedelta(seconds=policy.deadline)
    quiet = timedelta(seconds=policy.stall)
    connect = timedelta(seconds=min(_CONNECT_SECONDS, policy.stall))
    http = {"allow_http": plain_http, "connect_timeout": connect, "timeout": limit}
    never = {"max_retries": 0, "retry_timeout": limit}
    own = {
        "max_retries": 10,
        "retry_timeout": limit,
        "backoff": {
            "init_backoff": timedelta(seconds=policy.base),
            "max_backoff": timedelta(seconds=policy.cap),
            "base": 2,
        },
    }
    try:
        return Clients(
            read=make(client_options={**http, "read_timeout": quiet}, retry_config=never),
            write=make(client_options=http, retry_config=never),
            multipart=make(client_options=http, retry_config=own),
        )
    except (obx.BaseError, ValueError) as e:
        said = shorten(str(e).split("Debug source")[0])
        raise ConfigError(f"cannot be set up: {said}", url=url.root, hint=credential_hint(url.root)) from e


def _same(store: Any) -> Clients:
    return Clients(store, store, store)


def _if_set(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


class _MemoryNames:
    """What ``memory://name`` means in this process: the same store for the same name, as long as the process lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, Any] = {}

    def named(self, name: str) -> Any:
        with self._lock:
            return self._stores.setdefault(name, obstore_stores.MemoryStore())


# The one place where the process itself is the store, so its contents are global by meaning.
_MEMORY = _MemoryNames()
