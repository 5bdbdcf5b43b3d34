"""What makes a DataLoader worker send its batches through its arena: how their tensors and lists are pickled.

Only in the worker, and only for what ``multiprocessing`` pickles there: on arrival a batch is what it would be without,
plain tensors, arrays, bytes and lists. A tensor that does not lie in the arena is copied there, where torch would
copy it into a segment of its own; one of a few bytes travels in the message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import numpy as np
import torch
from torch.multiprocessing import reductions

from .arena import Arena, ArenaName, Sent
from .arenaview import VIEWS

FEW: Final = 2048
"""Bytes up to which a tensor is sent in the message."""
_ALIGNMENT: Final = 64

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
Part = tuple[str, int, int, Any, tuple[int, ...]]
"""A value in a packed list: its kind, its first byte and the one behind it, its dtype and shape."""


class Ragged(list[Any]):
    """A field's values that cannot be stacked, in a DataLoader worker: sent together, they arrive as a list."""


def ragged(values: list[Any]) -> Ragged:
    """Values that are not stacked, in a DataLoader worker."""
    sending()
    return Ragged(values)


def shared_bytes(nbytes: int) -> torch.Tensor:
    """Uninitialised memory as a flat uint8 tensor that is sent to the process that reads the batches without a copy."""
    arena = sending()
    if arena is not None:
        taken = torch.empty(nbytes, dtype=torch.uint8) if nbytes <= FEW else arena.take(nbytes)
        if taken is not None:
            return taken
    storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def sending() -> Arena | None:
    """The arena of this process, a DataLoader worker, which from now on sends through it; ``None`` without one."""
    return _sending(os.getpid())


@cache
def _sending(pid: int) -> Arena | None:
    arena = Arena.make()
    ForkingPickler.register(Ragged, _reduce_ragged)
    if arena is not None:
        ForkingPickler.register(torch.Tensor, _reduce_tensor)
    return arena


# --- tensors ---


def _reduce_tensor(tensor: torch.Tensor) -> Reduced:
    arena = sending()
    if arena is None or not _plain(tensor):
        return _by_torch(tensor)
    storage = tensor.untyped_storage()
    sent = arena.send(storage)
    if sent is not None:
        return _sent(sent, tensor, int(tensor.storage_offset()), tensor.stride())
    nbytes = tensor.numel() * tensor.element_size()
    if storage.is_shared() or nbytes > storage.nbytes():
        return _by_torch(tensor)  # shared on purpose, or the same element many times
    if nbytes <= FEW:
        return rebuild_few, (_flat(tensor).numpy().tobytes(), _name(tensor.dtype), tuple(tensor.shape))
    copied = arena.take(nbytes)
    sent = None if copied is None else arena.send(copied.untyped_storage())
    if copied is None or sent is None:
        return _by_torch(tensor)
    copied.copy_(_flat(tensor))
    return _sent(sent, tensor, 0, tensor.contiguous().stride())


def _sent(sent: Sent, tensor: torch.Tensor, start: int, stride: tuple[int, ...]) -> Reduced:
    # plain values: what names a class or an object is found by its name again on arrival, for each tensor
    return rebuild, (*sent.name, *sent[1:], _name(tensor.dtype), start, tuple(tensor.shape), stride)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_torch(tensor: torch.Tensor) -> Reduced:
    reduced: Reduced = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return reduced


def _plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after the other, as bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def rebuild(
    pid: int,
    fd: int,
    key: int,
    size: int,
    handle: Any,
    ticket: int,
    offset: int,
    nbytes: int,
    dtype: str,
    start: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A tensor that arrives by an arena."""
    storage = VIEWS.storage(Sent(ArenaName(pid, fd, key, size), handle, ticket, offset, nbytes))
    return torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, start, shape, stride)


def rebuild_few(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that arrives in the message."""
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)


# --- lists ---


def _reduce_ragged(values: Ragged) -> Reduced:
    """Arrays, tensors and bytes of a list together in one stretch of memory; other values, and few bytes, as ever."""
    sizes = [_packed_bytes(value) for value in values]
    if sum(sizes) <= FEW:
        return list, (list(values),)
    ends = np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()
    memory = shared_bytes(ends[-1])
    room = memory.numpy()
    parts: list[Part | None] = []
    others = []
    for value, size, end in zip(values, sizes, ends, strict=True):
        if not size:
            parts.append(None)
            others.append(value)
            continue
        first = end - -(-size // _ALIGNMENT) * _ALIGNMENT
        part = (first, first + size)
        room[slice(*part)] = _as_bytes(value)
        if isinstance(value, bytes):
            parts.append(("bytes", *part, None, ()))
        elif isinstance(value, np.ndarray):
            parts.append(("array", *part, value.dtype, value.shape))
        else:
            parts.append(("tensor", *part, value.dtype, tuple(value.shape)))
    return rebuild_ragged, (memory, parts, others)


def _packed_bytes(value: Any) -> int:
    """Bytes that a value takes in a packed list; 0 for one that goes as it is."""
    kind = type(value)
    if kind is np.ndarray:
        return 0 if value.dtype.hasobject else int(value.nbytes)
    if kind is bytes:
        return len(value)
    if kind is torch.Tensor:
        return value.numel() * value.element_size() if _plain(value) else 0
    return 0


def _as_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, torch.Tensor):
        return _flat(value).numpy()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def rebuild_ragged(memory: torch.Tensor, parts: Sequence[Part | None], others: Sequence[Any]) -> list[Any]:
    """A list that arrives: its values are views of one stretch of memory, which is in use as long as one of them is."""
    room = memory.numpy()
    rest = iter(others)
    out: list[Any] = []
    for part in parts:
        if part is None:
            out.append(next(rest))
            continue
        kind, first, end, dtype, shape = part
        if kind == "bytes":
            out.append(room[first:end].tobytes())
        elif kind == "array":
            out.append(room[first:end].view(dtype).reshape(shape))
        else:
            out.append(memory[first:end].view(dtype).view(shape))
    return out
