"""Rot and loss below a commit record: found, named to the tensor and the byte, with bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.errors import CheckpointDamaged, CheckpointNotFound, Denied, NearflashError, NotFound, Unavailable
from cachefs.hashing import tensor_digest
from ckptstore import CheckpointStore
from ckptstore.claims import claim_generation
from ckptstore.commit import begin_step
from ckptstore.layout import StepRef, part_name, segment_name
from ckptstore.manifest import Chunk, FileRef, Part, PartRef, Root, TensorEntry, encode_part, encode_sealed, part_ref
from ckptstore.storage_posix import PosixStorage
from ckptstore.testing.model import Fault, ModelStore, Request
from ckptstore.testing.saving import root_of, write_node
from ckptstore.timeline import latest_ref
from ckptstore.verify import WINDOW, Damage, plan_windows, verify_step

REF = StepRef(10, 1)


def saved(model: ModelStore) -> None:
    storage = model.storage()
    claim = claim_generation(storage, "a")
    writer = begin_step(storage, 10, claim.generation, claim.attempt)
    nodes = [write_node(writer, n, [b"first %d " % n * 5, b"second %d" % n]) for n in range(2)]
    writer.commit(root_of(writer, nodes), [file for node in nodes for file in node.files])


def files_of(model: ModelStore) -> dict[str, bytes]:
    return {key: data for key, data in model.objects.items() if REF.folder in key}


def test_every_single_changed_byte_is_found_and_named() -> None:
    model = ModelStore()
    saved(model)
    assert verify_step(model.storage(), REF) == []
    for key, data in files_of(model).items():
        for position in range(0, len(data), max(1, len(data) // 40)):
            broken = bytearray(data)
            broken[position] ^= 0x10
            model.objects[key] = bytes(broken)
            (damage,) = verify_step(model.storage(), REF)
            assert damage.file == key.removeprefix("run/")
            if key.endswith(".safetensors"):
                node, number = int(key[-22:-17]), int(key[-16:-12])
                assert damage.tensor == f"t{node}.{number}"
                assert damage.what == "the digest is wrong"
                start = damage.offset
                assert start is not None
                assert start <= position
        model.objects[key] = data
    assert verify_step(model.storage(), REF) == []


def test_every_file_that_is_missing_or_cut_is_found_without_reading_the_bytes() -> None:
    model = ModelStore()
    saved(model)
    for key, data in files_of(model).items():
        name = key.removeprefix("run/")
        model.objects[key] = data[:-1]
        (damage, *_) = verify_step(model.storage(), REF, deep=False)
        assert damage.file == name
        del model.objects[key]
        if key.endswith("manifest.json"):
            with pytest.raises(CheckpointNotFound, match="there is no step 10"):
                verify_step(model.storage(), REF)
        else:
            (damage,) = verify_step(model.storage(), REF, deep=False)
            assert damage.file == name
            assert "missing" in damage.what
        model.objects[key] = data


def test_a_segment_that_was_cut_names_the_tensors_that_are_lost() -> None:
    model = ModelStore()
    saved(model)
    key = f"run/{REF.folder}/{segment_name('a', 1, 0)}"
    model.objects[key] = model.objects[key][:-3]
    whole, chunk = verify_step(model.storage(), REF)
    assert "has 37 bytes instead of 40" in whole.what
    assert (chunk.tensor, chunk.offset, chunk.what) == ("t1.0", 20, "the file ends before this chunk does")


def test_progress_is_told_in_bytes() -> None:
    model = ModelStore()
    saved(model)
    told: list[int] = []
    assert verify_step(model.storage(), REF, on_bytes=told.append) == []
    assert sum(told) == sum(len(data) for key, data in files_of(model).items() if key.endswith(".safetensors"))


def test_damage_reads_as_one_line() -> None:
    assert str(Damage("a/b", "w", "the digest is wrong", 7)) == "a/b at byte 7: the digest is wrong (tensor 'w')"
    assert str(Damage("a/b", None, "is missing")) == "a/b: is missing"


def step_of(storage: PosixStorage, tensors: tuple[TensorEntry, ...], segment: bytes) -> None:
    claim = claim_generation(storage, "a")
    writer = begin_step(storage, 10, claim.generation, "a")
    name = segment_name("a", 0, 0)
    writer.write(name, [segment])
    file = FileRef(name, len(segment))
    data = encode_part(Part(attempt="a", node=0, tensors=tensors, files=(file,)))
    writer.write(part_name("a", 0), [data])
    part = part_ref(part_name("a", 0), data)
    writer.commit(Root(step=10, generation=1, attempt="a", world_size=1, created=0.0, parts=(part,)), [file])


def chunk_of(segment: bytes, start: int, end: int) -> Chunk:
    return Chunk((start,), (end - start,), segment_name("a", 0, 0), start, end, tensor_digest(segment[start:end]))


def test_a_tensor_whose_chunks_do_not_add_up_is_damage(tmp_path: Path) -> None:
    segment = b"0123456789"
    storage = PosixStorage(tmp_path)
    tensors = (
        TensorEntry("gap", "U8", (10,), (chunk_of(segment, 0, 4), chunk_of(segment, 6, 10))),
        TensorEntry("twice", "U8", (10,), (chunk_of(segment, 0, 10), chunk_of(segment, 0, 10))),
        TensorEntry("whole", "U8", (10,), (chunk_of(segment, 0, 10),)),
        TensorEntry("tied", "U8", (10,), alias_of="whole"),
        TensorEntry("empty", "U8", (0, 5)),
        TensorEntry("own", "U8", (10,), (chunk_of(segment, 0, 10),), per_rank=0),
        TensorEntry("own", "U8", (10,), (chunk_of(segment, 0, 10),), per_rank=1),
    )
    step_of(storage, tensors, segment)
    assert [(d.tensor, d.what) for d in verify_step(storage, REF)] == [
        ("gap", "the chunks hold 8 of 10 elements"),
        ("twice", "the chunks hold 20 of 10 elements"),
    ]


def test_a_shape_that_the_chunks_do_not_fill_is_damage_before_anything_is_allocated(tmp_path: Path) -> None:
    segment = b"0123456789"
    huge = TensorEntry("huge", "uint8", (10**15,), (chunk_of(segment, 0, 10),))
    step_of(PosixStorage(tmp_path), (huge,), segment)
    with CheckpointStore(tmp_path) as store, pytest.raises(CheckpointDamaged, match=r"'huge'.* chunks for 10 elements"):
        store.load(step=10)


def test_records_nested_without_end_are_damage(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    claim_generation(storage, "a")
    writer = begin_step(storage, 10, 1, "a")
    data = encode_part(Part(attempt="a", node=0)).replace(
        b'"objects":null', b'"objects":' + b"[" * 20000 + b"]" * 20000
    )
    assert len(data) > 40000
    writer.write(part_name("a", 0), [data])
    part = part_ref(part_name("a", 0), data)
    writer.commit(Root(step=10, generation=1, attempt="a", world_size=1, created=0.0, parts=(part,)), [])
    assert any("not a readable record" in d.what for d in verify_step(storage, REF))


def test_verifying_a_large_chunk_takes_little_memory(tmp_path: Path) -> None:
    segment = bytes(5 * WINDOW + 17)
    storage = PosixStorage(tmp_path)
    step_of(storage, (TensorEntry("w", "U8", (len(segment),), (chunk_of(segment, 0, len(segment)),)),), segment)
    del segment
    tracemalloc.start()
    try:
        assert verify_step(storage, REF) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * WINDOW


def test_many_small_chunks_are_read_together() -> None:
    model = ModelStore()
    storage = model.storage()
    claim = claim_generation(storage, "a")
    writer = begin_step(storage, 10, claim.generation, "a")
    segment = bytes(range(256)) * 40
    name = segment_name("a", 0, 0)
    writer.write(name, [segment])
    chunks = tuple(chunk_of(segment, start, start + 10) for start in range(0, len(segment), 10))
    data = encode_part(
        Part(
            attempt="a",
            node=0,
            tensors=(TensorEntry("w", "U8", (len(segment),), chunks),),
            files=(FileRef(name, len(segment)),),
        )
    )
    writer.write(part_name("a", 0), [data])
    writer.commit(
        Root(
            step=10,
            generation=1,
            attempt="a",
            world_size=1,
            created=0.0,
            parts=(part_ref(part_name("a", 0), data),),
        ),
        [],
    )
    model.log.clear()
    assert verify_step(model.storage(), REF) == []
    assert sum(request.op == "get_range" for request in model.log) == 1


@given(
    spans=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 200)), max_size=40),
    window=st.integers(1, 300),
    size=st.integers(0, 700),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_windows_hold_every_chunk_within_the_file_once(spans: list[tuple[int, int]], window: int, size: int) -> None:
    name = segment_name("a", 0, 0)
    chunks = tuple(Chunk((i,), (1,), name, start, start + length, "0" * 32) for i, (start, length) in enumerate(spans))
    part = Part(attempt="a", node=0, tensors=(TensorEntry("w", "U8", (99,), chunks),), files=(FileRef(name, 800),))
    windows = list(plan_windows([part], REF, {f"{REF.folder}/{name}": size}, window))
    got = sorted((span.start, span.end) for w in windows for span in w.spans)
    assert got == sorted((s, s + n) for s, n in spans if s + n <= size)
    for w in windows:
        assert w.file == f"{REF.folder}/{name}"
        assert w.end - w.start <= window or len(w.spans) == 1


@pytest.mark.parametrize("error", [Unavailable, Denied])
def test_a_store_that_does_not_answer_is_not_a_damaged_checkpoint(error: type[NearflashError]) -> None:
    model = ModelStore()
    saved(model)

    def hook(request: Request) -> Fault:
        if request.op == "get" and request.key.endswith("-p0001.json"):
            raise error("not now", url=request.key)
        return Fault.NONE

    with pytest.raises(error):
        verify_step(model.storage(hook=hook), REF)
    with pytest.raises(error):
        latest_ref(model.storage(hook=hook))


def test_a_file_that_vanishes_while_it_is_verified_is_damage() -> None:
    model = ModelStore()
    saved(model)

    def hook(request: Request) -> Fault:
        if request.op == "get_range" and request.key.endswith("r00001-0001.safetensors"):
            raise NotFound("gone", url=request.key)
        return Fault.NONE

    damages = verify_step(model.storage(hook=hook), REF)
    assert {damage.tensor for damage in damages} == {"t1.1"}


def test_a_manifest_that_names_files_elsewhere_leads_nowhere() -> None:
    """A hostile manifest, digests and all: it must not make a reader open anything outside the store."""
    model = ModelStore()
    saved(model)
    import msgspec

    evil = Part(attempt="a", node=0, files=(FileRef("../../etc/passwd", 10),))
    data = msgspec.json.encode(evil)
    file = part_name("a", 0)
    model.objects[f"run/{REF.folder}/{file}"] = data
    root = Root(
        step=10,
        generation=1,
        attempt="a",
        world_size=1,
        created=0.0,
        parts=(PartRef(file, len(data), tensor_digest(data)),),
    )
    model.objects[f"run/{REF.manifest}"] = encode_sealed(root)
    model.log.clear()
    (damage,) = verify_step(model.storage(), REF)
    assert "cannot be a segment" in damage.what
    assert all(request.key.startswith("run/") and ".." not in request.key for request in model.log)
