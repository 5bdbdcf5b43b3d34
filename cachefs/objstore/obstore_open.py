"""Makes the obstore backend for a URL's scheme: client settings, credentials, addressing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from obstore import exceptions as obx
from obstore import store as obstore_stores

from ..cloudvars import AZURE, GOOGLE, store_options
from ..config import Origin
from ..errors import ConfigError
from .backoff import RetryPolicy
from .bundle import read_bundle
from .credentials import CredentialSource, ObstoreProvider
from .obstore_backend import Clients, ObstoreStore, Traits
from .presets import resolve
from .proxies import DIRECT, proxy_for
from .replies import credential_hint, shorten
from .url import ObjectUrl

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "http", "https", "file", "memory"})

_CONNECT_SECONDS = 5


@dataclass(frozen=True)
class Wire:
    """How requests reach ``endpoint``: ``proxy`` as :func:`.proxy_for` says; ``ca_bundle``: a PEM file to trust."""

    endpoint: str
    proxy: str | None
    ca_bundle: str | None

    @classmethod
    def of(cls, origin: Origin, endpoint: str) -> Wire:
        return cls(endpoint, proxy_for(origin, endpoint), origin.ca_bundle)

    def options(self) -> dict[str, Any]:
        """obstore's client options; reads the file. Raises :class:`ConfigError` if it cannot be read."""
        found: dict[str, Any] = {"allow_http": self.endpoint.startswith("http://")}
        if self.proxy is not None:
            # Without one named, the environment's would be used; so one is, and is not used for this very host.
            found["proxy_url"] = self.proxy or "http://127.0.0.1:9"
            if self.proxy == DIRECT:
                found["proxy_excludes"] = urlsplit(self.endpoint).hostname
        if self.ca_bundle is not None:
            pem = read_bundle(self.ca_bundle)
            found["root_certificate"] = pem
            if self.proxy:
                found["proxy_ca_certificate"] = pem
        return found


def open_obstore(url: ObjectUrl, origin: Origin, policy: RetryPolicy, source: CredentialSource) -> ObstoreStore:
    """The obstore backend of a URL's bucket. Nothing is connected or looked up before the first request.

    Raises :class:`ConfigError` for a scheme that obstore does not know or settings that exclude each other.
    """
    match url.scheme:
        case "s3" | "s3a":
            return _open_s3(url, origin, policy, source)
        case "gs":
            options = store_options(GOOGLE, origin.extra) | _if_set(skip_signature=origin.anonymous or None)
            at = options.get("base_url") or "https://storage.googleapis.com"
            return _open_cloud(url, obstore_stores.GCSStore, options, policy, Wire.of(origin, at))
        case "az":
            # An origin's endpoint is that of S3 (AWS_ENDPOINT_URL) unless it says otherwise.
            endpoint = origin.endpoint if origin.preset == "azure" else None
            own = _if_set(skip_signature=origin.anonymous or None, endpoint=endpoint)
            options = store_options(AZURE, origin.extra) | own
            at = options.get("endpoint") or "https://blob.core.windows.net"
            return _open_cloud(url, obstore_stores.AzureStore, options, policy, Wire.of(origin, at))
        case "http" | "https":
            return _open_http(url, policy, Wire.of(origin, url.root))
        case "file":
            paths = Traits(to_path=lambda key: key.lstrip("/"), to_key=lambda path: "/" + path, pages=False)
            return ObstoreStore(url.root, lambda: _same(obstore_stores.LocalStore()), paths)
        case "memory":
            return ObstoreStore(url.root, lambda: _same(_MEMORY.named(url.bucket)), Traits(pages=False))
    raise ConfigError(
        f"obstore knows no {url.scheme}:// URLs", url=str(url), hint=f"known: {', '.join(sorted(SCHEMES))}"
    )


def _open_s3(url: ObjectUrl, origin: Origin, policy: RetryPolicy, source: CredentialSource) -> ObstoreStore:
    access = resolve(origin, url.bucket)
    wire = Wire.of(origin, access.bucket_endpoint(url.bucket))

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
        if origin.requester_pays:
            options["request_payer"] = True
        if origin.sse_customer_key is not None:
            options |= {"server_side_encryption": "sse-c", "sse_customer_key_base64": origin.sse_customer_key}
        if not source.anonymous:
            source.keys(url.root)  # raises when there are none, in our own words
            options["credential_provider"] = ObstoreProvider(source, url.root)

        def make(**http: Any) -> Any:
            return obstore_stores.S3Store(url.bucket, **options, **http)

        return _clients(url, make, policy, wire)

    traits = Traits(bulk_delete=access.bulk_delete, explains_head=True, tagged=True)
    return ObstoreStore(url.root, connect, traits, renew=lambda: source.renew(url.root))


def _open_cloud(url: ObjectUrl, kind: Any, options: dict[str, Any], policy: RetryPolicy, wire: Wire) -> ObstoreStore:
    def make(**http: Any) -> Any:
        return kind(url.bucket, **options, **http)

    return ObstoreStore(url.root, lambda: _clients(url, make, policy, wire), Traits())


def _open_http(url: ObjectUrl, policy: RetryPolicy, wire: Wire) -> ObstoreStore:
    def make(**http: Any) -> Any:
        return obstore_stores.HTTPStore(url.root, **http)

    # The key of an http URL is percent-encoded already; obstore encodes what it is given.
    paths = Traits(to_path=unquote, to_key=quote)
    return ObstoreStore(url.root, lambda: _clients(url, make, policy, wire), paths)


def _clients(url: ObjectUrl, make: Callable[..., Any], policy: RetryPolicy, wire: Wire) -> Clients:
    limit = timedelta(seconds=policy.deadline)
    quiet = timedelta(seconds=policy.stall)
    connect = timedelta(seconds=min(_CONNECT_SECONDS, policy.stall))
    http = {**wire.options(), "connect_timeout": connect, "timeout": limit}
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
