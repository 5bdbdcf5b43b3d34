"""Folders that ``litdata.optimize`` wrote: their ``index.json`` names all chunks, with sizes and counts.

A writer that was stopped before it merged its workers' indexes leaves these (``0.index.json``, or ``0-index.json`` of a
node): they are read in the order of their numbers, as merging would have put them. Folders below the given one may
hold data sets of their own; all of them are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from cachefs.errors import ConfigError, FormatError

from ..formats import LitData
from ..formats.listing import INDEX, tool_of
from ..formats.litdata_listing import LitChunk, LitConfig, read_litdata_index
from .abc import Folder, Found, side_by_side

_PART = re.compile(r"(\d+)[.-]index\.json")


def litdata_layout(folder: Folder) -> Found | None:
    """A folder with LitData indexes, in it or in folders below it: all their chunks, in order."""
    if not (folder.format is None or isinstance(folder.format, LitData)):
        return None
    urls: list[str] = []
    chunks: list[LitChunk] = []
    config: LitConfig | None = None
    for url in _indexes(folder):
        raw = folder.read(url)
        if tool_of(raw) != "litdata":
            if folder.format is None:
                continue
            raise FormatError("no LitData index: not JSON that lists chunks", url=url)
        found, own = read_litdata_index(raw, url)
        if config is not None and own != config:
            raise ConfigError("LitData chunks that are written differently in one data set", url=url)
        config = own
        base = url.rpartition("/")[0]
        urls += [f"{base}/{chunk.filename}" for chunk in found]
        chunks += found
    return None if config is None else _found(folder, urls, chunks, config)


def _indexes(folder: Folder) -> list[str]:
    """The merged index of each folder, or its parts in the order of their numbers."""
    merged = {item.url.rpartition("/")[0]: item.url for item in folder.named(INDEX)}
    parts: list[tuple[str, int, str]] = []
    for item in folder.listed:
        base, _, name = item.url.rpartition("/")
        match = _PART.fullmatch(name)
        if match is not None and base not in merged:
            parts.append((base, int(match[1]), item.url))
    whole = [(base, 0, url) for base, url in merged.items()]
    return [url for _, _, url in sorted(whole + parts)]


def _found(folder: Folder, urls: list[str], chunks: list[LitChunk], config: LitConfig) -> Found:
    known = folder.by_url
    missing = [url for url in urls if url not in known]
    known = known | {stat.url: stat for stat in side_by_side(folder.client.stat, missing)}
    stats = tuple(known[url] for url in urls)
    if config.parquet:
        return Found(stats)  # their own bytes tell the rest
    format = folder.format if isinstance(folder.format, LitData) else LitData()
    return Found(
        stats,
        format.described(config),
        tuple(_samples(chunks, format.block, config, folder.url)),
        tuple(chunk.chunk_bytes for chunk in chunks) if config.wrap == "chunk" else None,
    )


def _samples(chunks: Iterable[LitChunk], block: int | None, config: LitConfig, url: str) -> Iterable[int]:
    if not config.tokens:
        return (chunk.chunk_size for chunk in chunks)
    if block is None:
        return (1 for _ in chunks)
    return (_tokens(chunk, url) // block for chunk in chunks)


def _tokens(chunk: LitChunk, url: str) -> int:
    if chunk.dim is None:
        raise FormatError(f"the index does not say how many tokens {chunk.filename} holds", url=url)
    return chunk.dim
