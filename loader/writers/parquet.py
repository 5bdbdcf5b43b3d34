"""Parquet files, written with pyarrow. See :mod:`.parquet_columns` for what a value becomes.

A file is closed once it has the size that is asked for, counted as the values are (before encoding); row groups hold a
quarter of that, at most 16 MiB, so that a reader that wants few rows reads little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from cachefs.errors import ConfigError

from .abc import Placed, Writer, column_names, payload
from .parquet_columns import JSON, ArrowColumn, choose, named

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MOST_GROUP = 16 << 20


class ParquetWriter(Writer):
    """Holds one row group."""

    name = "parquet"
    shards = r"part-\d{5,}\.parquet"
    compressions = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")

    def begin(self, first: Sequence[Placed]) -> None:
        import pyarrow as pa

        names = column_names(first, self.options.columns)
        self._columns = {name: self._choose(name, first) for name in names}
        fields = [
            pa.field(name, column.type, metadata={"nearflash": JSON} if column.text else None)
            for name, column in self._columns.items()
        ]
        self._schema: pa.Schema = pa.schema(fields)
        self.written.columns = {n: JSON if c.text else str(c.type) for n, c in self._columns.items()}
        self._held: list[Placed] = []
        self._held_bytes = self._file_bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pq.ParquetWriter | None = None
        self._group = max(1, min(self.options.shard_size // 4, _MOST_GROUP))

    def _choose(self, name: str, first: Sequence[Placed]) -> ArrowColumn:
        wanted = self.options.columns.get(name)
        try:
            if wanted is not None:
                return named(wanted)
            return choose([placed.sample.get(name) for placed in first])
        except ValueError as e:
            if wanted is not None:
                raise ConfigError(f"column {name!r}: {e}") from e
            at = next((p for p in first if _unfit(p.sample.get(name))), first[0])
            raise at.refuse(name, e, hint="leave it out with --fields, or --column NAME=json") from e

    def add(self, placed: Placed) -> None:
        extra = placed.sample.keys() - self._columns.keys()
        if extra:
            raise placed.refuse(min(extra), "the first samples have no such field", hint="choose with --fields")
        self._held.append(placed)
        self._held_bytes += sum(map(payload, placed.sample.values()))
        if self._held_bytes >= self._group:
            self._flush()
        if self._file_bytes >= self.options.shard_size:
            self._close()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._held:
            return
        table = pa.Table.from_arrays([self._array(n, c) for n, c in self._columns.items()], schema=self._schema)
        if self._writer is None:
            self._shard = f"part-{self.written.shards:05d}.parquet"
            self._file = self.output.create(self._shard)
            kind, _, level = (self.options.compression or "snappy").partition(":")
            self._writer = pq.ParquetWriter(
                self._file, self._schema, compression=kind, compression_level=self.level(1, 22) if level else None
            )
        self._writer.write_table(table, row_group_size=len(self._held))
        self._file_bytes += self._held_bytes
        self._held, self._held_bytes = [], 0

    def _array(self, name: str, column: ArrowColumn) -> pa.Array:
        try:
            return column.array([placed.sample.get(name) for placed in self._held])
        except (ValueError, TypeError, OverflowError, NotImplementedError) as e:
            for placed in self._held:
                reason = _reason(column, placed.sample.get(name))
                if reason is not None:
                    hint = f"the first samples made it {self.written.columns[name]}; --column {name}=TYPE names another"
                    raise placed.refuse(name, reason, hint=hint) from e
            raise self._held[0].refuse(name, e) from e

    def _close(self) -> None:
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.close()
        self._writer = self._file = None
        self._file_bytes = 0
        self.published(self.output.publish(self._shard))

    def end(self) -> None:
        self._flush()
        self._close()


def _reason(column: ArrowColumn, value: Any) -> Exception | None:
    try:
        column.array([value])
    except (ValueError, TypeError, OverflowError, NotImplementedError) as e:
        return e
    return None


def _unfit(value: Any) -> bool:
    try:
        choose([value])
    except ValueError:
        return True
    return False
