"""Tars as they are (only headers have a checksum) and compressed ones (all bytes have)."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import zstandard

import loader
from loader.testing import tar_bytes
from tests.fault.format_damage import Case


def archive(rng: random.Random) -> bytes:
    kind = rng.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    long = "" if kind == tarfile.USTAR_FORMAT else "é" * 90
    names = [f"d{long}/{i}.{field}" for i in range(2) for field in ("jpg", "json")]
    members = [(name, rng.randbytes(rng.choice([0, 1, 300, 512]))) for name in names]
    raw = tar_bytes([("README", b"x"), *members, ("d/3.txt", b"text")], kind)
    return raw[: -(-len(raw.rstrip(b"\0")) // 512) * 512 + 1024]  # the end marker, without the padding


def many(rng: random.Random) -> bytes:
    """More than the longest run that gets lost; every header has a checksum, and no payload looks like one."""
    return tar_bytes([(f"{i:03}.jpg", b"p" * rng.choice([1, 300, 512, 700])) for i in range(80)], tarfile.USTAR_FORMAT)


def as_file(name: str, pack: Callable[[bytes], bytes]) -> Callable[[random.Random], dict[str, bytes]]:
    return lambda rng: {name: pack(archive(rng))}


def checked_frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def read(path: Path) -> loader.ShardReader:
    return loader.open_shard(path, format="webdataset")


CASES = [
    Case("webdataset", as_file("a.tar", bytes), read),
    Case("webdataset-holes", lambda rng: {"a.tar": many(rng)}, read, kinds=("hole",), told=True),
    Case("webdataset-gz", as_file("a.tar.gz", gzip.compress), read, checksummed=True),
    Case("webdataset-bz2", as_file("a.tar.bz2", bz2.compress), read, checksummed=True),
    Case("webdataset-xz", as_file("a.tar.xz", lzma.compress), read, checksummed=True),
    Case("webdataset-zst", as_file("a.tar.zst", checked_frame), read, checksummed=True),
]
