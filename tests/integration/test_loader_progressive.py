"""A large data set without an index in a real S3 server: what is fetched before the first batch, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cachefs.objstore.blocking import BlockingStore
from cachefs.testing.node import Node, node
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer
from loader import ShardDataset
from loader.epochs import Orders
from loader.testing import write_tars

pytestmark = [pytest.mark.s3, pytest.mark.filterwarnings("ignore:This DataLoader will create")]
COUNTS = np.random.default_rng(5).integers(1, 5, 1000).tolist()
BATCH = 16


class Site:
    """A thousand shards behind a counting proxy, and nodes with a cache of their own."""

    def __init__(self, folder: Path, url: str, proxy: CountingProxy, nodes: Callable[[], Node]) -> None:
        self.folder = folder
        self.url = url
        self.proxy = proxy
        self.nodes = nodes

    def open(self, here: Node, **options: Any) -> ShardDataset:
        return ShardDataset(
            self.url, client=here.client(), **{"global_batch_size": BATCH, "ids": True, "seed": 2, **options}
        )

    def fetched(self) -> set[int]:
        """The shards of which bytes left the server since the proxy was cleared."""
        return {int(Path(key).stem) for key in self.requested()}

    def requested(self) -> list[str]:
        requests = (r for r in self.proxy.requests if r.method == "GET" and r.status in (200, 206))
        return [r.key for r in requests if r.key.endswith(".tar")]

    def sequence(self) -> list[int]:
        """The first epoch's samples, from the pure functions and all counts."""
        sizes = np.array([path.stat().st_size for path in sorted(self.folder.iterdir())])
        order = Orders.begin(np.array(COUNTS), sizes, batch=BATCH, seed=2, shuffle=True, cut=False)(0)
        shard, row = order.locate(np.arange(order.total))
        return (shard << 32 | row).tolist()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thousand")
    write_tars(folder, COUNTS)
    for path in folder.iterdir():  # in listing order beyond 999 as well
        path.rename(folder / f"{int(path.stem):04d}.tar")
    return folder


@pytest.fixture
def site(tmp_path: Path, shards: Path, seaweed: SeaweedServer, s3_bucket: str) -> Iterator[Site]:
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: store.put(f"t/{path.name}", path.read_bytes()), sorted(shards.iterdir())))
    running = []
    with CountingProxy(seaweed.endpoint) as proxy:

        def start() -> Node:
            place = tmp_path / f"node-{len(running)}"
            place.mkdir()
            running.append(node(place, replace(seaweed.origin, endpoint=proxy.endpoint)))
            return running[-1].__enter__()

        try:
            yield Site(shards, f"s3://{s3_bucket}/t", proxy, start)
        finally:
            for one in running:
                one.__exit__(None, None, None)


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def test_the_first_batch_takes_the_first_shards_and_a_resume_elsewhere_only_what_is_left(site: Site) -> None:
    samples = site.sequence()
    wanted = [samples[at : at + BATCH] for at in range(0, len(samples) - BATCH + 1, BATCH)]
    here = site.nodes()
    ds = site.open(here)
    batches = iter(ds.batched())
    assert next(batches)["__id__"].tolist() == wanted[0]
    first = site.fetched()
    assert len(first) <= 64, "of a thousand"
    with pytest.raises(TypeError):
        len(ds)
    assert ids(islice(batches, 29)) == wanted[1:30]
    state = json.loads(json.dumps(ds.state_dict()))
    batches.close()  # type: ignore[attr-defined]
    assert len(json.dumps(state)) < 2000

    used = {sample >> 32 for sample in samples[: 30 * BATCH]}
    left = {sample >> 32 for sample in samples[30 * BATCH :]}
    elsewhere = site.nodes()
    site.proxy.clear()
    for rank in range(2):
        ds = site.open(elsewhere, rank=rank, world_size=2)
        ds.load_state_dict(state)
        resumed = DataLoader(ds.batched(), batch_size=None, num_workers=rank * 2)
        half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        assert ids(islice(resumed, 10)) == [batch[half] for batch in wanted[30:40]]
        assert site.fetched() <= left, "and nothing of what is used up"
    assert used - left, "there is something that must not be fetched"
    assert len(site.fetched()) < 400


def test_a_whole_epoch_on_two_ranks_with_workers_fetches_each_shard_once(site: Site) -> None:
    samples = site.sequence()
    wanted = [samples[at : at + BATCH] for at in range(0, len(samples) - BATCH + 1, BATCH)]
    here = site.nodes()
    parts = []
    for rank in range(2):
        ds = site.open(here, rank=rank, world_size=2)
        parts.append(ids(DataLoader(ds.batched(), batch_size=None, num_workers=2 * rank)))
    assert [a + b for a, b in zip(*parts, strict=True)] == wanted
    keys = site.requested()
    assert len(keys) == len(set(keys)) == len(COUNTS)
    again = site.open(here)
    again.count()
    assert again.manifest.counts.tolist() == COUNTS
    assert site.requested() == keys, "all is in the cache"
