"""How much the bench moves: one frozen object, full size and a quick one that only shows that everything runs."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Objects and samples of all pages. Bytes, unless said otherwise."""

    cold_objects: int
    cold_object: int
    cold_chunk: int
    """Bytes per ranged GET, for the daemon and for the plain download alike."""
    cold_parallel: int
    """GETs in flight, for both."""
    token_rows: int
    """Rows of ``row_tokens`` uint16 tokens."""
    row_tokens: int
    token_shards: int
    batch: int
    """Rows or samples in a batch."""
    tar_samples: int
    tar_shards: int
    tar_least: int
    tar_most: int
    """A tar sample's payload lies between these two."""
    table_rows: int
    table_shards: int
    table_group: int
    """Rows in a row group, or in a record batch."""
    table_batch: int
    """Rows in a batch of a table."""
    index_bytes: int
    """Of each file that is indexed."""


FULL = Sizes(
    cold_objects=8,
    cold_object=32 * MIB,
    cold_chunk=8 * MIB,
    cold_parallel=16,
    token_rows=65_536,
    row_tokens=2048,
    token_shards=64,
    batch=32,
    tar_samples=2400,
    tar_shards=8,
    tar_least=60_000,
    tar_most=140_000,
    table_rows=524_288,
    table_shards=8,
    table_group=16_384,
    table_batch=256,
    index_bytes=128 * MIB,
)
QUICK = Sizes(
    cold_objects=3,
    cold_object=1 * MIB,
    cold_chunk=256 * 1024,
    cold_parallel=4,
    token_rows=512,
    row_tokens=256,
    token_shards=4,
    batch=16,
    tar_samples=64,
    tar_shards=4,
    tar_least=6_000,
    tar_most=14_000,
    table_rows=2048,
    table_shards=2,
    table_group=256,
    table_batch=64,
    index_bytes=1 * MIB,
)
