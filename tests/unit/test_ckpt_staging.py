"""The blocking copy: what is copied, once, into memory that is used again; and the order of things with a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cachefs.errors import CheckpointMismatch
from ckptstore.leaves import Leaf, Sharded
from ckptstore.staging import ALIGN, Arena, CudaCopies, HostCopies, Staged, place, stage


def staged(*values: Any, arena: Arena | None = None) -> Staged:
    device = HostCopies()
    leaves = [Leaf(f"t{i}", value) for i, value in enumerate(values)]
    return stage(leaves, arena or Arena(device), device)


def content(copy: Staged, index: int = 0) -> bytes:
    tensor = copy.tensors[index]
    return bytes(copy.memory[tensor.start : tensor.end])


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


MATRIX = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        MATRIX,
        MATRIX.t(),
        MATRIX[::2],
        MATRIX[1:3, 2:5],
        torch.tensor(3.5),
        torch.ones(1).expand(1000),
        torch.empty(0, 3),
        MATRIX.to(torch.bfloat16).t(),
        MATRIX.to(torch.float8_e4m3fn).t(),
        MATRIX.to(torch.uint16).t(),
        (MATRIX > 3).t(),
        torch.view_as_complex(MATRIX.reshape(4, 3, 2)),
        torch.nn.Parameter(MATRIX.clone()),
    ],
)
def test_the_elements_of_the_view_are_copied(tensor: torch.Tensor) -> None:
    copy = staged(tensor)
    assert content(copy) == raw(tensor.detach())
    assert copy.nbytes == tensor.numel() * tensor.element_size()


def test_conjugate_and_negative_views_are_resolved() -> None:
    tensor = torch.view_as_complex(MATRIX.reshape(4, 3, 2)).conj()
    assert content(staged(tensor)) == raw(tensor.resolve_conj())
    assert content(staged(tensor.imag)) == raw(tensor.imag.resolve_neg())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        np.array(2.5),
        np.array(["ab", "cde"]),
        np.array(["2024-01-01"], dtype="datetime64[s]"),
        np.zeros((0, 2)),
    ],
)
def test_arrays_are_copied(array: np.ndarray[Any, Any]) -> None:
    assert content(staged(array)) == array.tobytes()


def test_a_small_view_takes_its_own_bytes_only() -> None:
    assert staged(torch.zeros(10**6)[:10]).nbytes == 40


def test_what_happens_later_does_not_matter() -> None:
    tensor, array = torch.ones(4), np.ones(4)
    copy = staged(tensor, array)
    before = content(copy, 0), content(copy, 1)
    tensor.add_(1)
    array += 1
    del tensor, array
    gc.collect()
    assert (content(copy, 0), content(copy, 1)) == before


def test_the_same_view_is_copied_once() -> None:
    weight = torch.ones(8, 8)
    copy = staged(weight, weight.detach(), weight.t(), weight[:4])
    assert [t.alias_of for t in copy.tensors] == [None, "t0", None, None]
    assert copy.tensors[1].start == copy.tensors[0].start
    array = np.ones(3)
    assert [t.alias_of for t in staged(array, array.view()).tensors] == [None, "t0"]
    assert [t.alias_of for t in staged(torch.empty(0), torch.empty(0)).tensors] == [None, None]


def test_the_memory_is_used_again_and_grows() -> None:
    arena = Arena(HostCopies())
    first = staged(torch.ones(1000), arena=arena)
    address = np.frombuffer(first.memory, np.uint8).ctypes.data
    again = staged(torch.zeros(10), arena=arena)
    assert np.frombuffer(again.memory, np.uint8).ctypes.data == address
    big = staged(torch.ones(1 << 20), arena=arena)
    assert content(big) == raw(torch.ones(1 << 20))
    arena.release()
    arena.release()
    assert content(big) == raw(torch.ones(1 << 20))


def test_places_are_aligned_and_apart() -> None:
    tensors, _, size = place([Leaf(str(i), torch.ones(i, dtype=torch.uint8)) for i in range(1, 200, 7)])
    assert all(t.start % ALIGN == 0 for t in tensors)
    assert all(a.end <= b.start for a, b in pairwise(tensors))
    assert size >= tensors[-1].end


def test_sharded_parts_have_their_box() -> None:
    copy = staged(Sharded(torch.ones(2, 3), (5, 3), (2, 0)))
    assert copy.tensors[0].shape == (5, 3)
    assert copy.tensors[0].box == ((2, 0), (2, 3))
    with pytest.raises(CheckpointMismatch, match="does not lie"):
        Sharded(torch.ones(2, 3), (5, 3), (4, 0))


class FakeCuda:
    """``torch.cuda`` as far as it is used; ``log`` tells what was asked for, in order. Copies happen at once."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.inside: str | None = None

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.log.append(("pin",))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(("unpin",))
        return 0

    def Stream(self, device: object) -> FakeStream:
        return FakeStream(self, "side")

    def current_stream(self, device: object) -> FakeStream:
        return FakeStream(self, "main")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.inside = stream.name
        yield
        self.inside = None


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append((self.name, "waits for copy"))


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(("copy ends on", stream.name))

    def synchronize(self) -> None:
        self.cuda.log.append(("host waits",))


class GpuTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class Target:
    """Notes on which stream it is copied to."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        self.cuda.log.append(("copy on", self.cuda.inside or "host", "async" if non_blocking else "sync"))


def test_gpu_copies_run_beside_the_program_and_before_what_it_does_next() -> None:
    cuda = FakeCuda()
    copies = CudaCopies(cuda).begin()
    gpu = torch.ones(2).as_subclass(GpuTensor)
    for source in (gpu, torch.ones(2), gpu):
        copies.copy(Target(cuda), source)  # type: ignore[arg-type]
    ready = copies.finish()
    assert cuda.log == [
        ("side", "waits for", "main"),
        ("copy on", "side", "async"),
        ("copy on", "host", "sync"),
        ("copy on", "side", "async"),
        ("copy ends on", "side"),
        ("main", "waits for copy"),
    ]
    ready.wait()
    assert cuda.log[-1] == ("host waits",)


def test_a_block_is_pinned_while_it_is_in_use() -> None:
    cuda = FakeCuda()
    arena = Arena(CudaCopies(cuda))
    arena.reserve(10)
    arena.reserve(10)
    arena.reserve(1 << 23)
    arena.release()
    arena.release()
    assert cuda.log == [("pin",), ("unpin",), ("pin",), ("unpin",)]
