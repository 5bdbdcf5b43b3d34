"""The arena of DataLoader workers: places, tickets, what is sent how. One process plays both sides."""

from __future__ import annotations

import gc
import os
import pickle
import random
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import DataError
from loader import arena as arena_module
from loader import arenasend
from loader.arena import Arena, Sent
from loader.arenamap import SLOTS, TICKETS
from loader.arenasend import Ragged
from loader.arenaspace import Space, rounded
from loader.arenaview import Views

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="arenas are Linux's")


class TestSpace:
    @given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), max_size=80), st.integers(0, 2**32))
    def test_what_is_in_use_never_overlaps_and_what_fits_is_found(
        self, asked: list[tuple[int, float]], seed: int
    ) -> None:
        size, used, rng = 20_000, {}, random.Random(seed)
        space = Space(size, 16, lambda slot: slot in used)
        for nbytes, let_go in asked:
            block = space.take(nbytes)
            if block is not None:
                assert block.size >= nbytes and block.offset % 64 == 0 and block.offset + block.size <= size
                assert block.slot not in used
                assert space.at(block.offset) == block
                for other in used.values():
                    assert block.offset + block.size <= other.offset or other.offset + other.size <= block.offset
                used[block.slot] = block
            else:
                assert len(used) == 16 or not _fits(size, list(used.values()), rounded(nbytes))
            used = {slot: block for slot, block in used.items() if rng.random() > let_go}

    def test_the_lowest_place_is_used_again(self) -> None:
        used: set[int] = set()
        space = Space(1 << 20, 64, lambda slot: slot in used)
        offsets = []
        for _ in range(3):
            blocks = [space.take(1000) for _ in range(4) if not used.clear()]
            offsets.append([block.offset for block in blocks if block])
        assert offsets == [[0] * 4] * 3

    def test_sizes_are_rounded_by_an_eighth_at_most(self) -> None:
        for nbytes in (1, 64, 65, 1000, 4096, 4097, 10**6, 2**20, 2**20 + 1, 10**9):
            size = rounded(nbytes)
            assert nbytes <= size <= max(nbytes + 64, nbytes * 9 // 8 + 1) and size % 64 == 0
            assert rounded(size) == size

    def test_nothing_begins_elsewhere(self) -> None:
        space = Space(1 << 20, 4, lambda slot: True)
        block = space.take(100)
        assert block is not None
        assert [space.at(offset) for offset in (block.offset + 64, 1 << 19, 1 << 21)] == [None] * 3


def _fits(size: int, used: list[Any], wanted: int) -> bool:
    end = 0
    for block in sorted(used):
        if block.offset - end >= wanted:
            return True
        end = block.offset + block.size
    return size - end >= wanted


@linux
class TestArena:
    @pytest.fixture
    def arena(self) -> Arena:
        return Arena(1 << 20)

    @pytest.fixture
    def views(self) -> Views:
        return Views()

    def arrive(self, views: Views, sent: Sent | None) -> torch.Tensor:
        assert sent is not None
        return torch.empty(0, dtype=torch.uint8).set_(views.storage(sent._replace(handle=None)))

    def test_both_sides_see_one_memory_and_a_place_is_used_again_when_both_are_gone(
        self, arena: Arena, views: Views
    ) -> None:
        def taken() -> torch.Tensor:
            tensor = arena.take(1000)
            assert tensor is not None and tensor.shape == (1000,)
            return tensor

        tensor = taken()
        first = tensor.data_ptr()
        tensor.copy_(torch.arange(1000).to(torch.uint8))
        there = self.arrive(views, arena.send(tensor.untyped_storage()))
        assert torch.equal(there, tensor) and there.data_ptr() != first
        there[0] = 77
        assert tensor[0] == 77
        assert taken().data_ptr() != first
        part = there.view(10, 100)[3]
        del tensor, there
        assert taken().data_ptr() != first
        assert part.tolist() == torch.arange(300, 400).to(torch.uint8).tolist()
        array = part.numpy()
        del part
        assert taken().data_ptr() != first
        del array
        assert taken().data_ptr() == first

    def test_what_was_not_sent_is_free_when_it_is_gone_here(self, arena: Arena) -> None:
        pointers = set()
        for _ in range(20):
            tensor = arena.take(5000)
            assert tensor is not None
            pointers.add(tensor.data_ptr())
        assert len(pointers) == 2  # one is made before the other is gone

    def test_what_is_under_way_is_not_free(self, arena: Arena, views: Views) -> None:
        tensor = arena.take(100)
        assert tensor is not None
        first, sent = tensor.data_ptr(), arena.send(tensor.untyped_storage())
        del tensor
        other = arena.take(100)
        assert other is not None and other.data_ptr() != first
        there = self.arrive(views, sent)
        del there, other
        again = arena.take(100)
        assert again is not None and again.data_ptr() == first

    def test_a_tensor_sent_several_times(self, arena: Arena, views: Views) -> None:
        tensor = arena.take(100)
        assert tensor is not None
        first = tensor.data_ptr()
        sent = [arena.send(tensor.untyped_storage()) for _ in range(TICKETS)]
        assert arena.send(tensor.untyped_storage()) is None
        there = [self.arrive(views, each) for each in sent]
        there.pop()
        assert arena.send(tensor.untyped_storage()) is not None
        del tensor
        while there:
            other = arena.take(100)
            assert other is not None and other.data_ptr() != first
            there.pop()

    def test_full(self, arena: Arena) -> None:
        assert arena.take((1 << 20) + 1) is None
        held = [arena.take(1 << 18) for _ in range(4)]
        assert None not in held and arena.take(1) is None
        held[1] = None
        small = [arena.take(1 << 12) for _ in range(64)]
        assert None not in small and arena.take(1 << 12) is None
        del held, small
        assert arena.take(1 << 20) is not None

    def test_slots_are_bounded(self, arena: Arena) -> None:
        held = [arena.take(1) for _ in range(SLOTS)]
        assert None not in held and arena.take(1) is None
        held.pop()
        assert arena.take(1) is not None

    def test_only_its_own_memory_is_sent(self, arena: Arena) -> None:
        assert arena.send(torch.empty(100).untyped_storage()) is None
        other = Arena(1 << 20)
        there = other.take(100)
        assert there is not None and arena.send(there.untyped_storage()) is None

    def test_tensors_outlive_arena_and_views(self, views: Views) -> None:
        own = Arena(1 << 20)
        tensor = own.take(100)
        assert tensor is not None
        tensor.fill_(5)
        there = self.arrive(views, own.send(tensor.untyped_storage()))
        assert len(views) == 1
        del own, tensor
        gc.collect()
        assert there.tolist() == [5] * 100
        del there
        gc.collect()
        assert len(views) == 0 and "nearflash-batches" not in Path("/proc/self/maps").read_text()

    def test_an_arena_that_is_gone(self, views: Views) -> None:
        own = Arena(1 << 20)
        tensor = own.take(100)
        assert tensor is not None
        sent = own.send(tensor.untyped_storage())
        del own, tensor
        gc.collect()
        with pytest.raises(DataError, match="a batch's memory in process"):
            self.arrive(views, sent)
        other = open("/dev/null")  # the number is another file's  # noqa: SIM115
        with pytest.raises(DataError, match="a batch's memory in process"):
            self.arrive(views, sent)
        other.close()

    def test_what_a_forked_child_sees_is_not_written_over(self, arena: Arena, views: Views) -> None:
        tensor = arena.take(100)
        assert tensor is not None
        first = tensor.data_ptr()
        tensor.fill_(3)
        there = self.arrive(views, arena.send(tensor.untyped_storage()))
        del tensor
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                os.write(ready[1], b"x")
                os.read(done[0], 1)
                os._exit(0 if there.tolist() == [3] * 100 else 1)
            finally:
                os._exit(2)
        os.read(ready[0], 1)
        del there
        gc.collect()
        for _ in range(5):
            other = arena.take(100)
            assert other is not None and other.data_ptr() != first
            other.fill_(9)
        os.write(done[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for fd in (*ready, *done):
            os.close(fd)

    def test_where_there_is_none_to_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*args: Any) -> int:
            raise OSError("no memory")

        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", refused)
            assert Arena.make() is None
            patch.setattr(os, "memfd_create", refused)
            assert Arena.make() is None
            patch.delattr(os, "memfd_create")
            assert Arena.make() is None
        assert len(os.listdir("/proc/self/fd")) == before
        monkeypatch.setattr(arena_module, "ARENA_BYTES", 1 << 16)
        small = Arena.make()
        assert small is not None and small.take(1 << 17) is None


Cross = Callable[[Any], Any]


@pytest.fixture(params=[pytest.param("arena", marks=linux), "none"])
def cross(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cross]:
    """What becomes of a value that a worker sends: with an arena, and where there is none."""
    own = Arena(1 << 22) if request.param == "arena" else None
    monkeypatch.setattr(arenasend, "sending", lambda: own)
    monkeypatch.setattr(arenasend, "VIEWS", Views())

    class Pickler(ForkingPickler):
        _extra_reducers: ClassVar[dict[type, Any]] = {
            **ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
            Ragged: arenasend._reduce_ragged,
            **({} if own is None else {torch.Tensor: arenasend._reduce_tensor}),
        }

    yield lambda value: pickle.loads(Pickler.dumps(value))


TENSORS = {
    "few": torch.arange(10),
    "none": torch.zeros(3, 0),
    "scalar": torch.tensor(2.5),
    "many": torch.arange(5000),
    "bfloat16": torch.arange(5000).to(torch.bfloat16),
    "bool": torch.arange(5000) % 3 == 0,
    "complex": torch.arange(5000).to(torch.complex64),
    "conjugated": torch.arange(5000).to(torch.complex64).conj(),
    "transposed": torch.arange(5000).view(50, 100).T,
    "expanded": torch.arange(50).expand(200, 50),
    "a part": torch.arange(50_000)[10_000:20_000:2],
    "uint16": torch.arange(5000).to(torch.uint16),
    "shared": torch.arange(5000).share_memory_(),
    "parameter": torch.nn.Parameter(torch.ones(5000)),
    "sparse": torch.eye(100).to_sparse(),
    "meta": torch.empty(5000, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_are(cross: Cross, name: str) -> None:
    value = TENSORS[name]
    found = cross(value)
    assert type(found) is type(value)
    assert (found.dtype, found.shape, found.requires_grad) == (value.dtype, value.shape, value.requires_grad)
    if name != "meta":
        assert torch.equal(found.to_dense(), value.to_dense())
    if name not in ("meta", "sparse", "expanded", "parameter"):
        found[...] = found.clone()  # writable


def test_one_tensor_twice_and_its_views(cross: Cross) -> None:
    memory = arenasend.shared_bytes(8000)
    whole = memory.view(torch.int64).view(10, 100)
    whole.copy_(torch.arange(1000).view(10, 100))
    value = {"x": whole[:, :-1], "y": whole[:, 1:], "again": whole, **{str(n): whole[n] for n in range(10)}}
    found = cross(value)
    expected = torch.arange(1000).view(10, 100)
    assert torch.equal(found["x"], expected[:, :-1]) and torch.equal(found["y"], expected[:, 1:])
    assert torch.equal(found["again"], expected)
    assert all(torch.equal(found[str(n)], expected[n]) for n in range(10))
    assert found["x"].stride() == (100, 1)


def test_ragged_values_arrive_as_a_list(cross: Cross) -> None:
    values = [
        np.arange(1000, dtype=np.int32),
        np.arange(6000, dtype=np.float64).reshape(60, 100).T,
        np.zeros(0, np.uint8),
        np.float32(1.5).reshape(()) * np.ones(()),
        np.array(["a", None], dtype=object),
        np.arange(20).astype("datetime64[s]"),
        np.zeros(700, dtype=[("a", "u1"), ("b", "f4")]),
        torch.arange(3000).view(30, 100).T,
        torch.ones(3, dtype=torch.bfloat16),
        b"bytes" * 1000,
        b"",
        "text",
        None,
        {"x": 1},
        torch.ones(3000, requires_grad=True),
    ]
    found = cross(Ragged(values))
    assert type(found) is list and len(found) == len(values)
    for a, b in zip(found, values, strict=True):
        assert type(a) is type(b)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b) and a.flags.writeable
        elif isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b)
        else:
            assert a == b
    assert cross(Ragged([b"few", np.ones(3)]))[0] == b"few"
    assert cross(Ragged()) == []
