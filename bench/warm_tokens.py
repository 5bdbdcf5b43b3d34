"""Warm reading of token rows: shuffled batches of fixed-size records, against ``np.take`` on a memory map.

``np.take`` with the row numbers of a batch is the least that any loader must do: one gather into one new array. The
"map-style Dataset" is what many training scripts have today: a memory map, one row a call, stacked by DataLoader. "Of
batches" is the data set's own batches through DataLoader, "of samples" its samples, which DataLoader puts together.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from loader import Loader, ShardDataset, collate, formats

from .data import STEP, kept, token_shards
from .figure import Case, Figure, Timing, stopwatch
from .peers import Peer, cases
from .sizes import Sizes


@contextmanager
def figure(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure; its files stay for the next run."""
    folder = kept(scratch / "tokens", sizes, token_shards)
    raw = kept(scratch / "tokens-whole", sizes, partial(_whole, folder)) / "rows.raw"
    workers = (0, 2)
    arguments = (str(raw), str(sizes.row_tokens), str(sizes.batch))
    peers, skipped = cases(
        [
            Peer(f"{name}, {_workers(w)}", module, f"{module}_tokens", (*arguments, str(w)))
            for name, module in (("LitData", "litdata"), ("Mosaic Streaming", "streaming"))
            for w in workers
        ]
    )
    yield Figure(
        name="warm-tokens",
        title=f"Warm, rows of {sizes.row_tokens:,} uint16 tokens, shuffled batches of {sizes.batch}",
        unit="rows/s",
        scale=1.0,
        baseline="np.take",
        cases=(
            Case("np.take", "limit", lambda: take(raw, sizes)),
            Case("Loader", "ours", lambda: _epoch(Loader(_dataset(folder, sizes)), sizes)),
            Case("ShardDataset.batched", "ours", lambda: _epoch(_dataset(folder, sizes).batched(), sizes)),
            *(
                Case(f"DataLoader of batches, {_workers(w)}", "ours", partial(_batched, folder, sizes, w))
                for w in workers
            ),
            *(
                Case(f"DataLoader of samples, {_workers(w)}", "ours", partial(_sampled, folder, sizes, w))
                for w in workers
            ),
            *(Case(f"map-style Dataset, {_workers(w)}", "peer", partial(_map_style, raw, sizes, w)) for w in workers),
            *peers,
        ),
        skipped=skipped,
    )


def take(raw: Path, sizes: Sizes) -> Timing:
    """One shuffled epoch of gathers from one memory map."""
    rows = np.memmap(raw, np.uint16, "r").reshape(-1, sizes.row_tokens)
    order = np.random.default_rng(1).permutation(len(rows))
    with stopwatch() as watch:
        for start in range(0, len(order), sizes.batch):
            np.take(rows, order[start : start + sizes.batch], axis=0)
    return watch.timing(len(rows))


def _dataset(folder: Path, sizes: Sizes) -> ShardDataset:
    options = formats.Tokens(length=sizes.row_tokens, dtype="uint16", out="uint16")
    return ShardDataset(folder / "*.bin", batch_size=sizes.batch, format=options)


def _batched(folder: Path, sizes: Sizes, workers: int) -> Timing:
    return _epoch(DataLoader(_dataset(folder, sizes).batched(), batch_size=None, num_workers=workers), sizes)


def _sampled(folder: Path, sizes: Sizes, workers: int) -> Timing:
    dataset = _dataset(folder, sizes)
    return _epoch(DataLoader(dataset, batch_size=sizes.batch, num_workers=workers, collate_fn=collate), sizes)


def _map_style(raw: Path, sizes: Sizes, workers: int) -> Timing:
    return _epoch(DataLoader(Rows(raw, sizes), batch_size=sizes.batch, shuffle=True, num_workers=workers), sizes)


class Rows(Dataset[torch.Tensor]):
    """A row a call from one memory map, as training scripts write it."""

    def __init__(self, raw: Path, sizes: Sizes) -> None:
        self._rows = np.memmap(raw, np.uint16, "r").reshape(-1, sizes.row_tokens)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[i].copy())


def _epoch(batches: Iterable[Any], sizes: Sizes) -> Timing:
    """One epoch; the clock starts at the second batch, so that starting workers and listing files do not count."""
    iterator = iter(batches)
    next(iterator)
    with stopwatch() as watch:
        rows = sum(len(batch["tokens"] if isinstance(batch, dict) else batch) for batch in iterator)
    if rows != sizes.token_rows - sizes.batch:
        raise ValueError(f"an epoch gave {rows} rows after the first batch, not {sizes.token_rows - sizes.batch}")
    return watch.timing(rows)


def _whole(shards: Path, folder: Path, sizes: Sizes) -> None:
    """All shards behind each other in one file, for the tools that map one."""
    with open(folder / "rows.raw", "wb", buffering=0) as out:
        for shard in sorted(shards.glob("*.bin")):
            with open(shard, "rb") as part:
                shutil.copyfileobj(part, out, STEP)


def _workers(count: int) -> str:
    return f"{count} workers"
