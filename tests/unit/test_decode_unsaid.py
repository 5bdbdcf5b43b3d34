"""Images that no name or type tells: ``decode="pil"`` says that it left them."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import loader
from loader.testing import tar_bytes

OUT = io.BytesIO()
Image.new("RGB", (7, 5)).save(OUT, "PNG")
PNG = OUT.getvalue()


def lmdb_of(folder: Path, value: bytes) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder), map_size=1 << 20) as env, env.begin(write=True) as txn:
        for i in range(8):
            txn.put(b"%04d" % i, value)
    return folder


@pytest.mark.parametrize("decode", ["pil", "torch"])
def test_images_left_as_they_are_are_said_once(tmp_path: Path, decode: Any) -> None:
    source = lmdb_of(tmp_path / "db", PNG)
    data = loader.ShardDataset(source, batch_size=4, decode=decode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        list(data)
        list(data)
    said = [str(w.message) for w in caught if issubclass(w.category, loader.DataWarning)]
    assert len(said) == 1, said
    assert "'value' begins like one (png)" in said[0] and "decode={'value': f}" in said[0]


@pytest.mark.parametrize("decode", [None, "bytes", {"value": lambda raw: Image.open(io.BytesIO(raw)).size}])
def test_who_asked_for_no_images_is_told_nothing(tmp_path: Path, decode: Any) -> None:
    source = lmdb_of(tmp_path / "db", PNG)
    with warnings.catch_warnings():
        warnings.simplefilter("error", loader.DataWarning)
        sample = next(iter(loader.ShardDataset(source, batch_size=4, decode=decode)))
    assert isinstance(sample["value"], np.ndarray) or sample["value"] == (7, 5)


@pytest.mark.parametrize("members", [[("a.png", PNG), ("a.raw", PNG)], [("a.bin", b"no image")]])
def test_nothing_is_said_where_nothing_is_odd(tmp_path: Path, members: list[tuple[str, bytes]]) -> None:
    (tmp_path / "x.tar").write_bytes(tar_bytes(members))
    with warnings.catch_warnings():
        warnings.simplefilter("error", loader.DataWarning)
        list(loader.ShardDataset(tmp_path / "x.tar", batch_size=1, decode="pil"))
