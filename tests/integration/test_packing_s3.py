"""Packed data sets in a real S3 server: what is found of a shard is kept beside it in the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cachefs.hashing import name_digest
from cachefs.objstore.blocking import BlockingStore
from cachefs.testing.node import Node, node
from cachefs.testing.seaweed import SeaweedServer
from loader import Packing, ShardDataset
from loader.formats import Format, Jsonl, Parquet

pytestmark = pytest.mark.s3
PACKING = Packing(16)
DOCS = [list(range(10 * i + 1, 10 * i + 1 + i % 10)) for i in range(60)]


@pytest.mark.parametrize(("suffix", "kind", "name"), [("jsonl", Jsonl(), "view"), ("parquet", Parquet(), "parts")])
def test_lengths_are_found_once(
    tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str, suffix: str, kind: Format, name: str
) -> None:
    if suffix == "jsonl":
        (tmp_path / "x").write_text("".join(json.dumps({"tokens": doc}) + "\n" for doc in DOCS))
    else:
        pq.write_table(pa.table({"tokens": DOCS}), tmp_path / "x", row_group_size=25)
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        store.put(f"p/0.{suffix}", (tmp_path / "x").read_bytes())

    def read(here: Node) -> list[list[int]]:
        ds = ShardDataset(f"s3://{s3_bucket}/p", client=here.client(), batch_size=3, drop_last=False, packing=PACKING)
        return [sample["tokens"].tolist() for sample in ds]

    with node(tmp_path, replace(seaweed.origin)) as here:
        first = read(here)
        assert sorted(token for row in first for token in row if token) == [token for doc in DOCS for token in doc]
        kept = f"{name}-{name_digest(PACKING.over(kind).kept_as)}"
        with here.client().open(f"s3://{s3_bucket}/p/0.{suffix}") as shard:
            assert shard.attachment(kept) is not None
        assert read(here) == first
