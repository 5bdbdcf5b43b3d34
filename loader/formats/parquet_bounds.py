"""What the statistics of a Parquet row group say of its values, and whether a filter can keep any of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """``says``: an Arrow expression that holds for every row of a group; ``schema``: of the file."""

    says: Any
    schema: Any


def bounds_of(footer: Any, names: Collection[str]) -> Bounds | None:
    """What the statistics of the only row group of a footer say of these columns; ``None`` if nothing.

    Only of columns without nulls whose order leaves no doubt: whole numbers, texts, dates and times. Of floating-point
    numbers the least and the greatest say nothing of those that are no numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    schema, group = footer.schema.to_arrow_schema(), footer.row_group(0)
    says: Any = None
    for number in range(group.num_columns):
        column = group.column(number)
        name = column.path_in_schema
        top = name in names and name in schema.names and "." not in name  # else it may be a part of another field
        statistics = column.statistics if top else None
        if statistics is None or not _is_ordered(schema.field(name).type):
            continue
        if not (statistics.has_min_max and statistics.has_null_count and statistics.null_count == 0):
            continue
        kind = schema.field(name).type
        try:
            least, greatest = (pa.scalar(value, kind) for value in (statistics.min, statistics.max))
        except (OverflowError, ValueError):
            continue  # such as a date that Python's do not hold: pyarrow has no other way to give it out
        part = (pc.field(name) >= least) & (pc.field(name) <= greatest)
        says = part if says is None else says & part
    return None if says is None else Bounds(says, schema)


def excludes(bounds: Bounds, expression: Any) -> bool:
    """Whether the expression surely holds for no row of such bounds: asked of Arrow's library, which leaves out files
    of a data set by what is known of each. It is not to be asked of expressions with a NaN, to which Arrow draws wrong
    conclusions (``Parts.comparable``). Nothing is read. An expression that cannot be asked excludes nothing here:
    what is wrong with it is told where it is asked of values."""
    import pyarrow as pa
    from pyarrow import dataset

    format = dataset.ParquetFileFormat()
    fragment = format.make_fragment(pa.BufferReader(b""), partition_expression=bounds.says)
    files = dataset.FileSystemDataset([fragment], bounds.schema, format)
    try:
        return next(iter(files.get_fragments(filter=expression)), None) is None
    except (pa.ArrowException, ValueError, TypeError, KeyError):
        return False


def _is_ordered(kind: Any) -> bool:
    from pyarrow import types

    if types.is_timestamp(kind):
        return bool(kind.unit != "ns")  # which Python's times do not hold
    return bool(
        types.is_signed_integer(kind) or types.is_string(kind) or types.is_large_string(kind) or types.is_date(kind)
    )
