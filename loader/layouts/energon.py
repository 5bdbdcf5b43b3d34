"""Folders that ``energon prepare`` (Megatron Energon) has been over: tars with a folder ``.nv-meta`` beside them.

The tars are plain WebDataset shards, and Energon finds their samples by the rules of :mod:`loader.formats.webdataset`.
Its own notes are used for counts alone, so that nothing need be read for them: ``.info.json`` (in older versions
``.info.yaml``) says how many samples each tar holds, and each tar's ``.tar.idx``, one 64-bit offset a sample and one
for the end, says it again by its size. Only where both are there and agree for every tar are they believed; else the
tars are counted from their headers. Where samples lie is always found from the tar's own headers, never taken from
``.tar.idx`` or ``index.sqlite``, and a tar that turns out to hold another number of samples is an error.

On purpose different: ``split.yaml`` is not applied, all tars are the data set. A split is named by its tars
(``shard_{000..001}.tar``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..formats import WebDataset
from ..formats.listing import MOST_SAMPLES
from .abc import Folder, Found

if TYPE_CHECKING:
    from cachefs.shard import ObjectStat

META = ".nv-meta"
_JSON, _YAML = ".info.json", ".info.yaml"
_ENTRY = re.compile(r"  +(?P<name>'(?:[^']|'')*'|[^\s'\"?&*!|>%@`{\[#-][^#]*?): (?P<count>[0-9]{1,18})\s*")
_LEAST_SAMPLE = 512
_OFFSET = 8


def energon_layout(folder: Folder) -> Found | None:
    """The tars of a folder that Energon prepared, or of several below it, with their counts where these are sure."""
    if folder.format not in (None, WebDataset()):
        return None
    roots = _roots(folder)
    tars = tuple(item for item in folder.listed if item.url.endswith(".tar") and not _hidden(item.url, folder.url))
    if not roots or not tars:
        return None
    counts: dict[str, int] = {}
    for root, info in roots.items():
        known = _info(folder.read(info.url), info.url)
        counts |= {f"{root}/{name}": count for name, count in known.items()}
    sure = all(_agrees(item, counts.get(item.url), folder.by_url.get(f"{item.url}.idx")) for item in tars)
    return Found(tars, WebDataset(), tuple(counts[item.url] for item in tars) if sure else None)


def _roots(folder: Folder) -> dict[str, ObjectStat]:
    """The folders that have notes, each with the file that holds its counts: the JSON one where there are two."""
    found: dict[str, ObjectStat] = {}
    for name in (_YAML, _JSON):
        for item in folder.named(name):
            parent, _, _ = item.url.rpartition("/")
            root, _, last = parent.rpartition("/")
            if last == META:
                found[root] = item
    return found


def _agrees(tar: ObjectStat, count: int | None, offsets: ObjectStat | None) -> bool:
    return (
        count is not None
        and offsets is not None
        and offsets.size == _OFFSET * (count + 1)
        and count * _LEAST_SAMPLE <= tar.size
    )


def _info(raw: bytes, url: str) -> Mapping[str, int]:
    """The counts in an info file, by tar; none where it is damaged or written in another way."""
    if url.endswith(_YAML):
        return dict(_yaml_counts(raw.decode("utf-8", "replace")))
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    counts = document.get("shard_counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict):
        return {}
    return {name: count for name, count in counts.items() if type(count) is int and 0 <= count <= MOST_SAMPLES}


def _yaml_counts(text: str) -> Iterator[tuple[str, int]]:
    """The mapping ``shard_counts`` as PyYAML writes it, one name and number a line; other YAML is passed over."""
    inside = False
    for line in text.splitlines():
        if not line.startswith(" "):
            inside = line.rstrip() == "shard_counts:"
        elif inside and (entry := _ENTRY.fullmatch(line)) is not None:
            name = entry["name"]
            yield (name[1:-1].replace("''", "'") if name[0] == "'" else name), int(entry["count"])


def _hidden(url: str, folder: str) -> bool:
    return any(part.startswith(".") for part in url[len(folder) :].split("/"))
