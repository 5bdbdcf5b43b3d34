"""llm.c files: the header has to fit the size."""

from __future__ import annotations

import random

import numpy as np

import loader
from loader.formats import LlmC
from tests.fault.format_damage import Case


def llmc(magic: int, version: int, tokens: np.ndarray) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + tokens.tobytes()


def build(rng: random.Random) -> dict[str, bytes]:
    return {"t.bin": llmc(20240520, 1, np.array([rng.randrange(50257) for _ in range(700)], "<u2"))}


def build_wide(rng: random.Random) -> dict[str, bytes]:
    return {"t.bin": llmc(20240801, 7, np.array([rng.randrange(128256) for _ in range(300)], "<u4"))}


CASES = [
    Case("llmc", build, lambda path: loader.open_shard(path, LlmC())),
    Case("llmc windows", build_wide, lambda path: loader.open_shard(path, LlmC(length=20, stride=9))),
]
