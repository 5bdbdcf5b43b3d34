"""TFRecord: damage is found where it is, features follow the protobuf rules, declared sizes are believed by nobody."""

from __future__ import annotations

import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.errors import FormatError, MissingField, UnknownFormat
from loader.formats import TFRecord
from loader.formats.crc32c import crc32c, masked_lengths, unmasked
from loader.formats.tfrecord import RecordIndex
from tests.foreign.tfrecord_writer import (
    entry,
    example,
    feature,
    masked_crc,
    record,
    sized,
    tfrecord,
    varint,
)

EMPTY = bytes.fromhex("0a090a070a016b12021a00")
FIVE = example({"k": ("int64", [5])})
ABSENT = example({"other": ("bytes", [b"x"])})


def array(raw: bytes) -> Any:
    return np.frombuffer(bytearray(raw), np.uint8)


def offsets(raw: bytes) -> list[int]:
    return TFRecord().index(array(raw), "u").offsets.tolist()


def features(payload: bytes, wanted: frozenset[str] | None = None) -> dict[str, Any]:
    format = TFRecord(example=True)
    data = array(record(payload))
    return dict(format.read(data, format.index(data, "u"), 0, "u", wanted))


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else [v.tobytes() for v in value]
        for name, value in sample.items()
    }


def refused(payload: bytes) -> FormatError:
    with pytest.raises(FormatError) as e:
        features(payload)
    return e.value


# --- checksums ------------------------------------------------------------------------------------------------------


def test_the_checksum_is_that_of_the_rfc() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert unmasked(masked_crc(b"123456789")) == 0xE3069283
    assert crc32c(array(b"x123456789")[1:]) == 0xE3069283


def test_the_lengths_checksums_are_those_of_eight_bytes_each() -> None:
    rng = random.Random(1)
    lengths = [0, 1, 255, 256, (1 << 64) - 1, *(rng.getrandbits(rng.randint(1, 64)) for _ in range(300))]
    wanted = [masked_crc(struct.pack("<Q", length)) for length in lengths]
    assert masked_lengths(np.array(lengths, np.uint64)).tolist() == wanted
    assert masked_lengths(np.array(lengths[:3], np.uint64)).tolist() == wanted[:3]
    assert masked_lengths(np.array([], np.uint64)).tolist() == []


def test_a_bit_flip_fails_its_own_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "x"
    raw = bytearray(tfrecord([EMPTY, FIVE, ABSENT]))
    at = 16 + len(EMPTY) + 12 + 3
    raw[at] ^= 4
    path.write_bytes(raw)
    reader = loader.open_shard(path, TFRecord(example=True))
    assert [plain(reader[0]), plain(reader[2])] == [{"k": []}, {"other": [b"x"]}]
    with pytest.raises(FormatError, match=rf"{path} at byte {at - 3}: .*record 1 has a wrong CRC"):
        reader[1]
    assert loader.open_shard(path, TFRecord(verify=False))[1]["record"].tobytes() == bytes(raw[at - 3 :][: len(FIVE)])
    ds = loader.ShardDataset(path, batch_size=3, shuffle=False, on_error="skip")
    assert len(list(ds)) == 3 and ds.skipped == 1


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 17, 29, 31])
def test_a_cut_file_is_an_error_that_names_the_record(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x"
    raw = tfrecord([EMPTY, FIVE])
    path.write_bytes(raw[:-cut])
    wanted = 0 if cut > 16 + len(FIVE) else 16 + len(EMPTY)
    with pytest.raises(FormatError, match=rf"{path} at byte {wanted}: .*cut off"):
        loader.open_shard(path)


@pytest.mark.parametrize("number", [0, 1, 5])
@pytest.mark.parametrize("byte", [0, 3, 7, 8, 11])
def test_a_damaged_length_is_an_error_that_names_the_record(number: int, byte: int) -> None:
    sizes = [100, 100, 100, 7, 100, 100]
    raw = bytearray(tfrecord(bytes(size) for size in sizes))
    at = sum(size + 16 for size in sizes[:number])
    raw[at + byte] ^= 0x40
    with pytest.raises(FormatError, match=rf"u at byte {at}: the length of record {number} has a wrong CRC"):
        offsets(bytes(raw))


def test_bytes_behind_the_last_record_are_an_error() -> None:
    raw = record(b"a")
    with pytest.raises(FormatError, match=f"at byte {len(raw)}: .*cut off in the header of record 1"):
        offsets(raw + bytes(11))
    with pytest.raises(FormatError, match=f"at byte {len(raw)}: the length of record 1 has a wrong CRC"):
        offsets(raw + bytes(12))


@pytest.mark.parametrize("length", [2, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1, (1 << 64) - 16])
def test_a_declared_length_is_checked_against_the_file(length: int) -> None:
    head = struct.pack("<Q", length)
    raw = record(b"abc") + head + struct.pack("<I", masked_crc(head)) + b"x"
    with pytest.raises(FormatError, match=r"at byte 19: record 1 should end at byte \d+, the file has 32: cut off"):
        offsets(raw)


# --- the walk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [0] * 5000,
        [8] * 30_000,
        [8] * 9000 + [9] + [8] * 9000,
        [5, 6] * 7000,
        [700_000, 5_000_000, 3, 3, 3, 5_000_000, 5_000_000, 5_000_000],
    ],
    ids=lambda sizes: f"{len(sizes)} records",
)
def test_records_of_any_lengths_are_found(sizes: list[int]) -> None:
    # made of few different ones: the plain checksum of the tests is slow
    heads = {size: struct.pack("<QI", size, masked_crc(struct.pack("<Q", size))) for size in set(sizes)}
    raw = b"".join(heads[size] + bytes(size + 4) for size in sizes)
    wanted = [0, *np.cumsum(np.array(sizes, np.int64) + 16).tolist()]
    assert offsets(raw) == wanted


def test_only_bytes_that_have_come_are_looked_at() -> None:
    rng = random.Random(3)
    sizes = [rng.choice([10, 10, 10, 5000, 6_000_000]) for _ in range(60)] + [3000] * 2000
    heads = {size: struct.pack("<QI", size, masked_crc(struct.pack("<Q", size))) for size in set(sizes)}
    raw = array(b"".join(heads[size] + bytes(size + 4) for size in sizes))
    filling = np.zeros_like(raw)
    asked = []

    def ready(start: int, end: int) -> None:
        assert 0 <= start < end <= len(raw)
        asked.append(end - start)
        filling[start:end] = raw[start:end]

    found = TFRecord().index(filling, "u", ready).offsets
    assert found.tolist() == offsets(raw.tobytes())
    assert len(asked) < 100 and max(asked) <= 4 << 20


def test_content_tells(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(record(b"payload"))
    assert loader.open_shard(path)[0]["record"].tobytes() == b"payload"
    path = tmp_path / "y"
    path.write_bytes(bytes(9) + record(b"payload"))
    with pytest.raises(UnknownFormat):
        loader.open_shard(path)


def test_a_length_like_a_magic_number_is_no_compression(tmp_path: Path) -> None:
    for magic in (b"\x1f\x8b\x08", b"\x78\x9c\x00", b"BZh"):
        payload = bytes(int.from_bytes(magic, "little"))
        head = struct.pack("<Q", len(payload))
        path = tmp_path / magic.hex()
        path.write_bytes(head + struct.pack("<I", masked_crc(head)) + payload + struct.pack("<I", 0))
        assert len(loader.open_shard(path, "tfrecord")) == 1


def test_an_empty_file_has_no_records_where_the_format_is_given(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    assert len(loader.open_shard(path, "tfrecord")) == 0
    with pytest.raises(FormatError, match="empty file"):
        loader.open_shard(path)


def test_the_index_can_be_kept() -> None:
    raw = tfrecord([b"a" * k for k in range(50)])
    index = TFRecord().index(array(raw), "u")
    kept = index.to_bytes()
    assert RecordIndex.from_bytes(kept, len(raw)).offsets.tolist() == index.offsets.tolist()
    assert pickle.loads(pickle.dumps(index)).offsets.tolist() == index.offsets.tolist()
    assert index.nbytes < 500
    for at in range(len(kept)):
        damaged = bytearray(kept)
        damaged[at] ^= 1
        with pytest.raises(ValueError):
            RecordIndex.from_bytes(bytes(damaged), len(raw))
    with pytest.raises(ValueError, match="cannot be"):
        RecordIndex.from_bytes(kept, len(raw) - 1)
    with pytest.raises(ValueError):
        RecordIndex.from_bytes(b"", 0)


def test_options_survive() -> None:
    format = TFRecord(example=True, verify=False)
    assert TFRecord.from_options(format.options()) == format
    assert hash(format) != hash(TFRecord())


# --- tf.train.Example -----------------------------------------------------------------------------------------------


def test_an_empty_list_is_an_empty_array_and_an_absent_feature_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(tfrecord([EMPTY, FIVE, ABSENT]))
    empty, five, absent = loader.open_shard(path, TFRecord(example=True))
    assert empty["k"].dtype == np.int64 and empty["k"].shape == (0,)
    assert five["k"].tolist() == [5]
    with pytest.raises(MissingField, match="other"):
        absent["k"]


@pytest.mark.parametrize("packed", [True, False])
def test_numbers_keep_every_bit(packed: bool) -> None:
    ints = [0, 1, -1, 127, 128, 300, -(1 << 63), (1 << 63) - 1, 1 << 35] * 5
    floats = [0.0, -0.0, 1.5, float("inf"), 3.4e38]
    found = features(example({"few": ("int64", ints[:3]), "i": ("int64", ints), "f": ("float", floats)}, packed=packed))
    assert found["i"].tolist() == ints and found["few"].tolist() == ints[:3]
    assert found["f"].dtype == np.float32 and found["f"].tolist() == np.array(floats, np.float32).tolist()
    assert np.signbit(found["f"][1])
    assert all(found[name].flags.aligned and found[name].flags.writeable for name in found)


def test_byte_strings_are_views_of_the_record() -> None:
    data = array(record(example({"a": ("bytes", [b"one", b"", b"three"])})))
    format = TFRecord(example=True)
    values = format.read(data, format.index(data, "u"), 0, "u")["a"]
    assert [v.tobytes() for v in values] == [b"one", b"", b"three"]
    assert np.shares_memory(values[0], data)


def test_only_the_wanted_features_are_read() -> None:
    payload = example({"a": ("int64", [1]), "b": ("int64", [2])})
    assert plain(features(payload, frozenset(["b", "x"]))) == {"b": [2]}


def test_protobuf_s_rules_for_odd_messages() -> None:
    one, two = feature("int64", [1]), feature("int64", [2, 3])
    cases = {
        b"": {},
        sized(1, b""): {},
        sized(1, entry("k", b"")): {},  # no kind set: absent, as for TensorFlow
        sized(1, entry("k", one) + entry("k", two)): {"k": [2, 3]},  # the last of a name counts
        sized(1, entry("k", one)) + sized(1, entry("l", two)): {"k": [1], "l": [2, 3]},  # messages merge
        sized(1, entry("k", one + two)): {"k": [1, 2, 3]},
        sized(1, entry("k", one + feature("float", [0.5]))): {"k": [0.5]},  # of kinds the last one
        sized(1, sized(1, sized(2, one))): {"": [1]},
        sized(1, sized(1, sized(2, one) + sized(1, b"k"))): {"k": [1]},
        b"\x78\x07" + sized(1, b"\x7d1234" + entry("k", one) + b"\x7912345678"): {"k": [1]},  # unknown fields
    }
    for payload, wanted in cases.items():
        assert plain(features(payload)) == wanted, payload


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"\x0a\x05ab", "a field of 5 bytes where 2 are left"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "a field of 18446744073709551615 bytes"),
        (b"\x0a" + b"\xff" * 9 + b"\x02", "does not end"),
        (b"\x0a" + b"\xff" * 20, "does not end"),
        (b"\x0a\xff", "does not end"),
        (b"\x02\x00", "no field has this number"),
        (b"\x0b\x0c", "a group"),
        (b"\x0f", "unknown type"),
        (b"\x7d123", "a field of 4 bytes where 3 are left"),
        (sized(1, sized(1, sized(1, b"\xff") + sized(2, b""))), "no UTF-8"),
        (sized(1, entry("k", sized(2, sized(1, b"123")))), "no multiple of 4"),
        (sized(1, entry("k", sized(3, sized(1, b"\x80")))), "integers is damaged"),
        (sized(1, entry("k", sized(3, sized(1, bytes(40) + b"\x80")))), "integers is damaged"),
        (sized(1, entry("k", sized(3, sized(1, bytes(40) + b"\xff" * 9 + b"\x02")))), "integers is damaged"),
        (sized(1, entry("k", sized(3, sized(1, bytes(40) + b"\xff" * 10 + b"\x01")))), "integers is damaged"),
        (sized(1, entry("k", sized(3, sized(1, b"\x01\x80") + sized(1, b"\x01")))), "integers is damaged"),
        (sized(1, b"") + sized(2, b""), "SequenceExample"),
        (b"any text that is no message", "record 0 is no tf.train.Example"),
    ],
)
def test_what_is_no_example_is_an_error_of_its_record(payload: bytes, what: str) -> None:
    error = refused(payload)
    assert what in str(error) and error.url == "u" and error.offset is not None
    assert 12 <= error.offset <= 12 + len(payload)


def test_a_list_of_ints_of_any_length_reads_alike() -> None:
    rng = random.Random(5)
    for count in (1, 2, 11, 12, 13, 24, 25, 100, 1000):
        numbers = [rng.getrandbits(rng.choice([3, 7, 14, 40, 63])) for _ in range(count)]
        assert features(example({"k": ("int64", numbers)}))["k"].tolist() == numbers
    small = list(range(100))
    assert varint(127) == b"\x7f" and features(example({"k": ("int64", small)}))["k"].tolist() == small
