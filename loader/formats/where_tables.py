"""Arrow expressions asked of samples: of the columns of Parquet and Arrow shards, or of columns made for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, DataError, FormatError, MissingField

from .abc import Damage
from .arrow_pieces import Pieces
from .parquet_bounds import excludes
from .where_expression import Expression, parts_of

Mask: TypeAlias = npt.NDArray[np.bool_]

_SCALARS = (bool, int, float, str, bytes, np.generic, type(None))


def keeps(expression: Expression, columns: Mapping[str, Any], rows: int, url: str, which: str) -> Mask:
    """Of each of ``rows`` samples, whether the expression holds: of columns that are arrays or lists of scalars.

    Raises ``MissingField`` where it names another column, ``ConfigError`` where it cannot be evaluated of these.
    """
    import pyarrow as pa

    table = {}
    for name, values in columns.items():
        _check_scalars(name, values, url)
        try:
            table[name] = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
            raise ConfigError(
                f"field {name!r} of {which} is nothing that an Arrow expression can be asked of: {_line(e)}",
                url=url,
                hint="use a function: loader.Where(function, fields=[...])",
            ) from e
    return _evaluated(expression, pa.table(table), rows, url, which)


def _check_scalars(name: str, values: Any, url: str) -> None:
    if isinstance(values, np.ndarray):
        if values.ndim == 1:
            return
        kind = f"an array of shape {values.shape[1:]}"
    else:
        other = next((value for value in values if not isinstance(value, _SCALARS)), None)
        if other is None:
            return
        kind = f"a {type(other).__name__}"
    raise ConfigError(
        f"field {name!r} is {kind}, an Arrow expression can be asked of numbers and texts alone",
        url=url,
        hint="use a function: loader.Where(function, fields=[...])",
    )


def keeps_pieces(
    expression: Expression, fields: Sequence[str] | None, source: Pieces, names: Sequence[str], url: str
) -> tuple[Mask, dict[int, Damage]]:
    """The same of a whole shard, piece by piece, of its columns as they are stored; and the samples, by number, that
    it cannot be asked of. ``fields``: the columns that it reads, else those that the expression names."""
    parts = parts_of(expression)
    wanted = frozenset(parts.fields if fields is None else fields)
    absent = sorted(wanted.difference(names))
    if absent:
        raise MissingField(
            f"the filter {expression} reads a field that is not there: {absent[0]}",
            url=url,
            hint=f"fields present: {', '.join(names) or 'none'}",
        )
    kept: list[Mask] = []
    damaged: dict[int, Damage] = {}
    first = 0
    for number in range(len(source)):
        rows, offset = source.rows(number), source.offset(number)
        bounds = source.bounds(number, wanted) if rows and parts.comparable else None
        if rows == 0 or (bounds is not None and excludes(bounds, expression)):
            kept.append(np.zeros(rows, np.bool_))
            first += rows
            continue
        try:
            decoded = source.decoded(number, wanted, url)
        except FormatError as e:
            bad: Damage | None = Damage(e.what, e.offset or offset, e.hint)
        else:
            bad = next(iter(decoded.bad.values()), None)
        if bad is not None:
            damaged |= dict.fromkeys(range(first, first + rows), bad)
            kept.append(np.zeros(rows, np.bool_))
            first += rows
            continue
        for batch in decoded.batches:
            if batch.num_rows:
                mask, harmed = _of_batch(expression, batch, offset, url, f"samples from {first}")
                kept.append(mask)
                damaged |= {first + i: damage for i, damage in harmed.items()}
                first += batch.num_rows
    return np.concatenate(kept) if kept else np.zeros(0, np.bool_), damaged


def _of_batch(expression: Expression, batch: Any, offset: int, url: str, which: str) -> tuple[Mask, dict[int, Damage]]:
    """One record batch, whose bytes may be damaged: nothing is computed of a column that pyarrow finds unsound."""
    import pyarrow as pa

    damaged: dict[int, Damage] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        damaged |= {i: Damage(f"column {name!r}: {what}", offset) for i, what in _unsound(column).items()}
    kept = np.zeros(batch.num_rows, np.bool_)
    if len(damaged) == batch.num_rows:
        return kept, damaged
    if damaged:
        good = np.array([i for i in range(batch.num_rows) if i not in damaged], dtype=np.int64)
        batch = batch.take(pa.array(good))
        kept[good] = _evaluated(expression, pa.Table.from_batches([batch]), len(good), url, which)
    else:
        kept = _evaluated(expression, pa.Table.from_batches([batch]), len(kept), url, which)
    return kept, damaged


def _unsound(column: Any) -> dict[int, str]:
    """The rows of a column that nothing can be computed of, and why: all of them, unless only texts are no UTF-8."""
    import pyarrow as pa

    try:
        column.validate(full=True)
        return {}
    except pa.ArrowInvalid as e:
        what = _line(e)
    everything = dict.fromkeys(range(len(column)), what)
    large = pa.types.is_large_string(column.type)
    if not (large or pa.types.is_string(column.type)):
        return everything
    raw = column.view(pa.large_binary() if large else pa.binary())
    try:
        raw.validate(full=True)
    except pa.ArrowInvalid:
        return everything
    return {i: what for i, value in enumerate(raw) if not _is_text(value.as_py())}


def _is_text(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def _evaluated(expression: Expression, table: Any, rows: int, url: str, which: str) -> Mask:
    import pyarrow as pa
    from pyarrow import acero

    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
            acero.Declaration("project", acero.ProjectNodeOptions([expression], ["kept"])),
        ]
    )
    try:
        column = plan.to_table(use_threads=False).column(0)
    except MemoryError:
        raise
    except (pa.ArrowException, ValueError, TypeError, KeyError) as e:
        raise _refusal(expression, table.schema, e, url, which) from e
    if not pa.types.is_boolean(column.type):
        raise ConfigError(f"the filter {expression} gives {column.type}, not whether a sample is kept", url=url)
    mask: Mask = column.fill_null(False).to_numpy().astype(np.bool_)
    if len(mask) != rows:
        raise ConfigError(f"the filter {expression} gives {len(mask)} values for {rows} samples", url=url)
    return mask


def _refusal(expression: Expression, schema: Any, e: Exception, url: str, which: str) -> DataError | ConfigError:
    if "No match for FieldRef" in str(e):
        return MissingField(
            f"the filter {expression} reads a field that is not there: {_line(e)}",
            url=url,
            hint=f"fields that it was given: {', '.join(schema.names)}; name all that it reads: Where(fields=[...])",
        )
    unsigned = "uint64" in map(str, schema.types) and "not in range" in str(e)  # they are compared as signed ones
    return ConfigError(
        f"the filter {expression} cannot be asked of {which}: {_line(e)}",
        url=url,
        hint="compare a column of uint64 with pa.scalar(value, pa.uint64())" if unsigned else None,
    )


def _line(e: BaseException) -> str:
    return str(e).partition("\n")[0]
