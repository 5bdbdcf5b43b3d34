"""NumPy's files: a bare array has no checksum, an archive has one for each."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import loader
from loader import formats
from tests.fault.format_damage import Case

_TABLE = [("id", "<i4"), ("word", "<U5"), ("point", "<f4", (3,))]


def _saved(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    out = io.BytesIO()
    save(out, *arrays, **named)
    return out.getvalue()


def build_npy(rng: random.Random) -> dict[str, bytes]:
    return {"a.npy": _saved(np.save, np.array([[rng.random() for _ in range(6)] for _ in range(9)]))}


def build_structured(rng: random.Random) -> dict[str, bytes]:
    rows = [(rng.randrange(1 << 30), f"w{i}", [rng.random()] * 3) for i in range(9)]
    return {"a.npy": _saved(np.save, np.array(rows, np.dtype(_TABLE)))}


def build_tokens(rng: random.Random) -> dict[str, bytes]:
    return {"t.npy": _saved(np.save, np.array([rng.randrange(65536) for _ in range(300)], np.uint16))}


def _arrays(rng: random.Random) -> dict[str, Any]:
    return {
        "x": np.array([[rng.randrange(256) for _ in range(20)] for _ in range(12)], np.uint8),
        "y": np.array([rng.randrange(10) for _ in range(12)]),
        "text": np.array([f"text {i}" for i in range(12)]),
        "nothing": np.zeros((12, 0), np.float32),
    }


def build_npz(rng: random.Random) -> dict[str, bytes]:
    return {"a.npz": _saved(np.savez, **_arrays(rng))}


def build_compressed(rng: random.Random) -> dict[str, bytes]:
    return {"a.npz": _saved(np.savez_compressed, **_arrays(rng))}


CASES = [
    Case("npy", build_npy, loader.open_shard),
    Case("npy-structured", build_structured, loader.open_shard),
    Case("npy-tokens", build_tokens, lambda path: loader.open_shard(path, formats.Tokens(length=32))),
    Case("npy-windows", build_tokens, lambda path: loader.open_shard(path, formats.Npy(length=32, labels=True))),
    Case("npz", build_npz, loader.open_shard, checksummed=True),
    Case("npz-compressed", build_compressed, loader.open_shard, checksummed=True),
]
