"""cachefs: a locality-aware cache of objects on a node's local flash.

Importing the package is cheap: neither torch nor pyarrow nor an object-store client is loaded until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client, Shard, connect
    from .config import Origin, Settings

__version__ = "0.1.0"
__all__ = ["Client", "Origin", "Settings", "Shard", "__version__", "connect"]

_LAZY = {"Client": ".client", "Shard": ".client", "connect": ".client", "Origin": ".config", "Settings": ".config"}


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
