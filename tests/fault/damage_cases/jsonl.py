"""JSON Lines, plain and compressed."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from pathlib import Path

import zstandard

import loader
from tests.fault.format_damage import Case


def lines(rng: random.Random) -> bytes:
    out = b""
    for number in range(25):
        row = {
            "id": number,
            "text": "".join(rng.choice('abc é世\n"\\') for _ in range(rng.randrange(80))),
            "score": rng.choice([rng.random(), float("nan"), 1e300, None]),
            "tags": ["x" * k for k in range(rng.randrange(4))],
            "meta": {"k": {"deep": [[[number]]]}},
            "big": rng.getrandbits(rng.choice([8, 64, 200])),
        }
        out += json.dumps(row, ensure_ascii=rng.random() < 0.5).encode() + rng.choice([b"\n", b"\r\n", b"\n\n"])
    return out


def opened(path: Path) -> loader.ShardReader:
    return loader.open_shard(path, "jsonl")


CASES = [
    Case("jsonl", lambda rng: {"x.jsonl": lines(rng)}, opened),
    Case("jsonl_found", lambda rng: {"x.jsonl": lines(rng)}, loader.open_shard),
    Case("jsonl_gz", lambda rng: {"x": gzip.compress(lines(rng)) * 2}, loader.open_shard, checksummed=True),
    Case("jsonl_bz2", lambda rng: {"x": bz2.compress(lines(rng))}, loader.open_shard, checksummed=True),
    Case("jsonl_zst", lambda rng: {"x": zstandard.compress(lines(rng))}, opened),
]
