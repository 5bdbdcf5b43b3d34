"""Records: what is written reads back, what is not whole or not of this version is refused, 10^5 chunks are quick."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import CheckpointDamaged, CheckpointUnsupported
from cachefs.hashing import tensor_digest
from ckptstore.layout import StepRef, part_name, segment_name
from ckptstore.manifest import (
    FORMAT,
    Chunk,
    ClaimRecord,
    FileRef,
    Part,
    PartRef,
    Root,
    StartRecord,
    TensorEntry,
    Tombstone,
    check_root,
    decode_claim,
    decode_part,
    decode_root,
    decode_start,
    encode_part,
    encode_sealed,
    part_ref,
    segment_names,
)

SEGMENT = segment_name("a", 0, 0)
DIGEST = "0123456789abcdef" * 2
REF = StepRef(100, 3)


def root(**changes: Any) -> Root:
    fields: dict[str, Any] = {
        "step": 100,
        "generation": 3,
        "attempt": "a",
        "world_size": 2,
        "created": 1.5,
        "parts": (PartRef(part_name("a", 0), 10, DIGEST),),
        "metadata": {"loader": {"position": 2**70, "x": [1, None, "é"]}},
    }
    return Root(**{**fields, **changes})


def part(*tensors: TensorEntry, files: tuple[FileRef, ...] = (FileRef(SEGMENT, 24),)) -> Part:
    return Part(attempt="a", node=0, tensors=tensors, files=files, objects={"big": 2**70})


def entry(*chunks: Chunk, shape: tuple[int, ...] = (2, 3), **changes: Any) -> TensorEntry:
    return TensorEntry("w", "F32", shape, chunks, **changes)


def reseal(data: bytes, change: dict[str, Any]) -> bytes:
    """A sealed record with some fields replaced, and a right digest, as another writer would make it."""
    record = {k: v for k, v in json.loads(data).items() if k != "digest"}
    body = json.dumps({**record, **change}).encode()[1:]
    return b'{"digest":"%b",%b' % (tensor_digest(body).encode(), body)


def test_a_root_reads_back_and_is_plain_json() -> None:
    data = encode_sealed(root())
    assert decode_root(data, REF, url="u") == root()
    assert root().ref == REF
    plain = json.loads(data)
    assert plain["kind"] == "checkpoint"
    assert plain["format"] == FORMAT
    assert plain["metadata"]["loader"]["position"] == 2**70
    assert plain["digest"] == tensor_digest(data[data.index(b",") + 1 :])


def test_a_part_reads_back_with_its_segments() -> None:
    earlier = f"{StepRef(90, 3).folder}/{segment_name('a', 1, 0)}"
    whole = part(
        entry(Chunk((0, 0), (2, 3), SEGMENT, 0, 24, DIGEST)),
        TensorEntry("scalar", "F32", (), (Chunk((), (), earlier, 0, 4, DIGEST),)),
        TensorEntry("empty", "F32", (0, 7), ()),
        TensorEntry("tied", "F32", (2, 3), alias_of="w"),
        TensorEntry("rng", "U8", (1,), (Chunk((0,), (1,), SEGMENT, 3, 4, DIGEST),), per_rank=3),
        files=(FileRef(SEGMENT, 24), FileRef(earlier, 4)),
    )
    data = encode_part(whole)
    assert decode_part(data, part_ref("x", data), url="u") == whole
    assert segment_names(whole, REF) == {f"{REF.folder}/{SEGMENT}": 24, earlier: 4}


@pytest.mark.parametrize(
    "record",
    [
        Tombstone(step=100, generation=3, attempt="a", created=1.0, reason="retention"),
        ClaimRecord(generation=3, attempt="../x\n\0é", created=1.0),
        StartRecord(generation=3, attempt="a", parent=2, step=90),
        StartRecord(generation=3, attempt="a"),
    ],
)
def test_the_small_records_read_back(record: Any) -> None:
    data = encode_sealed(record)
    if isinstance(record, Tombstone):
        assert decode_root(data, REF, url="u") == record
    elif isinstance(record, ClaimRecord):
        assert decode_claim(data, url="u") == record
    else:
        assert decode_start(data, url="u") == record


def test_a_start_record_names_a_checkpoint_or_nothing() -> None:
    assert StartRecord(generation=3, attempt="a", parent=2, step=0).ref == StepRef(0, 2)
    assert StartRecord(generation=3, attempt="a").ref is None


@pytest.mark.parametrize("parent, step", [(3, 1), (4, 1), (2, None), (None, 1)])
def test_a_start_that_cannot_be_is_refused(parent: int | None, step: int | None) -> None:
    with pytest.raises(CheckpointDamaged, match="cannot start from"):
        decode_start(encode_sealed(StartRecord(generation=3, attempt="a", parent=parent, step=step)), url="u")


@settings(max_examples=200)
@given(data=st.data())
def test_any_changed_or_missing_byte_of_a_sealed_record_is_noticed(data: st.DataObject) -> None:
    good = encode_sealed(root())
    position = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:position]
    else:
        bad = bytearray(good)
        bad[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointDamaged):
        decode_root(bytes(bad), REF, url="u")


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\xff" * 80, b'{"digest":"' + b"0" * 32 + b'",}'])
def test_what_is_no_record_is_damage_and_names_the_url(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match=r"^s3://b/m: "):
        decode_root(data, REF, url="s3://b/m")


def test_a_manifest_of_another_step_is_damage() -> None:
    with pytest.raises(CheckpointDamaged, match="the manifest of step 100"):
        decode_root(encode_sealed(root()), StepRef(100, 4), url="u")


def test_a_claim_is_no_root() -> None:
    with pytest.raises(CheckpointDamaged, match="not a readable record"):
        decode_root(encode_sealed(ClaimRecord(generation=3, attempt="a", created=0.0)), REF, url="u")


def test_a_newer_format_is_refused_with_a_reason_and_is_no_damage() -> None:
    newer = reseal(encode_sealed(root()), {"format": FORMAT + 1, "parts": "something new"})
    with pytest.raises(CheckpointUnsupported, match=f"written in format {FORMAT + 1}.*use a newer nearflash"):
        decode_root(newer, REF, url="u")
    body = msgspec.json.encode({"kind": "part", "format": FORMAT + 1})
    with pytest.raises(CheckpointUnsupported):
        decode_part(body, part_ref("x", body), url="u")


def test_a_field_that_this_version_does_not_know_is_ignored() -> None:
    assert decode_root(reseal(encode_sealed(root()), {"later": [1]}), REF, url="u") == root()


@pytest.mark.parametrize(
    "parts, attempt",
    [
        ((PartRef("../p.json", 1, DIGEST),), "a"),
        ((PartRef(part_name("b", 0), 1, DIGEST),), "a"),
        ((PartRef(part_name("a", 0), 1, DIGEST), PartRef(part_name("a", 0), 1, DIGEST)), "a"),
        ((), ""),
    ],
)
def test_a_root_may_name_only_its_own_parts_once(parts: tuple[PartRef, ...], attempt: str) -> None:
    with pytest.raises(CheckpointDamaged):
        check_root(root(parts=parts, attempt=attempt), url="u")


@pytest.mark.parametrize(
    "field, value", [("step", -1), ("generation", 0), ("world_size", 0), ("parts", [{"file": "x"}])]
)
def test_numbers_out_of_range_are_damage(field: str, value: Any) -> None:
    with pytest.raises(CheckpointDamaged):
        decode_root(reseal(encode_sealed(root()), {field: value}), REF, url="u")


@pytest.mark.parametrize(
    "tensors, files, match",
    [
        ((), (FileRef("../x-r00000-0000.safetensors", 1),), "cannot be a segment"),
        ((), (FileRef("/etc/passwd", 1),), "cannot be a segment"),
        ((), (FileRef(f"step-1-g1/{SEGMENT}", 1),), "cannot be a segment"),
        ((), (FileRef(SEGMENT, 1), FileRef(SEGMENT, 1)), "cannot be a segment"),
        ((entry(Chunk((0, 0), (2, 3), SEGMENT, 0, 25, DIGEST)),), (FileRef(SEGMENT, 24),), "are not in"),
        ((entry(Chunk((0, 0), (2, 3), SEGMENT, 9, 8, DIGEST)),), (FileRef(SEGMENT, 24),), "are not in"),
        ((entry(Chunk((0, 0), (2, 3), "elsewhere", 0, 1, DIGEST)),), (FileRef(SEGMENT, 24),), "are not in"),
        ((entry(Chunk((0,), (2,), SEGMENT, 0, 1, DIGEST)),), (FileRef(SEGMENT, 24),), "dimensions"),
        ((entry(Chunk((1, 0), (2, 3), SEGMENT, 0, 1, DIGEST)),), (FileRef(SEGMENT, 24),), "outside its shape"),
        ((entry(Chunk((0, 0), (2, 3), SEGMENT, 0, 1, DIGEST), alias_of="v"),), (FileRef(SEGMENT, 24),), "alias"),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(
    tensors: tuple[TensorEntry, ...], files: tuple[FileRef, ...], match: str
) -> None:
    bad = part(*tensors, files=files)
    with pytest.raises(CheckpointDamaged, match=match):
        encode_part(bad)
    data = msgspec.json.encode(bad)
    with pytest.raises(CheckpointDamaged, match=match):
        decode_part(data, part_ref("x", data), url="u")


def test_a_part_with_other_bytes_or_another_length_is_refused() -> None:
    data = encode_part(part())
    ref = part_ref("x", data)
    with pytest.raises(CheckpointDamaged, match="digest is wrong"):
        decode_part(data.replace(b'"node":0', b'"node":1'), ref, url="u")
    with pytest.raises(CheckpointDamaged, match=f"has {len(data) - 1} bytes instead of {len(data)}"):
        decode_part(data[:-1], ref, url="u")


def test_a_hundred_thousand_chunks_open_in_one_quick_pass() -> None:
    size = 64
    tensors = tuple(
        TensorEntry(
            f"layers.{i}.weight",
            "F32",
            (1000, 16),
            tuple(Chunk((j, 0), (1, 16), SEGMENT, j * size, (j + 1) * size, DIGEST) for j in range(1000)),
        )
        for i in range(100)
    )
    data = encode_part(Part(attempt="a", node=0, tensors=tensors, files=(FileRef(SEGMENT, 1000 * size),)))
    ref = part_ref("x", data)
    seconds = min(timed(lambda: decode_part(data, ref, url="u")) for _ in range(3))
    # A plain json.loads builds the same objects as dicts and checks nothing; generous for a loaded machine.
    assert seconds < 2 * timed(lambda: json.loads(data)) + 1


def timed(act: Any) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
