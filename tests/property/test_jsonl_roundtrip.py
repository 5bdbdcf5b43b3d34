"""Random objects written by Python's json read back equal, whatever lies between the lines."""

from __future__ import annotations

import bz2
import gzip
import json
from typing import Any
from unittest import mock

import numpy as np
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.formats import Jsonl, jsonl

PACKINGS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress, "bz2": bz2.compress}
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
ROW = st.dictionaries(st.text(max_size=6), VALUE, max_size=5)
ENDS = st.sampled_from(["\n", "\r\n", "\n\n", " \n\t\r\n", "\n" * 70])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(ROW, ENDS), max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from(sorted(PACKINGS)),
    st.integers(1, 400),
)
def test_rows_read_back_equal(rows: list[Any], ascii_only: bool, bom: bool, packing: str, step: int) -> None:
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row, end in rows)
    raw = PACKINGS[packing](text.encode("utf-8-sig" if bom else "utf-8", "surrogatepass"))
    format = Jsonl()
    with mock.patch.object(jsonl, "_STEP", step):
        data = format.unpack(np.frombuffer(bytearray(raw), np.uint8), "u")
        index = format.index(data, "u")
        source = format.source(data, index)
        found = [dict(format.read(source, index, i, "u")) for i in range(len(index))]
        assert [repr(row) for row in found] == [repr(row) for row, _ in rows]  # repr: NaN equals itself, 1 not 1.0
        for name in {name for row, _ in rows for name in row}:
            projected = [dict(format.read(source, index, i, "u", frozenset([name]))) for i in range(len(index))]
            assert repr(projected) == repr([{name: row[name]} if name in row else {} for row, _ in rows])
