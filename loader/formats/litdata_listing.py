"""The ``index.json`` of a LitData data set: its chunks, and the configuration that all of them share.

Chunks do not describe themselves; without this index they cannot be read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from cachefs.errors import FormatError, UnknownFormat

from .listing import Count, Size, decoded, is_inside
from .litdata_tree import parse_tree

_READ_LOADERS = ("PyTreeLoader", "TokensLoader", "ParquetLoader")
_WRAPS = ("chunk", "batch", "sample")


class LitChunk(msgspec.Struct, frozen=True):
    """One chunk: its name in the index's folder, its items, its size decompressed, and (of tokens) their number."""

    filename: str
    chunk_size: Count
    chunk_bytes: Size
    dim: Size | None = None


class LitConfig(NamedTuple):
    """What all chunks share. Plain and hashable.

    ``leaves``: the serializers of an item's values, in order; ``tree``: how they are nested (``data_spec``); ``wrap``:
    what each Zstandard frame holds (``chunk``, ``batch``, ``sample``; ``None``: nothing is compressed); ``tokens``:
    the values are runs of tokens, one behind the other; ``parquet``: the chunks are Parquet files.
    """

    leaves: tuple[str, ...] = ()
    tree: str | None = None
    wrap: str | None = None
    tokens: bool = False
    parquet: bool = False


class _Config(msgspec.Struct):
    data_format: Any = None
    data_spec: Any = None
    compression: str | None = None
    compression_level: str | None = None
    encryption: Any = None
    item_loader: str | None = None


class _Index(msgspec.Struct):
    chunks: list[LitChunk]
    config: _Config


def read_litdata_index(raw: bytes, url: str) -> tuple[list[LitChunk], LitConfig]:
    """The chunks an index lists, in order, and their configuration.

    Raises ``FormatError`` for a damaged index, ``UnknownFormat`` for data that is encrypted or laid out otherwise.
    """
    index = decoded(raw, _Index, "LitData index", url)
    for number, chunk in enumerate(index.chunks):
        if not is_inside(chunk.filename):
            raise FormatError(
                f"chunk {number} of the index has the name {chunk.filename!r}, which is not one inside its folder",
                url=url,
            )
    return index.chunks, _config(index, url)


def _config(index: _Index, url: str) -> LitConfig:
    config = index.config
    loader = config.item_loader or ("TokensLoader" if _are_tokens(index) else "PyTreeLoader")
    if loader not in _READ_LOADERS:
        raise UnknownFormat(f"LitData chunks of the item loader {loader!r}, which are not read", url=url)
    if config.encryption:
        algorithm = config.encryption.get("algorithm") if isinstance(config.encryption, dict) else config.encryption
        raise UnknownFormat(
            f"LitData chunks encrypted with {algorithm}, which are not read", url=url, hint="write them unencrypted"
        )
    if loader == "ParquetLoader":
        return LitConfig(parquet=True)
    leaves = config.data_format
    if not isinstance(leaves, list) or not leaves or not all(isinstance(leaf, str) for leaf in leaves):
        raise FormatError(f"the index has the data_format {leaves!r}, not the names of serializers", url=url)
    if not isinstance(config.data_spec, str | None):
        raise FormatError("the data_spec of the index is no text", url=url)
    try:
        tree = parse_tree(config.data_spec)
    except ValueError as e:
        raise FormatError(str(e), url=url) from e
    if tree.leaves != len(leaves):
        raise FormatError(f"the data_spec has {tree.leaves} leaves, the data_format {len(leaves)}", url=url)
    if loader == "TokensLoader" and len(leaves) != 1:
        raise FormatError(f"tokens have one leaf, the data_format has {len(leaves)}", url=url)
    return LitConfig(tuple(leaves), config.data_spec, _wrap(config, url), loader == "TokensLoader")


def _are_tokens(index: _Index) -> bool:
    """As old writers, which named no loader, let it be told."""
    leaves = index.config.data_format
    headless = isinstance(leaves, list) and len(leaves) == 1 and str(leaves[0]).startswith("no_header_")
    return headless and bool(index.chunks) and index.chunks[0].dim is not None


def _wrap(config: _Config, url: str) -> str | None:
    if config.compression is None:
        return None
    if config.compression.partition(":")[0] != "zstd":
        raise UnknownFormat(f"LitData chunks compressed with {config.compression}; zstd is read", url=url)
    wrap = config.compression_level or "chunk"
    if wrap not in _WRAPS:
        raise UnknownFormat(f"LitData chunks whose compression_level is {wrap!r}, which is not read", url=url)
    return wrap
