"""A zarr store is a folder; as a data set it is one shard, and a folder of stores is as many shards."""

from __future__ import annotations

from cachefs.shard import ObjectStat

from ..formats.zarr import Zarr
from ..formats.zarr_folder import MARKS, bind
from .abc import Folder, Found


def zarr_layout(folder: Folder) -> Found | None:
    """The outermost folders that hold zarr metadata, each a shard of its own, in order of their names."""
    if not (folder.format is None or isinstance(folder.format, Zarr)):
        return None
    marked = {item.url.rpartition("/")[0] for item in folder.named(*MARKS)}
    roots = sorted(url for url in marked if not any(parent in marked for parent in _parents(url, folder.url)))
    if not roots:
        return None
    contents: dict[str, list[ObjectStat]] = {url: [] for url in roots}
    for item in folder.listed:
        for parent in _parents(item.url, folder.url):
            if parent in contents:
                contents[parent].append(item)
                break
    return Found(tuple(bind(url, items) for url, items in contents.items()), folder.format or Zarr())


def _parents(url: str, top: str) -> list[str]:
    """The folders above ``url``, up to ``top``."""
    found = []
    while len(url) > len(top):
        url = url.rpartition("/")[0]
        found.append(url)
    return found
