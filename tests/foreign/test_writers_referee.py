"""What we convert, the other tools read: webdataset, pyarrow, and mosaicml-streaming where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.testing import tar_bytes
from loader.tool.cli import main

SAMPLES: list[dict[str, Any]] = [
    {"jpg": b"\xff\xd8" + bytes([i]) * i, "txt": f"text {i} é", "cls": i, "json": {"i": i, "n": None}}
    for i in range(40)
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    members = []
    for i, sample in enumerate(SAMPLES):
        members += [
            (f"train/{i:04d}.jpg", sample["jpg"]),
            (f"train/{i:04d}.txt", sample["txt"].encode()),
            (f"train/{i:04d}.cls", str(sample["cls"]).encode()),
            (f"train/{i:04d}.json", json.dumps(sample["json"]).encode()),
        ]
    (tmp_path / "source.tar").write_bytes(tar_bytes(members))
    return tmp_path / "source.tar"


def convert(source: Path, out: Path, *argv: str) -> Path:
    assert main(["convert", str(source), str(out), *argv, "--json"]) == 0
    return out


def test_webdataset_reads_our_tars(source: Path, tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    # by way of MDS, so that every value was written from a value
    mds = convert(source, tmp_path / "mds", "--to", "mds")
    out = convert(mds, tmp_path / "out", "--to", "wds", "--shard-size", "30kB")
    urls = sorted(map(str, out.iterdir()))
    assert len(urls) > 2
    rows = list(wds.WebDataset(urls, shardshuffle=False).decode())
    assert [row["__key__"] for row in rows] == [f"train/{i:04d}" for i in range(40)]
    for row, sample in zip(rows, SAMPLES, strict=True):
        assert {name: row[name] for name in ("txt", "cls", "json")} == {n: sample[n] for n in ("txt", "cls", "json")}
    raw = list(wds.WebDataset(urls, shardshuffle=False))
    assert [row["jpg"] for row in raw] == [sample["jpg"] for sample in SAMPLES]


def test_webdataset_reads_our_arrays_and_packed_tars(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "t.bin")
    tokens = ("--format", "tokens", "--length", "100")
    out = convert(tmp_path / "t.bin", tmp_path / "out", "--to", "wds", "--compression", "gzip", *tokens)
    rows = list(wds.WebDataset([str(p) for p in out.iterdir()], shardshuffle=False).decode())
    assert np.array_equal(np.concatenate([row["tokens.npy"] for row in rows]), np.arange(1000))


def test_a_tar_is_copied_byte_for_byte(source: Path, tmp_path: Path) -> None:
    import tarfile

    out = convert(source, tmp_path / "out", "--to", "wds")
    with tarfile.open(source) as a, tarfile.open(out / "shard-000000.tar") as b:
        for x, y in zip(a, b, strict=True):
            left, right = a.extractfile(x), b.extractfile(y)
            assert left is not None and right is not None
            assert (x.name, left.read()) == (y.name, right.read())


def test_pyarrow_reads_our_parquet(source: Path, tmp_path: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    out = convert(source, tmp_path / "out", "--to", "parquet", "--shard-size", "1kB", "--compression", "zstd")
    table = dataset.dataset(str(out), format="parquet").to_table()
    rows = table.to_pylist()
    assert len(rows) == 40 and len(list(out.iterdir())) > 1
    for i, (row, sample) in enumerate(zip(rows, SAMPLES, strict=True)):
        assert (row["__key__"], row["jpg"], row["txt"], row["cls"]) == (f"train/{i:04d}", *list(sample.values())[:3])
        assert json.loads(row["json"]) == sample["json"]  # a key that is always null has no type of its own


def test_streaming_reads_our_mds(source: Path, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    for name, extra in (("raw", ()), ("zstd", ("--compression", "zstd"))):
        out = convert(source, tmp_path / name, "--to", "mds", "--shard-size", "1kB", *extra)
        data = streaming.LocalDataset(str(out)) if name == "raw" else streaming.StreamingDataset(local=str(out))
        assert len(data) == 40
        for i, sample in enumerate(SAMPLES):
            row = data[i]
            assert {field: row[field] for field in sample} == sample
            assert row["__key__"] == f"train/{i:04d}"
