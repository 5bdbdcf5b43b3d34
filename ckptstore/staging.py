"""The only part of a save that blocks: one copy of the state into memory of our own.

The memory is one page-aligned block that is kept and used again by the next save, grown when it must be; with a GPU it
is pinned. CPU tensors are copied at once. GPU tensors are copied on a side stream; the streams that were current are
made to wait for that copy before they run anything newer, so nothing that the program does afterwards, on the host or
on the GPU, changes what is saved, while the host goes on at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from .boxes import Box, Shape
from .dtypes import itemsize
from .leaves import Leaf, byte_tensor, identity, view_of
from .records import Rule

ALIGN = 64
GROWTH = 2 << 20
"""The block grows in steps of this many bytes."""


class StagedTensor(NamedTuple):
    """One tensor's place in the block: bytes ``[start, end)`` hold ``box`` in C order; else :class:`.records.Held`."""

    name: str
    dtype: str
    shape: Shape
    box: Box
    rule: Rule
    alias_of: str | None
    start: int
    end: int


class Ready(Protocol):
    """A copy that may still be under way."""

    def wait(self) -> None:
        """Block until the bytes are there."""
        ...


class Staged(NamedTuple):
    """A copied state. ``memory`` stays the arena's: it is overwritten by the next :func:`stage`."""

    tensors: tuple[StagedTensor, ...]
    memory: memoryview
    ready: Ready

    @property
    def nbytes(self) -> int:
        """Bytes copied; a tied tensor counts once."""
        return sum(t.end - t.start for t in self.tensors if t.alias_of is None)


class Device(Protocol):
    """How tensors reach the block: :class:`HostCopies`, or with a GPU :class:`CudaCopies`."""

    def pin(self, block: torch.Tensor) -> None:
        """Called with every new block."""
        ...

    def unpin(self, block: torch.Tensor) -> None:
        """Called before a block is dropped."""
        ...

    def begin(self) -> Copies:
        """Begin to copy one state."""
        ...


class Copies(Protocol):
    """The copies of one state."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target`` (contiguous, of the same type and shape, on the host)."""
        ...

    def finish(self) -> Ready:
        """All copies are started."""
        ...


class Arena:
    """The block. Not thread-safe; the owner must not stage anew while an earlier copy is still being read."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._map: mmap.mmap | None = None
        self._block: torch.Tensor | None = None

    def reserve(self, size: int) -> tuple[memoryview, torch.Tensor]:
        """``size`` bytes at least, as a view and as a tensor of bytes. The old content is lost."""
        if self._map is None or len(self._map) < size:
            self.release()
            self._map = mmap.mmap(-1, max(1, -(-size // GROWTH)) * GROWTH, flags=_MAP_FLAGS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages: slower to fill the first time, that is all
                    self._map.madvise(mmap.MADV_HUGEPAGE)
            self._block = torch.frombuffer(self._map, dtype=torch.uint8)
            self._device.pin(self._block)
        assert self._block is not None
        return memoryview(self._map), self._block

    def release(self) -> None:
        """Give the memory back as soon as nobody holds a view of it. Idempotent."""
        if self._block is not None:
            self._device.unpin(self._block)
        self._block = None
        self._map = None  # not closed: views that were handed out keep it alive


_MAP_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def place(leaves: Sequence[Leaf]) -> tuple[list[StagedTensor], list[Any], int]:
    """Where each leaf goes in the block, its local memory, and the bytes that all take.

    Two leaves that are the same view of the same memory (tied weights) get one place; the later is an alias of the
    earlier. Leaves of which this rank holds nothing at all are left out.
    """
    tensors: list[StagedTensor] = []
    sources: list[Any] = []
    seen: dict[tuple[object, ...], StagedTensor] = {}
    position = 0
    for leaf in leaves:
        view = view_of(leaf.value)
        if view is None:
            continue
        key = identity(view.local)
        first = seen.get((*key, view.shape, view.box)) if key is not None else None
        if first is not None:
            tensors.append(first._replace(name=leaf.name, rule=leaf.rule, alias_of=first.name))
        else:
            end = position + view.box.volume * itemsize(view.dtype)
            tensors.append(StagedTensor(leaf.name, view.dtype, view.shape, view.box, leaf.rule, None, position, end))
            if key is not None:
                seen[(*key, view.shape, view.box)] = tensors[-1]
            position = -(-end // ALIGN) * ALIGN
        sources.append(view.local)
    return tensors, sources, position


def stage(leaves: Sequence[Leaf], arena: Arena, device: Device) -> Staged:
    """Copy all leaves into the arena. On return the caller may change or free them."""
    tensors, sources, size = place(leaves)
    memory, block = arena.reserve(size)
    copies = device.begin()
    for tensor, source in zip(tensors, sources, strict=True):
        if tensor.alias_of is not None or tensor.start == tensor.end:
            continue
        if isinstance(source, np.ndarray):
            target = np.frombuffer(memory, source.dtype, source.size, tensor.start).reshape(source.shape)
            np.copyto(target, source)
            continue
        place_ = block[tensor.start : tensor.end]
        if source.is_contiguous() and not (source.is_conj() or source.is_neg()):
            copies.copy(place_, byte_tensor(source))
        else:
            copies.copy(place_.view(source.dtype).view(source.shape), source)
    return Staged(tuple(tensors), memory.toreadonly(), copies.finish())


class _Done:
    def wait(self) -> None:
        return


class HostCopies:
    """Copies that are complete when they return; for CPU tensors, and for devices without streams of their own."""

    def pin(self, block: torch.Tensor) -> None:
        return

    def unpin(self, block: torch.Tensor) -> None:
        return

    def begin(self) -> HostCopies:
        return self

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def finish(self) -> Ready:
        return _Done()


class CudaCopies:
    """Copies from GPUs on a side stream each. ``cuda``: the module ``torch.cuda``."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._sides: dict[Any, Any] = {}
        self._pinned: set[int] = set()

    def pin(self, block: torch.Tensor) -> None:
        """Register the block with the driver; without that the copies would be synchronous, but right."""
        if int(self._cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)) == 0:
            self._pinned.add(block.data_ptr())

    def unpin(self, block: torch.Tensor) -> None:
        if block.data_ptr() in self._pinned:
            self._cuda.cudart().cudaHostUnregister(block.data_ptr())
            self._pinned.discard(block.data_ptr())

    def begin(self) -> Copies:
        return _CudaRound(self._cuda, self._sides)


class _CudaRound:
    def __init__(self, cuda: Any, sides: dict[Any, Any]) -> None:
        self._cuda = cuda
        self._sides = sides
        self._used: set[Any] = set()
        self._held: list[torch.Tensor] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not source.is_cuda:
            target.copy_(source)
            return
        device = source.device
        if device not in self._sides:
            self._sides[device] = self._cuda.Stream(device)
        side = self._sides[device]
        if device not in self._used:
            side.wait_stream(self._cuda.current_stream(device))  # what was computed before the save
            self._used.add(device)
        with self._cuda.stream(side):
            target.copy_(source, non_blocking=True)
        self._held.append(source)  # else its memory could be given to another tensor before the copy has run

    def finish(self) -> Ready:
        events = []
        for device in self._used:
            event = self._cuda.Event()
            event.record(self._sides[device])
            self._cuda.current_stream(device).wait_event(event)  # what is computed from now on
            events.append(event)
        return _CudaReady(events, self._held)


class _CudaReady:
    def __init__(self, events: list[Any], held: list[torch.Tensor]) -> None:
        self._events = events
        self._held = held

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        self._held.clear()


def find_device() -> Device:
    """The way for this machine."""
    return CudaCopies(torch.cuda) if torch.cuda.is_available() else HostCopies()
