"""Batches on their way to a GPU: copied on a stream of their own while the training step computes.

The copy is asked for by the thread that made the batch; the consumer's stream waits for it, the consumer's thread does
not. Two things must not happen before their time, and a *guard* keeps each: the page-locked source may be used for
another batch only when the copy has been done, and the copied tensor's memory may be used again only when the
consumer's stream is past it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from .sample import Batch


class Sent(NamedTuple):
    """A batch that is being copied. ``done``: the event after the copy; ``source``: what must live until then."""

    batch: Any
    done: Any
    source: Any


class Transfer(Protocol):
    """Moves batches to where they are used."""

    def send(self, batch: Any) -> Sent:
        """Begin to move a batch; any thread."""

    def receive(self, sent: Sent) -> Any:
        """The batch, ready for what the calling thread does next."""

    def close(self) -> None:
        """Wait for what is under way, and let go of it. Idempotent; may be used again."""


class SideStream:
    """:class:`Transfer` to a CUDA device. ``cuda``: what stands for ``torch.cuda``."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._guarded: deque[Sent] = deque()

    def send(self, batch: Any) -> Sent:
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            moved = on_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            return Sent(moved, self._stream.record_event(), batch)

    def receive(self, sent: Sent) -> Any:
        current = self._cuda.current_stream(self._device)
        current.wait_event(sent.done)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        batch = on_tensors(sent.batch, used)
        self._guarded.append(sent._replace(batch=None))
        while self._guarded and self._guarded[0].done.query():
            self._guarded.popleft()
        return batch

    def close(self) -> None:
        """Wait for what is still being copied, and let go of it. Idempotent."""
        while self._guarded:
            self._guarded.popleft().done.synchronize()


def on_tensors(value: Any, change: Any) -> Any:
    """``value`` with each tensor in its mappings, lists and tuples changed; a :class:`Batch` keeps its stamp."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Batch):
        changed = type(value)({name: on_tensors(part, change) for name, part in value.items()})
        changed.stamp = value.stamp
        return changed
    if isinstance(value, Mapping):
        return {name: on_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_tensors(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(on_tensors(part, change) for part in value)
    return value


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors and arrays in a batch."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.layout == torch.strided else 0
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return sum([tensor_bytes(part) for part in value])
    if isinstance(value, Mapping):
        return sum([tensor_bytes(part) for part in value.values()])
    return 0
