"""Filtered data sets in a real S3 server: what is kept beside a shard, and who asks the predicate again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachefs.objstore.blocking import BlockingStore
from cachefs.testing.node import Node, node
from cachefs.testing.seaweed import SeaweedServer
from loader import ShardDataset, Where
from loader.manifest import LEAST_SHARDS
from loader.testing import tar_bytes

pytestmark = pytest.mark.s3


@pytest.mark.parametrize("shards", [3, LEAST_SHARDS])
def test_the_predicate_is_asked_once(tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str, shards: int) -> None:
    total = 0
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        for shard in range(shards):
            members = [(f"{n}.json", json.dumps({"n": n}).encode()) for n in range(total, total + 3)]
            store.put(f"w/{shard:03d}.tar", tar_bytes(members))
            total += 3
    calls: list[int] = []

    def odd(sample: Any) -> bool:
        calls.append(sample["json"]["n"])
        return bool(sample["json"]["n"] % 2)

    def read(here: Node) -> list[int]:
        where = Where(odd, fields=["json"], name="odd")
        ds = ShardDataset(f"s3://{s3_bucket}/w", client=here.client(), batch_size=1, where=where)
        assert ds.manifest.progressive == (shards == LEAST_SHARDS)
        return [sample["json"]["n"] for sample in ds]

    with node(tmp_path, seaweed.origin) as here:
        first = read(here)
        assert sorted(first) == list(range(1, total, 2))
        assert sorted(calls) == list(range(total))
        calls.clear()
        assert read(here) == first
        assert not calls
