"""Random items that litdata's own writer wrote read back equal, and as litdata's own reader reads them."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader
from loader.formats import LitData

pytest.importorskip("litdata")

from litdata import StreamingDataset
from litdata.streaming.framed_zstd import make_zstd_codec, pack_framed_zstd, pack_sample_zstd
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter

NUMBERS = ["int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]
Draw = Callable[[random.Random], Any]


def text(rng: random.Random) -> str:
    return "".join(rng.choices("ab é世\n", k=rng.randrange(12)))


SCALARS: dict[str, Draw] = {
    "int": lambda rng: rng.choice([0, -1, 2**63 - 1, -(2**63), rng.getrandbits(40)]),
    "float": lambda rng: rng.choice([0.0, -0.0, 1e-310, float("inf"), rng.gauss(0, 1)]),
    "bool": lambda rng: rng.random() < 0.5,
    "str": text,
    "bytes": lambda rng: rng.randbytes(rng.randrange(20)),
}


def array(rng: random.Random) -> Draw:
    dtype, axes, tensor = np.dtype(rng.choice(NUMBERS)), rng.randint(1, 3), rng.random() < 0.5

    def draw(rng: random.Random) -> Any:
        shape = [rng.randint(0, 3) for _ in range(axes)]
        values = np.array([rng.randrange(100) for _ in range(int(np.prod(shape)))]).astype(dtype).reshape(shape)
        return torch.from_numpy(values) if tensor else values

    return draw


def leaf(rng: random.Random, *, nested: bool) -> Draw:
    """How to draw the values of one leaf: all of one kind, as a writer demands. Only in a dict may a list be one."""
    kind = rng.choice([*SCALARS, "array", "array", *(["list", "dicts"] if nested else [])])
    if kind == "array":
        return array(rng)
    if kind in SCALARS:
        return SCALARS[kind]
    if kind == "list":
        part = SCALARS[rng.choice(["int", "float", "bool", "str"])]
        return lambda rng: [part(rng) for _ in range(rng.randint(1, 4))]
    row = {"k": SCALARS["int"], "t": text, "x": SCALARS["float"]}
    return lambda rng: [{name: part(rng) for name, part in row.items()} for _ in range(rng.randint(1, 3))]


def schema(rng: random.Random, depth: int = 0) -> Draw:
    kind = rng.choice(["dict", "tuple", "leaf"] if depth else ["dict", "dict", "dict", "tuple", "list", "leaf"])
    if kind == "leaf" or depth > 2:
        return leaf(rng, nested=False)
    count = rng.randint(1, 4)
    if kind == "dict":
        parts = {f"{i}{text(rng)}": leaf(rng, nested=not depth) for i in range(count)}
        return lambda rng: {name: part(rng) for name, part in parts.items()}
    children = [schema(rng, depth + 1) for _ in range(count)]
    make = list if kind == "list" else tuple
    return lambda rng: make(child(rng) for child in children)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        theirs = theirs.numpy()
    if isinstance(theirs, bytes | memoryview):
        return isinstance(ours, np.ndarray) and ours.dtype == np.uint8 and ours.tobytes() == theirs
    if isinstance(theirs, np.ndarray):
        return bool(ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs))
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def write(folder: str, items: list[Any], **options: Any) -> None:
    writer = BinaryWriter(folder, **options)
    for number, item in enumerate(items):
        writer.add_item(number, item)
    writer.done()
    writer.merge()


def compress(folder: Path, level: str) -> None:
    """Compress chunks as litdata does where the package ``zstd``, which it asks for, is installed."""
    codec = make_zstd_codec("zstd:4")
    index = json.loads((folder / "index.json").read_text())
    for chunk in index["chunks"]:
        path = folder / chunk["filename"]
        raw = path.read_bytes()
        if level == "batch":
            path.write_bytes(pack_framed_zstd(raw, codec, 2))
        elif level == "sample":
            path.write_bytes(pack_sample_zstd(raw, codec))
        else:
            path.unlink()
            chunk["filename"] = chunk["filename"].replace(".bin", ".zstd.bin")
            (folder / chunk["filename"]).write_bytes(zstandard.compress(raw))
    index["config"] |= {"compression": "zstd", "compression_level": None if level == "chunk" else level}
    (folder / "index.json").write_text(json.dumps(index))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_items_read_back_equal(seed: int) -> None:
    rng = random.Random(seed)
    draw = schema(rng)
    items = [draw(rng) for _ in range(rng.randint(1, 7))]
    level = rng.choice([None, None, "chunk", "batch", "sample"])
    with tempfile.TemporaryDirectory() as root:
        folder = f"{root}/plain"
        write(folder, items, chunk_size=rng.randint(1, 4))
        theirs = StreamingDataset(folder)
        read = [theirs[i] for i in range(len(theirs))]
        rows = b"LDARW01\0" in b"".join(path.read_bytes()[-8:] for path in Path(folder).glob("*.bin"))
        if level is not None and not rows:
            folder = shutil.copytree(folder, f"{root}/packed")  # litdata's values are views into what it mapped
            compress(Path(folder), level)
        ours = [dict(sample) for sample in loader.ShardDataset(folder, batch_size=1, shuffle=False, decode="bytes")]
    assert len(ours) == len(items) == len(read)
    for mine, item, other in zip(ours, items, read, strict=True):
        value = mine if isinstance(item, dict) else mine["value"]
        assert same(value, item)
        assert same(value, other)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from(NUMBERS), st.integers(1, 9), st.booleans())
def test_tokens_are_cut_as_tokens_loader_cuts_them(runs: list[int], dtype: str, block: int, tensors: bool) -> None:
    items: list[Any] = [(np.arange(sum(runs[:i]), sum(runs[: i + 1])) % 2).astype(dtype) for i in range(len(runs))]
    if tensors:
        items = [torch.from_numpy(item) for item in items]
    with tempfile.TemporaryDirectory() as folder:
        write(folder, items, chunk_size=50, item_loader=TokensLoader())
        theirs = StreamingDataset(folder, item_loader=TokensLoader(block_size=block))
        wanted = [theirs[i] for i in range(len(theirs))]
        whole = list(loader.ShardDataset(folder, batch_size=1, shuffle=False))
        if wanted:
            ours = loader.ShardDataset(folder, batch_size=1, shuffle=False, format=LitData(block=block))
            assert all(same(a["tokens"], b) for a, b in zip(ours, wanted, strict=True))
    assert sum(len(sample["tokens"]) for sample in whole) == sum(runs)
