"""Files that NumPy wrote (``.npy``, ``.npz``) read as NumPy reads them."""

from __future__ import annotations

import hashlib
import io
import zipfile
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
from tests.foreign.test_foreign_shards import DATA, check, expected

NPZ = ["compressed.npz", "plain.npz", "positional.npz"]
maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")


def check_rows(samples: Any, wanted: list[dict[str, Any]]) -> None:
    samples = list(samples)
    assert len(samples) == len(wanted)
    for sample, want in zip(samples, wanted, strict=True):
        assert sample.keys() == want["fields"].keys()
        for name, field in want["fields"].items():
            if field["type"] == "bool":
                assert sample[name] is field["value"]
            else:
                check(sample[name], field)


def saved(path: Path, *arrays: Any, **named: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, *arrays, **named)
    else:
        np.savez(path, *arrays, **named)
    return path


@pytest.mark.parametrize("name", NPZ)
def test_every_row_of_every_array(name: str) -> None:
    document = expected(f"npz__{name}")
    shard = loader.open_shard(DATA / "npz" / name)
    assert shard.format == formats.Npz()
    check_rows(shard, document["samples"])
    check_rows(loader.ShardDataset(DATA / "npz" / name, batch_size=1, shuffle=False), document["samples"])
    with np.load(DATA / "npz" / name) as archive:
        [whole] = loader.open_shard(DATA / "npz" / name, formats.Npz(rows=False))
        assert whole.keys() == set(archive.files)
        assert all(np.array_equal(whole[n], archive[n]) and whole[n].dtype == archive[n].dtype for n in whole)


def test_rows_of_a_bare_array() -> None:
    document = expected("tokens__real_2d.npy")
    path = DATA / "tokens" / "real_2d.npy"
    check_rows(loader.open_shard(path), document["samples"])
    check_rows(loader.ShardDataset(path, batch_size=1, shuffle=False), document["samples"])
    [whole] = loader.open_shard(path, formats.Npy(rows=False))
    check(whole["value"], document["array"])


def test_a_row_of_tokens_is_scalars_or_windows() -> None:
    [want] = expected("tokens__real_1d.npy")["samples"]
    path = DATA / "tokens" / "real_1d.npy"
    for format in (formats.Tokens(length=5000), formats.Npy(length=5000)):
        [whole] = loader.open_shard(path, format)
        check(whole["tokens"], want["fields"]["tokens"])
        assert whole["tokens"][:4].tolist() == want["first"] and whole["tokens"][-4:].tolist() == want["last"]
        [sample] = loader.ShardDataset(path, batch_size=1, format=format)
        check(sample["tokens"], want["fields"]["tokens"])
    scalars = list(loader.open_shard(path))
    assert len(scalars) == 5000 and [s["value"] for s in scalars] == np.load(path).tolist()
    assert scalars[0]["value"].dtype == np.uint16
    with pytest.raises(FormatError, match=r"holds uint16, not int32.*dtype=\"uint16\""):
        loader.open_shard(path, formats.Tokens(length=10, dtype="int32"))
    with pytest.raises(FormatError, match=r"shape \(37, 64\).*formats\.Npy\(\)"):
        loader.open_shard(DATA / "tokens" / "real_2d.npy", formats.Tokens(length=10, dtype="int32"))


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_windows_of_files_with_and_without_header(tmp_path: Path, labels: bool, workers: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 1000).astype(np.uint16)
    saved(tmp_path / "1.npy", tokens[:600])
    tokens[600:].tofile(tmp_path / "2.npy")
    format = formats.Tokens(length=16, labels=labels)
    starts = [k for first, last in ((0, 600), (600, 1000)) for k in range(first, last - 15 - labels, 16)]
    ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False, format=format)
    assert len(ds) == len(starts)
    batches = list(DataLoader(ds.batched(), batch_size=None, num_workers=workers))
    assert [b["tokens"][0].tolist() for b in batches] == [tokens[k : k + 16].tolist() for k in starts]
    if labels:
        assert [b["labels"][0].tolist() for b in batches] == [tokens[k + 1 : k + 17].tolist() for k in starts]
    same = loader.ShardDataset(tmp_path / "1.npy", batch_size=4, format=formats.Npy(length=16, labels=labels), seed=3)
    other = loader.ShardDataset(tmp_path / "1.npy", batch_size=4, format=format, seed=3)
    for a, b in zip(same.batched(), other.batched(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_the_same_samples_from_two_workers() -> None:
    for path, name in ((DATA / "npz" / "plain.npz", "x"), (DATA / "tokens" / "real_2d.npy", "value")):
        wanted = np.stack([sample[name] for sample in loader.open_shard(path)])
        for batched in (False, True):
            ds = loader.ShardDataset(path, batch_size=4, shuffle=False, drop_last=False)
            size = {"batch_size": None} if batched else {"batch_size": 4, "collate_fn": loader.collate}
            batches = DataLoader(ds.batched() if batched else ds, num_workers=2, **size)
            assert np.array_equal(torch.cat([batch[name] for batch in batches]), wanted)


@maps
def test_values_are_the_file_s_own_bytes_and_private(tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.int32).reshape(20, 30)
    for path in (saved(tmp_path / "a.npy", array), saved(tmp_path / "a.npz", value=array)):
        before = path.read_bytes()
        for i, sample in enumerate(loader.open_shard(path)):
            value = sample["value"]
            file, offset = mapped_at(value)
            assert Path(file).samefile(path)
            assert before[offset : offset + value.nbytes] == array[i].tobytes()
            value[0] = -1
            torch.from_numpy(value).add_(1)
        assert path.read_bytes() == before
        assert all(np.array_equal(s["value"], row) for s, row in zip(loader.open_shard(path), array, strict=True))


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(60, dtype=np.float32).reshape(5, 4, 3)),
        np.arange(12).reshape(3, 4).astype(">i8"),
        np.arange(6, dtype=np.complex64),
        np.arange(7, dtype=np.float16)[:, None],
        np.array([True, False]),
        np.array(["a", "b\u0436", ""]),
        np.array([b"ab", b"c"]),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.zeros((4, 0), np.int32),
        np.zeros((0, 3)),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_kinds_of_arrays(tmp_path: Path, array: np.ndarray[Any, Any], version: tuple[int, int]) -> None:
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, array, version)
    shard = loader.open_shard(tmp_path / "a.npy")
    assert len(shard) == len(array)
    for sample, row in zip(shard, array, strict=True):
        np.testing.assert_array_equal(sample["value"], row)
        if isinstance(sample["value"], np.ndarray):
            assert sample["value"].dtype == array.dtype


def test_batches_hold_what_samples_hold(tmp_path: Path) -> None:
    table = np.zeros(9, [("id", "<i4"), ("point", ">f4", (3,)), ("word", "<U4"), ("inner", [("a", "u1"), ("b", "?")])])
    table["id"], table["word"], table["inner"]["a"] = range(9), [f"w{i}" for i in range(9)], range(9)
    saved(tmp_path / "t.npy", table)
    samples = list(loader.open_shard(tmp_path / "t.npy"))
    assert set(samples[0]) == {"id", "point", "word", "inner"} and samples[3]["word"] == "w3"
    assert samples[3]["inner"] == {"a": 3, "b": False}
    [batch] = loader.ShardDataset(tmp_path / "t.npy", batch_size=9, shuffle=False).batched()
    whole = loader.collate([loader.open_shard(tmp_path / "t.npy")[i] for i in range(9)])
    assert batch["word"] == whole["word"] and torch.equal(batch["point"], whole["point"])
    assert torch.equal(batch["inner"]["a"], whole["inner"]["a"]) and torch.equal(batch["id"], whole["id"])
    [only] = loader.ShardDataset(tmp_path / "t.npy", batch_size=9, fields=["id"]).batched()
    assert set(only) == {"id"}


def test_arrays_of_several_lengths_have_to_be_chosen(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.arange(4), names=np.arange(3), count=np.array(4))
    with pytest.raises(FormatError, match=r"x 4, y 4, names 3.*Npz\(arrays=\('x', \.\.\.\)\).*rows=False"):
        loader.open_shard(path)
    some = loader.open_shard(path, formats.Npz(arrays=("x", "y")))
    assert len(some) == 4 and set(some[0]) == {"x", "y"} and some.skipped == 2
    [whole] = loader.open_shard(path, formats.Npz(rows=False))
    assert whole["count"] == 4 and len(whole["names"]) == 3
    with pytest.raises(FormatError, match=r"no array 'z'.*x, y, names, count"):
        loader.open_shard(path, formats.Npz(arrays=("z",)))
    path = saved(tmp_path / "b.npz", x=np.zeros((4, 2)), count=np.array(4))
    assert [set(sample) for sample in loader.open_shard(path)] == [{"x"}] * 4
    with pytest.raises(ConfigError, match="arrays"):
        formats.Npz(arrays="x")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"no rows.*rows=False"):
        loader.open_shard(saved(tmp_path / "c.npy", np.array(3)))
    [scalar] = loader.open_shard(tmp_path / "c.npy", formats.Npy(rows=False))
    assert scalar["value"] == 3


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    objects = np.array([{"a": 1}, None], object)
    with pytest.raises(FormatError, match="unpickling"):
        loader.open_shard(saved(tmp_path / "o.npy", objects))
    path = saved(tmp_path / "o.npz", meta=objects, x=np.arange(2))
    with pytest.raises(FormatError, match=r"'meta'.*unpickling.*fields="):
        loader.open_shard(path)[0]
    assert [s["x"] for s in loader.ShardDataset(path, batch_size=1, fields=["x"], shuffle=False)] == [0, 1]


def test_a_second_array_in_one_file_is_not_passed_over(tmp_path: Path) -> None:
    with open(tmp_path / "two.npy", "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(4))
    with pytest.raises(FormatError, match="several arrays were saved into one file"):
        loader.open_shard(tmp_path / "two.npy")


def archive(entries: dict[str, bytes], **options: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_archives_that_numpy_did_not_write(tmp_path: Path) -> None:
    x = npy(np.arange(5))
    (tmp_path / "a.npz").write_bytes(archive({"x.npy": x, "é/y.npy": x, "read.me": b"!"}) + b"")
    shard = loader.open_shard(tmp_path / "a.npz")
    assert set(shard[0]) == {"x", "é/y"} and shard.skipped == 1
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as file:
        file.writestr("x.npy", x)
        file.comment = b"PK\x05\x06 a comment that looks like an end"
    assert [s["x"] for s in loader.open_shard(tmp_path / "c.npz")] == list(range(5))
    (tmp_path / "b.npz").write_bytes(archive({"x.npy": x}, compression=zipfile.ZIP_BZIP2))
    with pytest.raises(UnknownFormat, match=r"'x\.npy' is packed by method 12"):
        loader.open_shard(tmp_path / "b.npz")
    (tmp_path / "no.zip").write_bytes(archive({"archive/data.pkl": x}))
    with pytest.raises(UnknownFormat, match="no npz"):
        loader.open_shard(tmp_path / "no.zip")


def test_damage_in_an_array_is_told_when_it_is_read(tmp_path: Path) -> None:
    arrays = {"x": np.arange(4000).reshape(4, 1000), "y": np.arange(4)}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        raw = bytearray((tmp_path / "a.npz").read_bytes())
        raw[len(raw) // 3] ^= 0x10
        (tmp_path / "bad.npz").write_bytes(raw)
        bad = loader.ShardDataset(tmp_path / "bad.npz", batch_size=1, fields=["x"])
        with pytest.raises(FormatError, match=r"bad\.npz.*'x\.npy'"):
            next(iter(bad))
        good = loader.ShardDataset(tmp_path / "bad.npz", batch_size=1, fields=["y"], shuffle=False)
        assert [s["y"] for s in good] == [0, 1, 2, 3]


def test_declared_sizes_are_not_believed(tmp_path: Path) -> None:
    """A header that asks for terabytes, and a stream that would become them."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 1000), }"
    for rows in (1 << 40, 1 << 61, 1 << 70):
        text = (header % rows).ljust(118) + b"\n"
        raw = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        (tmp_path / "big.npy").write_bytes(raw + bytes(800))
        with pytest.raises(FormatError, match=r"needs|damaged"):
            loader.open_shard(tmp_path / "big.npy")
    (tmp_path / "bomb.npz").write_bytes(archive({"x.npy": npy(np.zeros(9))}, compression=zipfile.ZIP_DEFLATED))
    raw = bytearray((tmp_path / "bomb.npz").read_bytes())
    entry = raw.rfind(b"PK\x01\x02")
    raw[entry + 24 : entry + 28] = (1 << 31).to_bytes(4, "little")
    (tmp_path / "bomb.npz").write_bytes(raw)
    with pytest.raises(FormatError, match="size that cannot be: 2147483648"):
        loader.open_shard(tmp_path / "bomb.npz")


@pytest.mark.parametrize("code", [0xFFFFFFFF, 0x110000])
def test_text_that_is_none_is_told(tmp_path: Path, code: int) -> None:
    path = saved(tmp_path / "a.npy", np.array(["ab", "cd", "ef"]))
    raw = path.read_bytes()
    path.write_bytes(raw[:-16] + code.to_bytes(4, "little") + raw[-12:])
    shard = loader.open_shard(path)
    assert shard[0]["value"] == "ab" and shard[2]["value"] == "ef"
    with pytest.raises(FormatError, match="'value' of sample 1"):
        shard[1]
    with pytest.raises(FormatError, match="no text"):
        list(loader.ShardDataset(path, batch_size=3).batched())
    good = loader.ShardDataset(path, batch_size=3, on_error="skip", shuffle=False)
    with pytest.warns(loader.DataWarning):
        assert [s["value"] for s in good] == ["ab", "ab", "ef"] and good.skipped == 1


def test_an_epoch_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npz", x=np.arange(40).reshape(10, 4))
    digest = hashlib.sha256(path.read_bytes()).digest()
    ds = loader.ShardDataset(path, batch_size=2, shuffle=False)
    for _ in range(2):
        for i, sample in enumerate(ds):
            assert sample["x"].tolist() == list(range(4 * i, 4 * i + 4))
            sample["x"][:] = -1
    assert hashlib.sha256(path.read_bytes()).digest() == digest
