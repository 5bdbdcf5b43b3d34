"""Zero copy, private memory, fresh maps for every pass, and nothing left open."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loader
from cachefs.client import connect
from loader import ShardDataset
from loader.buffers import IndexCache, ShardPool
from loader.formats import Tokens, WebDataset
from loader.manifest import build_manifest
from loader.testing import mapped_at, write_mds, write_tars, write_tokens

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc/self")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def open_files(folder: Path) -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sum(link.startswith(str(folder)) for link in links)


def maps(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


@linux
class TestZeroCopy:
    def test_tar_members_are_the_file_s_own_bytes(self, tmp_path: Path) -> None:
        values = write_tars(tmp_path, [3, 2])
        for sample in ShardDataset(tmp_path, batch_size=1, ids=True):
            path, offset = mapped_at(sample["bin"])
            raw = Path(path).read_bytes()
            assert raw[offset : offset + 40] == sample["bin"].tobytes()
            assert sample["bin"].tobytes() in values and Path(path).parent == tmp_path

    def test_mds_values_are_too(self, tmp_path: Path) -> None:
        write_mds(tmp_path, [3])
        for sample in ShardDataset(tmp_path, batch_size=1):
            path, offset = mapped_at(sample["blob"])
            assert path == str(tmp_path / "shard.00000.mds")
            assert Path(path).read_bytes()[offset:].startswith(sample["blob"].tobytes())

    def test_and_token_windows_and_the_source_of_token_batches(self, tmp_path: Path) -> None:
        write_tokens(tmp_path / "t.bin", 100)
        ds = ShardDataset(tmp_path, batch_size=2, format=Tokens(length=8), ids=True)
        for sample in ds:
            assert mapped_at(sample["tokens"]) == (str(tmp_path / "t.bin"), 16 * sample["__id__"])
        with ds.begin_pass() as reading:
            assert mapped_at(reading.reader.pool.get(0).source) == (str(tmp_path / "t.bin"), 0)

    def test_torch_tensors_share_the_memory(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [1])
        [sample] = ShardDataset(tmp_path, batch_size=1, decode="torch")
        assert mapped_at(sample["bin"].numpy())[0] == str(tmp_path / "000.tar")


class TestWriting:
    def test_writes_reach_neither_the_file_nor_another_reader_nor_the_next_epoch(self, tmp_path: Path) -> None:
        values = set(write_tars(tmp_path, [3, 2]))
        before = [sha256(path) for path in sorted(tmp_path.iterdir())]
        ds = ShardDataset(tmp_path, batch_size=1)
        other = iter(ShardDataset(tmp_path, batch_size=1))
        held = next(other)
        for _ in range(2):
            seen = set()
            for sample in ds:
                seen.add(sample["bin"].tobytes())
                assert sample["bin"].flags.writeable
                sample["bin"][:] = 0
                torch.from_numpy(sample["bin"]).add_(7)
            assert seen == values
        assert held["bin"].tobytes() in values
        assert {held["bin"].tobytes(), *(sample["bin"].tobytes() for sample in other)} == values
        assert {
            sample["bin"].tobytes() for path in sorted(tmp_path.iterdir()) for sample in loader.open_shard(path)
        } == values
        assert [sha256(path) for path in sorted(tmp_path.iterdir())] == before

    def test_repeats_do_not_show_what_was_written_into_the_first(self, tmp_path: Path) -> None:
        values = write_tars(tmp_path, [2, 1])
        ds = ShardDataset(tmp_path, batch_size=8, pad=True, shuffle=False, lanes=1)
        seen = []
        for sample in ds:
            seen.append(sample["bin"].tobytes())
            sample["bin"][:] = 0
        assert seen == (values * 3)[:8]
        gc.collect()
        assert open_files(tmp_path) == 0

    def test_a_write_never_ends_the_process(self, tmp_path: Path) -> None:
        """What a read-only map would do: signal 11."""
        write_tokens(tmp_path / "tok.bin", 12)
        before = sha256(tmp_path / "tok.bin")
        child = multiprocessing.get_context("fork").Process(target=_write_tokens, args=(tmp_path / "tok.bin",))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert sha256(tmp_path / "tok.bin") == before
        [sample] = loader.open_shard(tmp_path / "tok.bin", format=Tokens(length=12))
        assert sample["tokens"].tolist() == list(range(12))

    def test_a_forked_child_opens_fresh_maps(self, tmp_path: Path) -> None:
        values = write_tars(tmp_path, [4])
        ds = ShardDataset(tmp_path, batch_size=1, shuffle=False)
        held = list(ds)
        for sample in held:
            sample["bin"][:] = 0
        queue = multiprocessing.get_context("fork").SimpleQueue()
        child = multiprocessing.get_context("fork").Process(target=_send_all, args=(ds, queue))
        child.start()
        assert queue.get() == values
        child.join(60)
        assert child.exitcode == 0

    def test_a_sample_outlives_its_pass_and_its_data_set(self, tmp_path: Path) -> None:
        values = write_tars(tmp_path, [2])
        samples = list(ShardDataset(tmp_path, batch_size=1, shuffle=False))
        (tmp_path / "000.tar").unlink()
        gc.collect()
        assert [sample["bin"].tobytes() for sample in samples] == values


def _write_tokens(path: Path) -> None:
    ds = ShardDataset(path, batch_size=1, format=Tokens(length=12))
    [sample] = ds
    sample["tokens"][0] = 1
    torch.from_numpy(sample["tokens"]).view(torch.int16).add_(1)
    [batch] = ds.batched()
    batch["tokens"].view(torch.int16).add_(1)


def _send_all(ds: ShardDataset, queue: Any) -> None:
    ds.set_epoch(0)
    queue.put([sample["bin"].tobytes() for sample in ds])


@linux
class TestBounds:
    def test_an_early_break_leaves_nothing_open(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [3] * 20)
        ds = ShardDataset(tmp_path, batch_size=2)
        for _ in range(3):
            for sample in ds:
                assert mapped_at(sample["bin"])[0]
                break
            del sample
            gc.collect()
            assert open_files(tmp_path) == 0 and maps(tmp_path) == 0

    def test_an_error_leaves_nothing_open(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [3] * 4)
        ds = ShardDataset(tmp_path, batch_size=2, transform=lambda s, rng: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(ds)
        gc.collect()
        assert open_files(tmp_path) == 0 and maps(tmp_path) == 0

    def test_open_shards_are_bounded(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [2] * 60)
        ds = ShardDataset(tmp_path, batch_size=2, lanes=2, block_shards=3)
        most = 0
        for _sample in map(str, ds):
            most = max(most, maps(tmp_path))
        assert 4 <= most <= 2 * (3 + 1)

    def test_a_pool_closes_the_least_recently_used(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [2] * 5)
        client, indexes = connect(), IndexCache()
        manifest = build_manifest(tmp_path, client, format=None, on_error="raise", indexes=indexes)
        pool = ShardPool(manifest, client, capacity=2, indexes=indexes)
        one = pool.get(1)
        assert pool.get(1) is one
        pool.get(0), pool.get(1), pool.get(2)
        assert len(pool) == 2 and pool.get(1) is one
        assert pool.get(0) is not None and len(pool) == 2
        pool.close()
        pool.close()
        assert len(pool) == 0
        sample = one.format.read(one.source, one.index, 0, one.url)  # what was handed out stays
        assert sample["bin"].tobytes().startswith(b"2:")

    def test_decompressed_shards_are_bounded_by_their_bytes(self, tmp_path: Path) -> None:
        import gzip

        write_tars(tmp_path, [2] * 4)
        for path in sorted(tmp_path.iterdir()):
            path.write_bytes(gzip.compress(path.read_bytes()))
        client, indexes = connect(), IndexCache()
        manifest = build_manifest(tmp_path, client, format=None, on_error="raise", indexes=indexes)
        size = manifest.sizes.size and len(gzip.decompress((tmp_path / "000.tar").read_bytes()))
        pool = ShardPool(manifest, client, capacity=9, indexes=indexes, private_bytes=2 * size)
        for number in range(4):
            pool.get(number)
            assert len(pool) == min(number + 1, 2)
        tight = ShardPool(manifest, client, capacity=9, indexes=indexes, private_bytes=1)
        tight.get(0), tight.get(1)
        assert len(tight) == 1

    def test_indexes_are_bounded_and_not_pickled(self, tmp_path: Path) -> None:
        import pickle

        write_tars(tmp_path, [50])
        data = np.fromfile(tmp_path / "000.tar", np.uint8)
        index = WebDataset().index(data, "x")
        cache = IndexCache(limit=3 * index.nbytes)
        for number in range(5):
            cache.put(number, index)
        assert [cache.get(number) is not None for number in range(5)] == [False, False, True, True, True]
        assert cache.nbytes == 3 * index.nbytes
        cache.put(4, index)
        assert cache.nbytes == 3 * index.nbytes
        again = pickle.loads(pickle.dumps(cache))
        assert again.get(4) is None and again.nbytes == 0
        assert pickle.loads(pickle.dumps(index)) == index
