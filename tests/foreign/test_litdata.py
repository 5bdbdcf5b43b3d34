"""Data sets that litdata wrote read as litdata reads them: every value of every item."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.errors import ConfigError, FormatError, UnknownFormat
from loader.formats import LitData
from loader.testing import mapped_at

DATA = Path(__file__).parent / "data"
ITEMS = sorted(path.name for path in (DATA / "litdata").iterdir() if path.name != "tokens")


def expected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "expect" / f"litdata__{name}.json").read_text())
    return document


def check(value: Any, wanted: dict[str, Any]) -> None:
    kind = wanted["type"]
    if kind in ("array", "tensor"):
        assert isinstance(value, np.ndarray)
        assert (str(value.dtype), list(value.shape)) == (wanted["dtype"], wanted["shape"])
        assert hashlib.sha256(np.ascontiguousarray(value)).hexdigest() == wanted["sha256"]
    elif kind == "bytes":
        assert value.dtype == np.uint8 and value.ndim == 1
        assert (len(value), hashlib.sha256(value).hexdigest()) == (wanted["len"], wanted["sha256"])
    elif kind == "list":
        assert isinstance(value, list | tuple)
        for item, want in zip(value, wanted["items"], strict=True):
            check(item, want)
    elif kind == "struct":
        assert list(value) == list(wanted["fields"])
        for name, want in wanted["fields"].items():
            check(value[name], want)
    else:
        assert type(value).__name__ == kind and value == wanted["value"]


def check_samples(samples: Any, wanted: list[dict[str, Any]]) -> None:
    for sample, want in zip(samples, wanted, strict=True):
        assert list(sample) == list(want["fields"])
        for name, field in want["fields"].items():
            check(sample[name], field)


@pytest.mark.parametrize("name", ITEMS)
def test_every_value_of_a_chunk(name: str) -> None:
    document = expected(name)
    readers = [loader.open_shard(DATA / "litdata" / name / chunk["file"]) for chunk in document["chunks"]]
    assert [len(reader) for reader in readers] == [chunk["items"] for chunk in document["chunks"]]
    check_samples((sample for reader in readers for sample in reader), document["samples"])


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize("source", ["", "index.json"])
def test_every_value_of_a_data_set(name: str, source: str) -> None:
    document = expected(name)
    ds = loader.ShardDataset(DATA / "litdata" / name / source, batch_size=1, shuffle=False)
    assert ds.manifest.counts.tolist() == [chunk["items"] for chunk in document["chunks"]]
    check_samples(ds, document["samples"])


def test_every_value_in_two_workers() -> None:
    from torch.utils.data import DataLoader

    document = expected("zstd_batch")
    ds = loader.ShardDataset(DATA / "litdata" / "zstd_batch", batch_size=1, shuffle=False)
    check_samples(DataLoader(ds, batch_size=None, num_workers=2, collate_fn=_as_it_is), document["samples"])


def _as_it_is(sample: Any) -> Any:
    return sample


def test_a_chunk_of_tokens_is_one_sample() -> None:
    document = expected("tokens")
    ds = loader.ShardDataset(DATA / "litdata" / "tokens", batch_size=1, shuffle=False)
    check_samples(ds, document["samples"])
    for chunk, want in zip(document["chunks"], document["samples"], strict=True):
        check_samples(loader.open_shard(DATA / "litdata" / "tokens" / chunk["file"]), [want])


def test_tokens_are_cut_into_blocks_as_tokens_loader_does() -> None:
    blocks = expected("tokens")["blocks"]
    format = LitData(block=blocks["block_size"])
    ds = loader.ShardDataset(DATA / "litdata" / "tokens", batch_size=1, shuffle=False, format=format)
    assert [hashlib.sha256(s["tokens"]).hexdigest() for s in ds] == blocks["sha256"]
    shard = loader.open_shard(DATA / "litdata" / "tokens" / "chunk-0-0.bin", format=format)
    assert [hashlib.sha256(s["tokens"]).hexdigest() for s in shard] == blocks["sha256"][: len(shard)]
    with pytest.raises(ConfigError, match="cuts tokens"):
        len(loader.ShardDataset(DATA / "litdata" / "plain", batch_size=1, format=format))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
@pytest.mark.parametrize(("name", "fields"), [("plain", ("blob", "vec", "u16")), ("tokens", ("tokens",))])
def test_values_are_the_chunk_s_own_bytes(name: str, fields: tuple[str, ...]) -> None:
    path = DATA / "litdata" / name / "chunk-0-0.bin"
    raw = path.read_bytes()
    for sample in loader.open_shard(path):
        for field in fields:
            value = sample[field]
            if value.size:
                file, offset = mapped_at(value)
                assert Path(file).samefile(path)
                assert raw[offset : offset + value.nbytes] == value.tobytes()
            assert value.flags.writeable


def test_the_parts_of_a_tuple_may_be_named() -> None:
    format = LitData(names=("x", "pair", "rest"))
    ds = loader.ShardDataset(DATA / "litdata" / "tensors", batch_size=1, shuffle=False, format=format, fields=["pair"])
    assert [s["pair"] for s in ds] == [(i, f"t{i}") for i in range(17)]
    with pytest.raises(ConfigError, match="items have 3 parts"):
        loader.open_shard(DATA / "litdata" / "tensors" / "chunk-0-0.bin", format=LitData(names=("x", "y")))


def test_parts_of_an_index_that_were_not_merged(tmp_path: Path) -> None:
    whole = json.loads((DATA / "litdata" / "plain" / "index.json").read_text())
    for number, chunks in ((10, whole["chunks"][2:]), (2, whole["chunks"][:2])):
        config = whole["config"] | {"types": {"n": number}}
        (tmp_path / f"{number}.index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    for file in (DATA / "litdata" / "plain").glob("*.bin"):
        shutil.copy(file, tmp_path)
    ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)
    check_samples(ds, expected("plain")["samples"])


def test_a_chunk_beside_its_worker_s_index(tmp_path: Path) -> None:
    shutil.copy(DATA / "litdata" / "plain" / "index.json", tmp_path / "0.index.json")
    shutil.copy(DATA / "litdata" / "plain" / "chunk-0-1.bin", tmp_path)
    first = expected("plain")["chunks"][0]["items"]
    shard = loader.open_shard(tmp_path / "chunk-0-1.bin")
    check_samples(shard, expected("plain")["samples"][first : first + len(shard)])


def test_a_chunk_without_an_index_says_so(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "litdata" / "plain" / "chunk-0-1.bin", tmp_path))
    with pytest.raises(UnknownFormat):
        loader.open_shard(path)
    with pytest.raises(FormatError, match=r"no index\.json beside the chunk"):
        loader.open_shard(path, format="litdata")
