"""Tars that are indexed while they arrive, and indexes that are kept."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from cachefs.errors import FormatError, NotFound
from loader.formats import WebDataset
from loader.formats.abc import Mapped
from loader.formats.tar_index import TarIndex
from loader.testing import tar_bytes

SAMPLES = [(f"a/{i}.{ext}", bytes([i + 1]) * (3000 * i + 1)) for i in range(6) for ext in ("bin", "json")]
LONG = [(f"{'é' * 80}{i}/{'k' * 150}.bin", bytes([i + 1]) * 2000) for i in range(3)]
ARCHIVES = {
    "ustar": tar_bytes(SAMPLES, tarfile.USTAR_FORMAT),
    "gnu": tar_bytes(SAMPLES + LONG, tarfile.GNU_FORMAT),
    "pax": tar_bytes(SAMPLES + LONG, tarfile.PAX_FORMAT),
    "joined": tar_bytes(SAMPLES) * 2,
    "no end": tar_bytes(SAMPLES, tarfile.USTAR_FORMAT).rstrip(b"\0"),
    "empty": tar_bytes([]),
}


class Arriving:
    """A buffer that is zero until it is asked for, piece by piece; keeps what was asked."""

    def __init__(self, whole: bytes, step: int = 1) -> None:
        self.whole = np.frombuffer(whole, np.uint8)
        self.data = np.zeros(len(whole), np.uint8)
        self.step = step
        self.asked: list[tuple[int, int]] = []

    def ready(self, start: int, end: int) -> None:
        assert 0 <= start <= end <= len(self.whole)
        self.asked.append((start, end))
        first, last = start // self.step * self.step, -(-end // self.step) * self.step
        self.data[first:last] = self.whole[first:last]


class OneObject:
    """:class:`loader.formats.abc.Objects` of one object that is still arriving."""

    def __init__(self, arriving: Arriving) -> None:
        self.arriving = arriving
        self.beside: dict[str, bytes] = {}

    def map(self, url: str, stat: Any = None) -> Mapped:
        return Mapped(self.arriving.data, self.arriving.ready)

    def read(self, url: str) -> bytes:
        raise NotFound("nothing beside it", url=url)

    def stat(self, url: str) -> Any:
        raise NotFound("nothing beside it", url=url)

    def list(self, folder: str) -> list[Any]:
        return []

    def bound(self, url: str) -> tuple[str, int] | None:
        return None

    def kept(self, url: str, name: str) -> bytes | None:
        return self.beside.get(name)

    def keep(self, url: str, name: str, make: Callable[[], bytes]) -> None:
        self.beside[name] = make()

    def close(self) -> None:
        pass


def parts(index: TarIndex) -> dict[str, Any]:
    return {name: getattr(index, name) for name in TarIndex.__slots__}


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("step", [1, 4096])
def test_an_archive_is_indexed_from_the_bytes_it_asked_for(name: str, step: int) -> None:
    raw = ARCHIVES[name]
    arriving = Arriving(raw, step)
    index = WebDataset().index(arriving.data, "shard", arriving.ready)
    assert parts(index) == parts(WebDataset().index(np.frombuffer(raw, np.uint8), "shard"))
    assert arriving.asked == sorted(arriving.asked), "front to back, as bytes arrive"


def test_only_headers_are_asked_for() -> None:
    arriving = Arriving(ARCHIVES["ustar"])
    index = WebDataset().index(arriving.data, "shard", arriving.ready)
    headers = [(start - 512, start) for start in index.starts]
    assert arriving.asked[: len(headers)] == headers
    for start, size in zip(index.starts, index.sizes, strict=True):
        assert all(end <= start or first >= start + size for first, end in arriving.asked)


@pytest.mark.parametrize("name", ARCHIVES)
def test_opening_ends_with_every_byte_there(name: str) -> None:
    arriving = Arriving(ARCHIVES[name])
    format = WebDataset()
    opened = format.open(OneObject(arriving), "shard")
    assert bytes(arriving.data) == ARCHIVES[name]
    if len(opened.index):
        assert len(format.read(opened.source, opened.index, 0, "shard")["bin"]) == 1


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_a_compressed_archive_is_whole_before_it_is_unpacked(pack: Any) -> None:
    opened = WebDataset().open(OneObject(Arriving(pack(ARCHIVES["pax"]))), "shard")
    assert len(opened.index) == 9 and opened.private_bytes == len(ARCHIVES["pax"])


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_the_first_bytes_tell_how_an_archive_is_compressed(pack: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(pack(ARCHIVES["ustar"]))
    reader = loader.open_shard(path)
    assert [(s["__key__"], s["bin"].tobytes()) for s in reader] == [
        (f"a/{i}", bytes([i + 1]) * (3000 * i + 1)) for i in range(6)
    ]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FormatError, match=str(path)):
        loader.open_shard(path, format="webdataset")


def test_what_the_origin_raises_comes_through() -> None:
    def gone(start: int, end: int) -> None:
        raise NotFound("gone", url="s3://b/a.tar")

    with pytest.raises(NotFound):
        WebDataset().index(np.zeros(5000, np.uint8), "s3://b/a.tar", gone)


class TestKept:
    RAW = tar_bytes(
        [*SAMPLES, ("README", b""), ("caf\udce9.x", b"1"), ("b.x\udce9", b"2"), ("c.y", b""), ("c.y", b"")],
        tarfile.GNU_FORMAT,
    )

    def index(self) -> TarIndex:
        return WebDataset().index(np.frombuffer(self.RAW, np.uint8), "shard")

    def test_an_index_reads_back_equal(self) -> None:
        index = self.index()
        again = TarIndex.from_bytes(index.to_bytes(), len(self.RAW))
        assert parts(again) == parts(index) and again.damaged and again.skipped == 1
        assert parts(pickle.loads(pickle.dumps(index))) == parts(index)

    @pytest.mark.parametrize("size", [0, 1, 20_000])
    def test_one_of_a_larger_tar_is_refused(self, size: int) -> None:
        with pytest.raises(ValueError, match="does not fit"):
            TarIndex.from_bytes(self.index().to_bytes(), size)

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_damage_is_found(self, data: st.DataObject) -> None:
        raw = bytearray(self.index().to_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= data.draw(st.integers(1, 255))
        with pytest.raises(ValueError):
            TarIndex.from_bytes(bytes(raw), len(self.RAW))
        with pytest.raises(ValueError):
            TarIndex.from_bytes(bytes(raw[:at]), len(self.RAW))

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_a_hostile_one_points_nowhere_else(self, data: st.DataObject) -> None:
        body = bytearray(self.index().to_bytes()[4:])
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(body) - 8))
            body[at : at + 8] = struct.pack("<q", data.draw(st.sampled_from([-1, 2**63 - 1, 0, 1, 2**31, 77])))
        try:
            index = TarIndex.from_bytes(zlib.crc32(body).to_bytes(4, "little") + bytes(body), len(self.RAW))
        except ValueError:
            return
        source = np.frombuffer(self.RAW, np.uint8)
        for i in range(len(index)):
            try:
                sample = WebDataset().read(source, index, i, "shard")
            except FormatError:
                continue
            sizes = index.sizes[index.first[i] : index.first[i + 1]]
            assert sum(len(v) for k, v in sample.items() if k != "__key__") <= sum(sizes)
