"""Warm reading of tar samples of about 100 KB: views into the mapped shards, against a memcpy of the same bytes.

A view costs no copy, so its rate says how much Python a sample costs. "Copied" reads every byte of every payload once,
as a decoder would, into one buffer: what compares with the memcpy, and it is asked of the other tools as well. With
worker processes the bytes must cross to the parent, for every tool. LitData reads the same payloads from own chunks.
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

from loader import Loader, ShardDataset, collate

from .data import kept, tar_shards
from .figure import Case, Figure, Timing, stopwatch
from .peers import Peer, cases
from .sizes import Sizes

Bytes = npt.NDArray[np.uint8]


@contextmanager
def figure(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure; its files stay for the next run."""
    folder = kept(scratch / "samples", sizes, tar_shards)
    arguments = (str(folder), str(sizes.batch))
    peers, skipped = cases(
        [
            Peer(f"{name}, {w} workers{_words(use)}", module, f"{module}_samples", (*arguments, str(w), use))
            for name, module in (("WebDataset", "webdataset"), ("LitData", "litdata"))
            for w, use in ((0, "counted"), (0, "copied"), (2, "counted"))
        ]
    )
    spans = payloads(folder)
    ours = partial(_ours, folder, sizes)
    yield Figure(
        name="warm-samples",
        title=f"Warm, tar samples of about {(sizes.tar_least + sizes.tar_most) // 2000} KB, shuffled",
        unit="samples/s",
        scale=1.0,
        baseline="memcpy",
        cases=(
            Case("memcpy", "limit", lambda: memcpy(spans, sizes)),
            Case("Loader", "ours", lambda: ours(Loader, counted)),
            Case("Loader, copied", "ours", lambda: ours(Loader, copying(sizes))),
            Case("ShardDataset", "ours", lambda: ours(_itself, _one)),
            Case("ShardDataset, copied", "ours", lambda: ours(_itself, copying(sizes))),
            Case("DataLoader, 0 workers", "ours", lambda: ours(partial(_loaded, sizes, 0), counted)),
            Case("DataLoader, 0 workers, copied", "ours", lambda: ours(partial(_loaded, sizes, 0), copying(sizes))),
            Case("DataLoader, 2 workers", "ours", lambda: ours(partial(_loaded, sizes, 2), counted)),
            *peers,
        ),
        skipped=skipped,
    )


def _words(use: str) -> str:
    return "" if use == "counted" else f", {use}"


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


def _one(sample: Any) -> int:
    return 1


def counted(batch: Any) -> int:
    """The samples of a batch."""
    return len(batch["bin"])


def copying(sizes: Sizes) -> Callable[[Any], int]:
    """What copies every payload of a sample or batch into one buffer, and counts them."""
    room = np.empty(sizes.tar_most, np.uint8)

    def copy(item: Any) -> int:
        views: list[Bytes] = item["bin"] if isinstance(item["bin"], list) else [item["bin"]]
        for view in views:
            np.copyto(room[: len(view)], view)
        return len(views)

    return copy


def _itself(dataset: ShardDataset) -> Iterable[Any]:
    return dataset


def _loaded(sizes: Sizes, workers: int, dataset: ShardDataset) -> Iterable[Any]:
    return DataLoader(dataset, batch_size=sizes.batch, num_workers=workers, collate_fn=collate)


def _ours(
    folder: Path, sizes: Sizes, through: Callable[[ShardDataset], Iterable[Any]], use: Callable[[Any], int]
) -> Timing:
    """One epoch; the clock starts after the first item, so that starting workers and indexing do not count."""
    iterator = iter(through(ShardDataset(folder, batch_size=sizes.batch)))
    first = use(next(iterator))
    with stopwatch() as watch:
        done = sum(use(item) for item in iterator)
    if first + done != sizes.tar_samples:
        raise ValueError(f"an epoch gave {first + done} samples, not {sizes.tar_samples}")
    return watch.timing(done)
