"""Samples to batches: :func:`collate`, made for ``DataLoader(collate_fn=loader.collate)``.

Unlike torch's own it keeps what cannot be stacked (images of different sizes, encoded bytes) as lists instead of
failing, and it carries the samples' :class:`~loader.sample.Stamp` into the batch, so ``dataset.state_after(batch)``
knows where the user is whatever the workers have read ahead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from cachefs.errors import ConfigError, DataError

from .arenasend import ragged, shared_bytes
from .sample import Batch, Rows, Sample, Stamp, batch_type


def collate(samples: Sequence[Any] | Batch) -> Any:
    """A batch from samples that are all mappings, all tuples or lists of one length, or all single values.

    Mappings become a :class:`~loader.sample.Batch` with the same fields. Per field (or place):

    * arrays and tensors of one shape and dtype, and numbers of one type, are stacked into one tensor;
    * arrays and tensors that differ in shape stay a list (*ragged*), as do ``str``, ``bytes`` and all other objects;
    * nested mappings and tuples are collated in turn where their structure agrees, else kept as a list.

    A :class:`~loader.sample.Batch` is returned as it is, so that ``DataLoader(dataset.batched(), batch_size=None)`` can
    be given this function instead of torch's own conversion, which knows no times and looks into every list.

    In a DataLoader worker tensors are stacked straight into shared memory (``loader.arena``). Raises ``DataError`` when
    samples have different fields (say what to do), ``ConfigError`` when the DataLoader's ``batch_size`` is not the data
    set's.
    """
    if isinstance(samples, Batch):
        return samples
    if not samples:
        raise DataError("an empty list of samples cannot be collated")
    first = samples[0]
    if isinstance(first, Mapping):
        stamp = common_stamp(samples)
        batch = batch_type(samples)(_mappings(samples))
        batch.stamp = stamp
        return batch
    if type(first) in (tuple, list) and _same_length(samples):
        return type(first)(_field(list(column)) for column in zip(*samples, strict=True))
    return _field(list(samples))


def common_stamp(samples: Sequence[Any]) -> Stamp | None:
    """The stamp of the samples of one batch; ``None`` if they carry none (a transform made new objects).

    Raises ``ConfigError`` where they are not exactly one batch of the data set.
    """
    stamps = [sample.stamp if isinstance(sample, Sample) else None for sample in samples]
    stamp = stamps[0]
    if stamp is None:
        return None
    if len(samples) != stamp.size or any(other is not stamp for other in stamps):
        raise ConfigError(
            f"a batch of {len(samples)} samples, but the data set deals batches of {stamp.size}",
            hint="give both the same batch_size, or use DataLoader(dataset.batched(), batch_size=None)",
        )
    return stamp


_NUMPY = {
    torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind)
    for kind in ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
}
_STACKABLE = frozenset(_NUMPY.values())

Allocator = Callable[[tuple[int, ...], np.dtype[Any]], tuple[torch.Tensor, npt.NDArray[Any]]]
"""Makes an uninitialised tensor; returned with the array over the same memory."""


_ALLOCATOR: ContextVar[Allocator | None] = ContextVar("nearflash_allocator", default=None)


def allocator() -> Allocator:
    """The allocator for batches made here: that of :func:`allocating`, else in a DataLoader worker shared memory, which
    is sent without a copy."""
    chosen = _ALLOCATOR.get()
    if chosen is not None:
        return chosen
    return _private if get_worker_info() is None else _shared


def allocates_privately() -> bool:
    """Whether a batch made here stays in this process, in memory of its own."""
    return _ALLOCATOR.get() is None and get_worker_info() is None


@contextmanager
def allocating(chosen: Allocator) -> Iterator[None]:
    """Let :func:`collate` put the batches of this thread into memory from ``chosen`` meanwhile."""
    token = _ALLOCATOR.set(chosen)
    try:
        yield
    finally:
        _ALLOCATOR.reset(token)


def _private(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[torch.Tensor, npt.NDArray[Any]]:
    # numpy's allocation, because malloc keeps what it frees; torch's aligned one takes new pages for each batch
    array = np.empty(shape, dtype)
    return torch.from_numpy(array), array


def _shared(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[torch.Tensor, npt.NDArray[Any]]:
    tensor = _shared_tensor(shape, torch.from_numpy(np.empty(0, dtype)).dtype)
    return tensor, tensor.numpy()


def _shared_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return shared_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _kept(values: list[Any]) -> list[Any]:
    """Values that are not stacked."""
    return values if get_worker_info() is None else ragged(values)


def _mappings(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = samples[0].keys()
    for sample in samples:
        if sample.keys() != names:
            differ = ", ".join(sorted(map(str, names ^ sample.keys())))
            raise DataError(
                f"samples of one batch differ in the field(s) {differ}",
                hint="choose fields=[...] that every sample has, or fill them in a transform",
            )
    first = samples[0]
    made = (first.rows if isinstance(first, Sample) else None) or {}
    return {name: _column([sample[name] for sample in samples], made.get(name)) for name in names}


def _column(values: list[Any], rows: Rows | None) -> Any:
    """One field's values; where they are still the rows of a tensor, that tensor."""
    if rows is not None and len(values) == len(rows.views) and all(map(operator.is_, values, rows.views)):
        return rows.tensor
    return _field(values)


def _field(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return _arrays(values)
    if isinstance(first, torch.Tensor):
        return _tensors(values)
    kind = type(first)
    if kind is bytes:
        return _kept(values)
    if kind is str:
        return values  # whatever the others are
    if any(type(value) is not kind for value in values):
        return values
    if isinstance(first, bool | int | float):
        return _numbers(values)
    if isinstance(first, np.generic) and stackable(first.dtype):
        return torch.from_numpy(np.array(values))
    if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
        return _mappings(values)
    if kind is tuple and _same_length(values):
        return tuple(_field(list(column)) for column in zip(*values, strict=True))
    return values


def _arrays(values: list[Any]) -> Any:
    first = values[0]
    same = all(isinstance(v, np.ndarray) and v.shape == first.shape and v.dtype == first.dtype for v in values)
    if not same or not stackable(first.dtype):
        return _kept(values)
    tensor, array = allocator()((len(values), *first.shape), first.dtype.newbyteorder("="))
    np.stack(values, out=array)
    return tensor


def _tensors(values: list[Any]) -> Any:
    first = values[0]
    if not all(isinstance(v, torch.Tensor) and v.shape == first.shape and v.dtype == first.dtype for v in values):
        return _kept(values)
    if first.layout != torch.strided or first.device.type != "cpu":
        return torch.stack(values)
    if any(v.requires_grad or v.is_conj() or v.is_neg() or v.is_quantized for v in values):
        return torch.stack(values)
    if _ALLOCATOR.get() is not None and first.dtype in _NUMPY:
        tensor, _ = allocator()((len(values), *first.shape), _NUMPY[first.dtype])
        return torch.stack(values, out=tensor)
    if get_worker_info() is None:
        return torch.stack(values)
    return torch.stack(values, out=_shared_tensor((len(values), *first.shape), first.dtype))


def stackable(dtype: np.dtype[Any]) -> bool:
    """Whether torch has tensors of this dtype (in the machine's byte order)."""
    return dtype.newbyteorder("=") in _STACKABLE


def collate_values(values: list[Any]) -> Any:
    """One field's values, as :func:`collate` joins them."""
    return _field(values)


def _numbers(values: list[Any]) -> Any:
    try:
        return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)
    except (OverflowError, RuntimeError, ValueError):
        return values  # integers beyond 64 bits


def _same_length(values: Sequence[Any]) -> bool:
    first = values[0]
    return all(type(value) is type(first) and len(value) == len(first) for value in values)
