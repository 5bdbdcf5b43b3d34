"""Asynchronous, atomically committed, sharded checkpoints on a file system or an object store.

::

    with ckptstore.CheckpointStore("s3://bucket/run") as store:
        saving = store.save_async(100, {"model": model, "optimizer": optimizer, "step": 100})
        saving.result()                       # durable
        state = store.load({"model": model, "optimizer": optimizer})

Importing this package imports no torch; that comes with the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layout import StepRef
    from .leaves import Sharded
    from .saving import Save
    from .stateful import RngState
    from .store import Backing, CheckpointStore, Timeouts
    from .upload import SaveOptions
    from .verify import Damage

_HOMES = {
    "Backing": "store",
    "CheckpointStore": "store",
    "Damage": "verify",
    "RngState": "stateful",
    "Save": "saving",
    "SaveOptions": "upload",
    "Sharded": "leaves",
    "StepRef": "layout",
    "Timeouts": "store",
}

__all__ = [
    "Backing",
    "CheckpointStore",
    "Damage",
    "RngState",
    "Save",
    "SaveOptions",
    "Sharded",
    "StepRef",
    "Timeouts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptstore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
