"""How long the lists of a column are, found from their offsets, piece by piece and without a Python object for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .arrow_pieces import Pieces

Int64s = npt.NDArray[np.int64]


def list_lengths(pieces: Pieces, name: str, url: str) -> Int64s | None:
    """As :meth:`loader.formats.Format.lengths`: of a column of lists of integers, a null as an empty one. ``None`` for
    any other column."""
    wanted = frozenset({name})
    out: list[Int64s] = []
    for number in range(len(pieces)):
        try:
            decoded = pieces.decoded(number, wanted, url)
        except FormatError:
            out.append(np.full(pieces.rows(number), -1))
            continue
        for batch in decoded.batches:
            if name in decoded.bad:
                out.append(np.full(batch.num_rows, -1))
                continue
            place = batch.schema.get_field_index(name)
            found = None if place < 0 else _lengths(batch.column(place))
            if found is None:
                return None
            out.append(found)
    return np.concatenate(out) if out else np.empty(0, np.int64)


def _lengths(column: Any) -> Int64s | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, types = column.type, pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not types.is_integer(kind.value_type):
        return None
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return np.full(len(column), -1)
    if column.flatten().null_count:
        return None
    sizes = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    found: Int64s = np.nan_to_num(sizes, nan=0).astype(np.int64)  # a null has no number
    return found
