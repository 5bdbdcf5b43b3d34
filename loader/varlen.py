"""Batches of packed samples as one run of tokens, for attention over segments of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cachefs.errors import DataError

from .sample import Batch

BOUNDS = "cu_seqlens"
LONGEST = "max_seqlen"


def pack_batch(batch: Mapping[str, Any]) -> Batch:
    """A batch of packed samples (:class:`loader.Packing`) laid end to end.

    Fields of shape ``(samples, length)`` become views of shape ``(samples * length,)``. ``cu_seqlens`` becomes one
    int32 tensor with the bounds of all segments of the batch, from 0 to ``samples * length``, on the same device, and
    ``max_seqlen``, an ``int``, is added: the length of the longest segment, padding included. Other fields stay as they
    are. Raises ``DataError`` for a batch of other samples.
    """
    bounds = batch.get(BOUNDS)
    if bounds is None or not len(bounds):
        raise DataError(
            f"a batch without the field {BOUNDS!r} has no segments", hint="pack_batch is for ShardDataset(packing=...)"
        )
    stacked = bounds.cpu() if isinstance(bounds, torch.Tensor) else bounds  # in one step, not row by row
    rows = [np.asarray(row.cpu() if isinstance(row, torch.Tensor) else row) for row in stacked]
    length = int(rows[0][-1])
    if len(rows) * length >= 1 << 31:
        raise DataError(f"{len(rows)} rows of {length} tokens are too many for bounds of 32 bits")
    joined = np.concatenate([rows[0][:1], *(row[1:] for row in rows)]).astype(np.int32)
    joined[1:] += np.repeat(np.arange(len(rows), dtype=np.int32) * np.int32(length), [len(row) - 1 for row in rows])
    out = Batch()
    out.stamp = batch.stamp if isinstance(batch, Batch) else None
    device = torch.device("cpu")
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.shape == (len(rows), length) and name != BOUNDS:
            device = value.device
            out[name] = value.reshape(-1)
        else:
            out[name] = value
    out[BOUNDS] = torch.from_numpy(joined).to(device)
    out[LONGEST] = int(np.diff(joined).max())
    return out
