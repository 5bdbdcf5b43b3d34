"""LitData chunks, as ``litdata.optimize`` of litdata 0.2.76 and earlier ones write them.

Chunks do not describe themselves: the ``index.json`` beside them (:mod:`.litdata_listing`) names the serializers of an
item's values (:mod:`.litdata_leaves`) and how they are nested (:mod:`.litdata_tree`). See :mod:`.litdata_index` for
the layout of a chunk. An item that is a dict is a sample with its keys as fields; any other item is the one field
``value``, or, where ``LitData(names=...)`` names its parts, a field each. Chunks of tokens have the field ``tokens``.

Compression with Zstandard is read by chunk (decompressed to memory first), by batch (a frame when one of its items is
read) and by sample. Chunks that ``litdata.index_parquet_dataset`` indexed are Parquet files and read as such.

On purpose different from litdata:

* Arrays and tensors are numpy views where they are not compressed (no copy, writable); images, video and other files
  are handed out as stored and decoded on request.
* Sizes and offsets are checked before anything is read; an item whose values do not fill it is an error.
* Leaves that are pickled, or written by a serializer of the user's own, are an error only where they are asked for.
* Tokens are one sample a chunk unless ``LitData(block=...)`` cuts them, which litdata always does; as there, what is
  left behind the last whole block of a chunk is not read.
* Index parts that were not merged (``0.index.json`` ...) are read as the merged index would be.
* Encrypted chunks and those of ``TemporalArrayLoader`` or the user's own item loader are refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cachefs.errors import ConfigError, Denied, FormatError, NotFound

from ..sample import Sample
from .abc import Bytes, Format, Objects, Opened, Ready, all_there
from .listing import INDEX, tool_of
from .litdata_index import LitIndex, Shape, index_chunk
from .litdata_items import Items, Rows, TokenRows
from .litdata_listing import LitConfig, read_litdata_index
from .litdata_tree import LEAF
from .magic import ZSTD
from .options import settle_names
from .packed import MOST, unzstd

_CHUNK = re.compile(r"chunk-(\d+)-\d+\.")


@dataclass(frozen=True)
class LitData(Format):
    """``block``: cut chunks of tokens into samples of so many. ``names``: field names for the parts of items that are
    tuples or lists. ``allow_pickle``: read pickled values, which runs code that the file chooses.

    The others are what the data set's index says; with ``leaves=None`` it is read when a chunk is opened.
    Raises ``ConfigError`` for options that make no sense.
    """

    name: ClassVar[str] = "litdata"
    block: int | None = None
    names: tuple[str, ...] | None = None
    allow_pickle: bool = False
    leaves: tuple[str, ...] | None = None
    tree: str | None = None
    wrap: str | None = None
    tokens: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and (isinstance(self.block, bool) or not isinstance(self.block, int)):
            raise ConfigError(f"LitData(block={self.block!r}) is not a number of tokens")
        if self.block is not None and self.block < 1:
            raise ConfigError(f"LitData(block={self.block}) is not a positive number of tokens")
        settle_names(self, "names")

    @classmethod
    def beside(cls, objects: Objects, url: str) -> LitData | None:
        folder, slash, name = url.rpartition("/")
        part = _CHUNK.match(name)
        for index in (INDEX, f"{part[1]}.{INDEX}") if part else (INDEX,):
            try:
                raw = objects.read(f"{folder}{slash}{index}")
            except (NotFound, Denied):
                continue
            if tool_of(raw) == "litdata":
                chunks, config = read_litdata_index(raw, f"{folder}{slash}{index}")
                if not config.parquet and any(chunk.filename == name for chunk in chunks):
                    return cls().described(config)
        return None

    def described(self, config: LitConfig) -> LitData:
        """The format with what an index says."""
        if self.block is not None and not config.tokens:
            raise ConfigError("LitData(block=...) cuts tokens; these chunks hold items")
        return replace(self, leaves=config.leaves, tree=config.tree, wrap=config.wrap, tokens=config.tokens)

    def completed(self, known: Format) -> LitData:
        if not isinstance(known, LitData) or self.leaves is not None or known.leaves is None:
            return self
        return self.described(LitConfig(known.leaves, known.tree, known.wrap, known.tokens))

    def identity(self) -> str:
        return f"{self.block} {self.names}"  # what else there is, the data set says of itself

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        if self.leaves is None and index is None:
            found = LitData.beside(objects, url)
            if found is None:
                raise FormatError(f"no {INDEX} beside the chunk names it; LitData chunks need one", url=url)
            return self.completed(found).open(objects, url, unpacked=unpacked, part=part)
        opened = super().open(objects, url, index=index, unpacked=unpacked, part=part)
        return opened._replace(private_bytes=opened.private_bytes + opened.index.inflated)

    def unpack(self, data: Bytes, url: str, *, limit: int | None = None) -> Bytes:
        if data[: len(ZSTD)].tobytes() != ZSTD:
            return data  # no chunk has so many items that its first bytes look so
        if limit is None:
            return unzstd(data, url)
        # some versions do not count the chunk's head
        whole = unzstd(data, url, most=limit if limit > MOST else min(2 * limit + 4096, MOST))
        if len(whole) < limit:
            raise FormatError(f"decompresses to {len(whole)} bytes, not to {limit}: cut off or another file", url=url)
        return whole

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> LitIndex:
        if self.leaves is None:
            raise ConfigError(f"LitData chunks are described by the {INDEX} beside them", hint="open them by URL")
        shape = Shape(self.leaves, self.tree, self.wrap, self.names, self.allow_pickle)
        return index_chunk(data, url, shape, (self.block or 0) if self.tokens else None)

    def source(self, data: Bytes, index: LitIndex) -> Items | Rows | TokenRows:
        if index.block is not None:
            return TokenRows(data, index)
        return Items(data, index) if index.rows is None else Rows(data, index)

    def keeps_state(self, source: Items | Rows | TokenRows) -> bool:
        return source.stateful

    def read(
        self,
        source: Items | Rows | TokenRows,
        index: LitIndex,
        i: int,
        url: str,
        fields: frozenset[str] | None = None,
    ) -> Sample:
        return source.read(i, url, fields)

    def kind(self, index: LitIndex, name: str) -> str:
        if index.block is not None or index.rows is not None:
            return ""
        leaves = index.shape.decoders()
        for field in index.shape.fields():
            if field.name == name and field.node is LEAF:
                return leaves[field.first].kind
        return ""
