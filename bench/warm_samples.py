"""Warm reading of tar samples of about 100 KB: views into the mapped shards, against a memcpy of the same bytes.

A view costs no copy, so its rate says how much Python a sample costs; "views, copied" reads every byte of every view
once, as a decoder would, and is what compares with the memcpy. With worker processes the bytes must cross to the
parent, for every tool.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from loader import ShardDataset, collate

from .data import kept, tar_shards
from .figure import Case, Figure, Timing, stopwatch
from .peers import Peer, cases
from .sizes import Sizes

Bytes = npt.NDArray[np.uint8]


@contextmanager
def figure(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure; its files stay for the next run."""
    folder = kept(scratch / "samples", sizes, tar_shards)
    workers = (0, 2)
    peers, skipped = cases(
        [
            Peer(
                f"WebDataset, {w} workers", "webdataset", "webdataset_samples", (str(folder), str(sizes.batch), str(w))
            )
            for w in workers
        ]
    )
    spans = payloads(folder)
    yield Figure(
        name="warm-samples",
        title=f"Warm, tar samples of about {(sizes.tar_least + sizes.tar_most) // 2000} KB, shuffled",
        unit="samples/s",
        scale=1.0,
        baseline="memcpy",
        cases=(
            Case("memcpy", "limit", lambda: memcpy(spans, sizes)),
            Case("ShardDataset, views, copied", "ours", lambda: copied(_dataset(folder, sizes), sizes)),
            Case("ShardDataset, views", "ours", lambda: _epoch(_dataset(folder, sizes), sizes, lambda sample: 1)),
            *(Case(f"DataLoader, {w} workers", "ours", partial(_loaded, folder, sizes, w)) for w in workers),
            *peers,
        ),
        skipped=skipped,
    )


def payloads(folder: Path) -> list[tuple[Path, int, int]]:
    """Where the payloads lie, as Python's own ``tarfile`` finds them: file, start, size."""
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [(path, m.offset_data, m.size) for m in tar.getmembers() if m.name.endswith(".bin")]
    return found


def memcpy(spans: list[tuple[Path, int, int]], sizes: Sizes) -> Timing:
    """One shuffled epoch of copies into one buffer."""
    maps = {path: np.memmap(path, np.uint8, "r").view(np.ndarray) for path in {span[0] for span in spans}}
    order = [spans[i] for i in np.random.default_rng(1).permutation(len(spans))]
    room = np.empty(sizes.tar_most, np.uint8)
    with stopwatch() as watch:
        for path, start, size in order:
            np.copyto(room[:size], maps[path][start : start + size])
    return watch.timing(len(order))


def copied(dataset: ShardDataset, sizes: Sizes) -> Timing:
    """One epoch that copies every payload out of its view into one buffer."""
    room = np.empty(sizes.tar_most, np.uint8)

    def copy(sample: Any) -> int:
        view: Bytes = sample["bin"]
        np.copyto(room[: len(view)], view)
        return 1

    return _epoch(dataset, sizes, copy)


def _dataset(folder: Path, sizes: Sizes) -> ShardDataset:
    return ShardDataset(folder, batch_size=sizes.batch)


def _loaded(folder: Path, sizes: Sizes, workers: int) -> Timing:
    loader = DataLoader(_dataset(folder, sizes), batch_size=sizes.batch, num_workers=workers, collate_fn=collate)
    return _epoch(loader, sizes, lambda batch: len(batch["bin"]))


def _epoch(items: Iterable[Any], sizes: Sizes, use: Callable[[Any], int]) -> Timing:
    """One epoch; the clock starts after the first item, so that starting workers and indexing do not count."""
    iterator = iter(items)
    first = use(next(iterator))
    with stopwatch() as watch:
        done = sum(use(item) for item in iterator)
    if first + done != sizes.tar_samples:
        raise ValueError(f"an epoch gave {first + done} samples, not {sizes.tar_samples}")
    return watch.timing(done)
