"""Megatron pairs: the index is checked against the data; tokens themselves carry no checksum."""

from __future__ import annotations

import random
import struct

import numpy as np

import loader
from loader.formats import Megatron
from tests.fault.format_damage import Case


def pair(lengths: list[int], documents: list[int], tokens: np.ndarray, modes: list[int] | None) -> dict[str, bytes]:
    """The two files, as Megatron's builder lays them out."""
    code = {"uint16": 8, "int32": 4}[tokens.dtype.name]
    starts = np.cumsum([0, *lengths[:-1]]) * tokens.itemsize if lengths else []
    idx = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    idx += np.array(lengths, "<i4").tobytes() + np.array(starts, "<i8").tobytes() + np.array(documents, "<i8").tobytes()
    if modes is not None:
        idx += np.array(modes, "i1").tobytes()
    return {"t.bin": tokens.tobytes(), "t.idx": idx}


def build(dtype: str, modes: bool) -> dict[str, bytes]:
    rng = random.Random(dtype)
    lengths = [rng.randrange(12) for _ in range(30)]
    documents = [0, 3, 3, 4, 11, 30]
    tokens = np.array([rng.randrange(60000) for _ in range(sum(lengths))]).astype(dtype)
    return pair(lengths, documents, tokens, [k % 2 for k in range(30)] if modes else None)


CASES = [
    Case("megatron index", lambda rng: build("uint16", False), loader.open_shard, mutated=("t.idx",)),
    Case(
        "megatron modes",
        lambda rng: build("int32", True),
        lambda path: loader.open_shard(path, Megatron(sample="document")),
        mutated=("t.idx", "t.bin"),
    ),
    Case(
        "megatron windows",
        lambda rng: build("uint16", False),
        lambda path: loader.open_shard(path, Megatron(length=7, labels=True)),
        mutated=("t.idx", "t.bin"),
    ),
]
