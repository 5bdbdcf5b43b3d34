"""Files that other tools wrote read as these tools read them: every field of every sample."""

from __future__ import annotations

import hashlib
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.errors import FormatError, UnknownFormat
from loader import formats
from loader.decoders import raw_to_pil, to_pil
from loader.testing import mapped_at

DATA = Path(__file__).parent / "data"
TARS = sorted(path.name for path in (DATA / "wds").glob("*.tar*"))
MDS = sorted(path.name for path in (DATA / "mds").iterdir())


def expected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "expect" / f"{name}.json").read_text())
    return document


def sha256(value: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(value)).hexdigest()


def check_bytes(value: np.ndarray, wanted: dict[str, Any]) -> None:
    assert value.dtype == np.uint8 and value.ndim == 1
    assert (len(value), sha256(value)) == (wanted["len"], wanted["sha256"])


def check_array(value: Any, wanted: dict[str, Any]) -> None:
    assert (str(value.dtype), list(value.shape)) == (wanted["dtype"], wanted["shape"])
    assert sha256(value) == wanted["sha256"]


def check_number(value: Any, wanted: dict[str, Any]) -> None:
    number = float(wanted["value"]) if wanted["type"] == "float" else wanted["value"]
    assert (math.isnan(number) and math.isnan(value)) or value == number
    if "dtype" in wanted:
        assert str(value.dtype) == wanted["dtype"]
    if isinstance(number, float):
        assert math.copysign(1, value) == math.copysign(1, number) or math.isnan(number)


def check_image(value: Any, wanted: dict[str, Any]) -> None:
    if wanted["type"] == "pil":
        image = raw_to_pil(value)
        assert (image.mode, list(image.size)) == (wanted["mode"], wanted["size"])
    else:
        check_bytes(value, wanted)
        image = to_pil(value)
    if "decoded" in wanted:
        check_array(np.asarray(image), wanted["decoded"])


def check(value: Any, wanted: dict[str, Any]) -> None:
    kind = wanted["type"]
    if kind == "bytes":
        check_bytes(value, wanted)
    elif kind == "array":
        check_array(value, wanted)
    elif kind in ("int", "float"):
        check_number(value, wanted)
    elif kind in ("png", "jpeg", "pil"):
        check_image(value, wanted)
    elif kind == "decimal":
        assert isinstance(value, Decimal) and value == Decimal(wanted["value"])
    else:
        assert kind in ("str", "json") and value == wanted["value"]


def check_samples(samples: Any, wanted: list[dict[str, Any]]) -> None:
    samples = list(samples)
    assert len(samples) == len(wanted)
    for sample, want in zip(samples, wanted, strict=True):
        if "key" in want:
            assert sample["__key__"] == want["key"]
        assert {name for name in sample if name != "__key__"} == set(want["fields"])
        for name, field in want["fields"].items():
            check(sample[name], field)


@pytest.mark.parametrize("name", TARS)
def test_webdataset_tars_have_every_member(name: str) -> None:
    check_samples(loader.open_shard(DATA / "wds" / name), expected(f"wds__{name}")["samples"])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
@pytest.mark.parametrize("name", [name for name in TARS if not name.endswith(".gz")])
def test_payloads_are_the_archive_s_own_bytes(name: str) -> None:
    path = DATA / "wds" / name
    members = {(m["offset"], m["size"]) for m in expected(f"wds__{name}")["members"] if m["type"] == "file"}
    for sample in loader.open_shard(path):
        for field, value in sample.items():
            if field != "__key__" and len(value):
                file, offset = mapped_at(value)
                assert Path(file).samefile(path)
                assert (offset, len(value)) in members


@pytest.mark.parametrize("name", ["shards", "energon"])
def test_a_folder_of_tars_is_a_data_set_and_its_side_files_are_not(name: str) -> None:
    wanted = expected(f"wds__{name}")["samples"]
    ds = loader.ShardDataset(DATA / "wds" / name, batch_size=1, shuffle=False, decode="bytes")
    assert [Path(shard.url).name for shard in ds.manifest.shards] == sorted({sample["shard"] for sample in wanted})
    check_samples(ds, wanted)


@pytest.mark.parametrize("name", MDS)
@pytest.mark.parametrize("source", ["", "index.json"])
def test_mds_has_every_column(name: str, source: str) -> None:
    document = expected(f"mds__{name}")
    ds = loader.ShardDataset(DATA / "mds" / name / source, batch_size=1, shuffle=False, decode="bytes")
    assert [Path(shard.url).name for shard in ds.manifest.shards] == [shard["file"] for shard in document["shards"]]
    assert ds.manifest.counts.tolist() == [shard["samples"] for shard in document["shards"]]
    check_samples(ds, document["samples"])


@pytest.mark.parametrize("name", MDS)
def test_an_mds_shard_describes_itself(name: str) -> None:
    document = expected(f"mds__{name}")
    samples = [s for shard in document["shards"] for s in loader.open_shard(DATA / "mds" / name / shard["file"])]
    check_samples(samples, document["samples"])


def test_images_decode_to_pil_and_to_tensors() -> None:
    wanted = expected("mds__all_columns")["samples"]
    pil = loader.ShardDataset(DATA / "mds" / "all_columns", batch_size=1, shuffle=False, decode="pil")
    tensors = loader.ShardDataset(DATA / "mds" / "all_columns", batch_size=1, shuffle=False, decode="torch")
    for image, tensor, want in zip(pil, tensors, wanted, strict=True):
        for name in ("png", "pil"):
            check_array(np.asarray(image[name]), want["fields"][name]["decoded"])
            pixels = tensor[name].permute(1, 2, 0).squeeze(-1) if tensor[name].shape[0] == 1 else tensor[name]
            pixels = pixels if pixels.ndim == 2 else pixels.permute(1, 2, 0)
            check_array(pixels.numpy(), want["fields"][name]["decoded"])
        check_array(tensor["fix"].numpy(), want["fields"]["fix"])


@pytest.mark.parametrize("name", ["nanogpt_train.bin", "olmo_part-0-00000.npy"])
def test_headerless_tokens(name: str) -> None:
    [want] = expected(f"tokens__{name}")["samples"]
    field = want["fields"]["tokens"]
    count = field["shape"][0]
    [whole] = loader.open_shard(DATA / "tokens" / name, format=formats.Tokens(length=count))
    check_array(whole["tokens"], field)
    assert whole["tokens"][:4].tolist() == want["first"] and whole["tokens"][-4:].tolist() == want["last"]
    rows = [row["tokens"] for row in loader.open_shard(DATA / "tokens" / name, format=formats.Tokens(length=100))]
    assert len(rows) == count // 100
    assert np.array_equal(np.concatenate(rows), whole["tokens"][: count // 100 * 100])
    with pytest.raises(UnknownFormat, match=r"formats\.Tokens\(length="):
        loader.open_shard(DATA / "tokens" / name)


@pytest.mark.parametrize("name", ["llmc_train.bin", "megatron_u16.idx"])
def test_files_with_a_header_are_not_taken_for_headerless_ones(name: str) -> None:
    with pytest.raises(FormatError, match=r"its bytes are (llmc|megatron), not tokens"):
        loader.open_shard(DATA / "tokens" / name, format=formats.Tokens(length=10))
