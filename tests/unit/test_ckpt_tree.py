"""A state taken apart and put together: kinds of values, names, refusals, joining the structures of ranks."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cachefs.errors import CheckpointError, CheckpointMismatch
from ckptstore.bind import Binder
from ckptstore.catalog import Catalog
from ckptstore.manifest import Root
from ckptstore.stateful import RngState, module_entries
from ckptstore.structure import NOTHING, Selector, children, component, join, merge, prune, tensor_names
from ckptstore.tree import MAX_DEPTH, flatten


class Masked(torch.Tensor):
    """A tensor that means more than its numbers."""


def rebuilt(state: dict[Any, Any], *, allow_pickle: bool = False) -> Any:
    """What a state without tensors is after its JSON has been written and read."""
    flat = flatten(state, allow_pickle=allow_pickle)
    assert flat.leaves == ()
    root = Root(step=0, generation=1, attempt="a", world_size=1, created=0.0, parts=())
    catalog = Catalog(root, msgspec.json.decode(flat.structure), {})
    return Binder(catalog, 0, Selector(None), allow_pickle=allow_pickle).bind()


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types all the way down, bit for bit in floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**53,
    2**53 + 1,
    2**70,
    -(2**200),
    1 << 20_000,
    0.0,
    -0.0,
    0.1,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0],
    1.0,
    complex(1, -2),
    complex(math.nan, math.inf),
    "",
    "text",
    "line\nbreak \0 é 😀",
    "lone \ud800 surrogate",
    b"",
    b"\0\xff",
    bytearray(b"mutable"),
    [],
    (),
    {},
    [1, [2, (3, {"a": None})]],
    (1,),
    {"a": 1, "b": {"c": []}},
    {"$tensor": "not a tag"},
    {"$a": 1, "b": 2},
    {0: "int", "0": "text", "#0": "hash"},
    {True: 1, None: 2, 1.5: 3, b"k": 4, 2**70: 5, math.inf: 6},
    {"lone \ud800": 1},
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cpu"),
    torch.device("cuda:3"),
    torch.Size([2, 3]),
    torch.Size([]),
    np.float32(0.1),
    np.float64(0.1),
    np.int8(-3),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.datetime64("2024-02-29T12:00"),
    np.str_("word"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(rebuilt({"value": value}), {"value": value})


def test_an_ordered_dict_keeps_its_order() -> None:
    assert list(rebuilt({"d": OrderedDict([("z", 1), ("a", 2)])})["d"].items()) == [("z", 1), ("a", 2)]


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        Colour.RED,
        namedtuple("Point", "x y")(1, 2),
        defaultdict(list),
        lambda: 0,
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.ma.MaskedArray([1, 2], mask=[0, 1]),
        torch.zeros(2).as_subclass(Masked),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.nn.parameter.UninitializedParameter(),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_saved_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(CheckpointMismatch, match=r"'outer/#1/inner'"):
        flatten({"outer": [0, {"inner": value}]})


def test_a_key_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="'outer' has a key"):
        flatten({"outer": {(1, 2): 3}})


def test_a_state_is_a_dict() -> None:
    with pytest.raises(CheckpointMismatch, match="a state is a dict, not list"):
        flatten([1])  # type: ignore[arg-type]


def test_pickle_only_when_asked_for_on_both_sides() -> None:
    state = {"path": Path("a/b")}
    with pytest.raises(CheckpointMismatch, match="allow_pickle"):
        flatten(state)
    assert rebuilt(state, allow_pickle=True) == state
    catalog_of = flatten(state, allow_pickle=True)
    root = Root(step=0, generation=1, attempt="a", world_size=1, created=0.0, parts=())
    binder = Binder(Catalog(root, msgspec.json.decode(catalog_of.structure), {}), 0, Selector(None))
    with pytest.raises(CheckpointMismatch, match="'path' is a pickled object"):
        binder.bind()
    with pytest.raises(CheckpointMismatch, match="cannot be pickled"):
        flatten({"f": lambda: 0}, allow_pickle=True)


def test_a_state_that_contains_itself_or_is_too_deep_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(CheckpointMismatch, match="contains itself"):
        flatten(loop)
    deep: Any = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(CheckpointMismatch, match="deep"):
        flatten({"deep": deep})
    shared = [1]
    assert rebuilt({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_an_unknown_tag_is_an_error() -> None:
    root = Root(step=0, generation=1, attempt="a", world_size=1, created=0.0, parts=())
    for node in ({"$new": 1}, {"$dtype": "nothing"}):
        with pytest.raises(CheckpointError):
            Binder(Catalog(root, {"x": node}, {}), 0, Selector(None)).bind()


def test_names() -> None:
    tensor = torch.zeros(1)
    state = {
        "model": {"layer.weight": tensor},
        0: tensor,
        "0": [tensor],
        "a/b": tensor,
        "a": {"b": tensor},
        "#0": tensor,
        "%2F": tensor,
        "": tensor,
        "__metadata__": tensor,
        "nul\0": tensor,
        "😀": tensor,
        "\ud800": tensor,
    }
    names = [leaf.name for leaf in flatten(state).leaves]
    assert names == [
        "model/layer.weight",
        "#0",
        "0/#0",
        "a%2Fb",
        "a/b",
        "%230",
        "%252F",
        "%empty",
        "%5F_metadata__",
        "nul%00",
        "😀",
        "%ED%A0%80",
    ]
    assert list(tensor_names(msgspec.json.decode(flatten(state).structure))) == names


def test_the_structure_names_what_flatten_names() -> None:
    state = {
        "a": {0: [1, {"b/": (2,)}], "\ud800": 3, b"k": 4, None: 5, 1.5: 6, 2**70: 7, math.nan: 8},
        "__metadata__": 9,
    }

    def names(node: Any, path: str) -> list[str]:
        return [n for c in children(node, path) or () for n in names(c.node, c.name)] or [path]

    plain = names(msgspec.json.decode(flatten(state).structure), "")
    assert len(set(plain)) == len(plain)
    assert plain[:2] == ["a/#0/#0", "a/#0/#1/b%2F/#0"]
    for key, name in ((0, "a/#0"), ("\ud800", "a/%ED%A0%80"), (None, "a/#null")):
        leaf = flatten({"a": {key: torch.zeros(1)}}).leaves[0]
        assert leaf.name == name


def test_component_and_join() -> None:
    assert join("", "__metadata__") == "%5F_metadata__"
    assert join("a", "__metadata__") == "a/__metadata__"
    assert component(1) != component("1") != component(True)
    assert component(True) == "#true" and component(None) == "#null"


def test_a_selector_takes_names_globs_and_what_is_below() -> None:
    pick = Selector(["model", "optim/*/step"])
    assert pick("model") and pick("model/a/b") and pick("optim/state/#0/step")
    assert not pick("model2") and not pick("optim/state/#0/exp_avg") and not pick("step")
    assert Selector(None).all and Selector(None)("anything")
    assert not Selector(())("anything")


def test_prune_keeps_places_in_sequences() -> None:
    node = {"a": [1, {"b": 2}, 3], "c": {"d": 4}}
    assert prune(node, Selector("a/#1")) == {"a": [None, {"b": 2}, None]}
    assert prune(node, Selector("c")) == {"c": {"d": 4}}
    assert prune(node, Selector("nothing")) is NOTHING


def test_merge_joins_dicts_and_reports_what_differs() -> None:
    nodes = [((0, 1), {"a": 1, "only0": [1], "t": {"$tuple": [1, 2]}}), ((2,), {"a": 1, "t": {"$tuple": [1, 3]}})]
    merged = merge(nodes, lambda name: False)
    assert merged.conflicts == [("t/#1", [(0, 1), (2,)])]
    merged = merge(nodes, lambda name: name.startswith("t"))
    assert merged.conflicts == []
    assert merged.node == {
        "a": 1,
        "only0": [1],
        "t": {"$tuple": [1, {"$ranks": [[[0, 1], 2], [[2], 3]]}]},
    }


def test_merge_tells_types_apart() -> None:
    for left, right in ((1, 1.0), (1, True), ([1], {"$tuple": [1]}), ([1], [1, 2]), ({"a": 1}, [1])):
        assert merge([((0,), {"x": left}), ((1,), {"x": right})], lambda name: False).conflicts


def test_wrappers_leave_no_trace_in_a_modules_names() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(torch.nn.Linear(2, 2))
            self.module = torch.nn.Linear(2, 2)

    names = [e.name for e in module_entries(Wrapped())]
    assert names == ["inner.weight", "inner.bias", "module.weight", "module.bias"]
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert [e.name for e in module_entries(compiled)] == ["0.weight", "0.bias"]
    parallel = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert [e.name for e in module_entries(parallel)] == ["0.weight", "0.bias"]


def test_rng_state_takes_all_generators_back() -> None:
    import random

    rng = RngState()
    saved = rng.state_dict()
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    rng.load_state_dict(saved)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
