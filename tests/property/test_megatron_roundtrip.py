"""Random Megatron pairs read back as they were written: by sequence, document and window."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from loader.formats import Megatron
from tests.fault.damage_cases.megatron import pair


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
    st.sampled_from(["uint16", "int32"]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
)
def test_pairs_read_back_equal(
    documents: list[list[int]], dtype: str, length: int, stride: int, with_modes: bool
) -> None:
    lengths = [n for document in documents for n in document]
    bounds = np.cumsum([0, *map(len, documents)]).tolist()
    whole = (np.arange(sum(lengths)) * 7919 % 65000).astype(dtype)
    modes = [k % 3 for k in range(len(lengths))] if with_modes else None
    starts = np.cumsum([0, *lengths]).tolist()
    with tempfile.TemporaryDirectory() as folder:
        for name, data in pair(lengths, bounds, whole, modes).items():
            Path(folder, name).write_bytes(data)
        path = Path(folder, "t.idx")
        samples = list(loader.open_shard(path))
        assert [s["tokens"].tolist() for s in samples] == [whole[a:b].tolist() for a, b in itertools.pairwise(starts)]
        assert all(s["tokens"].dtype == dtype for s in samples)
        if modes is not None:
            assert [int(s["mode"]) for s in samples] == modes
        found = loader.open_shard(path, Megatron(sample="document"))
        assert [s["tokens"].tolist() for s in found] == [
            whole[starts[a] : starts[b]].tolist() for a, b in itertools.pairwise(bounds)
        ]
        windows = loader.open_shard(path, Megatron(length=length, stride=stride))
        fits = [k for k in range(0, len(whole), stride) if k + length <= len(whole)]
        assert [s["tokens"].tolist() for s in windows] == [whole[k : k + length].tolist() for k in fits]
