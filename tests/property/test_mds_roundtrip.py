"""Random samples that mosaicml-streaming's own writer wrote read back equal, in every compression, with its digests."""

from __future__ import annotations

import random
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader
from loader.formats import Mds
from loader.layouts.mds_index import hashes, mismatch

streaming = pytest.importorskip("streaming")

COLUMNS = {
    "a": "int", "b": "bytes", "f": "float32", "fix": "ndarray:uint8:3", "images": "jpeg_array", "j": "json",
    "n": "ndarray", "p": "pkl", "s": "str", "sd": "str_decimal", "si": "str_int",
}  # fmt: skip


def row(rng: random.Random) -> dict[str, Any]:
    return {
        "a": rng.getrandbits(60),
        "b": rng.randbytes(rng.randrange(30)),
        "f": np.float32(rng.random()),
        "fix": np.frombuffer(rng.randbytes(3), np.uint8),
        "images": [bytearray(rng.randbytes(rng.randrange(5))) for _ in range(rng.randint(1, 3))],
        "j": {"k": [rng.random(), None]},
        "n": np.arange(rng.randint(1, 300), dtype=np.int16).reshape(1, -1),
        "p": {rng.random()},
        "s": "".join(rng.choices("aé世", k=rng.randrange(9))),
        "sd": Decimal(rng.randrange(1000)) / 8,
        "si": rng.getrandbits(100),
    }


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, bytes | bytearray):
        return isinstance(ours, np.ndarray) and ours.tobytes() == bytes(theirs)
    if isinstance(theirs, np.ndarray):
        return bool(ours.dtype == theirs.dtype and np.array_equal(ours, theirs))
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from([None, "gz:3", "bz2", "br:5", "snappy", "zstd:4"]))
def test_samples_read_back_equal(seed: int, compression: str | None) -> None:
    rng = random.Random(seed)
    rows = [row(rng) for _ in range(rng.randint(1, 12))]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "set")
        kept = {"compression": compression, "hashes": ["sha1", "xxh64"], "size_limit": 2000}
        with streaming.MDSWriter(out=str(folder), columns=COLUMNS, **kept) as writer:
            for sample in rows:
                writer.write(sample)
        ours = list(loader.ShardDataset(folder, batch_size=1, shuffle=False, format=Mds(allow_pickle=True)))
        for name, digests in hashes((folder / "index.json").read_bytes(), "index").items():
            if (folder / name).exists():
                assert mismatch(np.fromfile(folder / name, np.uint8), digests) is None
    for mine, wanted in zip(ours, rows, strict=True):
        assert mine.keys() == wanted.keys()
        assert all(same(mine[name], wanted[name]) for name in wanted)
