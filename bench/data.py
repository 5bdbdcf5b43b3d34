"""The data that the pages read, made from a fixed seed and kept between runs.

Every file is written in steps of megabytes, as download tools and the cache's daemon do, also those of the peers'
writers: a kernel with large folios keeps such a file in large pages, and mapping or reading it costs a fraction of what
a file written in small steps does. That would otherwise decide between tools.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .sizes import Sizes

SEED = 7
STEP = 8 << 20
"""Bytes that are written in one call."""


def kept(folder: Path, sizes: Sizes, make: Callable[[Path, Sizes], None]) -> Path:
    """``folder`` as ``make`` filled it; made again only if sizes changed or an earlier run was cut short."""
    stamp = folder / "made.json"
    wanted = json.dumps(asdict(sizes))
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder, sizes)
        stamp.write_text(wanted)
    return folder


def token_shards(folder: Path, sizes: Sizes) -> None:
    """Headerless uint16 files ``tokens-*.bin``."""
    rng = np.random.default_rng(SEED)
    rows = sizes.token_rows // sizes.token_shards
    for i in range(sizes.token_shards):
        rng.integers(0, 50_257, (rows, sizes.row_tokens), dtype=np.uint16).tofile(folder / f"tokens-{i:03d}.bin")


def tar_shards(folder: Path, sizes: Sizes) -> None:
    """WebDataset shards whose samples are a ``bin`` of random bytes and a ``cls``."""
    rng = np.random.default_rng(SEED)
    blob = rng.integers(0, 256, sizes.tar_most * 64, dtype=np.uint8).tobytes()
    lengths = rng.integers(sizes.tar_least, sizes.tar_most, sizes.tar_samples)
    starts = rng.integers(0, len(blob) - sizes.tar_most, sizes.tar_samples)
    per = sizes.tar_samples // sizes.tar_shards
    for s in range(sizes.tar_shards):
        members: list[tuple[str, bytes]] = []
        for i in range(s * per, (s + 1) * per):
            payload = blob[starts[i] : starts[i] + lengths[i]]
            members += [(f"{i:08d}.bin", payload), (f"{i:08d}.cls", str(i % 1000).encode())]
        (folder / f"samples-{s:03d}.tar").write_bytes(_tar(members))


def _tar(members: list[tuple[str, bytes]]) -> memoryview:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getbuffer()


def table_shards(folder: Path, sizes: Sizes) -> None:
    """The same rows as Parquet and as uncompressed Arrow files: four columns of numbers and one of short strings."""
    rng = np.random.default_rng(SEED)
    rows = sizes.table_rows // sizes.table_shards
    for s in range(sizes.table_shards):
        number = np.arange(s * rows, (s + 1) * rows)
        table = pa.table(
            {
                "id": number,
                "label": rng.integers(0, 1000, rows, dtype=np.int32),
                "weight": rng.random(rows),
                "score": rng.random(rows, dtype=np.float32),
                "name": [f"sample number {i} of a table" for i in number.tolist()],
            }
        )
        pq.write_table(table, folder / f"rows-{s:03d}.parquet", row_group_size=sizes.table_group)
        with pa.ipc.new_file(folder / f"rows-{s:03d}.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=sizes.table_group)
    rewritten(folder)


def record_files(folder: Path, sizes: Sizes) -> None:
    """One tar, TFRecord and JSONL file each with records of 100 KB and of 1 KB: ``<format>-<record bytes>``."""
    rng = np.random.default_rng(SEED)
    for record in RECORDS:
        count = max(sizes.index_bytes // record, 1)
        data = rng.integers(32, 127, record, dtype=np.uint8)
        data[(data == ord('"')) | (data == ord("\\"))] = ord(" ")
        payload = data.tobytes()
        (folder / f"tar-{record}").write_bytes(_tar([(f"{i:08d}.bin", payload) for i in range(count)]))
        (folder / f"tfrecord-{record}").write_bytes(_tfrecord(payload) * count)
        (folder / f"jsonl-{record}").write_bytes((b'{"text": "' + payload + b'"}\n') * count)


RECORDS = (100_000, 1_000)


def _tfrecord(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + _masked(length) + payload + _masked(payload)


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def rewritten(folder: Path) -> None:
    """Write every file of another tool's writer again, in steps of :data:`STEP`."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        fresh = path.with_name(f"{path.name}.fresh")
        with open(path, "rb") as old, open(fresh, "wb", buffering=0) as new:
            shutil.copyfileobj(old, new, STEP)
        fresh.replace(path)


def cold_objects(folder: Path, sizes: Sizes) -> None:
    """Files of random bytes to be uploaded."""
    rng = np.random.default_rng(SEED)
    for i in range(sizes.cold_objects):
        (folder / f"object-{i:03d}.bin").write_bytes(rng.bytes(sizes.cold_object))
