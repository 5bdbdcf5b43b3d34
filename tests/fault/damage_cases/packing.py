"""Packed shards: the lengths of documents are found of damaged files, by each way that there is."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import loader
from loader import Packing
from loader.formats import Format, Jsonl, Mds, Megatron, Parquet
from loader.testing import mds_bytes
from tests.fault.damage_cases.megatron import pair
from tests.fault.format_damage import Case


def _documents(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1, 1000) for _ in range(rng.choice((0, 3, 8, 21)))] for _ in range(9)]


def _mds(rng: random.Random) -> dict[str, bytes]:
    rows = [
        {"s": b"x" * (i % 3), "tokens": bytes([33, 1 << 2, len(doc)]) + np.array(doc, "<i4").tobytes()}
        for i, doc in enumerate(_documents(rng))
    ]
    return {"0.mds": mds_bytes({"s": "str", "tokens": "ndarray"}, rows, [None, None])}


def _megatron(rng: random.Random) -> dict[str, bytes]:
    docs = _documents(rng)
    flat = np.array([token for doc in docs for token in doc], np.uint16)
    return pair([len(doc) for doc in docs], list(range(len(docs) + 1)), flat, None)


def _table(rng: random.Random) -> pa.Table:
    return pa.table({"tokens": pa.array(_documents(rng), pa.list_(pa.int32()))})


def _parquet(rng: random.Random) -> dict[str, bytes]:
    out = io.BytesIO()
    pq.write_table(_table(rng), out, row_group_size=4, compression="none")
    return {"0.parquet": out.getvalue()}


def _jsonl(rng: random.Random) -> dict[str, bytes]:
    return {"0.jsonl": "".join(json.dumps({"tokens": doc}) + "\n" for doc in _documents(rng)).encode()}


def _case(
    name: str,
    build: Callable[[random.Random], dict[str, bytes]],
    format: Format,
    mutated: tuple[str, ...] = (),
) -> Case:
    packing = Packing(8, document_ids=True)
    return Case(f"packed {name}", build, lambda path: loader.open_shard(path, packing.over(format)), mutated=mutated)


CASES = [
    _case("mds", _mds, Mds()),
    _case("megatron", _megatron, Megatron(), mutated=("t.idx", "t.bin")),
    _case("parquet", _parquet, Parquet()),
    _case("jsonl", _jsonl, Jsonl()),
]
