"""Tensors of a state as the rest of the package sees them: an element type, a global shape, a box, and local memory.

A plain tensor or array is its own whole. A DTensor's box follows from its mesh and placements. :class:`Sharded` says
it outright. Which memory is contiguous, which device it is on and whether it is a view does not matter to a save: the
elements of the view are what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cachefs.errors import CheckpointMismatch

from .boxes import Box, Placement, Shape, shard
from .dtypes import NUMPY_KINDS, NUMPY_PREFIX, known, numpy_has
from .records import Rule


@dataclass(frozen=True, eq=False)
class Sharded:
    """This rank's part of a tensor that several ranks hold together, for code that does not use DTensor.

    ``local``: the part, of any strides, on any device; ``global_shape``: the whole tensor's shape; ``offsets``: where
    the part begins in it (elements, one per axis). The parts of all ranks must cover the whole; equal parts count
    once. For a load, ``local`` is filled in place.
    """

    local: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        box = Box(tuple(self.offsets), tuple(self.local.shape))
        if not box.within(self.global_shape):
            raise CheckpointMismatch(
                f"a part of shape {list(self.local.shape)} at {list(self.offsets)} does not lie in a tensor of shape "
                f"{list(self.global_shape)}"
            )


class Leaf(NamedTuple):
    """One tensor or array of a state, under its name; ``rule``: what holds where several ranks have it whole."""

    name: str
    value: Any
    rule: Rule = "equal"


class View(NamedTuple):
    """A leaf taken apart. ``local`` is the caller's memory: a torch tensor or a numpy array of shape ``box.shape``."""

    dtype: str
    shape: Shape
    box: Box
    local: Any


def view_of(value: Any) -> View | None:
    """What a leaf's value is; ``None`` for a DTensor over other ranks only.

    Raises :class:`CheckpointMismatch` for a DTensor whose local part is no box.
    """
    if isinstance(value, np.ndarray):
        return View(numpy_dtype(value.dtype), value.shape, Box.whole(value.shape), value)
    if isinstance(value, Sharded):
        shape = tuple(value.global_shape)
        local = value.local.detach()
        return View(torch_dtype_name(local.dtype), shape, Box(tuple(value.offsets), tuple(local.shape)), local)
    if is_dtensor(value):
        return _dtensor_view(value)
    return View(torch_dtype_name(value.dtype), tuple(value.shape), Box.whole(value.shape), value.detach())


def fault_of(value: Any) -> str | None:
    """Why a tensor or array cannot be saved, or ``None``."""
    if isinstance(value, np.ndarray):
        if type(value) not in (np.ndarray, np.memmap):  # a mask or a unit would be lost without a word
            return f"a numpy subclass {type(value).__name__}"
        if value.dtype.kind not in NUMPY_KINDS or value.dtype.itemsize == 0:
            return f"a numpy array of type {value.dtype}"
        return None
    tensor: Any = value.local if isinstance(value, Sharded) else value
    if is_lazy(tensor):
        return "a parameter that is not initialised yet"
    if is_dtensor(tensor):
        if any(p.is_partial() for p in tensor.placements):
            return "a DTensor with a Partial placement; reduce it first"
        tensor = tensor._local_tensor
    elif is_traceable_wrapper_subclass(tensor):
        return f"a tensor subclass {type(tensor).__name__} whose data lies elsewhere"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor subclass {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no data"
    if tensor.is_quantized or not known(torch_dtype_name(tensor.dtype)):
        return f"a tensor of type {tensor.dtype}"
    return None


def identity(local: Any) -> tuple[object, ...] | None:
    """Equal for two local tensors that are the same view of the same memory; ``None``: not comparable (no bytes)."""
    if isinstance(local, np.ndarray):
        if local.size == 0:
            return None
        return ("numpy", local.__array_interface__["data"][0], local.shape, local.strides, local.dtype.str)
    if local.numel() == 0:
        return None
    flags = (local.is_conj(), local.is_neg())
    return (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, flags)


def is_dtensor(value: Any) -> bool:
    """Whether it is torch's DTensor, without importing that."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def torch_dtype_name(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype | None:
    """The torch type of this name, or ``None``."""
    dtype = getattr(torch, name, None) if known(name) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def numpy_dtype(dtype: np.dtype[Any]) -> str:
    """A numpy type's name in a checkpoint: torch's where torch has the same, in this machine's byte order."""
    if dtype.isnative and dtype.kind in "biufc" and numpy_has(dtype.name):
        return dtype.name
    return NUMPY_PREFIX + dtype.str


def byte_tensor(local: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes."""
    return local.reshape(-1).view(torch.uint8) if local.numel() else torch.empty(0, dtype=torch.uint8)


def _dtensor_view(value: Any) -> View | None:
    mesh = value.device_mesh
    local = value._local_tensor.detach()
    shape = tuple(value.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    box = shard(shape, tuple(mesh.shape), tuple(coordinate), [_placement(p) for p in value.placements])
    if box is None or box.volume != local.numel():
        raise CheckpointMismatch(
            f"a DTensor of shape {list(shape)} placed as {value.placements} is not one box on this rank",
            hint="redistribute it, or give its parts as ckptstore.Sharded",
        )
    # An empty shard may come with any shape that has a zero in it.
    return View(torch_dtype_name(value.dtype), shape, box, local.reshape(box.shape) if not box.volume else local)


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Placement(None)
    if not hasattr(placement, "dim"):
        raise CheckpointMismatch(f"a DTensor with the placement {placement} cannot be saved")
    return Placement(placement.dim, getattr(placement, "split_factor", 1))
