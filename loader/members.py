"""Batches of tar samples, field by field: what ``collate`` makes of the same samples, without an object for each.

A sample whose bytes are views costs nothing but Python, so what is done for each counts: here one lookup of how its
members are laid out, one slice a field and its key. Where the samples of a batch are not all laid out alike, or one of
them is damaged, there is no short way, and whoever goes the long one finds out what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .collation import collate_values
from .formats import Format, WebDataset
from .formats.where import stored_in, unfiltered
from .sample import FoldedBatch, Stamp
from .samples import ID, REPEAT, Places, Recipe, SampleReader

KEY = "__key__"
Layout = tuple[tuple[int, str], ...]
"""The fields of a sample: which of its members each is, and its name."""


def reads_members(format: Format, recipe: Recipe) -> bool:
    """Whether nothing is asked for that needs samples one by one."""
    return isinstance(unfiltered(format), WebDataset) and recipe.transform is None and recipe.on_error == "raise"


class MemberGather:
    """Batches of tar samples. Any number of threads may call it, if the reader's pool is one for them."""

    def __init__(self, reader: SampleReader) -> None:
        self._pool = reader.pool
        self._recipe = reader.recipe
        self._layouts: dict[int, dict[bytes, Layout]] = {}  # by shard and the numbers of the members' names

    def batch(self, stamp: Stamp, places: Places) -> FoldedBatch | None:
        """One batch; ``None`` where the samples have to be looked at one by one."""
        if places.repeat is not None and places.repeat.any():
            return None
        numbers, rows = places.shard.tolist(), places.row.tolist()
        columns = self._columns(numbers, rows)
        if columns is None:
            return None
        # what decodes a field of a tar is told by its name, so it is the same for all shards
        decode, first = self._recipe.decode, self._pool.get(numbers[0])
        batch = FoldedBatch()
        for name, values in columns.items():
            decoder = decode.decoder(name, first)
            if name == KEY:
                batch[name] = values
            elif decoder is not None:
                batch[name] = collate_values(self._decoded(decoder, name, values, numbers, rows))
            elif len(set(map(len, values))) == 1:
                batch[name] = collate_values(values)
            else:
                batch[name] = values  # arrays of bytes that differ in length
        batch.stamp = stamp
        if self._recipe.ids:
            batch[ID] = torch.from_numpy(places.ids)
        if self._recipe.repeats:
            batch[REPEAT] = torch.from_numpy(np.zeros(len(rows), np.bool_))
        return batch

    def _columns(self, numbers: list[int], rows: list[int]) -> dict[str, list[Any]] | None:
        """The values of each field; ``None`` unless all samples have the same ones, undamaged and laid out alike."""
        shards: dict[int, Any] = {}
        keys: list[Any] = []
        common: Layout | None = None
        fields: list[tuple[int, list[Any]]] = []
        for number, i in zip(numbers, rows, strict=True):
            opened = shards.get(number)
            if opened is None:
                shard = self._pool.get(number)
                index, kept, damaged = stored_in(shard.index)
                if damaged and any(at in damaged for at, of in zip(rows, numbers, strict=True) if of == number):
                    return None
                layouts = self._layouts.setdefault(number, {})
                opened = shards[number] = (shard.source, index, index.starts, index.sizes, index.names, layouts, kept)
            source, index, starts, sizes, names, layouts, kept = opened
            if kept is not None:
                i = int(kept[i])
            begin, end = index.first[i], index.first[i + 1]
            code = names[begin:end].tobytes()
            layout = layouts.get(code)
            if layout is None:
                layout = layouts[code] = self._layout([index.fields[name] for name in names[begin:end]])
            if layout is not common:
                if common is None:
                    common = layout
                    fields = [(member, []) for member, _ in layout]
                elif layout != common:
                    return None
            if index.damaged and i in index.damaged:
                return None
            keys.append(index.key(i))
            for member, values in fields:
                start = starts[begin + member]
                values.append(source[start : start + sizes[begin + member]])
        assert common is not None
        names_found = [name for _, name in common]
        if any(name != KEY and name not in names_found for name in self._recipe.fields or ()):
            return None
        return {KEY: keys, **{name: values for name, (_, values) in zip(names_found, fields, strict=True)}}

    def _layout(self, names: list[str]) -> Layout:
        wanted = self._recipe.wanted
        return tuple((member, name) for member, name in enumerate(names) if wanted is None or name in wanted)

    def _decoded(
        self, decoder: Callable[[Any], Any], name: str, values: list[Any], numbers: list[int], rows: list[int]
    ) -> list[Any]:
        decode, get = self._recipe.decode, self._pool.get
        if decode.common:
            with suppress(
                Exception
            ):  # an image library raises what it likes; one by one it is told which sample it was
                return [decoder(value) for value in values]
        return [
            decode.value(decoder, value, name, get(number), i)
            for value, number, i in zip(values, numbers, rows, strict=True)
        ]
