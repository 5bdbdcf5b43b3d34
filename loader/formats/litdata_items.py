"""Reading LitData items: where an item's bytes come from, and how they become a sample."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from cachefs.errors import FormatError

from ..sample import Sample
from .abc import Bytes
from .arrow import Arrow
from .litdata_index import LitIndex
from .packed import unzstd

TOKENS = "tokens"


class Items:
    """The items of one open chunk, by number. Frames that were decompressed are kept: a chunk has few and an epoch
    needs each item of them."""

    def __init__(self, data: Bytes, index: LitIndex) -> None:
        self._data = data
        self._offsets = index.offsets
        self._frames = index.frames
        self._inflated: dict[int, Bytes] = {}
        self._single = index.shape.wrap == "sample"
        self._fields = index.shape.fields()
        self._leaves = index.shape.decoders()
        self._sizes = struct.Struct(f"<{len(self._leaves)}I")
        self._simple = all(field.node.kind == "leaf" for field in self._fields)

    def read(self, i: int, url: str, fields: frozenset[str] | None) -> Sample:
        item, at = self._item(i, url)
        head = self._sizes.size
        if len(item) < head:
            raise FormatError(f"item {i} is too short for the sizes of its values", url=url, offset=at)
        sizes = self._sizes.unpack_from(item.data)
        if head + sum(sizes) != len(item):
            raise FormatError(
                f"the values of item {i} take {head + sum(sizes)} bytes, the item has {len(item)}", url=url, offset=at
            )
        ends = [head]
        for size in sizes:
            ends.append(ends[-1] + size)
        sample = Sample()
        for name, first, node in self._fields:
            if fields is None or name in fields:
                values = [
                    self._value(leaf, item[ends[leaf] : ends[leaf + 1]], name, i, url, at + ends[leaf])
                    for leaf in range(first, first + node.leaves)
                ]
                sample[name] = values[0] if node.kind == "leaf" else node.build(iter(values))
        return sample

    def _value(self, leaf: int, raw: Bytes, name: str, i: int, url: str, at: int) -> Any:
        decoder = self._leaves[leaf]
        if isinstance(decoder, str):
            raise FormatError(f"field {name!r} {decoder}", url=url, offset=at, hint="leave it out with fields=[...]")
        try:
            return decoder.decode(raw)
        except ValueError as e:
            raise FormatError(f"field {name!r} of item {i}: {e}", url=url, offset=at) from e

    def _item(self, i: int, url: str) -> tuple[Bytes, int]:
        """An item's bytes, decompressed, and the byte of the chunk to name in messages."""
        begin, end = self._offsets[i : i + 2].tolist()
        if self._frames is not None:
            return self._framed(i, begin, end, url)
        item = self._data[begin:end]
        if not self._single:
            return item, begin
        try:
            return unzstd(item, url), begin
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
        base = int(self._offsets[first])
        return whole[begin - base : end - base], at


class Rows:
    """The rows of a chunk that stand in Arrow memory, with the values that LitData hands out."""

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
