"""Options of packing: how they may be spelled, which of them make no sense, and what decoders do to what is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachefs.errors import ConfigError
from loader import Packing, ShardDataset, formats


def jsonl(folder: Path, docs: list[list[int]]) -> Path:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps({"tokens": doc}) + "\n" for doc in docs))
    return path


def _zeroed(row: Any) -> Any:
    row[:] = 0
    return row


@pytest.mark.parametrize("batched", [True, False])
def test_a_decoder_that_writes_into_tokens_changes_no_label(tmp_path: Path, batched: bool) -> None:
    path = jsonl(tmp_path, [[1, 2, 3, 4], [5, 6, 7], [8, 9]])

    def labels(decode: Any) -> list[Any]:
        ds = ShardDataset(path, batch_size=1, shuffle=False, packing=Packing(8), decode=decode)
        return [np.asarray(row["labels"]).ravel().tolist() for row in (ds.batched() if batched else ds)]

    assert labels({"tokens": _zeroed}) == labels(None)
    assert max(labels(None)[0]) > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": ">u2"}, "dtype='>u2'.*little-endian"),
        ({"out": ">i4"}, "out='>i4'.*little-endian"),
        ({"out": None}, "out=None.*no integer dtype"),
        ({"out": "uint64"}, "out='uint64'.*labels"),
        ({"eos_id": 100257, "dtype": "uint16"}, "eos_id=100257.*uint16"),
        ({"eos_id": -1, "dtype": "uint16"}, "eos_id=-1.*uint16"),
        ({"mask": 3}, "mask=3"),
        ({"mask": ""}, "mask=''"),
        ({"mask": "loss", "labels": False}, "mask='loss', labels=False"),
        ({"field": ""}, "field=''"),
        ({"field": "__id__"}, "field='__id__'"),
        ({"field": "max_seqlen"}, "field='max_seqlen'"),
        ({"labels": 1}, "labels=1"),
    ],
)
def test_more_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Packing(**{"length": 8, **options})


def test_numbers_and_dtypes_in_any_spelling() -> None:
    plain = Packing(8, dtype="uint16", eos_id=3, out="int32")
    for dtype in ("<u2", np.uint16, np.dtype("uint16")):
        other: Any = Packing(np.int64(8), dtype=dtype, eos_id=np.uint16(3), out=np.int32)  # type: ignore[arg-type]
        assert other == plain
        assert other.over(formats.Jsonl()).identity() == plain.over(formats.Jsonl()).identity()
    assert Packing(8, out="uint64", labels=False).out == "uint64"
    for made in (formats.TokenFile("<u2"), formats.TokenFile(np.uint16)):  # type: ignore[arg-type]
        assert made == formats.TokenFile("uint16")
    assert formats.Tokens(4, dtype="<u2", out="<i4").identity() == formats.Tokens(4, dtype="uint16").identity()


@pytest.mark.parametrize("kind", [formats.TokenFile, lambda dtype: formats.Tokens(4, dtype=dtype)])
def test_files_of_swapped_bytes_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"dtype='>u2'.*little-endian"):
        kind(">u2")


@pytest.mark.parametrize("given", [512, True, "best_fit"])
def test_what_is_no_packing(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"packing=.*loader\.Packing\(2048\)"):
        ShardDataset(jsonl(tmp_path, [[1]]), batch_size=1, packing=given)
