"""Any state that can be saved comes back equal, types and all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore import Backing, CheckpointStore
from ckptstore.ranks import alone
from ckptstore.testing.model import ModelStore

texts = st.text(st.characters(exclude_categories=[]), max_size=6)
keys = st.one_of(texts, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary(max_size=3))
tensors = st.builds(
    lambda shape, dtype, turned: (
        torch.arange(int(np.prod(shape))).to(dtype).reshape(shape).T
        if turned and len(shape) == 2
        else torch.arange(int(np.prod(shape))).to(dtype).reshape(shape)
    ),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex64]),
    st.booleans(),
)
arrays = st.builds(
    lambda n, dtype: np.arange(n).astype(dtype),
    st.integers(0, 5),
    st.sampled_from(["<f4", ">i2", "<c16", "<M8[s]", "<U3", "|S2"]),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    tensors,
    arrays,
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1, 2]), np.float32(1.5), np.int64(3)]),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=25,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(type(j) is type(k) and j == k and same(x, y) for (j, x), (k, y) in pairs)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or repr(a) == repr(b)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(keys, nodes, max_size=5))
def test_a_state_comes_back(state: dict[Any, Any]) -> None:
    backing = Backing(storage=ModelStore().storage(), meeting=alone())
    with CheckpointStore("unused", backing=backing) as store:
        store.save(1, state)
        assert same(store.load(), state)
        assert store.verify() == []
        assert same(store.load(state), state)
