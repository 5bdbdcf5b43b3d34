"""Random records and Examples from an independent writer read back equal; random walks agree with a plain one."""

from __future__ import annotations

import gzip
import struct
import zlib
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import FormatError
from loader.formats import TFRecord, detect_bytes
from loader.formats.tfrecord import RecordIndex
from tests.foreign.tfrecord_writer import entry, example, masked_crc, sized, tfrecord

PACKINGS = {"plain": bytes, "gzip": gzip.compress, "zlib": zlib.compress}
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
FEATURE = st.one_of(
    st.tuples(st.just("bytes"), st.lists(st.binary(max_size=40), max_size=5)),
    st.tuples(st.just("float"), st.lists(st.floats(width=32), max_size=20)),
    st.tuples(st.just("int64"), st.lists(INT64 | st.integers(0, 300), max_size=60)),
)
EXAMPLE = st.dictionaries(st.text(max_size=8), FEATURE, max_size=6)


def array(raw: bytes) -> Any:
    return np.frombuffer(bytearray(raw), np.uint8)


def read_all(format: TFRecord, raw: bytes) -> list[dict[str, Any]]:
    data = format.unpack(array(raw), "u")
    index = format.index(data, "u")
    assert RecordIndex.from_bytes(index.to_bytes(), len(data)).offsets.tolist() == index.offsets.tolist()
    return [dict(format.read(data, index, i, "u")) for i in range(len(index))]


def same(found: Any, kind: str, values: Any) -> bool:
    if kind == "bytes":
        return [v.tobytes() for v in found] == values
    wanted = np.array(values, np.float32 if kind == "float" else np.int64)
    return found.dtype == wanted.dtype and np.array_equal(found, wanted, equal_nan=kind == "float")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=300) | st.just(bytes(20)), max_size=30), st.sampled_from(sorted(PACKINGS)))
def test_records_read_back_equal(payloads: list[bytes], packing: str) -> None:
    raw = PACKINGS[packing](tfrecord(payloads))
    assert [s["record"].tobytes() for s in read_all(TFRecord(), raw)] == payloads
    if payloads:
        assert isinstance(detect_bytes(array(raw), "u"), TFRecord)


@settings(max_examples=120, deadline=None)
@given(st.lists(EXAMPLE, max_size=4), st.booleans())
def test_examples_read_back_equal(samples: list[dict[str, Any]], packed: bool) -> None:
    raw = tfrecord(example(sample, packed=packed) for sample in samples)
    for found, wanted in zip(read_all(TFRecord(example=True), raw), samples, strict=True):
        assert set(found) == set(wanted)
        assert all(same(found[name], kind, values) for name, (kind, values) in wanted.items())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40) | st.integers(0, 9000), st.integers(1, 900)), max_size=12))
def test_runs_of_equal_lengths_are_walked_right(runs: list[tuple[int, int]]) -> None:
    heads = {size: struct.pack("<QI", size, masked_crc(struct.pack("<Q", size))) for size, _ in runs}
    raw = b"".join((heads[size] + bytes(size + 4)) * count for size, count in runs)
    sizes = np.repeat([size + 16 for size, _ in runs], [count for _, count in runs]).astype(np.int64)
    assert TFRecord().index(array(raw), "u").offsets.tolist() == [0, *np.cumsum(sizes).tolist()]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=120) | st.binary(max_size=60).map(lambda b: sized(1, entry("k", b))))
def test_any_payload_is_an_example_or_a_typed_error(payload: bytes) -> None:
    try:
        [sample] = read_all(TFRecord(example=True), tfrecord([payload]))
    except FormatError as e:
        assert str(e).startswith("u at byte ")
    else:
        for value in sample.values():
            assert sum(v.nbytes for v in (value if isinstance(value, list) else [value])) <= 8 * len(payload)
