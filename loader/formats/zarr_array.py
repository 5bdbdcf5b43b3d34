"""One array of a zarr store: which objects hold some of its rows, and what they decode to."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, FormatError, NearflashError

from .abc import Bytes
from .packed import MOST
from .zarr_folder import StoreFolder
from .zarr_guard import guard_of
from .zarr_metadata import check_depth, shapes, unpickles
from .zarr_sizes import Suspect

LONE = "data"
"""The field of a store that is one array."""
_MOST_CHUNKS = 1_000_000
"""Objects that hold the rows of one piece."""


class ZarrArray:
    """An array with a sample axis, the first. ``chunk`` is the shape of what one object holds: a shard where there are
    shards. Raises ``FormatError`` where the zarr library cannot make anything of its metadata."""

    def __init__(self, folder: StoreFolder, path: str, document: dict[str, Any], *, allow_pickle: bool) -> None:
        self.name = path or LONE
        self.url = f"{folder.url}/{path}" if path else folder.url
        check_depth(self.name, document, self.url)
        self.shape, self.chunk = shapes(self.name, document, self.url)
        if not allow_pickle and unpickles(document):
            raise FormatError(
                f"the chunks of {self.name!r} hold pickles, which run code that they choose",
                url=self.url,
                hint="formats.Zarr(allow_pickle=True) if you trust them, or leave it out with arrays=(...)",
            )
        self._folder = folder
        self._document = document
        self._zarr, self._store = _open(path, document, self.name, self.url)
        stored = np.dtype(self._zarr.dtype)
        self.dtype: np.dtype[Any] = np.dtype(object) if stored.kind == "T" else stored.newbyteorder("=")
        self._prefix = f"{path}/" if path else ""
        self._check_sizes()
        try:
            self._guard = guard_of(document, self.chunk, 0 if self.dtype.hasobject else self.dtype.itemsize, MOST)
        except Suspect as e:
            raise FormatError(f"the chunks of {self.name!r} cannot be read: {e}", url=self.url) from e

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Of one sample, decoded."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def plain(self) -> bool:
        """Whether an object's bytes are its rows, one after the other, so that they need no decoding."""
        document = self._document
        stored = np.dtype(self._zarr.dtype)
        if stored.kind not in "biufc" or not stored.isnative or self.chunk[1:] != self.shape[1:] or not self.row_bytes:
            return False
        if document.get("zarr_format") == 2:
            flat = document.get("order") == "C" or len(self.shape) == 1
            return flat and document.get("compressor") is None and not document.get("filters")
        codecs = document.get("codecs")
        if not isinstance(codecs, list) or len(codecs) != 1 or not isinstance(codecs[0], dict):
            return False
        endian = (codecs[0].get("configuration") or {}).get("endian", "little")
        return codecs[0].get("name") == "bytes" and endian == "little" and np.little_endian

    def ask(self, first: int, last: int) -> None:
        """Have the objects of the rows ``first`` to before ``last`` fetched, before the first of them is waited for."""
        if self._folder.can_ask:
            self._folder.ask(self._keys(first, last))

    def mapped_chunk(self, number: int) -> npt.NDArray[Any]:
        """The rows of one object of a :attr:`plain` array, as a view of its map; fill values where it is absent."""
        key = self._key((number, *([0] * (len(self.shape) - 1))))
        data = self._folder.fetch([key]).get(key)
        self._folder.release()
        if data is None:
            first = number * self.chunk[0]
            return self.decode(first, min(first + self.chunk[0], self.rows))
        size = self.chunk[0] * self.row_bytes
        if len(data) != size:
            raise FormatError(f"a chunk of {size} bytes has {len(data)}", url=f"{self._folder.url}/{key}")
        return data.view(self.dtype).reshape(self.chunk)

    def decode(self, first: int, last: int) -> npt.NDArray[Any]:
        """The rows ``first`` to before ``last`` as a new array. Raises ``FormatError`` for damaged chunks, and what the
        client raises where one cannot be had; only what is truly absent reads as the fill value."""
        keys = self._keys(first, last)
        found = self._folder.fetch(keys)
        try:
            for key, data in found.items():
                self._check(key, data)
            self._store.chunks = {key: found.get(key) for key in keys}
            values = np.asarray(self._zarr[first:last])
        except (NearflashError, MemoryError):  # what was not to be had says nothing of the bytes
            raise
        except Exception as e:  # codecs of many packages raise whatever they like on damaged bytes
            raise FormatError(
                f"rows {first} to {last} of {self.name!r} cannot be decoded: {type(e).__name__}: {e}", url=self.url
            ) from e
        finally:
            self._store.chunks = {}
            self._folder.release()
        if values.shape != (last - first, *self.shape[1:]):
            raise FormatError(f"rows {first} to {last} of {self.name!r} decode to shape {values.shape}", url=self.url)
        return np.ascontiguousarray(values, self.dtype)

    def _check(self, key: str, data: Bytes) -> None:
        try:
            self._guard(data)
        except Suspect as e:
            raise FormatError(f"a damaged chunk of {self.name!r}: {e}", url=f"{self._folder.url}/{key}") from e

    def _keys(self, first: int, last: int) -> list[str]:
        if first == last:
            return []
        grid = [range(-(-n // c)) for n, c in zip(self.shape[1:], self.chunk[1:], strict=True)]
        along = range(first // self.chunk[0], (last - 1) // self.chunk[0] + 1)
        count = math.prod(map(len, (along, *grid)))
        if count > _MOST_CHUNKS:
            raise FormatError(f"{count} chunks of {self.name!r} hold rows {first} to {last}", url=self.url)
        return [self._key(place) for place in itertools.product(along, *grid)]

    def _key(self, place: tuple[int, ...]) -> str:
        return self._prefix + str(self._zarr.metadata.encode_chunk_key(place))

    def _check_sizes(self) -> None:
        for what, shape in (("chunk", self.chunk), ("sample", self.shape[1:])):
            size = math.prod(shape) * max(self.dtype.itemsize, 1)
            if size > MOST:
                raise FormatError(
                    f"one {what} of {self.name!r} takes {size} bytes decoded, more than {MOST}",
                    url=self.url,
                    hint="write smaller chunks",
                )


def _open(path: str, document: dict[str, Any], name: str, url: str) -> tuple[Any, Any]:
    try:
        import zarr
        from zarr.storage import StorePath

        from .zarr_store import MappedStore
    except ImportError as e:
        raise ConfigError(f"reading zarr needs zarr >= 3: {e}", hint="pip install 'zarr>=3.0.8'") from e
    store = MappedStore()
    try:
        return zarr.Array.from_dict(StorePath(store, path), document), store
    except MemoryError:
        raise
    except Exception as e:  # whatever it stumbles over in metadata that nobody has checked
        raise FormatError(f"the metadata of {name!r} cannot be used: {type(e).__name__}: {e}", url=url) from e
