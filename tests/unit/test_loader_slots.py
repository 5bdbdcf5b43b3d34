"""Buffers that are used again: never while somebody can see them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from loader.slots import Slots

F32 = np.dtype(np.float32)


def make(slots: Slots, *shape: int) -> torch.Tensor:
    tensor, array = slots.allocate(shape, F32)
    array[...] = 1
    return tensor


def test_a_buffer_is_used_again_when_its_tensor_is_gone() -> None:
    slots = Slots(most=1 << 20)
    first = make(slots, 10, 10)
    place = first.data_ptr()
    other = make(slots, 10, 10)
    assert other.data_ptr() != place and slots.made == 2
    del first
    assert make(slots, 10, 10).data_ptr() == place and slots.made == 2


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[3:],
        lambda t: t.numpy(),
        lambda t: t.numpy()[2:],
        lambda t: torch.from_numpy(t.numpy()[2:]),
        lambda t: t.split(2)[1],
        lambda t: t.view(-1)[7],
        lambda t: memoryview(t.numpy()),
        lambda t: t.T,
        lambda t: torch.utils.dlpack.from_dlpack(t),
    ],
    ids=["slice", "numpy", "numpy slice", "and back", "split", "element", "memoryview", "transposed", "dlpack"],
)
def test_whatever_sees_the_memory_holds_it(keep: Any) -> None:
    slots = Slots(most=1 << 20)
    tensor = make(slots, 8, 8)
    place = tensor.data_ptr()
    kept = keep(tensor)
    del tensor
    gc.collect()
    again = make(slots, 8, 8)
    assert again.data_ptr() != place
    del kept
    gc.collect()
    assert make(slots, 8, 8).data_ptr() == place
    del again


def test_free_buffers_are_kept_up_to_a_bound() -> None:
    slots = Slots(most=3 << 12)
    held = [make(slots, 1024) for _ in range(10)]
    held.clear()
    assert slots.free_bytes == 3 << 12
    held = [make(slots, 1024) for _ in range(4)]
    assert slots.made == 11


def test_shapes_dtypes_and_alignment() -> None:
    slots = Slots(most=1 << 20)
    for shape in [(0,), (3, 0), (), (5,), (129, 33)]:
        for dtype in (np.uint8, np.int64, np.float16, np.bool_, np.complex64):
            tensor, array = slots.allocate(shape, np.dtype(dtype))
            assert tuple(tensor.shape) == shape == array.shape and array.dtype == dtype
            assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
