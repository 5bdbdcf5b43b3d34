"""A shard as pieces (row groups, record batches) that are decoded when a row of theirs is read, and kept while read.

Both Parquet and Arrow shards read through :class:`Pieces`: it knows which piece a row lies in, holds the decoded pieces
that were used last up to a number of bytes, and gives a row as a sample or many rows as columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from ..grouping import grouped
from ..sample import Sample
from .abc import Damage
from .arrow_cells import cells_of
from .arrow_flat import Cells, Get, bytes_of_texts
from .arrow_weight import check_weight
from .parquet_bounds import Bounds

Int64s: TypeAlias = npt.NDArray[np.int64]
Fields: TypeAlias = frozenset[str] | None

KEPT = 256 << 20
"""Bytes of decoded pieces kept for one open shard; the piece that is being read always is."""


class Decoded(NamedTuple):
    """One piece in memory: its record batches in order, and the memory that they take besides the map.

    ``bad``: columns that could not be decoded, and why.
    """

    batches: Sequence[Any]
    private: int
    bad: Mapping[str, Damage] = MappingProxyType({})


def nothing(rows: int) -> Any:
    """A record batch of so many rows and no column."""
    import pyarrow as pa

    return pa.record_batch([pa.nulls(rows)], names=[""]).select([])


Decode: TypeAlias = Callable[[int, Fields, str], Decoded]
"""``decode(piece, fields, url)``. Raises ``FormatError`` for one that is damaged."""


_OBJECT = 64
"""Bytes of a text or number as a Python object, beyond its value; an array takes more, and one of a nested column."""


class Window:
    """Neighbouring rows ``first <= row < last`` of the shard whose columns lie in one record batch."""

    __slots__ = ("_cells", "_offset", "fields", "first", "gets", "last", "row_bytes")

    def __init__(self, batch: Any, first: int, fields: Fields, offset: int, bad: Mapping[str, Damage]) -> None:
        self._offset = offset
        self.first = first
        self.last = first + batch.num_rows
        self.fields = fields
        self._cells: list[tuple[str, Cells]] = []
        self.row_bytes = 0
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if fields is None or name in fields:
                cells, row_bytes = _checked_cells(column, offset)
                self._cells.append((name, cells))
                self.row_bytes += row_bytes
        self._cells += [(name, _refusing(damage)) for name, damage in bad.items()]
        self.gets: list[tuple[str, Get]] = [(name, cells.get) for name, cells in self._cells]

    def columns(self, rows: Int64s, run: bool, url: str) -> dict[str, Any]:
        """These rows (numbers in the shard) of every column. ``run``: whether they are neighbours in order."""
        n = len(rows)
        first = int(rows[0]) - self.first
        places: Any = slice(first, first + n) if run else rows - self.first
        within: Int64s | None = None if run else places
        out: dict[str, Any] = {}
        for name, cells in self._cells:
            values = cells.array if cells.array is not None else cells.stacked
            if values is not None:
                out[name] = values[places] if run else values.take(places, axis=0)
                continue
            try:
                if run and cells.span is not None:
                    out[name] = cells.span(places.start, places.stop)
                    continue
                if within is None:
                    within = rows - self.first
                out[name] = cells.many(within) if cells.many is not None else list(map(cells.get, within.tolist()))
            except ValueError as e:
                raise self.damaged(f"column {name!r} of samples {rows.min()} to {rows.max()}", e, url) from e
        return out

    def damaged(self, which: str, error: ValueError, url: str) -> FormatError:
        """What a getter's ``ValueError`` means."""
        damage = error.damage if isinstance(error, _Refused) else Damage(str(error), self._offset)
        return FormatError(f"{which}: {damage.what}", url=url, offset=damage.offset, hint=damage.hint)


class Pieces:
    """One open shard. ``starts``: the number of each piece's first row, and at the end that of all rows."""

    def __init__(
        self,
        starts: Int64s,
        decode: Decode,
        offsets: Int64s,
        kept: int = KEPT,
        bounds: Callable[[int, Fields], Bounds | None] | None = None,
    ) -> None:
        self._starts: list[int] = starts.tolist()
        self._behind = starts[1:]
        self._decode = decode
        self._of_bounds = bounds
        self._offsets = offsets
        self._kept = kept
        self._held: OrderedDict[tuple[int, Fields], tuple[list[Window], int]] = OrderedDict()
        self._bytes = 0
        self._failed: dict[tuple[int, Fields], FormatError] = {}
        self._now: Window | None = None

    def read(self, i: int, fields: Fields, url: str) -> Sample:
        """Row ``i`` as a sample."""
        window = self._now
        if window is None or not window.first <= i < window.last or window.fields is not fields:
            window = self._now = self._find(i, fields, url)
        row = i - window.first
        sample = Sample()
        name = ""
        try:
            for name, get in window.gets:
                sample[name] = get(row)
        except ValueError as e:
            raise window.damaged(f"column {name!r} of sample {i}", e, url) from e
        return sample

    def columns(self, rows: Int64s, fields: Fields, url: str) -> dict[str, Any]:
        """Many rows, column by column: arrays where all of them have no null and one shape, else lists."""
        n = len(rows)
        if n == 0:
            return {}
        first, last = int(rows[0]), int(rows[-1])
        run = last - first == n - 1 and bool((rows[1:] > rows[:-1]).all())
        if run:
            window = self._now
            if window is None or not window.first <= first < window.last or window.fields is not fields:
                window = self._now = self._find(first, fields, url)
            if last < window.last:
                return window.columns(rows, True, url)
            return self._in_order(rows, fields, url)
        pieces = np.searchsorted(self._behind, rows, "right")  # an empty piece starts where the next one does
        return _apart(rows, pieces, lambda piece, some: self._of_piece(piece, some, fields, url))

    def row_bytes(self, rows: Int64s, fields: Fields, url: str) -> int:
        """About the bytes that a row takes once it is read, where the first and the last of these rows lie."""
        return max(self._find(int(rows[at]), fields, url).row_bytes for at in (0, -1)) if len(rows) else 0

    def _of_piece(self, piece: int, rows: Int64s, fields: Fields, url: str) -> dict[str, Any]:
        windows = self._windows(piece, fields, url)
        which = np.searchsorted([window.first for window in windows[1:]], rows, "right")
        return _apart(rows, which, lambda window, some: windows[window].columns(some, False, url))

    def _in_order(self, rows: Int64s, fields: Fields, url: str) -> dict[str, Any]:
        """Neighbouring rows of several windows."""
        parts: list[dict[str, Any]] = []
        at = 0
        while at < len(rows):
            window = self._find(int(rows[at]), fields, url)
            end = int(np.searchsorted(rows, window.last))
            parts.append(window.columns(rows[at:end], True, url))
            at = end
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    def _find(self, i: int, fields: Fields, url: str) -> Window:
        number = bisect_right(self._starts, i) - 1  # an empty piece starts where the next one does
        windows = self._windows(number, fields, url)
        if len(windows) == 1:
            return windows[0]
        return windows[bisect_right(windows, i, key=lambda window: window.first) - 1]

    def _windows(self, number: int, fields: Fields, url: str) -> list[Window]:
        key = (number, fields)
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            return held[0]
        if key in self._failed:
            raise self._failed[key].with_traceback(None)  # else each raise would add to the one before
        try:
            windows, size = self._opened(number, fields, url)
        except FormatError as e:
            self._failed[key] = e
            raise
        self._held[key] = (windows, size)
        self._bytes += size
        while self._bytes > self._kept and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1][1]
        return windows

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._starts) - 1

    def rows(self, number: int) -> int:
        """How many rows a piece has."""
        return self._starts[number + 1] - self._starts[number]

    def offset(self, number: int) -> int:
        """Where a piece begins, in bytes."""
        return int(self._offsets[number])

    def bounds(self, number: int, fields: Fields) -> Bounds | None:
        """What is known of a piece's values without decoding it; ``None`` if nothing."""
        return None if self._of_bounds is None else self._of_bounds(number, fields)

    def decoded(self, number: int, fields: Fields, url: str) -> Decoded:
        """One piece, for the caller alone; its values are not checked. Raises ``FormatError`` for a damaged one."""
        decoded = self._decode(number, fields, url)
        found, wanted = sum(batch.num_rows for batch in decoded.batches), self.rows(number)
        if found != wanted:
            text = f"holds {found} samples where {wanted} are declared"
            raise FormatError(text, url=url, offset=self.offset(number))
        return decoded

    def _opened(self, number: int, fields: Fields, url: str) -> tuple[list[Window], int]:
        decoded = self.decoded(number, fields, url)
        first = self._starts[number]
        windows = []
        for batch in decoded.batches:
            if batch.num_rows:
                windows.append(Window(batch, first, fields, self.offset(number), decoded.bad))
                first += batch.num_rows
        return windows, decoded.private + 500 * len(windows) + self.rows(number)


def _apart(rows: Int64s, keys: Int64s, read: Callable[[int, Int64s], dict[str, Any]]) -> dict[str, Any]:
    """Rows that are read key by key, in their order again."""
    first = int(keys[0])
    if (keys == first).all():
        return read(first, rows)
    order, groups = found = grouped(keys)
    ordered = rows[order]
    parts = [read(key, ordered[start:end]) for key, start, end in groups]
    back = found.back
    return {name: _taken(_joined([part[name] for part in parts]), back) for name in parts[0]}


def _joined(parts: list[Any]) -> Any:
    """A column's parts behind each other."""
    if all(isinstance(part, np.ndarray) for part in parts) and len({(p.dtype, p.shape[1:]) for p in parts}) == 1:
        return np.concatenate(parts)
    return [value for part in parts for value in part]


def _taken(values: Any, order: Int64s) -> Any:
    return values[order] if isinstance(values, np.ndarray) else [values[at] for at in order.tolist()]


class _Refused(ValueError):
    """A cell of a column that cannot be read."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage.what)
        self.damage = damage


def _refusing(damage: Damage) -> Cells:
    def refuse(i: int) -> Any:
        raise _Refused(damage)

    return Cells(refuse)


def _checked_cells(column: Any, offset: int) -> tuple[Cells, int]:
    """The cells of a column that pyarrow has found sound, or cells that all raise ``ValueError``; and about what one
    takes once it is read."""
    import pyarrow as pa

    try:
        # A text that is no UTF-8 harms its own sample only, which raises when it is made; whatever else is wrong makes
        # the bytes invalid too.
        stored = bytes_of_texts(column.type)
        (column if stored is None else column.view(stored)).validate(full=True)
        check_weight(column)
        cells = cells_of(column)
        return cells, _cell_bytes(cells, column)
    except MemoryError:  # Arrow's is one of its own errors too, and says nothing of the column
        raise
    except (ValueError, pa.ArrowException) as e:
        return _refusing(Damage(str(e), offset, "leave it out with fields=[...]")), 0


def _cell_bytes(cells: Cells, column: Any) -> int:
    values = cells.array if cells.array is not None else cells.stacked
    if values is not None:
        return values.nbytes // len(column)
    stored = int(column.nbytes) // len(column)
    if bytes_of_texts(column.type) is not None:
        return stored + _OBJECT
    return 8 * stored + 4 * _OBJECT
