"""Writes segments that the safetensors library reads, as a stream: a header, then the bytes as they lie in memory.

Format (https://github.com/huggingface/safetensors, "Format"): the header's length in 8 bytes, little-endian; a header,
JSON ``{"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}`` padded with spaces;
then the data, without holes. The header depends on names, types and shapes only, so it is known before any data is
written and every byte's place in the file follows from it (:func:`layout`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from cachefs.errors import CheckpointError

from .dtypes import itemsize, safetensors_code

ALIGNMENT = 64
"""The data begins at a multiple of this; with tensors ordered by element size every one of them is aligned."""

MAX_HEADER = 100_000_000
"""Readers refuse a longer header."""

RESERVED = "__metadata__"


class Slot(NamedTuple):
    """One tensor of a segment; ``dtype`` as :mod:`.dtypes` names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """A segment's first bytes, where each slot's data then begins (from the file's start), and the file's size."""

    header: bytes
    starts: tuple[int, ...]
    size: int


def layout(slots: Sequence[Slot], metadata: Mapping[str, object] | None = None) -> Layout:
    """Lay out a segment whose data follows in the order of ``slots``.

    ``metadata`` values become text. Raises :class:`CheckpointError` for a name that is used twice or that the format
    reserves, and for a header that readers would refuse.
    """
    table: dict[str, object] = {}
    if metadata:
        table[RESERVED] = {key: value if isinstance(value, str) else str(value) for key, value in metadata.items()}
    position = 0
    begins = []
    for slot in slots:
        if slot.name == RESERVED or slot.name in table:
            why = "reserved by the format" if slot.name == RESERVED else "there twice"
            raise CheckpointError(f"a tensor cannot be called {slot.name!r} in a safetensors file: {why}")
        begins.append(position)
        end = position + math.prod(slot.shape) * itemsize(slot.dtype)
        code = safetensors_code(slot.dtype)
        shape = slot.shape if code else (*slot.shape, itemsize(slot.dtype))
        table[slot.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": (position, end)}
        position = end
    text = msgspec.json.encode(table)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"a safetensors header of {len(text)} bytes for {len(slots)} tensors is too long")
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, tuple(len(header) + b for b in begins), len(header) + position)
