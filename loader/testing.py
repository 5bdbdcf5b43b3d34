"""Writers of small shards, for tests: real files in each format, made without the reading code."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def tar_bytes(members: Iterable[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar archive of these members, in this order; names may repeat."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write_tars(folder: Path, counts: Sequence[int], *, payload: int = 40) -> list[bytes]:
    """Shards ``000.tar`` ... with so many samples each (fields ``bin`` and ``cls``); returns all ``bin`` values.

    The ``bin`` of sample number k of the data set starts with k as text, so it tells the sample.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values: list[bytes] = []
    for shard, count in enumerate(counts):
        members = []
        for i in range(count):
            value = f"{len(values)}:".encode().ljust(payload, b".")
            members += [(f"{i:05d}.bin", value), (f"{i:05d}.cls", str(len(values) % 10).encode())]
            values.append(value)
        (folder / f"{shard:03d}.tar").write_bytes(tar_bytes(members))
    return values


def mds_bytes(columns: Mapping[str, str], samples: Sequence[Mapping[str, bytes]], sizes: Sequence[int | None]) -> bytes:
    """One MDS shard from values that are encoded already; ``sizes`` are the columns' fixed sizes."""
    header = {"column_names": list(columns), "column_encodings": list(columns.values()), "column_sizes": list(sizes)}
    head = json.dumps(header).encode()
    bodies = []
    for sample in samples:
        variable = [len(sample[name]) for name, size in zip(columns, sizes, strict=True) if not size]
        bodies.append(struct.pack(f"<{len(variable)}I", *variable) + b"".join(sample[name] for name in columns))
    offsets = np.cumsum([4 + 4 * (len(samples) + 1) + len(head), *map(len, bodies)])
    return struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets.tolist()) + head + b"".join(bodies)


def write_mds(folder: Path, counts: Sequence[int]) -> list[bytes]:
    """A data set of MDS shards with columns ``id`` (int) and ``blob`` (bytes), with its index; returns all blobs."""
    folder.mkdir(parents=True, exist_ok=True)
    blobs: list[bytes] = []
    shards: list[dict[str, Any]] = []
    for number, count in enumerate(counts):
        samples = []
        for _ in range(count):
            samples.append({"id": struct.pack("<q", len(blobs)), "blob": f"blob {len(blobs)}".encode()})
            blobs.append(samples[-1]["blob"])
        raw = mds_bytes({"id": "int", "blob": "bytes"}, samples, [8, None])
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(raw)
        data = {"basename": name, "bytes": len(raw), "hashes": {}}
        shards.append(
            {"format": "mds", "samples": count, "raw_data": data, "zip_data": None, "compression": None, "version": 2}
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return blobs


def litdata_bytes(items: Sequence[Sequence[bytes]]) -> bytes:
    """One LitData chunk from values that are serialized already: per item its leaves."""
    bodies = [struct.pack(f"<{len(leaves)}I", *map(len, leaves)) + b"".join(leaves) for leaves in items]
    offsets = np.cumsum([8 + 4 * len(items), *map(len, bodies)])
    return struct.pack(f"<{len(offsets) + 1}I", len(items), *offsets.tolist()) + b"".join(bodies)


def litdata_index(chunks: Mapping[str, tuple[int, int]], fields: Mapping[str, str], **config: Any) -> bytes:
    """The index of LitData chunks (name to items and bytes) of dicts with these fields (name to serializer)."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "builtins.dict", "context": json.dumps(list(fields)), "children_spec": [leaf] * len(fields)}
    rows = [
        {"filename": name, "chunk_size": items, "chunk_bytes": size, "dim": None}
        for name, (items, size) in chunks.items()
    ]
    shared = {"data_format": list(fields.values()), "data_spec": json.dumps([1, tree]), "item_loader": "PyTreeLoader"}
    return json.dumps({"chunks": rows, "config": shared | config}).encode()


def write_tokens(path: Path, count: int, dtype: str = "uint16") -> np.ndarray[Any, Any]:
    """A headerless file of the tokens 0, 1, 2, ... (as far as the dtype goes); returns them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.arange(count).astype(dtype)
    tokens.tofile(path)
    return tokens


def mapped_at(array: np.ndarray[Any, Any]) -> tuple[str, int]:
    """The file that an array's first byte is mapped from, and the byte's offset in it, as the kernel says (Linux).

    ``("", 0)`` for memory that is no file's.
    """
    address = int(array.ctypes.data)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            path = name[0] if name else ""
            return (path, int(offset, 16) + address - first) if path.startswith("/") else ("", 0)
    return "", 0
