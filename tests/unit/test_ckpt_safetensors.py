"""Segments are files that the safetensors library reads; the library is the referee."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cachefs.errors import CheckpointError
from ckptstore.dtypes import itemsize, safetensors_code
from ckptstore.leaves import torch_dtype_name
from ckptstore.safetensors import ALIGNMENT, Slot, layout

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def bits(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """A tensor of every byte value in turn (valid bools for bool)."""
    raw = torch.arange(count * dtype.itemsize, dtype=torch.uint8) * 37
    return (raw % 2 if dtype == torch.bool else raw).view(dtype)


def write(path: Path, slots: list[Slot], tensors: list[torch.Tensor], metadata: Any = None) -> None:
    placed = layout(slots, metadata)
    with open(path, "wb") as f:
        f.write(placed.header)
        for tensor, start in zip(tensors, placed.starts, strict=True):
            assert f.tell() == start
            f.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    assert path.stat().st_size == placed.size


@pytest.mark.parametrize("dtype", DTYPES, ids=torch_dtype_name)
def test_every_type_can_be_read(dtype: torch.dtype, tmp_path: Path) -> None:
    name = torch_dtype_name(dtype)
    assert itemsize(name) == dtype.itemsize
    tensor = bits(dtype).view(2, 3)
    write(tmp_path / "x.safetensors", [Slot("x", name, (2, 3))], [tensor])
    found = load_file(tmp_path / "x.safetensors")["x"]
    if safetensors_code(name) is None:
        assert found.dtype == torch.uint8 and found.shape == (2, 3, dtype.itemsize)
        found = found.view(dtype).squeeze(-1)
    assert found.dtype == dtype
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_shapes_names_and_metadata(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "nul%00 and 😀": torch.ones(2),
        'quote " backslash \\': torch.ones(1),
    }
    slots = [Slot(n, torch_dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
    write(tmp_path / "x.safetensors", slots, list(tensors.values()), {"step": 5, "note": "text"})
    with safe_open(tmp_path / "x.safetensors", "pt") as f:
        assert f.metadata() == {"step": "5", "note": "text"}
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_metadata_without_tensors(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", [], [], {"step": 5})
    assert load_file(tmp_path / "x.safetensors") == {}


def test_the_data_is_aligned() -> None:
    placed = layout([Slot("a", "float64", (3,)), Slot("b", "uint8", (1,))])
    assert placed.starts[0] % ALIGNMENT == 0
    assert placed.starts == (len(placed.header), len(placed.header) + 24)


@pytest.mark.parametrize("names", [["__metadata__"], ["x", "x"]])
def test_names_that_no_reader_could_tell_apart_are_refused(names: list[str]) -> None:
    with pytest.raises(CheckpointError, match=repr(names[0])):
        layout([Slot(name, "uint8", (1,)) for name in names])


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="int3"):
        itemsize("int3")
    with pytest.raises(CheckpointError, match="numpy:nonsense"):
        itemsize("numpy:nonsense")
    assert itemsize("numpy:<M8[ns]") == np.dtype("<M8[ns]").itemsize
