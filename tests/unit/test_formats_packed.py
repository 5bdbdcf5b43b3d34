"""Compressed files: every codec, its magic number, cuts, sizes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from cachefs.errors import FormatError
from loader.formats.magic import codec_of
from loader.formats.packed import MOST, gunzip, unpack, unpacked, unzstd
from loader.formats.packed_head import begins

DATA = b"hello world" * 3000
PACKED = {
    "gz": gzip.compress(DATA),
    "bz2": bz2.compress(DATA),
    "xz": lzma.compress(DATA),
    "zstd": zstandard.compress(DATA),
    "br": bytes(pa.Codec("brotli").compress(DATA, asbytes=True)),
    "snappy": bytes(pa.Codec("snappy").compress(DATA, asbytes=True)),
}
TOLD = ["gz", "bz2", "xz", "zstd"]


def raw(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), np.uint8)


@pytest.mark.parametrize("codec", sorted(PACKED))
def test_every_codec_reads_into_private_memory(codec: str) -> None:
    found = unpacked(codec, raw(PACKED[codec]), "u", len(DATA))
    assert found.tobytes() == DATA and found.flags.writeable


@pytest.mark.parametrize("codec", TOLD)
def test_files_of_several_pieces_are_told_by_their_first_bytes(codec: str) -> None:
    twice = raw(PACKED[codec] * 2)
    assert codec_of(twice) == codec
    assert unpack(twice, "u").tobytes() == DATA * 2
    assert begins(twice, 100) == DATA[:100]
    assert DATA.startswith(begins(raw(PACKED[codec][:-9]), 100_000))


@pytest.mark.parametrize("codec", sorted(PACKED))
def test_a_cut_or_another_size_is_an_error(codec: str) -> None:
    for cut in (1, 3, len(PACKED[codec]) // 2):
        with pytest.raises(FormatError):
            unpacked(codec, raw(PACKED[codec][:-cut]), "u")
    for size in (len(DATA) - 1, len(DATA) + 1):
        with pytest.raises(FormatError):
            unpacked(codec, raw(PACKED[codec]), "u", size)


def test_no_cut_of_a_frame_without_a_size_is_a_silent_end() -> None:
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    noise = random.Random(1).randbytes(200_000)
    frame = stream.compress(noise) + stream.flush()
    skipped = b"\x50\x2a\x4d\x18\x02\0\0\0ab"
    assert unzstd(raw(frame + skipped), "u").tobytes() == noise
    for end in (3, 7, 1000, 140_000, len(frame) - 4, len(frame) - 1):
        with pytest.raises(FormatError):
            unzstd(raw(frame[:end]), "u")
    with pytest.raises(FormatError, match="cut off"):
        unzstd(raw(PACKED["zstd"] + frame[:150_000]), "u")


@pytest.mark.parametrize("codec", sorted(PACKED))
def test_no_declared_size_lifts_the_bound(codec: str) -> None:
    with pytest.raises(FormatError, match="are the most"):
        unpacked(codec, raw(PACKED[codec]), "u", MOST + 1)


def test_pieces_that_hold_nothing_are_not_endless() -> None:
    with pytest.raises(FormatError, match="compressed pieces"):
        gunzip(raw(gzip.compress(b"") * 1_100_000), "u")
    empty_blocks = zstandard.compress(b"")[:6] + b"\0\0\0" * 1_200_000 + b"\1\0\0"
    with pytest.raises(FormatError, match="compressed pieces"):
        unzstd(raw(zstandard.compress(b"a") + empty_blocks), "u")


def test_zstandard_files_may_begin_with_frames_that_are_skipped() -> None:
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    file = raw((skipped + PACKED["zstd"]) * 3)
    assert codec_of(file) == "zstd"
    assert unpack(file, "u").tobytes() == DATA * 3
    assert begins(file, 5000) == DATA[:5000]
    assert codec_of(raw(skipped + b"other")) is None
    assert codec_of(raw(skipped[:6])) is None
