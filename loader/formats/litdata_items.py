"""Reading LitData items: where an item's bytes come from, and how they become a sample."""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from cachefs.errors import FormatError

from ..sample import Sample
from .abc import Bytes
from .arrow import Arrow
from .litdata_index import LitIndex
from .litdata_leaves import RefusedLeaf
from .litdata_tree import LEAF
from .packed import MOST, unzstd

TOKENS = "tokens"
_FREE = 256 << 20
_RATIO = 1 << 10
"""Bytes that one compressed item may become, however few it has, and times that it may grow: nothing says its size."""


class Items:
    """The items of one open chunk, by number. Frames that were decompressed are kept: a chunk has few and an epoch
    needs each item of them."""

    def __init__(self, data: Bytes, index: LitIndex) -> None:
        self._data = data
        self._offsets = index.offsets.data
        self._frames = index.frames
        self._inflated: dict[int, Bytes] = {}
        self.stateful = index.frames is not None
        self._single = index.shape.wrap == "sample"
        self._fields = index.shape.fields()
        self._leaves = index.shape.decoders()
        self._sizes = struct.Struct(f"<{len(self._leaves)}I")

    def read(self, i: int, url: str, fields: frozenset[str] | None) -> Sample:
        item, at = self._item(i, url)
        head = self._sizes.size
        if len(item) < head:
            raise FormatError(f"item {i} is too short for the sizes of its values", url=url, offset=at)
        ends = [*accumulate(self._sizes.unpack_from(item.data), initial=head)]
        if ends[-1] != len(item):
            raise FormatError(
                f"the values of item {i} take {ends[-1]} bytes, the item has {len(item)}", url=url, offset=at
            )
        sample = Sample()
        leaf = 0
        try:
            for name, first, node in self._fields:
                if fields is None or name in fields:
                    leaf = first
                    if node is LEAF:
                        sample[name] = self._leaves[leaf].decode(item[ends[leaf] : ends[leaf + 1]])
                        continue
                    values = []
                    for leaf in range(first, first + node.leaves):
                        values.append(self._leaves[leaf].decode(item[ends[leaf] : ends[leaf + 1]]))
                    sample[name] = node.build(iter(values))
        except RefusedLeaf as e:
            hint = "leave it out with fields=[...]"
            raise FormatError(f"field {name!r} {e}", url=url, offset=at + ends[leaf], hint=hint) from None
        except ValueError as e:
            raise FormatError(f"field {name!r} of item {i}: {e}", url=url, offset=at + ends[leaf]) from e
        return sample

    def _item(self, i: int, url: str) -> tuple[Bytes, int]:
        """An item's bytes, decompressed, and the byte of the chunk to name in messages."""
        begin, end = self._offsets[i], self._offsets[i + 1]
        if self._frames is not None:
            return self._framed(i, begin, end, url)
        item = self._data[begin:end]
        if not self._single:
            return item, begin
        try:
            return unzstd(item, url, most=min(max(_RATIO * len(item), _FREE), MOST)), begin
        except FormatError as e:
            raise FormatError(f"item {i}: {e.what}", url=url, offset=begin) from e

    def _framed(self, i: int, begin: int, end: int, url: str) -> tuple[Bytes, int]:
        assert self._frames is not None  # the caller saw it
        number = int(np.searchsorted(self._frames["first"], i, "right")) - 1
        first, _, at, packed, size = self._frames[number].item()
        whole = self._inflated.get(number)
        if whole is None:
            try:
                whole = self._inflated[number] = unzstd(self._data[at : at + packed], url, size)
            except FormatError as e:
                raise FormatError(f"item {i} is in a damaged frame: {e.what}", url=url, offset=at) from e
        base = self._offsets[first]
        return whole[begin - base : end - base], at


class Rows:
    """The rows of a chunk that stand in Arrow memory, with the values that LitData hands out."""

    stateful: ClassVar[bool] = True

    def __init__(self, data: Bytes, index: LitIndex) -> None:
        assert index.rows is not None  # the caller saw it
        self._at = index.rows_at
        self._index = index.rows
        self._pieces = Arrow().source(data[self._at :], index.rows)

    def read(self, i: int, url: str, fields: frozenset[str] | None) -> Sample:
        try:
            sample = self._pieces.read(i, fields, url)
        except FormatError as e:
            offset = None if e.offset is None else e.offset + self._at
            raise FormatError(e.what, url=url, offset=offset, hint=e.hint) from e
        for name, value in sample.items():
            if not isinstance(value, str):
                sample[name] = _plain(value)
        return sample


def _plain(value: Any) -> Any:
    """Python's own values, as the same rows have where they stand in items; bytes stay a view."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value if value.dtype == np.uint8 else value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


class TokenRows:
    """A chunk of tokens: windows of ``block`` tokens, or all of them as one sample. Values are views."""

    stateful: ClassVar[bool] = False

    def __init__(self, data: Bytes, index: LitIndex) -> None:
        begin, end = index.offsets[[0, -1]].tolist()
        tokens = data[begin:end].view(index.dtype)
        count = len(index)
        self._name = index.shape.names[0] if index.shape.names else TOKENS
        self._rows = tokens[: count * index.block].reshape(count, index.block) if index.block else tokens.reshape(1, -1)

    def read(self, i: int, url: str, fields: frozenset[str] | None) -> Sample:
        sample = Sample()
        if fields is None or self._name in fields:
            sample[self._name] = self._rows[i]
        return sample
