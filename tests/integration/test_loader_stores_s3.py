"""Shards of several objects in a real S3 server: zarr stores, Megatron pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import loader
from cachefs.client import Client
from cachefs.errors import Changed
from cachefs.objstore.blocking import BlockingStore
from cachefs.testing.node import node
from cachefs.testing.seaweed import SeaweedServer
from tests.fault.damage_cases.megatron import pair

zarr = pytest.importorskip("zarr")

pytestmark = pytest.mark.s3

Put = Callable[[str, bytes], None]


@pytest.fixture
def client(tmp_path: Path, seaweed: SeaweedServer) -> Iterator[Client]:
    with node(tmp_path, seaweed.origin) as here:
        yield here.client()


@pytest.fixture
def put(seaweed: SeaweedServer, s3_bucket: str) -> Put:
    def put(key: str, data: bytes) -> None:
        with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
            store.put(key, data)

    return put


def upload(folder: Path, prefix: str, put: Put) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


def alone(samples: list[Any]) -> Any:
    return samples[0]


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_store_is_a_data_set(tmp_path: Path, client: Client, put: Put, s3_bucket: str, version: int) -> None:
    values = np.arange(40 * 6, dtype="i4").reshape(40, 6)
    shards = {"shards": (8, 6)} if version == 3 else {}
    group = zarr.open_group(tmp_path / "s", mode="w", zarr_format=version)
    group.create_array("x", shape=values.shape, chunks=(4, 6), dtype="i4", **shards)[...] = values
    group.create_array("y", shape=(40,), chunks=(10,), dtype="i8", compressors=None)[:30] = np.arange(1, 31)
    upload(tmp_path / "s", "stores/s", put)
    url = f"s3://{s3_bucket}/stores/s"
    for source in (url, f"{url}/", f"s3://{s3_bucket}/stores"):
        ds = loader.ShardDataset(source, client=client, batch_size=1, shuffle=False)
        assert {stat.url for stat in ds.manifest.shards} == {url}
        for workers in (0, 2):
            samples = list(DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=alone))
            assert np.array_equal(np.stack([sample["x"] for sample in samples]), values)
            assert [int(sample["y"]) for sample in samples] == [*range(1, 31), *[0] * 10]
    assert np.array_equal(np.stack([s["x"] for s in loader.open_shard(url, client=client)]), values)
    ds = loader.ShardDataset(url, client=client, batch_size=1, shuffle=False)
    assert len(ds) == 40
    put("stores/s/y/" + ("0" if version == 2 else "c/0"), np.zeros(10, "i8").tobytes())
    assert [int(sample["y"]) for sample in ds] == [*range(1, 31), *[0] * 10], "cached, as it was listed"
    client.evict(None)
    with pytest.raises(Changed):
        list(ds)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_megatron_pair_is_a_data_set(client: Client, put: Put, s3_bucket: str, workers: int) -> None:
    tokens = np.arange(100, dtype=np.uint16)
    for name, data in pair([30, 0, 70], [0, 2, 3], tokens, [0, 1, 0]).items():
        put(f"meg/{name}", data)
    for source in (f"s3://{s3_bucket}/meg", f"s3://{s3_bucket}/meg/t.bin"):
        ds = loader.ShardDataset(source, client=client, batch_size=1, shuffle=False)
        samples = list(DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=alone))
        assert [len(sample["tokens"]) for sample in samples] == [30, 0, 70]
        assert np.array_equal(np.concatenate([sample["tokens"] for sample in samples]), tokens)
    assert len(loader.open_shard(f"s3://{s3_bucket}/meg/t.idx", client=client)) == 3
