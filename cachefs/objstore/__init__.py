"""Object-store access: one small ABC, one backend a file, one policy for retries.

``open_store(url, origin)`` gives the store of a URL's bucket with that policy applied; ``BlockingStore(url, origin)``
the same for synchronous code. Backends and their libraries are imported when first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .abc import Listing, ObjectMeta, ObjectStore
from .url import ObjectUrl, parse_url

if TYPE_CHECKING:
    from .blocking import BlockingStore
    from .open import open_store

__all__ = ["BlockingStore", "Listing", "ObjectMeta", "ObjectStore", "ObjectUrl", "open_store", "parse_url"]

_LAZY = {"BlockingStore": ".blocking", "open_store": ".open"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
