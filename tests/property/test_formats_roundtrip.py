"""Random shards read back equal; random damage ends in right data or a typed error, never outside the buffer."""

from __future__ import annotations

import struct
import tarfile
import warnings
from typing import Any

import numpy as np
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import DataError
from loader.formats import Format, Mds, Tokens, WebDataset, detect_bytes
from loader.testing import mds_bytes, tar_bytes

PARTS = st.text(st.characters(codec="utf-8", exclude_characters="/.\0"), min_size=1, max_size=12)
KEYS = st.builds(
    lambda folders, base: "/".join([*folders, base]),
    st.lists(st.text("ab.", min_size=1, max_size=60), max_size=4),
    PARTS,
)
FIELDS = st.sampled_from(["jpg", "cls", "seg.png", "json", "x" * 80])


@st.composite
def tar_samples(draw: st.DrawFn) -> list[tuple[str, dict[str, bytes]]]:
    keys = draw(st.lists(KEYS.filter(lambda k: not k.startswith("__") and ".." not in k), max_size=6, unique=True))
    return [(key, draw(st.dictionaries(FIELDS, st.binary(max_size=1500), min_size=1, max_size=4))) for key in keys]


def padded(data: bytes, guard: bytes = b"\xa5" * 4096) -> np.ndarray[Any, Any]:
    """The shard inside a larger buffer: whatever is read outside it shows."""
    whole = np.frombuffer(bytearray(guard + data + guard), np.uint8)
    return whole[len(guard) : len(guard) + len(data)]


def read_all(format: Format, data: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    data = format.unpack(data, "shard")
    index = format.index(data, "shard")
    source = format.source(data, index)
    return [dict(format.read(source, index, i, "shard")) for i in range(len(index))]


def survives(format: Format, data: bytes) -> list[Any] | None:
    """All samples, or None where a typed error said that the data is damaged. Views stay inside the shard."""
    whole = padded(data)
    try:
        unpacked = format.unpack(whole, "shard")
        index = format.index(unpacked, "shard")
    except DataError as e:
        assert "shard" in str(e) and "\n" not in str(e)
        return None
    low = unpacked.ctypes.data
    high = low + unpacked.nbytes
    source = format.source(unpacked, index)
    out: list[Any] = []
    for i in range(len(index)):
        try:
            sample = format.read(source, index, i, "shard")
        except DataError as e:
            assert "shard" in str(e)
            out.append(None)
            continue
        for value in sample.values():
            if isinstance(value, np.ndarray) and value.size and np.shares_memory(value, unpacked):
                first = value.ctypes.data
                assert low <= first and first + value.nbytes <= high
        out.append(dict(sample))
    return out


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@settings(max_examples=60, deadline=None)
@given(tar_samples(), st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_tars_read_back_equal(samples: list[tuple[str, dict[str, bytes]]], format: int) -> None:
    members = [(f"{key}.{name}", value) for key, fields in samples for name, value in fields.items()]
    try:
        raw = tar_bytes(members, format)
    except ValueError:
        return  # ustar has no room for a name this long
    found = read_all(WebDataset(), padded(raw))
    assert [s.pop("__key__") for s in found] == [key for key, _ in samples]
    assert [{n: v.tobytes() for n, v in s.items()} for s in found] == [fields for _, fields in samples]
    if samples:
        assert isinstance(detect_bytes(padded(raw), "shard"), WebDataset)


TAR = tar_bytes([(f"a/{i}.{ext}", bytes([i]) * 600) for i in range(4) for ext in ("bin", "json")], tarfile.USTAR_FORMAT)
PAX = tar_bytes([(f"{'é' * 70}/{i}.bin", bytes([i]) * 600) for i in range(4)], tarfile.PAX_FORMAT)
COLUMNS = {"t": "ndarray", "n": "int", "s": "str", "f": "ndarray:uint16:4"}
ROWS = [
    {"t": bytes([8, 4, 3, i, i, i]), "n": struct.pack("<q", i), "s": f"text {i}".encode(), "f": bytes([i] * 8)}
    for i in range(5)
]
MDS = mds_bytes(COLUMNS, ROWS, [None, 8, None, 8])
ZSTD = zstandard.compress(MDS)
SHARDS: dict[str, tuple[Format, bytes]] = {
    "tar": (WebDataset(), TAR),
    "pax": (WebDataset(), PAX),
    "mds": (Mds(), MDS),
    "zstd": (Mds(), ZSTD),
}
NAMES = st.sampled_from(sorted(SHARDS))


@settings(max_examples=150, deadline=None)
@given(NAMES, st.data())
def test_a_cut_is_found_or_harmless(name: str, data: st.DataObject) -> None:
    format, raw = SHARDS[name]
    whole = read_all(format, padded(raw))
    found = survives(format, raw[: data.draw(st.integers(0, len(raw) - 1))])
    if found is not None:
        assert len(found) <= len(whole)
        assert all(same(a, b) for a, b in zip(found[:-1], whole, strict=False))
        if found:  # a tar cut between two members of one sample cannot tell; the missing end marker is warned of
            last, full = found[-1], whole[len(found) - 1]
            assert same(last, {name: full[name] for name in last})
            assert isinstance(format, WebDataset) or same(last, full)


@settings(max_examples=300, deadline=None)
@given(NAMES, st.data())
def test_flipped_bytes_end_in_data_or_a_typed_error(name: str, data: st.DataObject) -> None:
    format, raw = SHARDS[name]
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    survives(format, bytes(damaged))


@settings(max_examples=150, deadline=None)
@given(NAMES, st.integers(0, 1023), st.binary(min_size=1, max_size=64))
def test_damaged_heads_end_in_data_or_a_typed_error(name: str, at: int, junk: bytes) -> None:
    format, raw = SHARDS[name]
    damaged = bytearray(raw)
    damaged[at : at + len(junk)] = junk
    survives(format, bytes(damaged[: len(raw)]))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_end_in_a_format_or_a_typed_error(raw: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for format in (WebDataset(), Mds(), Tokens(length=3, stride=2, labels=True)):
            survives(format, raw)
        try:
            detect_bytes(padded(raw), "shard")
        except DataError as e:
            assert str(e).startswith("shard")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 50), st.booleans(), st.data())
def test_token_windows_are_those_of_the_definition(
    count: int, length: int, stride: int, labels: bool, data: st.DataObject
) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    format = Tokens(length=length, stride=stride, labels=labels)
    raw = padded(tokens.tobytes())
    starts = [k for k in range(0, count, stride) if k + length + labels <= count]
    found = read_all(format, raw)
    assert [s["tokens"].tolist() for s in found] == [tokens[k : k + length].tolist() for k in starts]
    if not starts:
        return
    which = np.array(data.draw(st.lists(st.integers(0, len(starts) - 1), min_size=1, max_size=8)))
    index = format.index(raw, "shard")
    out = np.empty((len(which), format.window), np.uint16)
    format.gather(format.source(raw, index), which, out)
    assert out.tolist() == [tokens[starts[i] : starts[i] + format.window].tolist() for i in which]
