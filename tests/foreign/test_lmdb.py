"""LMDB databases that the ``lmdb`` package wrote read as it reads them."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import loader
from cachefs.errors import ConfigError, FormatError, UnknownFormat
from loader import formats
from loader.testing import mapped_at
from tests.foreign.test_foreign_shards import DATA, check_samples, expected

NAMES = ["length_key", "num_samples", "padded", "single.lmdb"]
lmdb = pytest.importorskip("lmdb")


def data_file(name: str) -> Path:
    path = DATA / "lmdb" / name
    return path / "data.mdb" if path.is_dir() else path


def written(folder: Path, records: Any, *, name: bytes | None = None, **options: Any) -> Path:
    """A database of these records, in the form that lmdb.open makes by default."""
    folder.parent.mkdir(exist_ok=True)
    with lmdb.open(str(folder), map_size=1 << 28, max_dbs=4) as env:
        database = env.open_db(name, **options)
        with env.begin(write=True, db=database) as transaction:
            for key, value in records:
                transaction.put(key, value)
    return folder


def cursor(folder: Path, name: bytes | None = None, **options: Any) -> list[tuple[bytes, bytes]]:
    with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=4, subdir=folder.is_dir()) as env:
        database = env.open_db(name, create=False, **options)
        with env.begin(db=database) as transaction:
            return [(bytes(key), bytes(value)) for key, value in transaction.cursor()]


def records(shard: Any) -> list[tuple[bytes, bytes]]:
    return [(s["__key__"].encode("utf-8", "surrogateescape"), s["value"].tobytes()) for s in shard]


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_of_every_database(name: str) -> None:
    document = expected(f"lmdb__{name}")
    for source in (DATA / "lmdb" / name, data_file(name)):
        shard = loader.open_shard(source)
        assert shard.format == formats.Lmdb() and shard.skipped == len(document.get("other_keys", ()))
        check_samples(shard, document["samples"])
        check_samples(loader.ShardDataset(source, batch_size=1, shuffle=False), document["samples"])


@pytest.mark.parametrize("name", NAMES)
def test_every_record_where_nothing_is_left_out(name: str) -> None:
    raw = formats.Lmdb(skip=(), group=False)
    assert records(loader.open_shard(data_file(name), raw)) == cursor(DATA / "lmdb" / name)


def test_pairs_can_be_read_as_records() -> None:
    document = expected("lmdb__num_samples")
    check_samples(loader.open_shard(data_file("num_samples"), formats.Lmdb(group=False)), document["records"])
    [sample, *_] = loader.open_shard(data_file("num_samples"), formats.Lmdb(text=()))
    assert sample["label"].dtype == np.uint8
    images = loader.ShardDataset(data_file("num_samples"), batch_size=1, fields=["image"], decode="pil")
    assert {image.format for image in (next(iter(images))["image"],)} == {"JPEG"}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_same_samples_from_two_workers(start: str) -> None:
    path = data_file("single.lmdb")
    wanted = records(loader.open_shard(path))
    ds = loader.ShardDataset(path, batch_size=3, shuffle=False)
    batches = DataLoader(ds, batch_size=3, num_workers=2, collate_fn=loader.collate, multiprocessing_context=start)
    found = [pair for b in batches for pair in zip(b["__key__"], b["value"], strict=True)]
    assert [(key.encode(), torch.as_tensor(value).numpy().tobytes()) for key, value in found] == wanted


def test_a_folder_that_cannot_be_written_and_has_no_lock_file(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    shutil.copytree(DATA / "lmdb" / "padded", folder)
    os.chmod(folder / "data.mdb", 0o444)
    os.chmod(folder, 0o555)
    try:
        shard = loader.open_shard(folder)
        check_samples(shard, expected("lmdb__padded")["samples"])
        assert os.listdir(folder) == ["data.mdb"]
    finally:
        os.chmod(folder, 0o755)


def test_a_lock_file_is_no_shard(tmp_path: Path) -> None:
    folder = written(tmp_path / "db", [(b"a", b"1"), (b"b", b"2")])
    assert sorted(os.listdir(folder)) == ["data.mdb", "lock.mdb"]
    assert records(loader.open_shard(folder)) == records(loader.ShardDataset(folder, batch_size=1, shuffle=False))
    with pytest.raises(UnknownFormat, match=r"lock file; open the data\.mdb"):
        loader.open_shard(folder / "lock.mdb")
    written(tmp_path / "set" / "one", [(b"a", b"1")])
    written(tmp_path / "set" / "two", [(b"b", b"2")])
    both = loader.ShardDataset(tmp_path / "set", batch_size=1, shuffle=False)
    assert records(both) == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9, 0.999])
def test_a_cut_file_is_an_error_and_no_signal(tmp_path: Path, share: float) -> None:
    folder = written(tmp_path / "db", [(b"%04d" % i, bytes([i % 256]) * (i * 97 % 9000)) for i in range(300)])
    raw = (folder / "data.mdb").read_bytes()
    used = int(loader.open_shard(folder)._shard.index.records.at.max())
    (tmp_path / "cut.mdb").write_bytes(raw[: int(share * used)])
    with pytest.raises(FormatError, match="cut"):
        loader.open_shard(tmp_path / "cut.mdb")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
@pytest.mark.parametrize("name", NAMES)
def test_values_are_the_file_s_own_bytes_and_private(name: str) -> None:
    path = data_file(name)
    raw = path.read_bytes()
    shard = loader.open_shard(path)
    for sample in shard:
        for field in ("value", "image"):
            value = sample.get(field)
            if value is not None and len(value):
                file, offset = mapped_at(value)
                assert Path(file).samefile(path)
                assert raw[offset : offset + len(value)] == value.tobytes()
                value[0] ^= 0xFF
                torch.from_numpy(value).add_(1)
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(raw).digest()
    check_samples(loader.open_shard(path), expected(f"lmdb__{name}")["samples"])


def test_values_of_every_size(tmp_path: Path) -> None:
    wanted = [(b"%05d" % i, os.urandom(1) * i) for i in [*range(0, 5000, 13), 100_000, 1 << 20]]
    folder = written(tmp_path / "db", wanted)
    assert records(loader.open_shard(folder)) == sorted(wanted) == cursor(folder)


def test_a_database_that_was_changed_often(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "db"
    for _ in range(30):
        with lmdb.open(str(folder), map_size=1 << 26) as env, env.begin(write=True) as transaction:
            for key in rng.integers(0, 500, 60):
                if rng.random() < 0.4:
                    transaction.delete(b"%d" % key)
                else:
                    transaction.put(b"%d" % key, rng.bytes(int(rng.integers(0, 6000))))
        assert records(loader.open_shard(folder)) == cursor(folder)


@pytest.mark.parametrize("compact", [False, True])
def test_a_copy_of_a_database(tmp_path: Path, compact: bool) -> None:
    folder = written(tmp_path / "db", [(b"%04d" % i, b"x" * (i * 31 % 7000)) for i in range(200)])
    written(folder, [(b"%04d" % i, b"y" * (i * 17 % 7000)) for i in range(0, 200, 3)])
    (tmp_path / "copy").mkdir()
    with lmdb.open(str(folder), readonly=True) as env:
        env.copy(str(tmp_path / "copy"), compact=compact)
    assert records(loader.open_shard(tmp_path / "copy")) == cursor(folder)


@pytest.mark.parametrize("options", [{"writemap": True}, {"writemap": True, "map_async": True}, {"sync": False}])
def test_ways_of_writing(tmp_path: Path, options: dict[str, bool]) -> None:
    pairs = [(b"%04d" % i, b"x" * (i * 31 % 7000)) for i in range(200)]
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 26, **options) as env:
        for first in range(0, 200, 40):
            with env.begin(write=True) as transaction:
                transaction.cursor().putmulti(pairs[first : first + 40], append=True)
        env.sync(True)
    assert records(loader.open_shard(tmp_path / "db")) == pairs


def test_an_empty_database(tmp_path: Path) -> None:
    assert len(loader.open_shard(written(tmp_path / "db", []))) == 0


def test_sub_databases(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    written(folder, [(b"%03d" % i, b"train %d" % i) for i in range(300)], name=b"train")
    assert records(loader.open_shard(folder)) == cursor(folder, b"train")  # there is but one
    written(folder, [(b"x", b"test")], name=b"test")
    with pytest.raises(ConfigError, match=r"Lmdb\(database='test'\).*'test', 'train'"):
        loader.open_shard(folder)
    for name in ("train", "test"):
        shard = loader.open_shard(folder, formats.Lmdb(database=name))
        assert records(shard) == cursor(folder, name.encode())
    with pytest.raises(ConfigError, match=r"no database 'val'.*'test', 'train'"):
        loader.open_shard(folder, formats.Lmdb(database="val"))
    written(folder, [(b"plain", b"record")])
    with pytest.warns(loader.DataWarning, match=r"'test', 'train'"):
        shard = loader.open_shard(folder)
    assert records(shard) == [(b"plain", b"record")] and shard.skipped == 2


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("counts", [[1, 3, 1], [1, 900, 2, 30]])
def test_keys_with_several_values(tmp_path: Path, fixed: bool, counts: list[int]) -> None:
    values = [(b"key%d" % k, b"%08d" % i) for k, count in enumerate(counts) for i in range(count)]
    if not fixed:
        values = [(key, value * (int(value) % 9 + 1)) for key, value in values]
    options = {"dupsort": True, "dupfixed": fixed}
    folder = written(tmp_path / "db", values, name=b"d", **options)
    assert records(loader.open_shard(folder)) == cursor(folder, b"d", **options)


def test_integer_keys_are_numbers(tmp_path: Path) -> None:
    pairs = [(i.to_bytes(8, "little"), b"%d" % i) for i in (0, 1, 255, 256, 70_000)]
    folder = written(tmp_path / "db", pairs, name=b"n", integerkey=True)
    assert [(s["__key__"], s["value"].tobytes()) for s in loader.open_shard(folder)] == [
        (str(i), b"%d" % i) for i in (0, 1, 255, 256, 70_000)
    ]


def test_bookkeeping_is_told_from_samples(tmp_path: Path) -> None:
    words = written(tmp_path / "words", [(b"length", b"a vector"), (b"width", b"another"), (b"__init__", b"1")])
    assert [key for key, _ in records(loader.open_shard(words))] == [b"length", b"width"]
    assert len(loader.open_shard(words, formats.Lmdb(skip=()))) == 3
    assert len(loader.open_shard(words, formats.Lmdb(skip=("width", "length")))) == 1
    counted = written(tmp_path / "counted", [(b"__len__", b"\x80"), (b"__keys__", b"x" * 9000), (b"a", b"1")])
    shard = loader.open_shard(counted)
    assert records(shard) == [(b"a", b"1")] and shard.skipped == 2


def test_pairs_are_made_only_where_the_count_agrees(tmp_path: Path) -> None:
    pairs = [(b"%s-%d" % (field, i), b"%d" % i) for i in range(12) for field in (b"image", b"label")]
    exact = loader.open_shard(written(tmp_path / "exact", [*pairs[1:], (b"num-samples", b"12")]))
    assert len(exact) == 12 and {len(sample) for sample in exact} == {2, 3}  # image-0 is not there
    assert all(sample["label"] == sample["__key__"] for sample in exact)
    with pytest.warns(loader.DataWarning, match="every record is a sample"):
        other = loader.open_shard(written(tmp_path / "other", [*pairs, (b"num-samples", b"13")]))
    assert len(other) == 24
    assert len(loader.open_shard(tmp_path / "other", formats.Lmdb(group=True))) == 12
    with pytest.raises(FormatError, match="'meta'"):
        loader.open_shard(written(tmp_path / "other", [(b"meta", b"")]), formats.Lmdb(group=True))
    with pytest.raises(FormatError, match=r"'label' of sample 11 is no UTF-8"):
        loader.open_shard(written(tmp_path / "exact", [(b"label-0", b"\xff")]))[-1]


def test_keys_as_long_as_bookkeeping_s_are_samples(tmp_path: Path) -> None:
    keys = sorted(b"%0*d" % (width, i) for width in (6, 7, 8, 11) for i in range(3))
    folder = written(tmp_path / "db", [(key, b"5") for key in [*keys, b"length", b"num_samples", b"__len__"]])
    assert [key for key, _ in records(loader.open_shard(folder))] == keys
