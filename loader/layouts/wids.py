"""The shard list of WebDataset's indexed reader (``wids-index create``): tars with their sizes and counts, as JSON.

Follows wids 0.2: ``{"wids_version": 1, "shardlist": [{"url", "nsamples", "filesize"}], "base", "datasets"}``. URLs are
relative to ``base``, else to the list's own folder; the lists within ``datasets`` follow the first. In a folder the
list is ``shardindex.json`` (what the tool writes by default) or ``index.json``; under any other name it is a source by
itself.

Counts are believed unless a tar has another size than its entry says, or could not hold so many; then all are counted
from their headers. It is input from outside: names that would leave the list's folder, and local files named by a list
in an object store, are refused.

On purpose different: a list that another list names by ``source_url`` is not fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from cachefs.errors import ConfigError, FormatError, UnknownFormat
from cachefs.objstore.url import parse_url

from ..formats import WebDataset
from ..formats.listing import MOST_SAMPLES
from .abc import Folder, Found, side_by_side

if TYPE_CHECKING:
    from cachefs.client import Client
    from cachefs.shard import ObjectStat

NAMES = ("shardindex.json", "index.json")
MOST = 256 << 20
"""Bytes; a larger JSON file is no shard list."""
_LEAST_SAMPLE = 512


class WidsShard(NamedTuple):
    url: str
    samples: int
    size: int | None


def wids_layout(folder: Folder) -> Found | None:
    """A folder that holds a shard list: the shards it lists."""
    if folder.format not in (None, WebDataset()):
        return None
    for item in folder.named(*NAMES):
        if item.url.rpartition("/")[0] == folder.url and item.size <= MOST:
            shards = read_wids(folder.read(item.url), item.url)
            if shards is not None:
                return wids_found(shards, folder.by_url, folder.client)
    return None


def read_wids(raw: bytes, url: str) -> list[WidsShard] | None:
    """The shards of a list, in its order; ``None`` for JSON that is none. Raises ``FormatError`` for a damaged one."""
    if b'"shardlist"' not in raw or not raw.lstrip().startswith(b"{"):
        return None
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(document, dict) and "wids_version" in document and "shardlist" in document):
        return None
    if document["wids_version"] != 1:
        raise UnknownFormat(f"a shard list of version {document['wids_version']!r}; version 1 is read", url=url)
    return list(_shards(document, url.rpartition("/")[0], url))


def _shards(document: dict[str, Any], folder: str, url: str) -> Iterator[WidsShard]:
    base = document.get("base")
    if base is not None:
        folder = _absolute(base, folder, url).rstrip("/")
    for number, item in enumerate(_dicts(document.get("shardlist", []), "the shard list", url)):
        name, count, size = item.get("url"), item.get("nsamples"), item.get("filesize")
        if type(count) is not int or not 0 <= count <= MOST_SAMPLES:
            raise FormatError(f"the count of shard {number} is {count!r}, not a number of samples", url=url)
        yield WidsShard(_absolute(name, folder, url), count, size if type(size) is int else None)
    for part in _dicts(document.get("datasets", []), "the list of data sets", url):
        if "source_url" in part:
            raise UnknownFormat("the list names another list, which is not fetched", url=url, hint="name both")
        if part.get("datasets"):
            raise FormatError("data sets within data sets", url=url)
        yield from _shards(part, folder, url)


def _dicts(value: Any, what: str, url: str) -> list[dict[str, Any]]:
    if not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise FormatError(f"{what} is malformed", url=url)
    return value


def _absolute(name: Any, folder: str, url: str) -> str:
    """A shard's URL from its name in the list at ``url``."""
    local = _is_local(url)
    if isinstance(name, str) and name and "\0" not in name:
        if "://" in name:
            if local or not _is_local(name):
                return name
        elif name.startswith("/"):
            if local:
                return name
        elif "\\" not in name and ".." not in name.split("/"):
            return f"{folder}/{name.removeprefix('./')}"
    raise FormatError(f"the list names {name!r}, which is not a place that it may name", url=url)


def _is_local(name: str) -> bool:
    try:
        return parse_url(name).is_local
    except ConfigError:
        return False  # whoever opens it says why it is no URL


def wids_found(shards: list[WidsShard], listed: dict[str, ObjectStat], client: Client) -> Found:
    """The shards of a list as they are now."""
    missing = [shard.url for shard in shards if shard.url not in listed]
    there = dict(zip(missing, side_by_side(client.stat, missing), strict=True))
    stats = tuple(listed.get(shard.url) or there[shard.url] for shard in shards)
    sure = all(
        shard.size in (None, stat.size) and shard.samples * _LEAST_SAMPLE <= stat.size
        for shard, stat in zip(shards, stats, strict=True)
    )
    return Found(stats, WebDataset(), tuple(shard.samples for shard in shards) if sure else None)
