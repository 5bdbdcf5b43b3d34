"""The chunk bitmap as its two sides see it."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from cachefs.bitmap import HEADER_BYTES, BitmapReader, ChunkBits
from cachefs.errors import ProtocolMismatch


def test_a_reader_sees_what_the_writer_sets() -> None:
    bits = ChunkBits(5)
    with BitmapReader(bits.fd) as reader:
        assert reader.n_chunks == 5
        assert reader.first_missing() == 0
        assert bits.set(0)
        assert bits.set(1)
        assert not bits.set(1)
        assert [reader.has(i) for i in range(5)] == [True, True, False, False, False]
        assert reader.first_missing(0, 2) is None
        assert reader.first_missing(1) == 2
        assert not reader.all_set
        for i in (4, 3, 2):
            bits.set(i)
        assert reader.all_set and bits.all_set
        assert reader.first_missing() is None
    bits.close()


def test_the_reader_outlives_the_writer() -> None:
    bits = ChunkBits(2)
    bits.set(1)
    reader = BitmapReader(bits.fd)
    bits.close()
    bits.close()
    assert reader.has(1) and reader.first_missing() == 0


def test_no_chunks_means_all_set() -> None:
    bits = ChunkBits(0)
    with BitmapReader(bits.fd) as reader:
        assert reader.all_set and reader.first_missing() is None
    bits.close()


def test_a_snapshot_carries_over() -> None:
    bits = ChunkBits(3)
    bits.set(2)
    again = ChunkBits(3, bits.snapshot())
    assert again.missing() == [0, 1] and again.count == 1
    with pytest.raises(ValueError, match="3 initial bytes for 4 chunks"):
        ChunkBits(4, bits.snapshot())
    bits.close()
    again.close()


def test_superseded_is_a_mark_of_its_own() -> None:
    bits = ChunkBits(2)
    with BitmapReader(bits.fd) as reader:
        assert not reader.superseded
        bits.mark_superseded()
        assert reader.superseded and not reader.all_set and reader.first_missing() == 0
    bits.close()


def test_chunks_out_of_range_are_refused() -> None:
    bits = ChunkBits(2)
    with BitmapReader(bits.fd) as reader:
        for call in (lambda: reader.has(2), lambda: reader.has(-1), lambda: reader.first_missing(0, 3)):
            with pytest.raises(IndexError, match="of 2"):
                call()
    bits.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memfd seals are Linux's")
def test_a_client_can_neither_write_nor_resize_it() -> None:
    bits = ChunkBits(3)
    fd = os.dup(bits.fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"\1", HEADER_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, HEADER_BYTES + 3)
    bits.set(0)  # the writer still can
    assert bits.has(0)
    os.close(fd)
    bits.close()


def test_something_else_is_not_taken_for_a_bitmap(tmp_path: Path) -> None:
    for content in (b"short", b"x" * 200, b"NFBITS\0\1" + (1 << 40).to_bytes(8, "little") + bytes(100)):
        (tmp_path / "other").write_bytes(content)
        with open(tmp_path / "other", "rb") as f, pytest.raises(ProtocolMismatch, match="bitmap"):
            BitmapReader(f.fileno())
