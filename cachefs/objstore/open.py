"""From a URL to a store with the retry policy applied."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from ..clock import SYSTEM_CLOCK, Clock
from ..config import Origin, Settings
from ..errors import ConfigError
from ..metrics import Metrics
from .abc import ObjectMeta, ObjectStore
from .backoff import RetryPolicy
from .credentials import CredentialSource
from .limiter import Limiter
from .local_backend import LocalStore
from .native import RUNTIME
from .presets import resolve
from .retry import RetryingStore
from .route import RoutedStore, is_plain, is_plain_file, is_plain_url
from .url import ObjectUrl, parse_url

_S3 = frozenset({"s3", "s3a"})
_NATIVE = frozenset({"gs", "az", "http", "https", "file", "memory"})
_BACKENDS = ("auto", "obstore", "fsspec")


def open_store(
    url: ObjectUrl | str,
    origin: Origin,
    *,
    settings: Settings | None = None,
    metrics: Metrics | None = None,
    clock: Clock = SYSTEM_CLOCK,
    limiter: Limiter | None = None,
) -> ObjectStore:
    """The store of a URL's bucket; the key in the URL does not matter.

    Makes no connection and reads no credentials: the first request does, so that is where ``Denied`` and the like come
    from. Used and closed on one event loop. Without ``settings`` the policy's defaults apply; without ``limiter`` the
    store has one of its own (pass one to several stores of one bucket, so that they share its limit). Raises
    :class:`ConfigError` for a URL or an origin that can never work.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    policy = RetryPolicy.from_settings(settings) if settings is not None else RetryPolicy()
    return RetryingStore(
        open_backend(parsed, origin, policy),
        policy,
        limiter=limiter or Limiter(policy.parallel),
        metrics=metrics or Metrics(),
        clock=clock,
    )


def open_backend(url: ObjectUrl, origin: Origin, policy: RetryPolicy) -> ObjectStore:
    """The backend that ``origin.backend`` names, without the retry policy.

    ``"auto"``: obstore, and for what it cannot do exactly (:mod:`.route`) s3fs or fsspec; local files are read as they
    are (:mod:`.local_backend`). In a process forked from one
    that used obstore, s3fs or fsspec for everything (:mod:`.native`).
    """
    backend = origin.backend.lower()
    if backend not in _BACKENDS:
        raise ConfigError(f"no backend {origin.backend!r}", hint=f"one of {', '.join(_BACKENDS)}")
    if url.scheme == "file" and backend != "obstore":
        return LocalStore()
    if backend == "auto" and not RUNTIME.usable and url.scheme != "memory":
        backend = "fsspec"
    if url.scheme in _S3:
        return _open_s3(url, origin, policy, backend)
    if backend == "fsspec" or (backend == "auto" and url.scheme not in _NATIVE):
        return _open_fsspec(url)
    return _open_native(url, origin, policy, backend)


def _open_s3(url: ObjectUrl, origin: Origin, policy: RetryPolicy, backend: str) -> ObjectStore:
    access = resolve(origin, url.bucket)
    source = CredentialSource(origin)

    def exact() -> ObjectStore:
        from .s3fs_backend import S3fsStore
        from .s3fs_connect import connect

        return S3fsStore(
            url.root,
            url.bucket,
            origin,
            access,
            source,
            partial(connect, url.root, url.bucket, origin, access, policy, source),
        )

    if backend == "fsspec":
        return exact()
    from .obstore_open import open_obstore

    fast = open_obstore(url, origin, policy, source)
    return RoutedStore(fast, exact if backend == "auto" else None, exact_lists=backend == "auto")


def _open_native(url: ObjectUrl, origin: Origin, policy: RetryPolicy, backend: str) -> ObjectStore:
    from .obstore_open import open_obstore

    fast = open_obstore(url, origin, policy, CredentialSource(origin))
    if url.scheme == "file":
        return RoutedStore(fast, None, plain=is_plain_file, exact_lists=False)
    if url.scheme == "memory" or backend == "obstore":
        return RoutedStore(fast, None, exact_lists=False)
    web = url.scheme in {"http", "https"}

    def exact() -> ObjectStore:
        return _open_fsspec(url, ask=routed.head)

    routed = RoutedStore(fast, exact, plain=is_plain_url if web else is_plain, exact_lists=web)
    return routed


def _open_fsspec(url: ObjectUrl, ask: Callable[[str], Awaitable[ObjectMeta]] | None = None) -> ObjectStore:
    from .fsspec_backend import FsspecStore

    return FsspecStore(url, ask=ask)
