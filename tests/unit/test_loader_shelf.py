"""What one process found out is there for those that it was forked with."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from cachefs.client import connect
from cachefs.errors import FormatError
from cachefs.testing.clock import ManualClock
from loader import DataWarning, ShardDataset
from loader.buffers import IndexCache
from loader.manifest import Manifest, build_manifest
from loader.shelf import Shelf
from loader.testing import tar_bytes, write_mds, write_tars

FORK = multiprocessing.get_context("fork")


def test_what_is_put_there_is_found_by_all(tmp_path: Path) -> None:
    shelf = Shelf()
    assert shelf.read() == b""
    child = FORK.Process(target=_put, args=(shelf, b"found " * 10_000))
    child.start()
    child.join(60)
    assert shelf.read() == b"found " * 10_000


def _put(shelf: Shelf, data: bytes) -> None:
    with shelf.held():
        shelf.write(data)


def test_one_works_while_the_others_wait_and_a_dead_one_lets_go() -> None:
    shelf = Shelf(ManualClock())
    ready, go = FORK.Event(), FORK.Event()
    child = FORK.Process(target=_hold, args=(shelf, ready, go))
    child.start()
    assert ready.wait(60)
    with shelf.held(wait=30) as alone:
        assert not alone
    child.kill()
    child.join(60)
    with shelf.held(wait=30) as alone:
        assert alone


def _hold(shelf: Shelf, ready: Any, go: Any) -> None:
    with shelf.held():
        ready.set()
        go.wait(60)


def test_copies_are_shelves_of_their_own() -> None:
    shelf = Shelf()
    shelf.write(b"x")
    assert copy.deepcopy(shelf).read() == pickle.loads(pickle.dumps(shelf)).read() == b""


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        shelf = Shelf()
        shelf.write(b"x")
    del shelf
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


class TestManifest:
    @pytest.mark.parametrize("kind", ["tar", "mds"])
    def test_it_comes_back_as_it_was(self, tmp_path: Path, kind: str) -> None:
        if kind == "tar":
            write_tars(tmp_path, [3, 2])
            (tmp_path / "bad.tar").write_bytes(tar_bytes([("a.x", b"1" * 600)])[:700])
            (tmp_path / "odd.tar").write_bytes(tar_bytes([("README", b""), ("a.x", b"")]))
        else:
            write_mds(tmp_path, [3, 2])
        with pytest.warns(DataWarning) if kind == "tar" else _nothing():
            built = build_manifest(tmp_path, connect(), format=None, on_error="skip", indexes=IndexCache())
        again = Manifest.from_bytes(built.to_bytes(), None)
        assert again.format == built.format and again.digest == built.digest
        assert [(s.url, s.size, s.version) for s in again.shards] == [(s.url, s.size, s.version) for s in built.shards]
        assert again.counts.tolist() == built.counts.tolist() and again.sizes.tolist() == built.sizes.tolist()
        assert (again.raw_sizes is None) == (built.raw_sizes is None)
        assert again.skipped == built.skipped == (kind == "tar")
        assert {n: (type(e), str(e)) for n, e in again.damaged.items()} == {
            n: (type(e), str(e)) for n, e in built.damaged.items()
        }
        if kind == "tar":
            assert [type(e) for e in again.damaged.values()] == [FormatError]

    def test_forked_readers_list_once(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [2])
        ds = ShardDataset(tmp_path, batch_size=1)
        for count in (2, 2):  # the second child does not see the shard that came after the first one's look
            queue = FORK.SimpleQueue()
            child = FORK.Process(target=_count, args=(ds, queue))
            child.start()
            assert queue.get() == count
            child.join(60)
            write_tars(tmp_path / "more", [5])
        assert len(ds) == 2


def _count(ds: ShardDataset, queue: Any) -> None:
    queue.put(len(ds))


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
