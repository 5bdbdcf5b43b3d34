"""nearflash's data loader: shards of any common format as an exact, elastic, resumable PyTorch data set.

import loader
ds = loader.ShardDataset("s3://bucket/data", batch_size=32)
for batch in torch.utils.data.DataLoader(ds, batch_size=32, num_workers=2, collate_fn=loader.collate): ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import formats
from .formats.packing import Packing
from .reader import DataWarning, ShardReader, open_shard
from .sample import Batch, Sample

if TYPE_CHECKING:
    from .batched import Batches
    from .collation import collate
    from .dataset import ShardDataset
    from .formats.where import Where
    from .mixture import Mixture
    from .stages import Filter, Map
    from .threaded import Loader
    from .varlen import pack_batch

__all__ = [
    "Batch",
    "Batches",
    "DataWarning",
    "Filter",
    "Loader",
    "Map",
    "Mixture",
    "Packing",
    "Sample",
    "ShardDataset",
    "ShardReader",
    "Where",
    "collate",
    "formats",
    "open_shard",
    "pack_batch",
]

# These need torch, which open_shard does not.
_LAZY = {
    "Batches": ".batched",
    "Filter": ".stages",
    "Loader": ".threaded",
    "Map": ".stages",
    "Mixture": ".mixture",
    "ShardDataset": ".dataset",
    "Where": ".formats.where",
    "collate": ".collation",
    "pack_batch": ".varlen",
}


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, "accelerate"])


def __getattr__(name: str) -> Any:
    if name == "accelerate":  # a module that needs the package of that name
        return import_module(".accelerate", __name__)
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
