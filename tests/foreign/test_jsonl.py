"""JSON Lines files that other tools wrote: every value of every line, compared with Python's own parser as well."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

import loader
from loader.formats import Jsonl

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.name for path in (DATA / "jsonl").iterdir() if path.stat().st_size)


def expected(name: str) -> list[dict[str, Any]]:
    document = json.loads((DATA / "expect" / f"jsonl__{name}.json").read_text())
    return [{name: field.get("value") for name, field in sample["fields"].items()} for sample in document["samples"]]


def by_python(path: Path) -> list[Any]:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    elif path.suffix == ".zst":
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
            raw = stream.read()
    return [json.loads(line) for line in raw.decode("utf-8-sig").split("\n") if line.strip()]


def exact(value: Any) -> str:
    """Tells 1 from 1.0 and True, which are equal."""
    return json.dumps(value)


@pytest.mark.parametrize("name", NAMES)
def test_every_line(name: str) -> None:
    path = DATA / "jsonl" / name
    reader = loader.open_shard(path)
    assert isinstance(reader.format, Jsonl)
    assert [dict(s) for s in reader] == expected(name)
    assert [exact(dict(s)) for s in reader] == [exact(line) for line in by_python(path)]
    ds = loader.ShardDataset(path, batch_size=1, shuffle=False)
    assert [dict(s) for s in ds] == expected(name)


def test_two_workers_read_every_line() -> None:
    from torch.utils.data import DataLoader

    ds = loader.ShardDataset(DATA / "jsonl" / "plain.jsonl", batch_size=1, shuffle=False)
    batches = DataLoader(ds, batch_size=1, num_workers=2, collate_fn=list)
    assert [dict(s) for [s] in batches] == expected("plain.jsonl")


def test_the_empty_file_has_no_line() -> None:
    assert expected("empty.jsonl") == []
    assert len(loader.open_shard(DATA / "jsonl" / "empty.jsonl", "jsonl")) == 0


def test_bzip2(tmp_path: Path) -> None:
    raw = (DATA / "jsonl" / "plain.jsonl").read_bytes()
    path = tmp_path / "x"
    path.write_bytes(bz2.compress(raw[:1000]) + bz2.compress(raw[1000:]))
    assert [dict(s) for s in loader.open_shard(path)] == expected("plain.jsonl")


def test_fields_leave_the_rest_out() -> None:
    ds = loader.ShardDataset(DATA / "jsonl" / "plain.jsonl", batch_size=1, shuffle=False, fields=["id", "meta"])
    assert [dict(s) for s in ds] == [{"id": s["id"], "meta": s["meta"]} for s in expected("plain.jsonl")]
