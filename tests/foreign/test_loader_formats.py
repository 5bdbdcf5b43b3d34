"""Every kind of shard read by several threads at once is what one thread reads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader.formats import Tokens, npz

DATA = Path(__file__).parent / "data"
KINDS = [
    "arrow/feather_v2.feather",
    "arrow/file_lz4.arrow",
    "arrow/hf_saved",
    "arrow/stream_zstd.arrows",
    "jsonl/multi_frame.jsonl.zst",
    "jsonl/plain.jsonl",
    "litdata/flat_rows",
    "litdata/plain",
    "litdata/tensors",
    "litdata/tokens",
    "litdata/zstd_batch",
    "litdata/zstd_chunk",
    "litdata/zstd_sample",
    "lmdb/length_key",
    "lmdb/single.lmdb",
    "mds/all_columns",
    "mds/zstd",
    "npz/compressed.npz",
    "npz/plain.npz",
    "parquet/hf_image.parquet",
    "parquet/uneven_snappy.parquet",
    "tfrecord/examples.tfrecord.gz",
    "tfrecord/raw.tfrecord",
    "tokens/llmc_train.bin",
    "tokens/megatron_u16.bin",
    "tokens/olmo_part-0-00000.npy",
    "tokens/real_2d.npy",
    "wds/nonadjacent.tar",
    "wds/plain.tar.gz",
    "wds/types.tar",
    "zarr/v2_blosc_consolidated.zarr",
    "zarr/v3_raw.zarr",
    "zarr/v3_sharded.zarr",
]
NAMED = {"tokens/olmo_part-0-00000.npy": Tokens(length=16, dtype="uint16")}
"""What no bytes tell."""
PASSES = 6


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", KINDS)
def test_threads_read_what_one_thread_reads(name: str, hasty: None) -> None:
    if name.startswith("zarr/"):
        pytest.importorskip("zarr")
    dataset = loader.ShardDataset(DATA / name, batch_size=1, seed=3, format=NAMED.get(name))
    with loader.Loader(dataset, threads=4, collate_fn=_plain) as threaded:
        for epoch in range(PASSES):
            dataset.set_epoch(epoch)
            alone = [_told(batch) for batch in dataset.batched(_plain)]
            dataset.set_epoch(epoch)
            assert [_told(batch) for batch in threaded] == alone
            assert len(alone) == dataset.steps > 0


def _plain(samples: Any) -> list[dict[str, Any]]:
    return [dict(sample) for sample in samples]


def _told(value: Any) -> Any:
    """A value as something that compares by all there is of it, NaNs included."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        items = array.tolist() if array.dtype.hasobject else array.tobytes()
        return (str(array.dtype), array.shape, repr(items))
    if isinstance(value, dict):
        return {name: _told(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_told(item) for item in value]
    return (type(value).__name__, repr(value))


def test_what_a_shard_keeps_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    content_of = npz.content_of

    def slowly(data: Any, member: Any, url: str) -> Any:
        made.append(member.name)
        time.sleep(0.01)  # the other threads come by meanwhile
        return content_of(data, member, url)

    monkeypatch.setattr(npz, "content_of", slowly)
    dataset = loader.ShardDataset(DATA / "npz" / "compressed.npz", batch_size=1)
    with loader.Loader(dataset, threads=4, collate_fn=_plain) as threaded:
        assert list(threaded)
    assert made and len(made) == len(set(made))
