"""Packed data sets in mixtures, on several ranks whose batches are filled up, and read by several threads."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import loader
from loader import Mixture, Packing, ShardDataset, formats
from loader.formats.bins import Bins

LENGTH = 16


def documents(first: int, number: int = 9) -> list[list[int]]:
    """Some of them longer than a row; no token is there twice."""
    out = []
    for size in [5, 40, 3, 16, 1, 33, 8, 21, 12][:number]:
        out.append(list(range(first, first + size)))
        first += size
    return out


def sources(folder: Path, method: Any, batch: int | None) -> dict[str, ShardDataset]:
    """One of JSON Lines and one of Parquet."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"tokens": doc}) + "\n" for doc in documents(1)))
    pq.write_table(pa.table({"tokens": documents(1001)}), folder / "b.parquet", row_group_size=4)
    packing = Packing(LENGTH, method=method)
    return {
        name: ShardDataset(folder / file, batch_size=batch, packing=packing, seed=3, drop_last=False)
        for name, file in (("a", "a.jsonl"), ("b", "b.parquet"))
    }


@pytest.mark.parametrize("method", ["best_fit", "sequential"])
def test_mixed_rows_have_the_labels_of_their_own_documents(tmp_path: Path, method: Any) -> None:
    mixed = Mixture(sources(tmp_path, method, 1), global_batch_size=4)
    following = {a: b for doc in documents(1) + documents(1001) for a, b in itertools.pairwise(doc)}
    seen: set[int] = set()
    for batch in mixed.batched():
        for tokens, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
            assert labels == [following.get(token, -100) for token in tokens]
            seen.update(token for token in tokens if token)
    assert min(seen) < 1000 < max(seen)


@pytest.mark.parametrize("method", ["best_fit", "sequential"])
def test_ranks_with_batches_that_are_filled_up(tmp_path: Path, method: Any) -> None:
    sources(tmp_path, method, 1)
    packing = Packing(LENGTH, method=method)
    rows: list[tuple[bool, list[int]]] = []
    steps = []
    for rank in range(3):
        ds = ShardDataset(
            tmp_path / "a.jsonl", batch_size=2, packing=packing, rank=rank, world_size=3, pad=True, drop_last=False
        )
        batches = list(ds.batched())
        steps.append(len(batches))
        for batch in batches:
            repeats = batch.get("__repeat__", np.zeros(len(batch["tokens"]), bool)).tolist()
            rows += zip(repeats, batch["tokens"].tolist(), strict=True)
    assert len(set(steps)) == 1
    once = sorted(token for repeat, row in rows if not repeat for token in row if token)
    assert once == [token for doc in documents(1) for token in doc]
    assert any(repeat for repeat, _ in rows)


def test_threads_lay_a_shard_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"tokens": doc}) + "\n" for doc in documents(1)))
    made: list[int | None] = []
    layout = Bins.layout

    def counted(self: Bins, key: int | None = None) -> Any:
        made.append(key)
        return layout(self, key)

    monkeypatch.setattr(Bins, "layout", counted)
    with loader.open_shard(tmp_path / "a.jsonl", Packing(LENGTH).over(formats.Jsonl())) as shard:
        rows = list(range(len(shard))) * 4
        barrier = threading.Barrier(4, timeout=60)

        def read(part: list[int]) -> list[list[int]]:
            barrier.wait()
            return [shard[i]["tokens"].tolist() for i in part]

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(read, [rows] * 4))
    assert len(made) == 1
    assert found == [found[0]] * 4
