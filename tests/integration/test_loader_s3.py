"""Data sets in a real S3 server, through real daemons: what crosses the wire, and what memory samples point into."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import loader
from cachefs.errors import Changed, Denied, NotFound
from cachefs.objstore.blocking import BlockingStore
from cachefs.shard import FillingView
from cachefs.testing.node import Node, node
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer
from loader import ShardDataset
from loader.formats import Tokens, WebDataset
from loader.testing import mapped_at, write_mds, write_tars, write_tokens

pytestmark = pytest.mark.s3


@dataclass
class Bucket:
    """A bucket behind a counting proxy, and a node that caches it."""

    node: Node
    proxy: CountingProxy
    seaweed: SeaweedServer
    name: str
    folder: Path

    def upload(self, prefix: str) -> str:
        """Put a local folder's files under the prefix of the same name; returns its URL."""
        with BlockingStore(f"s3://{self.name}", self.seaweed.origin) as store:
            for path in sorted((self.folder / prefix).rglob("*")):
                if path.is_file():
                    store.put(str(path.relative_to(self.folder)), path.read_bytes())
        self.proxy.clear()
        return f"s3://{self.name}/{prefix}"

    def put(self, key: str, data: bytes) -> None:
        with BlockingStore(f"s3://{self.name}", self.seaweed.origin) as store:
            store.put(key, data)

    def gets(self) -> Counter[str]:
        """Bytes of shards that left the server, by key."""
        out: Counter[str] = Counter()
        for request in self.proxy.requests:
            if request.method == "GET" and request.key and request.status in (200, 206):
                out[request.key] += request.bytes_sent
        return out

    def open(self, source: Any, **options: Any) -> ShardDataset:
        return ShardDataset(source, client=self.node.client(), **{"batch_size": 2, "ids": True, **options})


@pytest.fixture
def bucket(tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str) -> Iterator[Bucket]:
    (tmp_path / "data").mkdir()
    with (
        CountingProxy(seaweed.endpoint) as proxy,
        node(tmp_path, replace(seaweed.origin, endpoint=proxy.endpoint)) as here,
    ):
        yield Bucket(here, proxy, seaweed, s3_bucket, tmp_path / "data")


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def test_two_ranks_with_workers_fetch_each_shard_once_and_the_next_epoch_nothing(bucket: Bucket) -> None:
    write_tars(bucket.folder / "tars", [6, 5, 7, 6], payload=30_000)
    url = bucket.upload("tars")
    local = [
        ids(ShardDataset(bucket.folder / "tars", batch_size=2, ids=True, rank=r, world_size=2).batched())
        for r in (0, 1)
    ]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [
        context.Process(target=_read_two_epochs, args=(bucket.open(url, rank=r, world_size=2), r, queue))
        for r in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    first = dict(queue.get() for _ in ranks)
    assert [first[r] for r in (0, 1)] == local
    sizes = {f"tars/{path.name}": path.stat().st_size for path in (bucket.folder / "tars").iterdir()}
    assert bucket.gets() == sizes
    bucket.proxy.clear()
    for _ in ranks:
        queue.get()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert not bucket.gets()
    assert not bucket.proxy.requests  # not even a listing: the manifest is kept


def _read_two_epochs(ds: ShardDataset, rank: int, queue: Any) -> None:
    batches = DataLoader(ds, batch_size=2, num_workers=2, collate_fn=loader.collate, multiprocessing_context="fork")
    for _ in range(2):
        queue.put((rank, ids(batches)))


def test_samples_are_the_cached_file_s_own_bytes_and_private(bucket: Bucket) -> None:
    values = write_tars(bucket.folder / "tars", [3, 2])
    blobs = write_mds(bucket.folder / "mds", [3, 2])
    tokens = write_tokens(bucket.folder / "tokens" / "t.bin", 64)
    cache = bucket.node.settings.cache_dir
    tars, mds = bucket.open(bucket.upload("tars"), batch_size=1), bucket.open(bucket.upload("mds"), batch_size=1)
    bins = bucket.open(bucket.upload("tokens"), batch_size=1, format=Tokens(length=8))
    files: dict[str, str] = {}
    for _ in range(2):  # what the first epoch writes, the second does not see
        seen: list[bytes] = []
        for ds, field in ((tars, "bin"), (mds, "blob"), (bins, "tokens")):
            for sample in ds:
                path, offset = mapped_at(sample[field])
                assert Path(path).is_relative_to(cache)
                raw = Path(path).read_bytes()
                assert files.setdefault(path, hashlib.sha256(raw).hexdigest()) == hashlib.sha256(raw).hexdigest()
                assert raw[offset:].startswith(sample[field].tobytes())
                seen.append(sample[field].tobytes())
                sample[field][:] = 0
        assert set(seen) == {*values, *blobs, *(row.tobytes() for row in tokens.reshape(-1, 8))}
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=_send_values, args=(tars, queue))
    child.start()
    assert queue.get() == set(values)
    child.join(60)


def _send_values(ds: ShardDataset, queue: Any) -> None:
    queue.put({sample["bin"].tobytes() for sample in ds})


def test_folder_markers_and_side_files_are_no_shards(bucket: Bucket) -> None:
    write_tars(bucket.folder / "dir", [2, 1])
    url = bucket.upload("dir")
    bucket.put("dir/", b"")
    bucket.put("dir/notes.txt", b"no shard")
    bucket.put("dir", b"")
    bucket.proxy.clear()
    for source in (url, f"{url}/", f"{url}/*.tar", f"{url}/{{000,001}}.tar"):
        ds = bucket.open(source, batch_size=1)
        assert [Path(shard.url).name for shard in ds.manifest.shards] == ["000.tar", "001.tar"]
        assert len(ds) == 3
    assert set(bucket.gets()) == {"dir/000.tar", "dir/001.tar"}


def test_what_is_not_there_is_one_line_that_names_it(bucket: Bucket) -> None:
    write_tars(bucket.folder / "dir", [1])
    url = bucket.upload("dir")
    for source, named in (
        (f"s3://{bucket.name}/nope", f"s3://{bucket.name}/nope"),
        (f"s3://{bucket.name}-not/dir", f"s3://{bucket.name}-not/dir"),
        ([f"{url}/000.tar", f"{url}/001.tar"], f"{url}/001.tar"),
        (f"{url}/*.mds", f"{url}/*.mds"),
    ):
        with pytest.raises((NotFound, Denied)) as error:
            len(bucket.open(source))
        assert named in str(error.value) and "\n" not in str(error.value)


def test_a_shard_that_changed_since_the_listing_is_noticed(bucket: Bucket) -> None:
    write_mds(bucket.folder / "mds", [4])
    ds = bucket.open(bucket.upload("mds"), batch_size=1)
    assert len(ds) == 4
    write_mds(bucket.folder / "other", [5])
    bucket.put("mds/shard.00000.mds", (bucket.folder / "other" / "shard.00000.mds").read_bytes())
    with pytest.raises(Changed, match=r"shard\.00000\.mds"):
        list(ds)


def test_a_data_set_larger_than_the_quota_is_read_all_the_same(bucket: Bucket) -> None:
    values = write_tars(bucket.folder / "tars", [3] * 6, payload=400_000)
    url = bucket.upload("tars")
    client = bucket.node.client(quota=3 << 20)
    ds = ShardDataset(url, batch_size=1, client=client)
    for _ in range(2):
        assert {sample["bin"].tobytes() for sample in ds} == set(values)


def test_an_index_is_made_once_and_kept_beside_the_shard(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    values = write_tars(bucket.folder / "kept", [5, 7])
    url = bucket.upload("kept")
    first = [bytes(sample["bin"]) for sample in bucket.open(url, shuffle=False)]
    assert first[:12] == values

    def walked(*_: Any, **__: Any) -> Any:
        raise AssertionError("the shard was walked again")

    monkeypatch.setattr(WebDataset, "index", walked)
    again = bucket.open(url, shuffle=False)  # knows nothing of the first, as another process of this node
    assert [bytes(sample["bin"]) for sample in again] == first
    assert bucket.gets().total() == sum(path.stat().st_size for path in (bucket.folder / "kept").iterdir())


def test_a_damaged_kept_index_is_made_anew(bucket: Bucket) -> None:
    write_tars(bucket.folder / "torn", [6])
    url = bucket.upload("torn")
    wanted = [bytes(sample["bin"]) for sample in bucket.open(url, shuffle=False)]
    attached = [path for path in bucket.node.settings.cache_dir.rglob("attached/**/*") if path.is_file()]
    assert attached
    for path in attached:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    assert [bytes(sample["bin"]) for sample in bucket.open(url, shuffle=False)] == wanted


def test_a_shard_is_indexed_while_it_arrives(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tars(bucket.folder / "slow", [40], payload=100_000)
    url = bucket.upload("slow") + "/000.tar"
    origin = replace(bucket.seaweed.origin, endpoint=bucket.proxy.endpoint)
    chunk = 1 << 17
    with node(tmp_path / "small chunks", origin, chunk_size=chunk, transfer_bytes=chunk) as here:  # one after the other
        client = here.client()
        size = client.stat(url).size
        there: list[int] = []
        ready = FillingView.ready

        def counted(self: FillingView, start: int, end: int) -> None:
            ready(self, start, end)
            if len(there) % 10 == 0:
                there.append(client.stat(url).cached_bytes)
            else:
                there.append(there[-1])

        monkeypatch.setattr(FillingView, "ready", counted)
        bucket.proxy.set_rate(4e6)
        with loader.open_shard(url, "webdataset", client=client) as shard:
            assert len(shard) == 40
            assert all(len(sample["bin"]) == 100_000 for sample in shard)
        # the walk went along with the download, instead of beginning at its end
        assert len(set(there)) > 3 and there[0] < size / 2, there
