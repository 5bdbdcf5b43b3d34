"""Shards in three formats, written by the demo itself: WebDataset tar, MDS, and headerless uint16 token files."""

from __future__ import annotations

import io
import json
import struct
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .plan import FORMATS, Plan
from .text import Document, stdlib_documents, windows


@dataclass(frozen=True)
class ShardFile:
    """One file to upload: its key within the bucket, where it lies, its size in bytes."""

    key: str
    path: Path
    size: int

    @property
    def is_shard(self) -> bool:
        """Whether it holds samples (an MDS ``index.json`` does not)."""
        return not self.key.endswith("index.json")


def write_tar(samples: Sequence[Document]) -> bytes:
    """A WebDataset shard: per sample ``<key>.txt`` and ``<key>.json``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for i, sample in enumerate(samples):
            about = json.dumps({"origin": sample.name, "bytes": len(sample.text)}).encode()
            for extension, data in (("txt", sample.text), ("json", about)):
                member = tarfile.TarInfo(f"{i:06d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


MDS_COLUMNS = {"origin": "str", "text": "bytes"}
"""Column name -> encoding, sorted by name as the format wants it."""


def mds_header(basename: str) -> dict[str, Any]:
    """What an MDS shard says about itself, in the file and again in ``index.json``."""
    return {
        "column_encodings": list(MDS_COLUMNS.values()),
        "column_names": list(MDS_COLUMNS),
        "column_sizes": [None] * len(MDS_COLUMNS),
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": basename, "bytes": 0, "hashes": {}},
        "samples": 0,
        "size_limit": None,
        "version": 2,
        "zip_data": None,
    }


def write_mds(samples: Sequence[Document], header: dict[str, Any]) -> bytes:
    """An MDS shard (format version 2, as Mosaic Streaming writes it).

    Little-endian uint32 throughout: number of samples, then one offset more than samples, counted from the start of
    the file; then the header as JSON; then the samples. A sample is the sizes of its columns of variable length,
    then the columns' bytes.
    """
    about = json.dumps({k: v for k, v in header.items() if k not in ("raw_data", "samples", "zip_data")}).encode()
    rows = []
    for sample in samples:
        columns = (sample.name.encode(), sample.text)
        rows.append(struct.pack(f"<{len(columns)}I", *map(len, columns)) + b"".join(columns))
    first = 4 * (len(rows) + 2) + len(about)
    offsets = np.cumsum([first, *map(len, rows)], dtype=np.uint32)
    return struct.pack("<I", len(rows)) + offsets.tobytes() + about + b"".join(rows)


def write_tokens(samples: Sequence[Document]) -> bytes:
    """A token file as nanoGPT's scripts write it: uint16, no header; one byte of text is one token."""
    return np.frombuffer(b"".join(s.text for s in samples), np.uint8).astype("<u2").tobytes()


def make_shards(folder: Path, plan: Plan) -> list[ShardFile]:
    """Write all shards below ``folder`` and return them. Shards of an earlier run with the same sizes are kept.

    The windows of text are dealt to the three formats in turn, so no two data sets hold the same samples.
    """
    stamp = folder / "made.json"
    made = json.dumps({"samples": plan.samples, "shards": plan.shards, "length": plan.length, "text": sys.version})
    if not (stamp.is_file() and stamp.read_text() == made):
        stamp.unlink(missing_ok=True)
        texts = windows(stdlib_documents(), plan.samples * len(FORMATS), plan.length)
        for k, (name, write) in enumerate(zip(FORMATS, (_wds, _mds, _tokens), strict=True)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for old in (folder / name).iterdir():
                old.unlink()
            own = texts[k :: len(FORMATS)]
            write(folder / name, [own[i : i + plan.per_shard] for i in range(0, len(own), plan.per_shard)])
        stamp.write_text(made)
    return [
        ShardFile(path.relative_to(folder).as_posix(), path, path.stat().st_size)
        for name in FORMATS
        for path in sorted((folder / name).iterdir())
    ]


Groups = Sequence[Sequence[Document]]


def _each(folder: Path, groups: Groups, pattern: str, write: Callable[[Sequence[Document]], bytes]) -> None:
    for i, group in enumerate(groups):
        (folder / pattern.format(i)).write_bytes(write(group))


def _wds(folder: Path, groups: Groups) -> None:
    _each(folder, groups, "text-{:05d}.tar", write_tar)


def _tokens(folder: Path, groups: Groups) -> None:
    _each(folder, groups, "train-{:05d}.bin", write_tokens)


def _mds(folder: Path, groups: Groups) -> None:
    index = []
    for i, group in enumerate(groups):
        header = mds_header(f"shard.{i:05d}.mds")
        data = write_mds(group, header)
        header["raw_data"]["bytes"] = len(data)
        header["samples"] = len(group)
        (folder / header["raw_data"]["basename"]).write_bytes(data)
        index.append(header)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": index}))
