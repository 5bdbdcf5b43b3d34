"""The arrays of a zarr store, as its metadata describes them: names, shapes, chunks and codecs.

The documents are read here and checked before the zarr library sees them: they come from outside, and a codec that
unpickles would run code that they choose.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from cachefs.errors import FormatError, UnknownFormat

from .zarr_folder import MARKS, StoreFolder

_MOST_DOCUMENTS = 100_000
_JSON_BYTES = 64 << 20
_MOST_DEPTH = 20


def read_documents(folder: StoreFolder) -> dict[str, dict[str, Any]]:
    """Every array's metadata by its path in the store (empty: the store itself is an array), in order of the paths.

    As zarr-python does, consolidated metadata is taken where there is some. Raises ``UnknownFormat`` for a folder that
    is no zarr store.
    """
    root = folder.probe(MARKS)
    documents: dict[str, dict[str, Any]] = {}
    if "zarr.json" in root:
        document = _json(root["zarr.json"], folder, "zarr.json")
        if document.get("node_type") == "array":
            return {"": document}
        inline = document.get("consolidated_metadata")
        members = inline.get("metadata") if isinstance(inline, dict) else None
        if isinstance(members, dict):
            documents = {path: entry for path, entry in members.items() if _node(entry) == "array"}
            return dict(sorted(documents.items()))
        found = _each(folder, "zarr.json")
        return {path: entry for path, entry in found if entry.get("node_type") == "array"}
    if ".zarray" in root:
        return {"": _json(root[".zarray"], folder, ".zarray")}
    if ".zmetadata" in root:
        members = _json(root[".zmetadata"], folder, ".zmetadata").get("metadata")
        if not isinstance(members, dict):
            raise FormatError("the consolidated metadata lists nothing", url=f"{folder.url}/.zmetadata")
        for key, entry in members.items():
            path, _, name = key.rpartition("/")
            if name == ".zarray" and isinstance(entry, dict):
                documents[path] = entry
        return dict(sorted(documents.items()))
    if ".zgroup" in root:
        return dict(_each(folder, ".zarray"))
    raise UnknownFormat("no zarr store: none of zarr.json, .zgroup and .zarray is in it", url=folder.url)


def shapes(name: str, document: dict[str, Any], url: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of an array, and of what one object of it holds (a shard where there are shards), checked."""
    shape = _shape(document.get("shape"), f"the shape of {name!r}", url, least=0)
    if document.get("zarr_format") == 2:
        chunk = _shape(document.get("chunks"), f"the chunks of {name!r}", url, least=1)
    else:
        grid = document.get("chunk_grid")
        options = grid.get("configuration") if isinstance(grid, dict) and grid.get("name") == "regular" else None
        if not isinstance(options, dict):
            raise FormatError(f"the chunk grid of {name!r} is not a regular one", url=url)
        chunk = _shape(options.get("chunk_shape"), f"the chunks of {name!r}", url, least=1)
    if len(chunk) != len(shape):
        raise FormatError(f"the shape and the chunks of {name!r} have different numbers of axes", url=url)
    return shape, chunk


def check_depth(name: str, document: dict[str, Any], url: str) -> None:
    """Refuse a document that is nested deeper than any array's: what is done with it need not ask again."""
    level: list[Any] = [value for key, value in document.items() if key != "attributes"]
    for _ in range(_MOST_DEPTH):
        inner = [list(v.values()) if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list)]
        level = list(itertools.chain.from_iterable(inner))
        if not level:
            return
    raise FormatError(f"the metadata of {name!r} is nested deeper than {_MOST_DEPTH} levels", url=url)


def unpickles(document: dict[str, Any]) -> bool:
    """Whether a codec of the array would unpickle what its chunks hold. Of a document that :func:`check_depth` let
    pass."""
    return any("pickle" in name for name in _codec_names(document))


def _codec_names(value: Any) -> Iterator[str]:
    """All that may name a codec in a metadata document: ``id`` and ``name`` of filters, compressors and codecs."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("id", "name") and isinstance(inner, str):
                yield inner.lower()
            elif key.endswith("codecs") and isinstance(inner, list):
                yield from (name.lower() for name in inner if isinstance(name, str))
            if key != "attributes":
                yield from _codec_names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _codec_names(inner)


def _each(folder: StoreFolder, mark: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The document of every node below the root."""
    if folder.keys is None:
        raise FormatError(
            "the arrays of the store are not known",
            url=folder.url,
            hint="give the right to list the folder, or consolidate the store's metadata",
        )
    keys = sorted(key for key in folder.keys if key.endswith(f"/{mark}"))
    if len(keys) > _MOST_DOCUMENTS:
        raise FormatError(f"a store of more than {_MOST_DOCUMENTS} arrays and groups", url=folder.url)
    for key, data in folder.fetch(keys).items():
        yield key[: -len(mark) - 1], _json(data, folder, key)


def _json(data: Any, folder: StoreFolder, key: str) -> dict[str, Any]:
    url = f"{folder.url}/{key}"
    if len(data) > _JSON_BYTES:
        raise FormatError(f"{len(data)} bytes are no metadata of an array", url=url)
    try:
        document = json.loads(data.tobytes())
    except (ValueError, RecursionError) as e:
        raise FormatError(f"the metadata is not readable as JSON: {e}", url=url) from e
    if not isinstance(document, dict):
        raise FormatError("the metadata is no JSON object", url=url)
    return document


def _node(entry: Any) -> Any:
    return entry.get("node_type") if isinstance(entry, dict) else None


def _shape(value: Any, what: str, url: str, *, least: int) -> tuple[int, ...]:
    ok = isinstance(value, list) and len(value) <= 64
    if not ok or not all(type(n) is int and least <= n < 1 << 62 for n in value):
        raise FormatError(f"{what} is {str(value)[:80]}", url=url)
    return tuple(value)
