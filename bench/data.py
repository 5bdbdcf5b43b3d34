"""The data that the pages read, made from a fixed seed and kept between runs."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from .sizes import Sizes

SEED = 7


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
        with tarfile.open(folder / f"samples-{s:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(s * per, (s + 1) * per):
                payload = blob[starts[i] : starts[i] + lengths[i]]
                for extension, data in (("bin", payload), ("cls", str(i % 1000).encode())):
                    member = tarfile.TarInfo(f"{i:08d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def cold_objects(folder: Path, sizes: Sizes) -> None:
    """Files of random bytes to be uploaded."""
    rng = np.random.default_rng(SEED)
    for i in range(sizes.cold_objects):
        (folder / f"object-{i:03d}.bin").write_bytes(rng.bytes(sizes.cold_object))
