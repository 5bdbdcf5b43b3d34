"""Headerless token files: every byte string of a right length is one."""

from __future__ import annotations

import random

import numpy as np

import loader
from loader import formats
from tests.fault.format_damage import Case


def build(rng: random.Random) -> dict[str, bytes]:
    return {"t.bin": np.array([rng.randrange(65536) for _ in range(500)], np.uint16).tobytes()}


CASES = [Case("tokens", build, lambda path: loader.open_shard(path, formats.Tokens(length=32)))]
